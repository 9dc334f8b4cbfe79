"""The user's own code among the frames of a stack: its line, which is neither torch's nor ours, and its module."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn

TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(__file__).parents[1]) + os.sep


def caller() -> str:
    """Return "file.py:line" of the innermost frame that is the user's."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((TORCH, OURS)):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "an unknown place"


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
