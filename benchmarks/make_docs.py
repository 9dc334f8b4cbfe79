"""``make generated``: what the documentation takes from the code.

docs/*.schema.json                                  the JSON Schemas of plans, clusters and cost graphs
docs/architecture.md, between ROOMS and END         the table of rooms: purposes from their ``__init__.py``, modules
docs/presets.md, between TABLES and TABLES_END      devices, links and machines by name, with sources
docs/10-….md, docs/evidence.md                      errors of published runs, from benchmarks/residuals.csv
docs/how-to/what-fits.md                            what ``benchmarks.what_fits`` stored
docs/accuracy.md                                    predictions beside published parallel runs, from stored scores
```console blocks of docs/09-plan-and-cli.md        commands (``$ …``) are run, what they print is put below them

    python -m benchmarks.make_docs           all of it
    python -m benchmarks.make_docs --files   the files alone, without running commands

Commands run in one empty folder, in order; a command that ends with another code than the block says (``# exit 4``)
stops the run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks import published_figures, what_fits
from benchmarks.accuracy import PAGE as ACCURACY
from benchmarks.accuracy import page_now
from benchmarks.preset_tables import preset_tables
from benchmarks.room_table import room_table
from benchmarks.rooms import read_house
from cost_models.cluster import ClusterSpec
from partitioner.cost_graphs.own import OwnGraphFile
from partitioner.cost_graphs.plan import GraphPlan
from partitioner.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "09-plan-and-cli.md"
ARCHITECTURE = DOCS / "architecture.md"
PRESETS = DOCS / "presets.md"
PREDICTION = DOCS / "10-calibration-and-prediction.md"
EVIDENCE = DOCS / "evidence.md"
TABLES, TABLES_END = "<!-- presets: made by `make generated` -->", "<!-- end of presets -->"
ROOMS, END = "<!-- rooms: made by `make generated` -->", "<!-- end of rooms -->"
SHORT_FORMS = ("DeviceSpec", "LinkSpec", "NodeLinks", "NetworkSpec")
"""Mappings that a cluster file may write as the name of a preset."""
SECONDS_PER_COMMAND = 600.0


def plan_schema() -> dict[str, Any]:
    """The JSON Schema of a plan file."""
    return _schema(Plan, "Plan")


def cluster_schema() -> dict[str, Any]:
    """The JSON Schema of a cluster file."""
    return _schema(ClusterSpec, "Cluster")


def graph_schema() -> dict[str, Any]:
    """The JSON Schema of a cost graph in our own format."""
    return _schema(OwnGraphFile, "Cost graph")


def graph_plan_schema() -> dict[str, Any]:
    """The JSON Schema of a cost graph's plan."""
    return _schema(GraphPlan, "Plan of a cost graph")


def _schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    found = _with_short_forms(model.model_json_schema(mode="validation"))
    assert isinstance(found, dict)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": title}


def _with_short_forms(schema: Any) -> Any:
    """Allow a text wherever one of SHORT_FORMS may stand."""
    if isinstance(schema, list):
        return [_with_short_forms(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if str(schema.get("$ref", "")).rpartition("/")[2] in SHORT_FORMS:
        return {"anyOf": [schema, {"type": "string"}]}
    return {key: _with_short_forms(value) for key, value in schema.items()}


def files() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    schemas = {
        "plan.schema.json": plan_schema(),
        "cluster.schema.json": cluster_schema(),
        "graph.schema.json": graph_schema(),
        "graph-plan.schema.json": graph_plan_schema(),
    }
    found = {DOCS / name: json.dumps(schema, indent=1) + "\n" for name, schema in schemas.items()}
    return {
        **found,
        ARCHITECTURE: _between(ARCHITECTURE, (ROOMS, room_table(read_house()), END)),
        ACCURACY: page_now(),
        PRESETS: _between(PRESETS, (TABLES, preset_tables(), TABLES_END)),
        what_fits.PAGE: what_fits.page(),
        PREDICTION: _between(
            PREDICTION,
            (published_figures.START, published_figures.table(), published_figures.END),
            (
                published_figures.HELD_OUT_START,
                published_figures.held_out_table(),
                published_figures.HELD_OUT_END,
            ),
        ),
        EVIDENCE: _between(
            EVIDENCE, (published_figures.START, published_figures.sentences(), f"  {published_figures.END}")
        ),
    }


def _between(path: Path, *parts: tuple[str, str, str]) -> str:
    """Return the page with a text between two of its lines, for each of the parts: (line, text, line)."""
    page = path.read_text()
    for begin, text, end in parts:
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def with_output(page: str) -> str:
    """``page`` with every console block's output as its commands print it now."""
    with tempfile.TemporaryDirectory() as folder:
        return re.sub(
            r"(?s)```console\n(.*?)```", lambda block: f"```console\n{_block(block[1], folder)}```", page
        )


def _block(text: str, folder: str) -> str:
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return "".join(f"$ {command}\n{_run(command, folder)}" for command in commands)


def _run(command: str, folder: str) -> str:
    """What the command prints, stdout before stderr; progress lines are left out."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "PARTITIONER_CALIBRATION": "none",
        "PARTITIONER_CACHE": "none",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_PER_COMMAND,
        check=False,
    )
    expected = re.search(r"# exit (\d+)", command)
    if done.returncode != (int(expected[1]) if expected else 0):
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    errors = "\n".join(line for line in done.stderr.splitlines() if " … " not in line)
    return "".join(f"{part.rstrip()}\n" for part in (done.stdout, errors) if part.strip())


def main() -> None:
    """Rewrite everything that is generated; say what changed."""
    wanted = files()
    if sys.argv[1:] != ["--files"]:
        wanted[PAGE] = with_output(PAGE.read_text())
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
