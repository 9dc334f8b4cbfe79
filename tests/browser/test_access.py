"""Readers who do not see, or see little: axe finds nothing to object to, in both themes and with things open."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

from tests.browser.conftest import Opened, Opener

AXE = files("axe_playwright_python") / "axe.min.js"
PHONE = 420  # pixels


def violations(opened: Opened) -> list[str]:
    """Run axe over the page and say what it objects to, one line each."""
    opened.page.evaluate(AXE.read_text("utf-8"))
    found: Any = opened.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"][:3]
    ]


@pytest.mark.parametrize(
    ("name", "theme"),
    [("many_stages", "light"), ("many_stages", "dark"), ("hostile", "light"), ("two", "dark")],
)
def test_axe_has_no_objection(open_page: Opener, name: str, theme: str) -> None:
    assert violations(open_page(name, theme)) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_has_no_objection_when_all_is_open(open_page: Opener, theme: str) -> None:
    opened = open_page("small", theme)
    opened.page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
    opened.box("layers.0–1").click()
    opened.box("attn").click()
    opened.box("op linear").click()
    opened.page.get_by_role("combobox", name="Search the graph").fill("mlp")
    assert violations(opened) == []


def test_axe_has_no_objection_on_a_phone(open_page: Opener) -> None:
    opened = open_page("small", width=PHONE)
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert violations(opened) == []
