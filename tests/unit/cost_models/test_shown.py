"""Texts in notebooks: escaped, and the same as in a terminal."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError, UsageError
from cost_models.shown import as_html, printable
from partitioner.explain.explanation import Explanation
from partitioner.report.intervals import step_text
from partitioner.verify.report import VerifyReport
from tests.support.made_plans import made_plan

HOSTILE = "<script>alert('1')</script>\x1b[31m & \"quoted\" \u202e"
REPORT = VerifyReport("net", 2, "1f1b", 4, 8, {"loss": 4}, (), None, 1.0, ())
PLAN = made_plan(ClusterSpec.preset("dgx-h100"))
NAMED = PLAN.model_copy(update={"model": PLAN.model.model_copy(update={"name": HOSTILE})})


def text_of(shown: str) -> str:
    """Return the text that a browser shows of what stands in ``<pre>``."""
    found = re.search(r"<pre[^>]*>(.*)</pre>$", shown, re.DOTALL)
    assert found
    return html.unescape(found[1])


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (PLAN, str(PLAN)),
        (REPORT, str(REPORT)),
        (Explanation("op", {"why": "it is cheap"}, ()), "why         it is cheap"),
        (ClusterSpec.preset("dgx-h100", nodes=2), ClusterSpec.preset("dgx-h100", nodes=2).describe()),
        (UsageError("no", ["because"], ["this"]), "error[usage]: no\n  because: because\n  try: this"),
    ],
    ids=["plan", "report", "explanation", "cluster", "error"],
)
def test_a_notebook_shows_what_print_shows(thing: object, text: str) -> None:
    assert text_of(thing._repr_html_()) == text  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "thing",
    [NAMED, replace(REPORT, model=HOSTILE), Explanation("op", {"why": HOSTILE}, ()), UsageError(HOSTILE)],
)
def test_names_are_never_html(thing: object) -> None:
    shown = thing._repr_html_()  # type: ignore[attr-defined]
    assert "<script" not in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown, "it would turn the text around"
    assert "&lt;script&gt;" in shown
    assert set(re.findall(r"</?(\w+)", shown)) <= {"pre", "table", "tr", "th", "td"}


def test_a_plan_has_a_short_table_above() -> None:
    rows = re.findall(r"<tr><th>(\w+)</th><td>([^<]*)</td></tr>", PLAN._repr_html_())
    assert [name for name, _ in rows] == ["model", "plan", "step", "throughput", "memory"]
    assert dict(rows)["step"] == step_text(PLAN)


def test_ipython_shows_errors_without_a_traceback_but_those_of_ours_with() -> None:
    assert UsageError(HOSTILE, ["x"])._render_traceback_() == [
        f"error[usage]: {printable(HOSTILE)}", "  because: x"
    ]  # fmt: skip
    try:
        raise InternalError("a bug")
    except InternalError as error:
        lines = error._render_traceback_()
    assert lines[0].startswith("Traceback")
    assert any("test_shown.py" in line for line in lines)


def test_a_table_comes_with_rows_only() -> None:
    assert "<table>" not in as_html("a")
    assert "<th>&lt;a&gt;</th><td>b</td>" in as_html("text", [("<a>", "b")])
