"""Every model × ranks × schedule, verified in float64 on real processes (``make verify-all``).

    python -m benchmarks.verify_matrix [--models gpt2,unet] [--ranks 2,3] [--schedules 1f1b,zb-v] [--smoke]
        [--recompute full|auto]       auto: on workers with so little memory that blocks must be
    python -m benchmarks.verify_matrix --strategy feature [--models …] [--mesh …] [--patterns …]   feature_matrix.py
    python -m benchmarks.verify_matrix --strategy hybrid [--models …] [--only …] [--json FILE]      hybrid_matrix.py
    python -m benchmarks.verify_matrix --strategy found [--models …] [--only …] [--json FILE]       found_matrix.py

One worker pool and one trace per model serve all cases. Prints a row per model and number of ranks, a column per
schedule: the largest error as a share of what is allowed (1.0 would be the limit), or what went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import feature_matrix, found_matrix, hybrid_matrix
from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, PartitionerError
from partitioner import Plan, Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.verify.report import VerifyReport
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from passes.search.words import RecomputeMode
from runtime.ranks.launch import WorkerPool
from runtime.schedules import SCHEDULES

SMALL_IMAGES = {"width": "0.06", "size": "32", "classes": "10"}
EXAMPLES: dict[str, tuple[str, dict[str, str]]] = {
    "unet": ("examples.unet:unet", {}),
    "lstm_seq2seq": ("examples.lstm_seq2seq:lstm_seq2seq", {}),
    "lora": ("examples.lora:lora", {"size": "tiny"}),
    **{
        name: (f"examples.cnns:{name}", SMALL_IMAGES)
        for name in ("vgg16", "googlenet", "resnet101", "resnet152")
    },
    "inception_resnet_v2": ("examples.cnns:inception_resnet_v2", {**SMALL_IMAGES, "size": "75"}),
}
"""Where each model that is not bundled comes from, and how it is made small."""
MODELS = ("gpt2", "llama-1b", "bert", "t5", "vit", "resnet50", "whisper", "mixtral", *EXAMPLES)
RANKS = (2, 3, 4)
SCHEDULES_SHOWN = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
MICROBATCHES = 4


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    model: str
    ranks: int
    schedule: str
    recompute: RecomputeMode = "none"


SMOKE = (
    Case("gpt2", 3, "1f1b"),
    Case("llama-1b", 2, "zb-h1"),
    Case("bert", 2, "gpipe"),
    Case("t5", 3, "zb-v"),
    Case("vit", 4, "1f1b"),
    Case("resnet50", 2, "interleaved"),
    Case("whisper", 3, "gpipe"),
    Case("mixtral", 2, "1f1b"),
    Case("unet", 3, "zb-h1"),
    Case("lstm_seq2seq", 3, "interleaved"),
    Case("lora", 2, "zb-v"),
    Case("vgg16", 2, "zb-h1"),
    Case("googlenet", 3, "gpipe"),
    Case("resnet101", 4, "1f1b"),
    Case("resnet152", 2, "zb-v"),
    Case("inception_resnet_v2", 4, "interleaved"),
)
"""Every model once, every schedule twice or more."""


def load(model: str) -> tuple[Workload, OpGraph]:
    """The model's small variant with real weights, and its trace."""
    source, settings = EXAMPLES.get(model, (model, {"size": "tiny"}))
    workload = load_workload(source, settings=settings)
    return workload, as_graph(workload)


def verify_case(case: Case, workload: Workload, graph: OpGraph, pool: WorkerPool) -> VerifyReport:
    """Plan with exactly ``case.ranks`` devices in use, and verify the plan."""
    schedule = SCHEDULES[case.schedule]
    stages = case.ranks * (schedule.chunks or 2)
    assert graph.loss is not None
    has_batch_norm = any("batch_norm" in str(node.target) for node in graph.ops)
    # of a micro-batch; workers have no less than a MiB, and images take more of it than tokens
    samples = 2 if case.recompute != "auto" else 16 if case.model == "unet" else 256
    make = functools.partial(
        partition,
        graph,
        batch_size=samples * MICROBATCHES
        - (0 if has_batch_norm else 1),  # uneven, but a batch norm refuses one sample
        microbatches=MICROBATCHES,
        schedule=case.schedule,
        pins={graph.loss: stages - 1},
    )
    if case.recompute == "auto":
        plan = _short_of_memory(make, case.ranks)
    else:
        plan = make(ClusterSpec.local(case.ranks), recompute=case.recompute)
    if case.recompute != "none":
        found = [f"{len(stage.recomputed_blocks)}" for stage in plan.stages]
        print(f"{case.model} {case.schedule}: blocks computed again: {' '.join(found)}", file=sys.stderr)
    assert len({rank for stage in plan.stages for rank in stage.devices}) == case.ranks
    return verify_plan(plan, workload, pool=pool, graph=graph)


def _short_of_memory(make: Callable[..., Plan], ranks: int) -> Plan:
    """On the largest workers on which some block must be computed again; on the smallest that do, if none ever must."""
    plan = make(ClusterSpec.local(ranks))
    memory = max(plan.prediction.peak_memory_bytes.values())
    with contextlib.suppress(InfeasibleError):
        while not any(stage.recomputed_blocks for stage in plan.stages):
            memory = int(0.95 * memory)
            plan = make(ClusterSpec.local(ranks, memory=memory), recompute="auto")
    return plan


def main() -> int:
    """Run the chosen cases; the number of failures is the exit code's sign."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--strategy", choices=("layer", "feature", "hybrid", "found"), default="layer")
    options.add_argument("--models", default="", help="all of the strategy's if not given")
    options.add_argument("--ranks", default=",".join(map(str, RANKS)))
    options.add_argument("--schedules", default=",".join(SCHEDULES_SHOWN))
    options.add_argument("--smoke", action="store_true", help="only the subset that `make test-all` runs")
    options.add_argument("--recompute", choices=("none", "full", "auto"), default="none")
    options.add_argument("--mesh", default="2,4,2x2")
    options.add_argument("--patterns", default=",".join(feature_matrix.PINS))
    options.add_argument("--only", default="", help="of hybrid plans those in whose line this stands")
    options.add_argument("--json", type=Path, help="of hybrid plans a line per case, added to a file")
    chosen = options.parse_args()
    if chosen.strategy in ("hybrid", "found"):
        models = chosen.models.split(",") if chosen.models else list(hybrid_matrix.MODELS)
        cases = {"hybrid": hybrid_matrix.cases_of, "found": found_matrix.cases_of}[chosen.strategy]
        return hybrid_matrix.run(models, chosen.only, chosen.json, cases)
    if chosen.strategy == "feature":
        models = chosen.models.split(",") if chosen.models else list(feature_matrix.MODELS)
        meshes = list(feature_matrix.meshes_of(chosen.mesh))
        return feature_matrix.run(models, meshes, chosen.patterns.split(","))
    chosen.models = chosen.models or ",".join(MODELS)
    schedules = chosen.schedules.split(",")
    started, failures, cases = time.monotonic(), 0, 0
    print(f"{'model':14} ranks  " + "  ".join(f"{name:>12}" for name in schedules), flush=True)
    with WorkerPool(max(map(int, chosen.ranks.split(",")))) as pool:
        for model in chosen.models.split(","):
            workload, graph = load(model)
            for ranks in map(int, chosen.ranks.split(",")):
                wanted = [Case(model, ranks, schedule, chosen.recompute) for schedule in schedules]
                cells = list(
                    _cells(
                        [c for c in wanted if not chosen.smoke or replace(c, recompute="none") in SMOKE],
                        workload,
                        graph,
                        pool,
                    )
                )
                cases += len(cells)
                failures += sum(not cell[0].isdigit() for cell in cells)
                print(f"{model:14} {ranks:5}  " + "  ".join(f"{cell:>12}" for cell in cells), flush=True)
    print(f"{cases - failures} of {cases} plans verified in {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def _cells(cases: list[Case], workload: Workload, graph: OpGraph, pool: WorkerPool) -> Iterator[str]:
    for case in cases:
        try:
            report = verify_case(case, workload, graph, pool)
        except PartitionerError as error:
            print(error.render(), file=sys.stderr, flush=True)
            yield error.kind
            continue
        if not report.passed:
            print(report, file=sys.stderr, flush=True)
            yield "DIFFERS"
            continue
        severity = report.worst.severity if report.worst is not None else math.inf
        yield f"{severity:.1e}"


if __name__ == "__main__":
    sys.exit(main())
