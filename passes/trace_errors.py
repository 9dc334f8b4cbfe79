"""An export that failed, told in the user's words: module, file and line, and what to change."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

from cost_models.errors import ModelError

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_MESSAGE_CHARACTERS = 300

_DATA_DEPENDENT = (
    "data-dependent",
    "Could not guard",
    "Could not extract specialized integer",
    "unbacked",
    "_local_scalar_dense",
)
_ADVICE = {
    "data": (
        "the code branches on (or takes a size from) numbers that are known only when it runs",
        "choose with torch.where, or with torch.cond for whole branches, instead of a Python if or while",
        "compute Python numbers from shapes or from the config, not with .item(), .tolist() or bool(tensor)",
    ),
    "other": (
        "",
        "call the model on example_inputs yourself: if that fails too, the inputs do not fit it",
        "keep NumPy, custom kernels and side effects out of forward: torch.export must see every operation",
    ),
}


def model_error(error: Exception, model: nn.Module, model_name: str) -> ModelError:
    """The ModelError for an exception that came out of ``torch.export``."""
    chain = list(_causes(error))
    kind = "data" if any(marker in str(e) for e in chain for marker in _DATA_DEPENDENT) else "other"
    reason, *suggestions = _ADVICE[kind]
    because = [f"{type(error).__name__}: {_first_line(chain[-1])}", *([reason] if reason else [])]
    where = next(filter(None, (_location(e, model) for e in chain)), None)
    if where is not None:
        because.insert(0, where)
    return ModelError(f"cannot trace {model_name}", because, suggestions)


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:_MESSAGE_CHARACTERS]


def _location(error: BaseException, model: nn.Module) -> str | None:
    """ "in module 'encoder.0': model.py:17: if x.sum() > 0:": the innermost frame that is neither torch's
    nor ours.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    line = module = None
    for frame, number in _frames(error.__traceback__):
        code = frame.f_code
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            module = paths[id(owner)]
        if not code.co_filename.startswith((_TORCH, _OURS, "<")):
            line = traceback.FrameSummary(code.co_filename, number, code.co_name)
    if line is None or module is None:
        return None
    at = f"{line.filename}:{line.lineno}: {line.line}"
    return f"in module {module!r}, {at}" if module else f"in {type(model).__name__}, {at}"


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    yield from traceback.walk_tb(trace)
