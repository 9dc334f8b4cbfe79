"""The user's own code among the frames of a stack: what is neither torch's nor ours."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch

TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(__file__).parents[1]) + os.sep


def caller() -> str:
    """Return "file.py:line" of the innermost frame that is the user's."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((TORCH, OURS)):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "an unknown place"
