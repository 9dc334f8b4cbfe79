"""Every model × fixed degrees × schedule of pipelines of sharded stages, verified in float64 on four real processes.

    python -m benchmarks.verify_matrix --strategy hybrid [--models gpt2,unet] [--only groups=1,3] [--json FILE]

A line per case: the largest error as a share of what is allowed (1.0 would be the limit), or in words why the case was
refused. "differs" and "raised" are faults, and make the exit code 1.

    groups=1,3 1f1b     stages of one device and of three
    interleave=2        each group has two stages, round and round
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from benchmarks import feature_matrix
from benchmarks.feature_matrix import load
from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from partitioner import Plan, Workload, partition
from partitioner.verify.report import VerifyReport
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from runtime.ranks.launch import WorkerPool

WORLD = 4
BATCH_SIZE, MICROBATCHES = 24, 4
"""Six samples a micro-batch: groups of one, two and three replicas divide them."""

MODELS = tuple(feature_matrix.MODELS)

CASES: tuple[tuple[str, str], ...] = (
    ("pipeline=2 tensor=2", "1f1b"),
    ("pipeline=2 tensor=2", "gpipe"),
    ("pipeline=2 tensor=2", "zb-h1"),
    ("pipeline=2 tensor=2 interleave=2", "interleaved"),
    ("pipeline=2 sequence=2", "1f1b"),
    ("pipeline=2 data=2", "1f1b"),
    ("pipeline=2 data=2 zero=1", "1f1b"),
    ("pipeline=2 data=2 zero=3", "gpipe"),
    ("pipeline=2 data=2 zero=3", "zb-h1"),
    ("pipeline=2 data=2 zero=1 recompute=full interleave=2", "interleaved"),
    ("pipeline=2 tensor=2 recompute=full", "1f1b"),
    ("data=2 tensor=2 zero=1", "1f1b"),
    ("pipeline=2", "1f1b"),
    ("interleave=2 pipeline=2 data=2", "zb-v"),
    ("groups=1,3", "1f1b"),
    ("groups=1,3 tensor=1 zero=1", "zb-h1"),
    ("groups=3,1", "gpipe"),
    ("groups=3,1 tensor=1 zero=3 recompute=full", "1f1b"),
    ("groups=2,1,1", "1f1b"),
    ("groups=2,1,1 recompute=full", "zb-h1"),
)
"""What is fixed, and the schedule."""

SMOKE: tuple[tuple[str, str, str], ...] = (
    ("gpt2", "groups=1,3", "1f1b"),
    ("llama-8b", "pipeline=2 tensor=2", "zb-h1"),
    ("t5", "groups=2,1,1", "1f1b"),
    ("resnet50", "pipeline=2 data=2 zero=1", "1f1b"),
    ("unet", "pipeline=2 data=2 zero=3", "gpipe"),
    ("mixtral", "pipeline=2 tensor=2 recompute=full", "1f1b"),
)
"""Every model that the acceptance names once."""


@dataclass(frozen=True)
class Found:
    """The outcome of a case."""

    model: str
    case: str
    outcome: str
    """passed, refused, differs or raised"""
    words: str
    """The largest error as a share of what is allowed, or what went wrong."""
    seconds: float = 0.0

    @property
    def fault(self) -> bool:
        """Tell whether something is wrong that a user could not have known."""
        return self.outcome in ("differs", "raised")

    def __str__(self) -> str:
        return f"{self.model:10} {self.case:64} {self.outcome:8} {self.seconds:4.0f} s  {self.words}"


Cases: TypeAlias = Sequence[tuple[str, Callable[[], Plan]]]
"""What each case is, and its plan."""


def make_plan(graph: OpGraph, fix: str, schedule: str) -> Plan:
    """Plan a case. Raises UsageError where the model or the groups do not allow it."""
    return partition(
        graph,
        ClusterSpec.local(WORLD),
        strategy="hybrid",
        fix=fix,
        schedule=schedule,
        batch_size=BATCH_SIZE,
        microbatches=MICROBATCHES,
    )


def verify_from_file(plan: Plan, workload: Workload, graph: OpGraph, pool: WorkerPool) -> VerifyReport:
    """Verify a plan as it comes back from its file."""
    return verify_plan(Plan.from_json(plan.model_dump_json()), workload, pool=pool, graph=graph)


def cases_of(graph: OpGraph) -> Cases:
    """List the cases of a model."""
    return [(f"{fix} @ {schedule}", partial(make_plan, graph, fix, schedule)) for fix, schedule in CASES]


def try_case(
    model: str, case: str, make: Callable[[], Plan], workload: Workload, graph: OpGraph, pool: WorkerPool
) -> Found:
    """Plan and verify a case, whatever comes of it."""
    began = time.monotonic()
    try:
        report = verify_from_file(make(), workload, graph, pool)
    except (UsageError, InfeasibleError) as error:
        outcome, words = "refused", "; ".join([error.what, *error.because])
    except Exception:  # noqa: BLE001 the rest of the table is worth having
        outcome, words = "raised", traceback.format_exc()
    else:
        worst = report.worst.severity if report.worst is not None else math.inf
        outcome, words = ("passed", f"{worst:.1e}") if report.passed else ("differs", str(report))
    return Found(model, case, outcome, words, time.monotonic() - began)


def run(
    models: Sequence[str], only: str, into: Path | None, cases: Callable[[OpGraph], Cases] = cases_of
) -> int:
    """Print a line per case of ``models`` whose text has ``only`` in it; 1 if one differs or raised something."""
    began, counts = time.monotonic(), Counter[str]()
    with WorkerPool(WORLD) as pool:
        for model in models:
            workload, graph = load(model)
            for case, make in cases(graph):
                if only not in f"{model} {case}":
                    continue
                found = try_case(model, case, make, workload, graph, pool)
                counts[found.outcome] += 1
                print(found, flush=True)
                if into is not None:
                    with into.open("a") as file:
                        file.write(json.dumps(asdict(found)) + "\n")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()), end="")
    print(f" in {time.monotonic() - began:.0f} s")
    return int(bool(counts["differs"] + counts["raised"]))
