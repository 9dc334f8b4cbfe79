"""Imports go down the four floors only, and every file stays a room of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {"cost_models": 1, "runtime": 2, "passes": 3, "partitioner": 4}
SOURCES = sorted(path for package in FLOORS for path in (ROOT / package).rglob("*.py"))


def imported_packages(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    floor = FLOORS[path.relative_to(ROOT).parts[0]]
    upward = {name for name in imported_packages(path.read_text()) if FLOORS.get(name, 0) > floor}
    assert not upward, f"{path.relative_to(ROOT)} on floor {floor} imports {sorted(upward)} above it"


def test_an_upward_import_is_found() -> None:
    assert imported_packages("def f():\n    from passes.graph.graph import OpGraph\n") == {"passes"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
