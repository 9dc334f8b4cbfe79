"""What discovery found, between runs: a JSON file beside the calibration. Data only; a bad file is left aside."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cost_models.calibration import VARIABLE, cache_path
from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.shard.words import Choice, Need

logger = logging.getLogger("partitioner")

FORMAT = 1


def default_path() -> Path | None:
    """Beside the calibration; None where that is switched off."""
    return None if os.environ.get(VARIABLE) == "none" else cache_path().with_name("sharding.json")


def read(path: Path) -> dict[str, list[Choice]]:
    """By signature. Empty if there is no file, or one of another torch or format."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["torch"] != torch.__version__:
            return {}
        return {str(key): [_choice(text) for text in texts] for key, texts in data["choices"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("ignoring the shardings in %s: %s", path, error)
        return {}


def write(path: Path, key: str, choices: Sequence[Choice]) -> None:
    """Add one op's. A file that cannot be written costs time in the next run, nothing else."""
    known = {**read(path), key: list(choices)}
    data: dict[str, Any] = {
        "format": FORMAT,
        "torch": torch.__version__,
        "choices": {name: [str(choice) for choice in found] for name, found in known.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
        os.replace(name, path)
    except OSError as error:
        logger.warning("cannot keep the shardings in %s: %s", path, error)


def _choice(text: str) -> Choice:
    """The inverse of ``str(choice)`` for choices without local functions."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"not a choice: {text!r}")
    needs = tuple(Need(_placement(word.removesuffix("~")), word.endswith("~")) for word in left.split())
    return Choice(needs, tuple(_placement(word) for word in right.split()))


def _placement(word: str) -> Placement:
    if word in ("R", "P"):
        return Replicate() if word == "R" else Partial()
    if word.startswith("S") and word[1:].isdecimal():
        return Shard(int(word[1:]))
    raise ValueError(f"not a placement: {word!r}")
