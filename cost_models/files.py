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


MOST_BYTES = 50_000_000
"""The largest file that is read as a text that people write or tools print."""


def text_of(path: Path) -> str:
    """Return a file's text. Raises UsageError: not there, too large, no UTF-8."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"cannot read {path}", [f"it is larger than {MOST_BYTES:,} bytes"])
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}", [str(error.strerror)]) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {path}", [f"byte {error.start} is not UTF-8 text"]) from error
