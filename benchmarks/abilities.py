"""The abilities of the product: every command with its options, every public name with its members and parameters.

    python -m benchmarks.abilities                    those of the file that are not there today; exits 1 where one is gone
    python -m benchmarks.abilities --root DIR         those of another checkout that are not there today
    python -m benchmarks.abilities --update           writes benchmarks/data/abilities.txt from today's

An ability is a line of text, such as ``plan --batch-size``, ``partition(strategy)`` or ``Plan.verify(model)``. New ones
need no update; one that goes on purpose does, and the diff of the file says so.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / "benchmarks" / "data" / "abilities.txt"


def abilities() -> list[str]:
    """List the abilities of the product that is imported, sorted."""
    return sorted({*_commands(), *_public_names()})


def _commands() -> Iterator[str]:
    from partitioner.cli import app

    for command in app:
        yield command
        if not command.startswith("-"):  # help, version and completion are cyclopts' own
            for option in app[command].assemble_argument_collection():
                yield from (f"{command} {name}" for name in option.names)


def _public_names() -> Iterator[str]:
    import partitioner

    for name in partitioner.__all__:
        entry = getattr(partitioner, name)
        yield from (name, *_parameters(name, entry))
        if inspect.isclass(entry):
            for member in dir(entry):
                if not member.startswith("_"):
                    value = getattr(entry, member, None)
                    yield from (f"{name}.{member}", *_parameters(f"{name}.{member}", value))
            yield from (f"{name}.{field}" for field in getattr(entry, "model_fields", ()))


def _parameters(name: str, entry: object) -> Iterator[str]:
    if not callable(entry) or (inspect.isclass(entry) and issubclass(entry, Exception)):
        return
    try:
        parameters = inspect.signature(entry).parameters
    except (TypeError, ValueError):  # one written in C
        return
    yield from (f"{name}({parameter})" for parameter in parameters if parameter != "self")


def abilities_of(root: Path) -> list[str]:
    """List the abilities of another checkout, imported in a process of its own by this file's code."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", str(Path(__file__)), "--list"]
    return subprocess.run(
        command, cwd=root, env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def main() -> None:
    """Compare, and print what is gone."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.abilities", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--root", type=Path, help="another checkout to compare with")
    parser.add_argument("--list", action="store_true", help="print today's abilities")
    parser.add_argument("--update", action="store_true", help="write the file that tests compare with")
    options = parser.parse_args()
    today = abilities()
    if options.list:
        print("\n".join(today))
        return
    if options.update:
        KNOWN.write_text("\n".join(today) + "\n", encoding="utf-8")
        return
    before = abilities_of(options.root) if options.root else KNOWN.read_text(encoding="utf-8").splitlines()
    gone = sorted(set(before) - set(today))
    print("\n".join((f"{len(before)} before, {len(today)} today, {len(gone)} gone", *gone)))
    sys.exit(bool(gone))


if __name__ == "__main__":
    main()
