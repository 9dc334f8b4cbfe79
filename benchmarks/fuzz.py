"""Random partitions of random models, verified on real processes: nothing may compute something else.

    python -m benchmarks.fuzz [--models 0:500] [--plans 20] [--json FILE]        10,000 partitions
    python -m benchmarks.fuzz --only 17:3                                        the fourth plan of model 17, in words
    python -m benchmarks.fuzz --strategies hybrid                   pipelines of sharded stages, layouts drawn at random

Each model (``benchmarks.fuzz_models``) is planned ``--plans`` times, with random strategy, devices, schedule, numbers of
micro-batches, pins, mesh, splits, recomputation, optimizer and precision; each plan is verified in float64 (``verify``):
the loss, every gradient, buffer and parameter. Outcomes:

    verified    agrees
    refused     an error in the user's words (PartitionerError, not InternalError), counted by what it says
    DIFFERS     the plan computes something else
    RAISED      anything else was raised, or a rank hung

The exit code is 1 if something differs or is raised. The seed of everything is the model's and the plan's number.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz_hybrid import random_layouts, random_pipeline
from benchmarks.fuzz_models import random_workload
from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError, PartitionerError
from cost_models.precision import Precision
from partitioner import Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from passes.split.families import families
from runtime.ranks.launch import WorkerError, WorkerPool
from runtime.schedules import SCHEDULES

RANKS = 4
STRATEGIES = ("layer", "feature", "free")
"""Drawn from; a seed gives the same plan as long as they stay as they are."""
TIME_LIMIT_SECONDS = 180.0
"""Longest wait for a plan, and for the ranks that verify it: a hang must end, and a busy machine is no fault."""
SEARCH_SECONDS = 0.3
"""Limit of a free search: here it matters that the plan is right, not that it is fast."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one plan."""

    model: int
    plan: int
    options: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    """Wall time of planning and verifying; the first plan of a model also traces it."""


def random_options(
    draw: random.Random, graph: OpGraph, strategies: Sequence[str] = STRATEGIES
) -> tuple[ClusterSpec, dict[str, Any]]:
    """Draw a cluster and options of ``partition``."""
    strategy = draw.choice(strategies)
    if strategy == "hybrid":
        return random_pipeline(draw, graph)
    options: dict[str, Any] = {
        "strategy": strategy,
        "batch_size": draw.choice([4, 6, 8, 9, 12]),
        "optimizer_memory": draw.choice(["none", "sgd", "momentum", "adamw"]),
        "microbatches": draw.choice([1, 1, 2, 3, 4]),
        "time_limit_seconds": SEARCH_SECONDS if strategy == "free" else TIME_LIMIT_SECONDS,
    }
    if strategy == "feature":
        mesh = draw.choice([(2,), (2,), (3,), (4,), (2, 2)])
        options["mesh"] = mesh
        options["microbatches"] = draw.choice([m for m in (1, 2, 3, 4) if options["batch_size"] % m == 0])
        options["pins"] = _layouts(draw, graph, mesh, options["batch_size"] // options["microbatches"])
        return ClusterSpec.local([2, 3, 4, 4, 4][[(2,), (3,), (4,), (2, 2)].index(mesh)]), options
    ranks = draw.choice([2, 3, 4])
    if draw.random() < 0.3:
        options["recompute"] = draw.choice(["full", "auto"])
    if strategy == "layer":
        options["schedule"] = draw.choice([*(s for s in SCHEDULES if not s.startswith("list")), "auto"])
        if draw.random() < 0.7:
            options["min_stages"] = draw.randint(2, ranks)
    else:
        options["pins"] = _devices(draw, graph, ranks)
        options["splits"] = _splits(draw, graph)
        options.pop("recompute", None)
    return ClusterSpec.local(ranks), options


def _layouts(
    draw: random.Random, graph: OpGraph, mesh: tuple[int, ...], samples: int
) -> dict[str, str] | None:
    """Draw pins of a feature-wise plan: a pattern for everything, or stored layouts of some parameters, or none.

    ``samples``: of a micro-batch; what its size or a parameter's does not allow is left out.
    """
    patterns = ["column_row"]
    if samples % math.prod(mesh) == 0:
        patterns += ["data", "data", "zero1", "zero3"]
        if any("embedding" in str(op.target) for op in graph.ops):
            patterns += ["sequence", "vocabulary"]
    if draw.random() < 0.5 and len(patterns) > len(mesh):
        return {"*": " ".join(draw.sample(patterns, len(mesh)))}
    read = sorted({i.name for i in graph.inputs if i.kind == "parameter"})
    found = {}
    for name in draw.sample(read, min(3, len(read))):
        shape = graph.parameters[name].shape
        places = [
            ["R", *(f"{kind}{dim}" for kind in ("S", "R/S") for dim in (0, 1) if _divides(size, shape, dim))]
            for size in mesh
        ]
        if draw.random() < 0.6:
            found[name] = " ".join(map(draw.choice, places)) + "?"
    return found or None


def _divides(size: int, shape: tuple[int, ...], dim: int) -> bool:
    return dim < len(shape) and shape[dim] % size == 0


def _devices(draw: random.Random, graph: OpGraph, ranks: int) -> dict[str, int]:
    """Pin some modules to random devices, none of them inside another."""
    modules = sorted({op.meta["module_path"] for op in graph.ops} - {""})
    chosen: list[str] = []
    for name in draw.sample(modules, min(len(modules), draw.randint(1, 4))):
        if not any(
            f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in chosen
        ):
            chosen.append(name)
    return {name: draw.randrange(ranks) for name in chosen}


def _splits(draw: random.Random, graph: OpGraph) -> dict[str, tuple[int, ...]] | None:
    """Draw uneven blocks for some families of neurons; None leaves them to the search."""
    if draw.random() < 0.3:
        return None
    found = {}
    for family in families(graph):
        if family.units > 1 and draw.random() < 0.4:
            first = draw.randint(1, family.units - 1)
            found[family.name] = (first, family.units - first)
    return found


def run_one(
    model: int,
    number: int,
    workload: Workload,
    graphs: dict[Precision | None, OpGraph],
    pool: WorkerPool,
    strategies: Sequence[str] = STRATEGIES,
) -> Outcome:
    """Plan and verify one partition of a model. ``graphs``: its traces so far, by precision."""
    draw = random.Random(1_000_003 * model + number)
    precision = draw.choice([None, None, None, Precision(compute=torch.bfloat16, master=torch.float32)])
    words = "?"
    try:
        if precision not in graphs:
            graphs[precision] = as_graph(workload, precision=precision)
        graph = graphs[precision]
        cluster, options = random_options(draw, graph, strategies)
        words = f"{len(cluster.devices)} devices, precision {precision or 'own'}, " + ", ".join(
            f"{name}={value}" for name, value in options.items() if not name.startswith("time")
        )
        with random_layouts(draw):
            plan = partition(graph, cluster, **{"strategy": "layer", **options})
        report = verify_plan(plan, workload, graph=graph, pool=pool, timeout_seconds=TIME_LIMIT_SECONDS)
    except (WorkerError, InternalError):
        return Outcome(model, number, words, "RAISED", traceback.format_exc())
    except PartitionerError as error:
        return Outcome(model, number, words, f"refused: {error.what}", str(error))
    except Exception:  # noqa: BLE001 the fuzz is there to find these
        return Outcome(model, number, words, "RAISED", traceback.format_exc())
    return Outcome(
        model, number, words, "verified" if report.passed else "DIFFERS", "" if report.passed else str(report)
    )


def main() -> int:
    """Run the chosen models; 1 if something differs or is raised."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--models", default="0:500", help="first:end")
    options.add_argument("--plans", type=int, default=20)
    options.add_argument("--only", default="", help="model:plan")
    options.add_argument("--strategies", default=",".join(STRATEGIES))
    options.add_argument("--json", type=Path, help="a line per plan")
    chosen = options.parse_args()
    logging.getLogger("partitioner").setLevel(logging.ERROR)
    first, end = map(int, chosen.models.split(":"))
    wanted = {model: list(range(chosen.plans)) for model in range(first, end)}
    if chosen.only:
        model, number = map(int, chosen.only.split(":"))
        wanted = {model: [number]}
    started, counts = time.monotonic(), Counter[str]()
    with WorkerPool(RANKS) as pool:
        for model, numbers in wanted.items():
            workload = random_workload(model)
            graphs: dict[Precision | None, OpGraph] = {}
            for number in numbers:
                begun = time.monotonic()
                found = run_one(model, number, workload, graphs, pool, chosen.strategies.split(","))
                found = replace(found, seconds=round(time.monotonic() - begun, 2))
                counts[found.outcome] += 1
                if found.outcome in ("DIFFERS", "RAISED") or chosen.only:
                    print(
                        f"--only {model}:{number}: {found.outcome}\n  {found.options}\n{found.reason}",
                        flush=True,
                    )
                if chosen.json is not None:
                    with chosen.json.open("a") as file:
                        file.write(json.dumps(asdict(found)) + "\n")
    total = sum(counts.values())
    print(f"{total} partitions of {len(wanted)} models in {time.monotonic() - started:.0f} s")
    for outcome, count in counts.most_common():
        print(f"{count:7}  {outcome}")
    return int(bool(counts["DIFFERS"] + counts["RAISED"]))


if __name__ == "__main__":
    sys.exit(main())
