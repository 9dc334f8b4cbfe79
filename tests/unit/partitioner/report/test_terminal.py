"""Colour and width of what commands print: on a terminal only, and never more than the words say."""

from __future__ import annotations

import re
import sys
from io import StringIO

import pytest

from cost_models.cluster import ClusterSpec
from partitioner.commands.options import emit
from partitioner.commands.plan_files import step_picture
from partitioner.report.text import coloured
from runtime.schedules import SCHEDULES
from tests.support.made_plans import made_plan
from tests.unit.runtime.schedules.helpers import chain
from tests.unit.runtime.simulate.test_timeline import run

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
TEXT = str(made_plan(ClusterSpec.preset("dgx-h100")))


class Terminal(StringIO):
    """A stdout that is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put stdout on a terminal that has colours."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return shown


def test_a_terminal_has_colours_and_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    picture = step_picture(run(chain(3), SCHEDULES["1f1b"].order(chain(3), 4), 4))
    for text in (TEXT, picture, "verified: net", "DIFFERS: net\n  differs: loss", "x" * 300):
        assert ESCAPES.sub("", coloured(text)) == text
    assert "\x1b[1;36mmodel       \x1b[0mchain" in coloured(TEXT)
    assert "\x1b[31mdoes not fit" in coloured(TEXT)
    assert "\x1b[32mF0-" in coloured(picture)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_where_it_is_not_wanted(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    assert coloured(TEXT) == TEXT


def test_a_pipe_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", StringIO())
    assert coloured(TEXT) == TEXT


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("100", 100), ("500", 120), ("20", 40)])
def test_commands_print_as_wide_as_the_terminal(
    columns: str, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", columns)
    plan = made_plan(ClusterSpec.preset("dgx-a100", nodes=3), tuple(range(24)))
    emit(plan, {}, False)
    lines = ESCAPES.sub("", shown.getvalue()).splitlines()
    assert max(map(len, lines)) <= widest
    assert max(map(len, lines)) > widest - 12, "the room is used"


def test_a_step_of_many_ranks_is_drawn_in_few_rows() -> None:
    rows = step_picture(run(chain(40), SCHEDULES["1f1b"].order(chain(40), 2), 2)).splitlines()
    assert len(rows) <= 1 + 17 + 2
    assert max(map(len, rows)) <= 80
