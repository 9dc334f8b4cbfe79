"""Files that a crash leaves whole, and the user's folder of those that can be made again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cost_models.errors import UsageError


def cache_folder() -> Path:
    """Return the user's folder for what was measured, tried or planned before; deleting it loses time, nothing else."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "partitioner"


CALIBRATION = "PARTITIONER_CALIBRATION"
"""Environment variable: the file of this machine's calibration; ``none`` for no calibration."""


def calibration_path() -> Path:
    """Return the file of the CPU workers' calibration: ``$PARTITIONER_CALIBRATION``, or one in the user's folder."""
    chosen = os.environ.get(CALIBRATION, "")
    return Path(chosen) if chosen and chosen != "none" else cache_folder() / "calibration.json"


def replace_file(target: Path, text: str) -> None:
    """Replace ``target`` by ``text``. Atomic: readers see the previous file or the new one, never half. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)  # there only if it was not moved, for whatever reason


MOST_BYTES = 16 * 2**20
"""A longer file is none that people write or tools print of a machine or a run."""


def text_of(path: Path) -> str:
    """Return a file's text. Raises UsageError: not there, too long, no UTF-8 (with the line)."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}", [error.strerror or str(error)]) from error
    if len(content) > MOST_BYTES:
        raise UsageError(f"cannot read {path}", [f"it has more than {MOST_BYTES // 2**20} MiB"])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"cannot read {path}, line {line}", ["it is not UTF-8 text"]) from error
