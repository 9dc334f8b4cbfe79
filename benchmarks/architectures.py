"""Architectures of transformers, tiny: traced, planned and verified layer-wise, feature-wise and freely.

    python -m benchmarks.architectures --only defaults --ways default             25 current ones, with default settings
    python -m benchmarks.architectures [--only qwen3,mamba] [--slice 1/4] [--ways layer,feature,free] [--json FILE]
    python -m benchmarks.architectures --rows 1.json,2.json --page docs/02b-architectures.md

A row per architecture: its operations, the seconds of its trace, the parts that are run whole (opaque), and per way the
largest error as a share of what is allowed (1.0 would be the limit), or what went wrong. The reasons of what failed are
said below the table. The exit code is 1 if a plan computes something else or something that is no error of ours is raised.
``--rows`` takes rows of earlier runs instead of running anything; ``--page`` writes the table into a page of the docs.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.architecture_defaults import DEFAULTS, LATER
from benchmarks.architecture_table import ARCHITECTURES
from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from partitioner import Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.bundled import NAMES, bundled
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from runtime.ops.opaque import Opaque
from runtime.ranks.launch import WorkerPool

WAYS: dict[str, dict[str, Any]] = {
    "layer": {"strategy": "layer", "schedule": "1f1b", "microbatches": 2, "min_stages": 2},
    "feature": {"strategy": "feature", "mesh": (2,), "pins": {"*": "column_row"}},
    "free": {"strategy": "free", "microbatches": 2, "time_limit_seconds": 10.0},
}
"""Options of ``partition``; small models would stay on one device where nothing asks for two."""
DEFAULT = "default"
"""The way without options, for batches of the example's size."""
BEGIN, END = "<!-- table: made by `make architectures` -->", "<!-- end of table -->"
"""The marks in a page, between which the table stands."""
BATCH_SIZE = 8
RANKS = 2


@dataclass
class Row:
    """The outcome of one architecture."""

    name: str
    operations: int = 0
    trace_seconds: float = 0.0
    needs: tuple[str, ...] = ()
    """The parts that are run whole, with the lines where they are defined."""
    cells: dict[str, str] = field(default_factory=dict)
    """Way -> error as a share of what is allowed, or the kind of failure."""
    reasons: list[str] = field(default_factory=list)


def every_architecture() -> dict[str, Callable[[], Workload]]:
    """Return the bundled families at their tiny size, and the further architectures."""

    def tiny(name: str) -> Callable[[], Workload]:
        return lambda: bundled(name, size="tiny")

    families = {name: tiny(name) for name in NAMES if name not in ("llama-8b", "llama-70b", "llama-405b")}
    return {**families, **ARCHITECTURES, **LATER}


def outcome(name: str, make: Callable[[], Workload], ways: list[str], pool: WorkerPool) -> Row:
    """Trace one architecture, and plan and verify it in all ways."""
    row = Row(name)
    try:
        workload = make()
        started = time.monotonic()
        graph = as_graph(workload, name=name)
        row.trace_seconds = round(time.monotonic() - started, 1)
        row.operations = len(graph)
        parts = [op.target for op in graph.ops if isinstance(op.target, Opaque)]
        row.needs = tuple(dict.fromkeys(f"{part.name} ({part.source})" for part in parts))
    except PartitionerError as error:
        row.cells = dict.fromkeys(ways, error.kind)
        row.reasons.append(f"{name}: {error.render()}")
        return row
    for way in ways:
        row.cells[way] = _cell(row, way, workload, graph, pool)
    return row


def _cell(row: Row, way: str, workload: Workload, graph: OpGraph, pool: WorkerPool) -> str:
    try:
        options = {"batch_size": BATCH_SIZE, **WAYS[way]} if way != DEFAULT else {}
        if way == "free":
            weights = [i.node for i in graph.inputs if i.kind == "parameter"]
            first = next(
                op for op in graph.ops if any(source.name in weights for source in op.all_input_nodes)
            )
            options["pins"] = {first.name: 0, graph.loss: RANKS - 1}
        plan = partition(graph, ClusterSpec.local(RANKS), **{"strategy": "layer", **options})
        report = verify_plan(plan, workload, pool=pool, graph=graph)
    except PartitionerError as error:
        row.reasons.append(f"{row.name}, {way}: {error.render()}")
        return error.kind
    except Exception as error:  # noqa: BLE001 the table is there to find these
        row.reasons.append(f"{row.name}, {way}: {type(error).__name__}: {error}")
        return "TRACEBACK"
    if not report.passed:
        row.reasons.append(f"{row.name}, {way}: {report}")
        return "DIFFERS"
    return f"{report.worst.severity if report.worst is not None else math.inf:.1e}"


def write_page(path: Path, rows: list[Row]) -> None:
    """Write the table, and the reasons of what failed, between the marks of a page."""
    lines = [
        "| architecture | ops | trace s | run whole | layer | feature | free |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        needs = ", ".join(f"`{part}`" for part in row.needs)
        cells = " | ".join(row.cells.get(way, "") for way in WAYS)
        lines.append(f"| {row.name} | {row.operations} | {row.trace_seconds:.1f} | {needs} | {cells} |")
    for reason in (reason for row in rows for reason in row.reasons):
        lines += ["", f"- {' '.join(reason.split())}"]
    before, _, rest = path.read_text().partition(f"{BEGIN}\n")
    _, _, after = rest.partition(END)
    path.write_text("\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"]))


def main() -> int:
    """Print the table; 1 if something differs or is no error of ours."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--only", default="", help="names, separated by commas; defaults: the 25 current ones"
    )
    options.add_argument("--slice", default="1/1", help="k/n: the k-th of n parts of the table")
    options.add_argument("--ways", default=",".join(WAYS))
    options.add_argument("--json", type=Path)
    options.add_argument("--rows", default="", help="files of earlier runs, separated by commas")
    options.add_argument("--page", type=Path, help="a page of the docs that shows the table")
    chosen = options.parse_args()
    logging.getLogger("partitioner").setLevel(logging.ERROR)
    if chosen.rows:
        files = map(Path, chosen.rows.split(","))
        rows = [Row(**fields) for file in files for fields in json.loads(file.read_text())]
    else:
        rows = _run(chosen)
    for row in rows:
        for reason in row.reasons:
            print(f"\n{reason}")
    verified = [cell for row in rows for cell in row.cells.values() if cell[0].isdigit()]
    cells = sum(len(row.cells) for row in rows)
    print(f"\n{len(rows)} architectures, {len(verified)} of {cells} plans verified")
    if chosen.page is not None:
        order = list(every_architecture())
        write_page(chosen.page, sorted(rows, key=lambda row: order.index(row.name)))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(cell in ("DIFFERS", "TRACEBACK") for row in rows for cell in row.cells.values()))


def _run(chosen: argparse.Namespace) -> list[Row]:
    """Run the rows that were asked for, and print each."""
    table = every_architecture()
    part, parts = map(int, chosen.slice.split("/"))
    names = chosen.only.split(",") if chosen.only else list(table)
    names = (list(DEFAULTS) if names == ["defaults"] else names)[part - 1 :: parts]
    ways = chosen.ways.split(",")
    rows: list[Row] = []
    print(
        f"{'architecture':14} {'ops':>5} {'trace s':>7}  " + "  ".join(f"{way:>9}" for way in ways),
        flush=True,
    )
    with WorkerPool(RANKS) as pool:
        for name in names:
            row = outcome(name, table[name], ways, pool)
            rows.append(row)
            cells = "  ".join(f"{row.cells[way]:>9}" for way in ways)
            print(
                f"{name:14} {row.operations:5} {row.trace_seconds:7.1f}  {cells}  {'; '.join(row.needs)}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
