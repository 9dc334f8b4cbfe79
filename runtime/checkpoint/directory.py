"""A directory of checkpoints: whole ones, and a file that names the newest.

    DIRECTORY/
      latest                        one line: the name of the newest whole checkpoint
      step-00000120-3f9c2ab1/
        rank-00000.safetensors      the tensors that rank 0 wrote
        checkpoint.json             everything that is no tensor, and where each tensor is; written last

A crash at any time leaves ``latest`` at a whole checkpoint: the file is replaced, in one step, after every rank has its
part on the disk. Older checkpoints, and what crashed saves left, go after that.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.errors import CheckpointError
from runtime.checkpoint.storage import IndexEntry, StoredIndex

logger = logging.getLogger("partitioner")

FORMAT, VERSION = "partitioner checkpoint", 1
_RECORD, _LATEST = "checkpoint.json", "latest"
_NAME = re.compile(r"step-\d+-[0-9a-f]{8}")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on the disk. ``record``: its JSON data without the index."""

    path: Path
    record: Mapping[str, Any]
    index: StoredIndex


def begin(directory: Path, step: int) -> Path:
    """Make a new, empty folder for a checkpoint."""
    path = directory / f"step-{step:08}-{secrets.token_hex(4)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write to {directory}", [error.strerror or str(error)]) from error
    return path


def commit(path: Path, record: Mapping[str, Any], index: StoredIndex, keep: int) -> None:
    """Make ``path``, whose tensors are on the disk, the newest checkpoint; keep ``keep`` in all."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        **record,
        "tensors": {name: e.to_json() for name, e in index.items()},
    }
    try:
        _write(path / _RECORD, json.dumps(data, indent=1, allow_nan=False) + "\n")
        _sync(path)
        _write(path.parent / _LATEST, path.name + "\n")
        _sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}", [error.strerror or str(error)]) from error
    whole = sorted(_whole(path.parent), key=lambda p: (p / _RECORD).stat().st_mtime_ns)
    kept = {path, *whole[max(0, len(whole) - keep) :]}
    for old in _all(path.parent):
        if old not in kept:
            remove(old)


def remove(path: Path) -> None:
    """Delete a checkpoint. Files that are not part of one stay, and are named in the log."""
    try:
        # The record first: without it the folder is no checkpoint, however far this gets.
        for file in (path / _RECORD, *sorted(path.glob("rank-*.safetensors")), *path.glob("*.new")):
            file.unlink(missing_ok=True)
        path.rmdir()
    except OSError as error:
        logger.warning("the old checkpoint %s could not be removed: %s", path, error)


def find(directory: Path) -> Path:
    """Return the checkpoint that ``directory`` means: itself, or the newest in it."""
    if (directory / _RECORD).is_file():
        return directory
    others = sorted(path.name for path in _whole(directory)) if directory.is_dir() else []
    suggestions = [f"load {directory / name}" for name in others[-3:]]
    try:
        name = (directory / _LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = "there is no such directory" if not directory.is_dir() else f"it has no file {_LATEST}: {error}"
        raise CheckpointError(f"{directory} holds no checkpoint", [why], suggestions) from error
    if not _NAME.fullmatch(name) or not (directory / name / _RECORD).is_file():
        raise CheckpointError(
            f"{directory} holds no whole checkpoint",
            [f"its newest should be {name[:100]!r}, which is not there, or not whole"],
            suggestions,
        )
    return directory / name


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Tell whether ``directory`` is a checkpoint, or one was saved in it: what ``engine.load`` would look at."""
    directory = Path(directory)
    return (directory / _RECORD).is_file() or (directory / _LATEST).is_file()


def read(path: Path) -> StoredCheckpoint:
    """Read and check the record and the index of the checkpoint in the folder ``path``: a disk may lie."""
    try:
        data = json.loads((path / _RECORD).read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}")
        if data["version"] != VERSION:
            raise CheckpointError(
                f"{path} cannot be read", [f"its version is {data['version']}, this reads {VERSION}"]
            )
        index = {name: IndexEntry.from_json(entry) for name, entry in data.pop("tensors").items()}
        missing = {"model", "step", "world_size", "optimizer", "loss_scale", "extra"} - data.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path / _RECORD} is damaged",
            [f"{type(error).__name__}: {error}"],
            ["load an earlier checkpoint"],
        ) from error
    return StoredCheckpoint(path, data, index)


def _all(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def _whole(directory: Path) -> list[Path]:
    return [path for path in _all(directory) if (path / _RECORD).is_file()]


def _write(path: Path, text: str) -> None:
    """Replace ``path`` in one step, on the disk."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _sync(directory: Path) -> None:
    """Make the names in ``directory`` safe."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
