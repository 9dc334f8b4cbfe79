"""The user's own code among the frames of a stack: its line, which is neither torch's nor ours, and its module."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from functools import lru_cache
from pathlib import Path
from traceback import FrameSummary
from types import FrameType

import torch
from torch import nn

TORCH = str(Path(torch.__file__).parent) + os.sep
_ROOT = Path(__file__).parents[1]
OURS = tuple(str(_ROOT / room) + os.sep for room in ("passes", "partitioner", "runtime", "cost_models"))
_NOT_THEIRS = (TORCH, *OURS, contextlib.__file__, "torch/", "<")
"""Beginnings of file names; export writes some of torch's relative, and code that torch makes is in no file."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def is_users(file: str) -> bool:
    """Tell whether a file's code is the user's."""
    return not file.startswith(_NOT_THEIRS)


def users_frame() -> FrameSummary | None:
    """Return the innermost frame that is the user's; None if no frame is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, lookup_line=False)


def caller() -> str:
    """Return "file.py:line" of the innermost frame that is the user's."""
    frame = users_frame()
    return "an unknown place" if frame is None else f"{Path(frame.filename).name}:{frame.lineno}"


@lru_cache(maxsize=4096)
def line_in(stack_trace: str) -> str:
    """Return "file.py:line" of the innermost frame of a written stack that is the user's; "" if there is none."""
    for file, line in reversed(_FRAME.findall(stack_trace)):
        if is_users(file):
            return f"{Path(file).name}:{line}"
    return ""


def innermost_module(model: nn.Module) -> str | None:
    """Return the path of the module whose code is running, None if none is."""
    paths = {id(module): path for path, module in model.named_modules()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            return str(paths[id(owner)])
        frame = frame.f_back
    return None
