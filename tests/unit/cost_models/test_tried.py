"""The first line of an error where a library was never tried; silence everywhere else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cost_models import tried
from cost_models.errors import DeadlockError, InternalError, ModelError, UsageError
from cost_models.tried import TRIED, untried_versions
from partitioner.doctor.findings import NEEDED

ROOT = Path(__file__).parents[3]
NEW = "torch 2.16.0 was not tried; known good: 2.11 to 2.14"


def test_what_this_environment_has_was_tried() -> None:
    assert untried_versions() == []


@pytest.mark.parametrize(
    ("name", "found", "line"),
    [
        ("torch", "2.14.1+cu130", None),
        ("torch", "2.14.0rc3", None),
        ("torch", "2.16.0", NEW),
        ("torch", "3.0a0+git12ab", "torch 3.0a0+git12ab was not tried; known good: 2.11 to 2.14"),
        ("torch", "2.9.1", "torch 2.9.1 was not tried; known good: 2.11 to 2.14"),
        ("pulp", "4.2.0", "pulp 4.2.0 was not tried; known good: 3"),
        ("Python", "3.14.0", "Python 3.14.0 was not tried; known good: 3.11 to 3.12"),
        ("transformers", None, None),
    ],
)
def test_an_untried_version_has_a_line(
    name: str, found: str | None, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "_installed", {name: found}.get)
    assert untried_versions() == ([] if line is None else [line])


def test_errors_that_it_may_explain_begin_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried, "_installed", {"torch": "2.16.0"}.get)
    for error in (ModelError("cannot trace M"), InternalError("zip()"), DeadlockError("a circle")):
        assert str(error).splitlines()[0] == NEW
    assert str(ModelError("cannot trace M")).splitlines()[1:] == ["error[model]: cannot trace M"]
    assert str(UsageError("cannot read --mesh")) == "error[usage]: cannot read --mesh"
    monkeypatch.undo()
    assert str(ModelError("cannot trace M")) == "error[model]: cannot trace M"


def test_the_bounds_of_the_package_are_those_that_were_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(map(_split, project["dependencies"]))
    assert set(bounds) == set(NEEDED) == set(TRIED) - {"Python", "transformers"}
    bounds["Python"] = project["requires-python"]
    for name, rest in bounds.items():
        low, high = re.search(r">=([\d.]+)", rest), re.search(r"<(\d+)", rest)
        assert low is not None
        assert low[1].startswith(TRIED[name][0]), name
        assert high is None or int(high[1]) == int(TRIED[name][1].split(".")[0]) + 1, name


def test_the_readme_says_when_the_first_and_the_last_were_tried() -> None:
    rows = re.findall(
        r"^\| \d{4}-\d\d-\d\d \| ([\d.]+) \| ([\d.]+) \|", (ROOT / "README.md").read_text(), re.M
    )
    for name, found in zip(("Python", "torch"), zip(*rows, strict=True), strict=True):
        releases = sorted(tuple(map(int, version.split(".")[:2])) for version in found)
        ends = tuple(".".join(map(str, release)) for release in (releases[0], releases[-1]))
        assert ends == TRIED[name], name


def test_the_smoke_part_names_tests_that_exist() -> None:
    named = [
        line for line in (ROOT / "tests/newest.txt").read_text().splitlines() if not line.startswith("#")
    ]
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def _split(requirement: str) -> tuple[str, str]:
    name = re.match(r"[\w-]+", requirement)
    assert name is not None
    return name[0], requirement[name.end() :]
