"""The documentation is current, and its examples are what the code reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from benchmarks.make_docs import DOCS, cluster_schema, files, plan_schema
from benchmarks.room_table import purpose, room_table
from benchmarks.rooms import make_house, read_house
from cost_models.cluster import ClusterSpec
from partitioner import partition
from tests.support.bad_workloads import net
from tests.support.made_plans import made_plan

HOUSE = read_house()
CLUSTERS = sorted((DOCS / "clusters").glob("*.yaml"))


@pytest.mark.parametrize("path", sorted(files()), ids=lambda path: path.name)
def test_generated_files_are_current(path: Path) -> None:
    assert path.read_text() == files()[path], "run `make docs`"


@pytest.mark.parametrize("folder", [folder for folder in HOUSE.folders if folder])
def test_every_room_has_a_purpose(folder: str) -> None:
    assert purpose(HOUSE, folder), (
        f"one sentence in the docstring of {folder}/__init__.py, for docs/architecture.md"
    )


def test_rooms_stand_above_those_that_they_import_from() -> None:
    house = make_house(
        {
            "passes/__init__.py": '''"""From ``a`` to b.\n\nMore."""''',
            "passes/compile.py": "",
            "passes/graph/graph.py": "",
            "passes/lower/lower.py": "import passes.split.split",
            "passes/split/split.py": "import passes.graph.graph",
        }
    )
    rows = [row for row in room_table(house).splitlines() if row.startswith("| `")]
    assert rows[0] == "| `passes/` | From `a` to b. | `compile` |"
    assert [row.split("`")[1] for row in rows[1:]] == ["passes/lower/", "passes/split/", "passes/graph/"]


def test_a_real_plan_fits_the_schema() -> None:
    validator = jsonschema.Draft202012Validator(plan_schema())
    validator.check_schema(plan_schema())
    plan = partition(net(), ClusterSpec.local(2), batch_size=8, pins={"first": 0, "second": 1})
    for found in (plan, made_plan(ClusterSpec.preset("dgx-h100", nodes=2), tuple(range(16)))):
        validator.validate(json.loads(found.model_dump_json()))


@pytest.mark.parametrize(
    "change", [{"batch_size": 0}, {"colour": "red"}, {"stages": "none"}, {"schema_version": 2}]
)
def test_the_schema_refuses_what_the_loader_refuses(change: dict[str, object]) -> None:
    data = {**json.loads(made_plan(ClusterSpec.preset("dgx-h100")).model_dump_json()), **change}
    assert not jsonschema.Draft202012Validator(plan_schema()).is_valid(data)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_example_clusters_fit_the_schema(path: Path) -> None:
    jsonschema.Draft202012Validator(cluster_schema()).validate(yaml.safe_load(path.read_text()))


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    pages = sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md")
    assert [page for page in pages if f"({page})" not in index] == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (DOCS / link).exists()] == []
