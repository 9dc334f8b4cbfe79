"""The documentation is current, and its examples are what the code reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from benchmarks.docstrings import docstrings
from benchmarks.make_docs import DOCS, ROOT, cluster_schema, files, plan_schema
from benchmarks.room_table import purpose, room_table
from benchmarks.rooms import FLOORS, House, make_house, read_house
from cost_models.cluster import ClusterSpec
from partitioner import partition
from tests.support.bad_workloads import net
from tests.support.made_plans import made_plan
from tests.support.mentions import missing, unknown
from tests.support.page_blocks import blocks_of

OF_DOCS = sorted(DOCS.rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *OF_DOCS]
NAMES_OF_OTHERS = {"sdp_utils", "register_flop_formula", "param_init_fn", "relu_3", "dq_accum", "softmax_d"}
"""Names in docstrings that no code of ours has: torch's, its kernels', and a node's in an example."""
CLUSTERS = sorted((DOCS / "clusters").glob("*.yaml"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code() -> House:
    """All that users run or read."""
    return read_house(floors=(*FLOORS, "benchmarks", "examples"))


def checkout() -> House:
    """That, and the tests."""
    return read_house(floors=(*FLOORS, "benchmarks", "examples", "tests"))


def test_generated_files_are_current() -> None:
    changed = [path.name for path, text in files().items() if path.read_text() != text]
    assert changed == [], "run `make generated`"


def test_every_room_has_a_purpose() -> None:
    house = read_house()
    without = [folder for folder in house.folders if folder and not purpose(house, folder)]
    assert without == [], "one sentence in the docstring of its __init__.py, for docs/architecture.md"


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
    "change", [{"batch_size": 0}, {"colour": "red"}, {"stages": "none"}, {"schema_version": 3}]
)
def test_the_schema_refuses_what_the_loader_refuses(change: dict[str, object]) -> None:
    data = {**json.loads(made_plan(ClusterSpec.preset("dgx-h100")).model_dump_json()), **change}
    assert not jsonschema.Draft202012Validator(plan_schema()).is_valid(data)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_example_clusters_fit_the_schema(path: Path) -> None:
    jsonschema.Draft202012Validator(cluster_schema()).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("index", ["docs/README.md", "mkdocs.yml"])
def test_the_index_names_every_page(index: str) -> None:
    text = (ROOT / index).read_text()
    pages = [str(path.relative_to(DOCS)) for path in OF_DOCS if path.name != "README.md"]
    assert [page for page in pages if f"({page})" not in text and f": {page}\n" not in text] == []


def test_the_examples_are_listed() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    names = [path.name for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py"]
    assert [name for name in names if f"[{name}]({name})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_pages_name_exists(page: Path) -> None:
    text = page.read_text()
    readers_own = {block.title for block in blocks_of(text)}
    assert [name for name in missing(text, checkout()) if name.partition(": ")[2] not in readers_own] == []


@pytest.mark.parametrize("package", [*FLOORS, "benchmarks", "examples"])
def test_what_docstrings_name_exists(package: str) -> None:
    house = checkout()
    found = {
        f"{module}:{text.line}": missing(text.text, house)
        for module, tree in house.trees.items()
        if house.files[module][0] == package
        for text in docstrings(tree)
    }
    assert {place: names for place, names in found.items() if names} == {}


def test_docstrings_use_names_of_the_code() -> None:
    found = {
        (module, word)
        for module, tree in code().trees.items()
        for text in docstrings(tree)
        for word in unknown(text.text, checkout())
        if word not in NAMES_OF_OTHERS
    }
    assert found == set()


def test_a_word_that_is_no_name_is_found() -> None:
    assert unknown("As ``needs_grad`` says, or ``needs_no_such_thing``.", code()) == ["needs_no_such_thing"]


@pytest.mark.parametrize(
    "name",
    [
        "passes/graph/no_such_file.py",
        "passes/no_such_room/",
        "tests/unit/no_such_*.py",
        "docs/99",
        "no_such_file.py",
        "`graph/no_such_file.py`",
        "passes.no_such_module",
        "passes.graph.graph.NoSuchClass",
        "runtime.program.program.Send.no_such_method",
    ],
)
def test_a_name_of_nothing_is_found(name: str) -> None:
    assert missing(f"Read\nthis: {name}, or this", checkout()) == [f"2: {name.strip('`')}"]


def test_names_of_what_exists() -> None:
    assert (
        missing(
            "passes/graph/graph.py, `graph.py`, graph/graph.py, docs/09, tests/unit/test_*.py, passes/shard/rules/, "
            'partitioner.ClusterSpec, passes.graph.graph.OpGraph, "train.py"',
            checkout(),
        )
        == []
    )
