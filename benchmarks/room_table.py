"""The table of rooms in docs/architecture.md: each room, its purpose, and the modules directly in it.

The purpose is the first paragraph of the docstring of the room's ``__init__.py``. In every folder, rooms stand in the
order of their imports: a room imports from the rooms below it.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.rooms import FLOORS, House, heights


def room_table(house: House) -> str:
    """Write all rooms as Markdown, the highest floor first."""
    floors = [(number, floor) for number, floor in enumerate(FLOORS, 1) if floor in house.folders]
    return "".join(_floor(house, number, floor) for number, floor in reversed(floors))


def purpose(house: House, folder: str) -> str:
    """Return what a room is for, in one sentence as Markdown."""
    first, _, _ = house.docstring(folder.replace("/", ".")).partition("\n\n")
    return " ".join(first.split()).replace("``", "`")


def _floor(house: House, number: int, floor: str) -> str:
    rows = [
        f"| `{folder}/` | {purpose(house, folder)} | {_modules(house, folder)} |\n"
        for folder in _from_above(house, floor)
    ]
    return f"\n**Floor {number}: {floor}**\n\n| room | what for | modules |\n|---|---|---|\n{''.join(rows)}"


def _from_above(house: House, folder: str) -> Iterator[str]:
    """Yield a folder and all below it, each before those that it imports from."""
    yield folder
    height = heights(frozenset(house.arrows(folder)))
    inner = [name for name in house.folders if name.rpartition("/")[0] == folder and name]
    for room in sorted(inner, key=lambda name: (-height.get(name.rpartition("/")[2], 0), name)):
        yield from _from_above(house, room)


def _modules(house: House, folder: str) -> str:
    return " ".join(f"`{name}`" for name in house.modules_in(folder))
