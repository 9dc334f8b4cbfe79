"""The counts of a house: each on a small house made for it."""

from __future__ import annotations

import ast

from benchmarks.docstrings import docstrings
from benchmarks.house import count_house, show
from benchmarks.rooms import House, make_house

ROOF = {"cost_models/units.py": "", "runtime/run.py": "", "partitioner/plan.py": ""}


def house(**passes: str) -> House:
    return make_house({**ROOF, **{f"passes/{name}.py": source for name, source in passes.items()}})


def test_layers_and_arrows_of_a_floor() -> None:
    floor = count_house(
        house(low="", middle="from passes.low import f", high="def f():\n    import passes.middle\n")
    ).floors["passes"]
    assert (floor.files, floor.children, floor.arrows, floor.layers, floor.module_layers) == (3, 3, 2, 3, 3)


def test_a_circle_is_one_layer() -> None:
    counts = count_house(house(one="import passes.two", two="import passes.one", three="import passes.one"))
    assert counts.file_circles == [("passes.one", "passes.two")]
    assert counts.room_circles == {"passes": [("one", "two")]}
    assert counts.floors["passes"].layers == 2


def test_homonyms_are_names_of_different_things() -> None:
    found = count_house(
        house(
            one="class Machine:\n    x = 1\nFloats = list[float]\n",
            two="class _Machine:\n    y = 2\nFloats = list[float]\n",
        )
    )
    assert found.homonyms == {"Machine": ["passes/one.py", "passes/two.py"]}


def test_questions_about_the_strategy() -> None:
    source = """
if plan.strategy == "layer": a
b = strategy in ("feature", "free")
c = "free" != request.strategy
d = isinstance(x, (FreeRequest, FeatureResult))
match strategy:
    case _: pass
same = strategy == other
known = isinstance(x, str)
"""
    places = count_house(house(ask=source)).strategy_dispatches
    assert places == [f"passes/ask.py:{line}" for line in (2, 3, 4, 5, 6)]


def test_numbers_with_a_name() -> None:
    source = """
SECONDS = 0.5
SIZES: tuple[int, ...] = (1, 2 << 10)
NAME = "text"
EXACT = True
class Tuning:
    gap: float = 1e-9
    name: str = "text"
"""
    counts = count_house(house(free_search=source, graph="OTHER = -1"))
    assert [place.split()[1] for place in counts.tuning_constants] == ["SECONDS", "SIZES", "gap"]
    assert counts.constants == 4


def test_docstrings_of_modules_classes_functions_and_attributes() -> None:
    source = '''"""Module."""
SIZE = 1
"""Of a constant."""
class Thing:
    """What it is."""
    name: str
    """Whether named."""
    def act(self):
        """Act."""
        "no docstring"
'''
    assert [text.text for text in docstrings(ast.parse(source))] == [
        "Module.",
        "Of a constant.",
        "What it is.",
        "Whether named.",
        "Act.",
    ]
    assert count_house(house(thing=source)).elliptical == [f"passes/thing.py:{line}" for line in (3, 5, 7)]


def test_the_table_tells_the_size() -> None:
    table = show(count_house(house(one="x = 1\ny = 2\n")))
    assert "passes            1      2" in table
    assert "fullest folder" in table
