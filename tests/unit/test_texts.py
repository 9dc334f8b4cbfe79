"""Docstrings say what they speak of, in the glossary's words, and their legends stand in columns."""

from __future__ import annotations

import pytest

from benchmarks.docstrings import docstrings, foreign_in, is_elliptical, slid_lines
from benchmarks.rooms import FLOORS, House, make_house, read_house

HOUSE = read_house()


def faults(house: House, folder: str) -> list[str]:
    """Return every faulty docstring below ``folder``, with its place."""
    return [
        f"{'/'.join(house.files[module])}.py:{text.line}: {fault}"
        for module, tree in house.trees.items()
        if "/".join(house.files[module]).startswith(f"{folder}/")
        for text in docstrings(tree)
        for fault in _faults_of(text.text)
    ]


def _faults_of(text: str) -> list[str]:
    opening = (
        [f"begins with {text.split()[0]!r}: say the thing or the verb first"] if is_elliptical(text) else []
    )
    torn = [f"torn from the row before: {line!r}" for line in slid_lines(text)]
    return opening + torn + [f"not a word of the glossary: {word}" for word in foreign_in(text)]


@pytest.mark.parametrize("folder", FLOORS)
def test_texts_are_clean(folder: str) -> None:
    found = faults(HOUSE, folder)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Of the last step."""',
        'def f():\n    """Whether it fits."""',
        'class A:\n    """What was found."""',
        'class A:\n    x: int\n    """How many."""',
        'X = 1\n"""Which: of several."""',
    ],
)
def test_an_elliptical_opening_is_found(source: str) -> None:
    (found,) = faults(make_house({"passes/graph/new.py": source}), "passes/graph")
    assert "say the thing or the verb first" in found


@pytest.mark.parametrize(
    "text", ["The last step.", "Tell whether it fits.", "At most 8.", "Whatever was found.", "Format bytes."]
)
def test_an_opening_with_a_thing_or_a_verb_is_none(text: str) -> None:
    assert not is_elliptical(text)


TORN = [
    """Bounds on a step.

    work    the busiest device is busy for the sum over its ops
    of
            all seconds
    """,
    """Bounds on a step.

    work    the busiest device is busy for the sum over its ops
    of all its seconds
            and no less
    """,
    """A way of data.

        model ─► graph ─► units ─► for every micro-batch count and schedule the best split and ─► programs
        ─► plan
    """,
]
WHOLE = [
    """Bounds on a step.

    work    the busiest device is busy for the sum over its ops of all its seconds, and no less than that, ever
            so small
    chain   the longest path
    """,
    """Prose whose last line is short, as happens wherever lines are filled up to some limit or other, whatever it
    is.
    """,
    """Files.

        latest       the newest
        step-120/
            model
    """,
]


@pytest.mark.parametrize("text", TORN)
def test_a_torn_row_is_found(text: str) -> None:
    assert len(slid_lines(text)) == 1


@pytest.mark.parametrize("text", WHOLE)
def test_a_whole_legend_is_none(text: str) -> None:
    assert slid_lines(text) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("One tick of the clock.", ["tick (step)"]),
        ("The number of what ranks\n    come together for.", ["come together (collective)"]),
        ("Resharding of operators.", ["operator (op)", "resharding (bridge)"]),
        ("Names in ``operator``, the steps and ops.", []),
    ],
)
def test_a_word_that_the_glossary_gives_up_is_found(text: str, words: list[str]) -> None:
    assert foreign_in(text) == words
