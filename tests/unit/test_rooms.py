"""Imports go down the floors and one way between rooms; rooms and files stay small; a class name means one thing."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.house import homonyms
from benchmarks.rooms import Circle, House, Import, circles, make_house, read_house, upward

MODULES_OF_A_ROOM = 25
LINES_OF_A_FILE = 400

HOUSE = read_house()


@cache
def every_circle() -> list[Circle]:
    return circles(HOUSE)


def full_rooms(house: House) -> dict[str, int]:
    """Return the rooms with more than MODULES_OF_A_ROOM modules, and how many they hold."""
    sizes = {folder: len(house.modules_in(folder)) for folder in house.folders}
    return {folder: size for folder, size in sizes.items() if size > MODULES_OF_A_ROOM}


def long_files(house: House) -> dict[str, int]:
    """Return the modules with more than LINES_OF_A_FILE lines, and how many they have."""
    lines = {module: len(source.splitlines()) for module, source in house.sources.items()}
    return {module: count for module, count in lines.items() if count > LINES_OF_A_FILE}


def test_imports_go_down_the_floors_only() -> None:
    assert not upward(HOUSE), "\n".join(map(str, upward(HOUSE)))


@pytest.mark.parametrize("folder", HOUSE.folders, ids=lambda folder: folder or "floors")
def test_the_children_of_a_folder_import_each_other_one_way(folder: str) -> None:
    found = [str(circle) for circle in every_circle() if circle.folder == folder]
    assert not found, "\n".join(found)


def test_rooms_stay_small() -> None:
    assert full_rooms(HOUSE) == {}


def test_files_stay_small() -> None:
    assert long_files(HOUSE) == {}


def test_a_class_name_means_one_thing() -> None:
    assert homonyms(HOUSE) == {}


ABOVE = [
    "import passes.compile",
    "from passes import compile",
    "from passes.compile import run",
    "def f():\n    from passes.compile import run\n",
    "if TYPE_CHECKING:\n    from passes.compile import run\n",
]


@pytest.mark.parametrize("source", ABOVE)
def test_an_import_from_a_floor_above_is_found(source: str) -> None:
    (found,) = upward(make_house({"passes/compile.py": "", "runtime/execute/bind.py": source}))
    assert (found.importer, found.imported) == ("runtime.execute.bind", "passes.compile")


def test_an_import_from_a_floor_below_is_none() -> None:
    assert upward(make_house({"passes/compile.py": "import runtime.run", "runtime/run.py": ""})) == []


@pytest.mark.parametrize(
    "back",
    [
        "from passes.search.layer.place import place",
        "def f():\n    from passes.search.layer.place import place\n",
        "if TYPE_CHECKING:\n    from passes.search.layer.place import place\n",
        "import passes.search.layer.place",
        "from ..search.layer import place",
    ],
)
def test_two_rooms_that_import_each_other_are_found(back: str) -> None:
    house = make_house(
        {
            "passes/lower/bridge.py": "",
            "passes/lower/realize.py": back,
            "passes/search/layer/place.py": "from passes.lower.bridge import bridges",
        }
    )
    (circle,) = circles(house)
    assert (circle.folder, circle.children) == ("passes", ("lower", "search"))
    assert len(circle.imports) == 2


def test_two_files_of_a_room_that_import_each_other_are_found() -> None:
    house = make_house(
        {
            "passes/graph/graph.py": "from passes.graph.nodes import f",
            "passes/graph/nodes.py": "from passes.graph.graph import g",
        }
    )
    (circle,) = circles(house)
    assert (circle.folder, circle.children) == ("passes/graph", ("graph", "nodes"))
    assert circle.imports[0] == Import("passes.graph.graph", "passes.graph.nodes", "f", 1)


def test_a_file_and_a_subfolder_that_import_each_other_are_found() -> None:
    house = make_house(
        {
            "passes/search/model.py": "from passes.search.layer.place import LayerRequest",
            "passes/search/layer/place.py": "from passes.search.model import read_model",
        }
    )
    assert [circle.children for circle in circles(house)] == [("layer", "model")]


def test_a_file_that_reads_what_its_rooms_init_collects_is_found() -> None:
    house = make_house(
        {
            "runtime/schedules/__init__.py": "from runtime.schedules.gpipe import gpipe",
            "runtime/schedules/gpipe.py": "from runtime.schedules import KINDS",
        }
    )
    assert [circle.children for circle in circles(house)] == [("__init__", "gpipe")]


def test_one_way_through_several_rooms_is_no_circle() -> None:
    house = make_house(
        {
            "passes/compile.py": "import passes.search.place",
            "passes/search/place.py": "import passes.graph.graph",
            "passes/graph/graph.py": "import runtime.run",
            "runtime/run.py": "",
        }
    )
    assert circles(house) == []


def test_a_full_room_is_found() -> None:
    names = [f"runtime/state/part_{number}.py" for number in range(MODULES_OF_A_ROOM)]
    house = make_house(dict.fromkeys([*names, "runtime/state/__init__.py", "runtime/state/deep/more.py"], ""))
    assert full_rooms(house) == {}
    house = make_house(dict.fromkeys([*names, "runtime/state/one_more.py"], ""))
    assert full_rooms(house) == {"runtime/state": MODULES_OF_A_ROOM + 1}


def test_a_long_file_is_found() -> None:
    source = "x = 1\n" * LINES_OF_A_FILE
    assert long_files(make_house({"runtime/state/parts.py": source})) == {}
    assert long_files(make_house({"runtime/state/parts.py": source + "y = 2\n"})) == {
        "runtime.state.parts": LINES_OF_A_FILE + 1
    }
