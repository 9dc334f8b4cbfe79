"""Refusal of files that hide our packages: ``runtime`` and ``passes`` are common names, so say plainly what hides them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("cost_models", "passes", "runtime")


def refuse_shadowed_packages(home: Path | None = None) -> None:
    """Raise ImportError if one of our packages resolves to somebody else's file.

    ``home``: the folder that holds our packages; the one this package was installed into if not given.
    """
    expected = home or Path(__file__).resolve().parents[1]
    problems = []
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None:
            problems.append(f"{name}: not found; it is installed beside partitioner in {expected}")
        elif spec.origin is None or Path(spec.origin).resolve().parent != expected / name:
            found = spec.origin or ", ".join(spec.submodule_search_locations or ())
            problems.append(f"{name}: {found} hides {expected / name}")
    if problems:
        raise ImportError(
            "partitioner cannot find its own packages:\n  "
            + "\n  ".join(problems)
            + "\n  try: rename the file or folder, or start Python from another directory"
        )
