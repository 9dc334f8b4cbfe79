"""Plans of earlier calls of ``partitioner plan``: the same call is answered from a file, without torch, model or search.

    arguments, files, machine, versions, sources ─► key ─► stored_plan ─► the plan's file and table, byte for byte
                                                           store_plan  ◄─ the plan that was searched for

The key holds everything that the plan follows from. A model of the user's own (``file.py:factory``) has none: its code may
read anything. A plan that a given time limit or Ctrl-C ended is not stored, for the next search may find a better one;
what the default strategy finds in its own time is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from cost_models import host
from cost_models.files import cache_folder, calibration_path, replace_file

logger = logging.getLogger("partitioner")

CACHE = "PARTITIONER_CACHE"
"""Environment variable: the folder of the plans; ``none`` for no stored plans."""
MOST_BYTES = 1 << 28
"""The most that all stored plans take together: as much as the largest plan file that is read."""
_OURS = ("cost_models", "runtime", "passes", "partitioner")
_LIBRARIES = ("torch", "transformers")
"""The packages whose code makes the model and its trace; of others the version counts."""
_ENVIRONMENT = ("CUDA", "HF_", "MKL_", "OMP_", "PARTITIONER_", "PYTORCH", "TORCH", "TRANSFORMERS_", "USE_")
"""The beginnings of the environment variables that these packages read."""
_NOT_FOR_PLANS = (CACHE, "TORCHINDUCTOR_CACHE_DIR")
"""Variables among these that no plan follows from; torch sets the second one itself."""
_DISTRIBUTIONS = (".dist-info", ".egg-info", ".egg-link", ".pth")


@dataclass(frozen=True)
class StoredPlan:
    """A plan as text."""

    plan: str
    """The plan's file."""
    table: str
    """The plan as it is printed."""
    width: int
    """The width that the table is fitted into."""


def plans_folder() -> Path | None:
    """Return the folder of stored plans: ``$PARTITIONER_CACHE``, or one in the user's cache; None if switched off."""
    chosen = os.environ.get(CACHE, "")
    if chosen == "none":
        return None
    return Path(chosen) if chosen else cache_folder() / "plans"


def plan_key(model: str, arguments: Mapping[str, object]) -> str | None:
    """Return the key of the plan that a call makes; None if it is not stored, or follows from more than is known.

    ``arguments``: all others that decide about the plan, as they were given.
    """
    if (":" in model and not model.startswith("hf:")) or plans_folder() is None:
        return None
    if any(find_spec(name) is None for name in _LIBRARIES):
        return None
    texts = [model.removeprefix("hf:"), *(text for text in arguments.values() if isinstance(text, str))]
    try:
        facts = {
            "model": model,
            "arguments": arguments,
            "files": {str(file.resolve()): _digest(file) for file in map(_file, texts) if file is not None},
            "calibration": _digest(calibration_path()) if calibration_path().is_file() else "",
            "machine": _machine(),
            "python": [sys.version, *sys.path],
            "packages": sorted(_distributions()),
            "sources": [*(_contents(name) for name in _OURS), *(_stamps(name) for name in _LIBRARIES)],
            "environment": _environment(),
        }
    except OSError as error:
        logger.debug("no stored plan is looked for: %s", error)
        return None
    return hashlib.sha256(json.dumps(facts, default=asdict).encode()).hexdigest()


def stored_plan(key: str) -> StoredPlan | None:
    """Return the plan with this key. None if there is none, or its file is not as it was written."""
    folder = plans_folder()
    if folder is None:
        return None
    file = folder / f"{key}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        plan = StoredPlan(data["plan"], data["table"], data["width"])
        if data["digest"] != _digest_of(key, plan):
            return None
        os.utime(file)  # what is used last is dropped last
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.debug("no stored plan in %s: %s", file, error)
        return None
    return plan


def store_plan(key: str, plan: StoredPlan) -> None:
    """Store a plan, and drop those that were used least recently. What cannot be written is searched for again."""
    folder = plans_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = {"digest": _digest_of(key, plan), **asdict(plan)}
        replace_file(folder / f"{key}.json", json.dumps(data))
        left = MOST_BYTES
        states = [(file.stat(), file) for file in folder.glob("*.json")]
        for state, file in sorted(states, key=lambda each: each[0].st_mtime_ns, reverse=True):
            left -= state.st_size
            if left < 0:
                file.unlink(missing_ok=True)
    except OSError as error:  # another process may have dropped a file meanwhile
        logger.debug("cannot store the plan in %s: %s", folder, error)


def _digest_of(key: str, plan: StoredPlan) -> str:
    return hashlib.sha256(json.dumps([key, asdict(plan)]).encode()).hexdigest()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _file(text: str) -> Path | None:
    """Return the file that an argument names: itself, or the configuration in the folder."""
    places = (Path(text), Path(text) / "config.json")
    return next((place for place in places if os.path.isfile(place)), None)


def _machine() -> list[object]:
    """Describe this machine: the plan may be of its workers, and the user's folder be shared with others."""
    has_gpu = os.path.exists("/dev/nvidiactl")
    return [*os.uname(), host.processor_name(), host.core_count(), host.memory_bytes(), has_gpu]


def _environment() -> dict[str, str]:
    names = (name for name in os.environ if name.startswith(_ENVIRONMENT) and name not in _NOT_FOR_PLANS)
    return {name: os.environ[name] for name in sorted(names)}


def _distributions() -> Iterator[str]:
    """Yield the installed packages with their versions, as their folders are called."""
    for folder in filter(os.path.isdir, sys.path):
        yield from (name for name in os.listdir(folder) if name.endswith(_DISTRIBUTIONS))


def _contents(package: str) -> str:
    """Return a digest of a package's code."""
    digest = hashlib.sha256()
    for path, _ in sorted(_code(package)):
        digest.update(path.encode() + b"\0" + Path(path).read_bytes())
    return digest.hexdigest()


def _stamps(package: str) -> str:
    """Return a digest of the sizes of a package's files and of when they changed: of thousands, within 0.03 s."""
    states = sorted((path, state.st_size, state.st_mtime_ns) for path, state in _code(package))
    return hashlib.sha256(repr(states).encode()).hexdigest()


def _code(package: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield a package's Python files."""
    spec = find_spec(package)
    folders = [*(spec.submodule_search_locations or ())] if spec is not None else []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir() and entry.name != "__pycache__":
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    yield entry.path, entry.stat()
