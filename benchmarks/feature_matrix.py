"""Every model × mesh × pattern of sharding, verified in float64 on real processes.

    python -m benchmarks.verify_matrix --strategy feature [--models gpt2,unet] [--mesh 2,2x2] [--patterns search,zero3]

"search" is what the search chooses by itself; the others are forced by pins (``PINS``). On two axes a pattern of parameters
or ops stands beside data parallelism, and ZeRO beside column and row. "n.a.": the mesh does not allow the pattern; why is
said below the table.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError, UsageError
from cost_models.layout import Replicate
from partitioner import Plan, Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.verify.report import VerifyReport
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from passes.search.feature.options import StoredChoice
from passes.search.feature.presets import rules_of
from passes.shard.words import Choice
from runtime.ranks.launch import WorkerPool

log = logging.getLogger("partitioner")

Mesh = tuple[int, ...]

TINY = {"size": "tiny"}
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    **{
        name: (name, TINY)
        for name in ("gpt2", "llama-8b", "bert", "t5", "vit", "resnet50", "whisper", "mixtral")
    },
    "alexnet": ("examples.alexnet:alexnet", {"classes": "16", "width": "0.0625", "size": "63"}),
    "unet": ("examples.unet:unet", {"channels": "8", "depth": "2", "size": "16"}),
    "lstm_seq2seq": (
        "examples.lstm_seq2seq:lstm_seq2seq",
        {"vocabulary": "64", "hidden": "16", "layers": "2", "source_steps": "3", "target_steps": "4"},
    ),
    "train_gpt": ("examples/byte_text.py:gpt", {"layers": "2", "width": "32"}),
}
"""Where each model comes from, and how it is made small."""

MESHES: tuple[Mesh, ...] = ((2,), (4,), (2, 2))

PINS: dict[str, tuple[str, str]] = {
    "search": ("", ""),
    "batch": ("data", "data"),
    "column/row": ("column_row", "data column_row"),
    "sequence": ("sequence", "data sequence"),
    "vocabulary": ("vocabulary", "data vocabulary"),
    "zero1": ("zero1", "zero1 column_row"),
    "zero3": ("zero3", "zero3 column_row"),
}
"""What each pattern pins every tensor to: on one axis, on two. (ZeRO-2 would cut gradients before the step's end; here
they are summed whole over micro-batches and cut when they are reduced, so that it is ZeRO-1.)"""

BATCH_SIZE, MICROBATCHES = 8, 2


def load(model: str) -> tuple[Workload, OpGraph]:
    """The model's small variant with real weights, and its trace."""
    source, settings = MODELS[model]
    workload = load_workload(source, settings=settings)
    return workload, as_graph(workload)


def make_plan(graph: OpGraph, mesh: Mesh, pattern: str) -> Plan:
    """The plan that the search makes around the pattern. Raises UsageError where the mesh does not allow it."""
    words = PINS[pattern][len(mesh) - 1]
    return partition(
        graph,
        ClusterSpec.local(math.prod(mesh)),
        strategy="feature",
        mesh=mesh,
        pins={"*": words} if words else None,
        batch_size=BATCH_SIZE,
        microbatches=MICROBATCHES,
    )


def verify_sharded(
    mesh: Mesh, pattern: str, workload: Workload, graph: OpGraph, pool: WorkerPool
) -> VerifyReport:
    """Plan and verify one cell of the table."""
    return verify_plan(make_plan(graph, mesh, pattern), workload, pool=pool, graph=graph)


def held_share(graph: OpGraph, plan: Plan, pattern: str) -> float:
    """Of the tensors that a pattern speaks of, on all axes: how many are as it says. (The rest does not divide, or no rule
    of the op allows it.)"""
    (stage,) = plan.stages
    assert stage.sharding is not None
    placement = stage.sharding.placement(stage.devices, plan.microbatches)
    words = PINS[pattern][len(placement.mesh.shape) - 1].split()
    whole = (Replicate(),) * len(placement.mesh.shape)
    held = []
    for axis in range(len(whole)):
        for name, rule in rules_of(graph, words[axis % len(words)]).items():
            given = graph.input_of.get(name)
            if given is None:
                held.append(rule.allows(placement.choices[name][axis]))
            elif given.kind == "batch":
                held.append(rule.allows(Choice((), (placement.batch.get(given.name, whole)[axis],))))
            else:
                stored = placement.stored.get(given.name, whole)
                state = placement.sharded_state.get(given.name, stored)
                held.append(rule.allows_stored(StoredChoice(stored[axis], state[axis], 0)))
    return sum(held) / len(held)


def run(models: Sequence[str], meshes: Sequence[Mesh], patterns: Sequence[str]) -> int:
    """Print the table; 1 if a cell is neither verified nor not applicable."""
    started, cells, reasons = time.monotonic(), [], []
    shares: list[tuple[float, str]] = []
    print(
        f"{'model':14} {'mesh':5} " + " ".join(f"{name:>10}" for name in patterns) + "   seconds", flush=True
    )
    with WorkerPool(max(map(math.prod, meshes))) as pool:
        for model in models:
            workload, graph = load(model)
            for mesh in meshes:
                shape, began = "x".join(map(str, mesh)), time.monotonic()
                print(f"{model:14} {shape:5} ", end="", flush=True)
                for pattern in patterns:
                    cell, why, share = _cell(mesh, pattern, workload, graph, pool)
                    shares += [(share, f"{model} {shape} {pattern}")] if share is not None else []
                    print(f"{cell:>10} ", end="", flush=True)
                    cells.append(cell)
                    reasons += [f"{model} {shape} {pattern}: {why}"] if why else []
                print(f"{time.monotonic() - began:9.0f}", flush=True)
    absent = cells.count("n.a.")
    verified = sum(cell[0].isdigit() for cell in cells)
    print(*reasons, sep="\n")
    least = min(shares, key=lambda cell: cell[0], default=(1.0, "-"))
    mean = sum(share for share, _ in shares) / max(len(shares), 1)
    print(
        f"of the tensors that patterns speak of, {mean:.1%} are as they say; fewest, {least[0]:.0%}, in {least[1]}"
    )
    print(
        f"{verified} verified, {absent} not applicable, {len(cells) - verified - absent} failed "
        f"in {time.monotonic() - started:.0f} s"
    )
    return 0 if verified + absent == len(cells) else 1


def _cell(
    mesh: Mesh, pattern: str, workload: Workload, graph: OpGraph, pool: WorkerPool
) -> tuple[str, str, float | None]:
    """The largest error as a share of what is allowed, or what went wrong and why; and ``held_share``."""
    plan = None
    try:
        plan = make_plan(graph, mesh, pattern)
        report = verify_plan(plan, workload, pool=pool, graph=graph)
    except PartitionerError as error:
        if plan is None and isinstance(error, UsageError):
            return "n.a.", "; ".join(error.because), None
        print(error.render(), file=sys.stderr, flush=True)
        return error.kind, error.what, None
    except Exception as error:
        log.exception("%s on %s", pattern, mesh)  # the rest of the table is worth having
        return "crash", f"{type(error).__name__}: {error}", None
    share = held_share(graph, plan, pattern) if PINS[pattern][0] else None
    if not report.passed:
        print(report, file=sys.stderr, flush=True)
        return "DIFFERS", f"first {report.first_difference}", share
    return f"{report.worst.severity if report.worst is not None else math.inf:.1e}", "", share


def meshes_of(text: str) -> Iterator[Mesh]:
    """ "2,2x2" -> (2,), (2, 2)."""
    for shape in text.split(","):
        yield tuple(map(int, shape.split("x")))
