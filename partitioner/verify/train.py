"""``verify(train=True)``: train with the engine as a user would, and beside it with a plain loop; compare everything.

    plan ─► local workers: deploy, loader, clipping, scheduler, save, load ─► losses, samples, state of every rank
    user's own module ─► ``plain_loop``: the same batches in the same order ─► the same, compared in ``train_compare``

    run                               steps                       beside the plain loop
    float64                           1 2 (save) 3                in float64, to 1e-9
    float64, resumed                  (load) 3 4                  the same
    float64, resumed under another    (load) 3 4                  the same; one device, or two where the plan has one
    the plan's own types              1 2 3                       in these types, to their rounding

A model that fails in float64 is run in its own types alone, and resumed in these.

``verify`` runs the programs alone. What only the engine does is tried here: the norm that clips, the loader, checkpoints,
optimizer shards, sums in 16 bits, who plays which device. Dropout is off in both worlds.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, PartitionerError, TimeLimitError, UsageError
from cost_models.precision import Precision
from cost_models.units import counted, format_bytes
from partitioner.deployment.facts import free_memory_bytes
from partitioner.deployment.share import holders_of
from partitioner.models.as_graph import ModelOrTrace
from partitioner.models.workload import Workload
from partitioner.planning.best import best_plan
from partitioner.planning.options import PlanOptions
from partitioner.record.data import PlanData
from partitioner.record.rebuild import plan_code, ranks_in_order
from partitioner.verify.copies import SentWorkload, sent_workload
from partitioner.verify.report import TrainComparison, TrainReport
from partitioner.verify.samples import FailsInFloat64Error, on_samples
from partitioner.verify.subject import mesh_of_all, notes_on, trace_of, workload_to_verify
from partitioner.verify.train_compare import ExpectedRun, compare_run, compare_saved, line
from partitioner.verify.train_course import TrainCourse, Tried, clipped, trained_model, tried
from partitioner.verify.train_rank import RESUMED_TO, SAVED, EngineRun, RankRun, TrainTask, train_rank
from passes.copies.dropout import random_ops, without_dropout
from passes.fidelity.agree import StepResult
from passes.graph.graph import OpGraph
from passes.progress import report_phase
from runtime.mesh.sharding import Block
from runtime.ranks.alone import alone
from runtime.ranks.launch import WorkerPool
from runtime.segment.microbatch import microbatch_sizes

PROCESS_BYTES = 400 * 2**20
"""Memory of a worker process without any model: torch, mostly."""
COPIES = 8
"""Copies of the parameters that a worker may hold at once: its models, state of three engines, what it tells."""
OF_DRAWS = frozenset(
    {"loss", "gradient norm", "gradient", "parameter", "parameter as read", "buffer", "optimizer state"}
)
"""Kinds of what follows from the numbers that forward draws."""


@alone(threads=True)
def verify_training(
    plan: PlanData,
    model: ModelOrTrace,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
    pool: WorkerPool | None = None,
    graph: OpGraph | None = None,
    source: Callable[[], Workload] | None = None,
    timeout_seconds: float = 300.0,
) -> TrainReport:
    """Train a few steps with the engine on local processes, save and resume, and compare with a plain loop over ``model``.

    ``source``: makes the model's workload in another process, if the model cannot be sent there. Others: as for
    ``verify_plan``.
    """
    started = time.monotonic()
    workload = workload_to_verify(model, example_inputs, loss_fn)
    _refuse_too_large(plan, workload.model)
    left_out: list[str] = []
    if source is None:
        source, left_out = sent_workload(workload)
    dims: dict[str, Any] = {"batch_dims": batch_dims, "dynamic_dims": dynamic_dims}
    if graph is None:
        graph = trace_of(plan, workload, dims)
    plain_graph, dropped = without_dropout(graph)
    notes = [*notes_on(plan, graph, dropped), *left_out]
    if plan.precision.loss_scale is not None:
        notes.append("in float64 nothing overflows, so the loss scale is tried in the plan's own types only")
    other = _other_plan(plan, graph, None if pool is None else pool.world_size)
    if other is None:
        notes.append("no other plan of this model was found to resume under")
    report_phase("verifying: a plain loop over the model")
    eager = trained_model(plan, workload, plain_graph, hooks=not left_out)
    multiple = plan_code(plan, graph, ranks_in_order(plan)).multiple

    def tried_in(double: bool) -> tuple[Tried, list[str]]:
        return on_samples(plan, workload, graph, multiple, partial(tried, eager, plan, double))

    double = True
    try:
        (course, plain, own), kept = tried_in(double)
    except FailsInFloat64Error as error:
        if plan.precision != Precision():
            raise
        double = False
        (course, plain, own), kept = tried_in(double)
        notes.append(f"compared in {course.own_types} alone: in float64 the model fails, {error.reason}")
    notes += kept
    types = (True, False) if double and own is not None else (double,)
    with tempfile.TemporaryDirectory(prefix="partitioner-verify-") as directory:
        task = TrainTask(
            source,
            None if isinstance(source, SentWorkload) else workload.model.state_dict(),
            plan.model_dump_json(),
            dims,
            course.leaves,
            course.batch_dims,
            course.samples,
            sum(course.sizes),
            clipped(plain[0].norm),
            directory,
            timeout_seconds,
            tuple(EngineRun(of_type, load) for of_type in types for load in (False, True)),
        )
        compared = _train(course, task, graph, other, plain, own, pool)
    if double:
        compared, rounding = course.without_rounding(compared, plain)
        notes += rounding
    drawing = random_ops(plain_graph)
    comparable = _comparable(compared) if drawing else None
    if comparable is not None:
        compared = [
            c for c in compared if c.kind not in OF_DRAWS or c.step <= comparable or math.isinf(c.error)
        ]
        notes.append(
            f"{counted(len(drawing), 'op')} {'draws' if len(drawing) == 1 else 'draw'} random numbers ({drawing[0]}), "
            "and ranks draw others than a plain loop: numbers that follow from them are left out"
        )
    kinds = [c.kind for c in compared]
    return TrainReport(
        model=plan.model.name,
        placed=_placed(plan),
        other_placed=None if other is None else _placed(other),
        steps=RESUMED_TO,
        samples=sum(course.sizes),
        optimizer=plan.optimizer_memory,
        compared={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        differences=tuple(c for c in compared if not c.agrees),
        worst=max(compared, key=lambda c: c.severity, default=None),
        seconds=time.monotonic() - started,
        notes=tuple(notes),
        comparable=comparable,
    )


def _train(
    course: TrainCourse,
    task: TrainTask,
    graph: OpGraph,
    other: PlanData | None,
    plain: Sequence[StepResult],
    own: Sequence[StepResult] | None,
    pool: WorkerPool | None,
) -> list[TrainComparison]:
    """Train on the ranks, and compare with ``plain``. ``own``: in the plan's types, or what rounding does where all is."""
    plan, double = course.plan, task.runs[0].double
    world_size = max(plan.world_size, 0 if other is None else other.world_size)
    with nullcontext(pool) if pool is not None else WorkerPool(world_size) as workers:
        report_phase(f"verifying: training on {counted(plan.world_size, 'local process')}")
        told = _run(workers, task, plan.world_size)
        types = "float64" if double else f"in {course.own_types}"
        expected = course.expected(plain, double=double, own=None if double else own)
        compared = [*_placement(types, plan, graph, told[0]), *_both(types, told[0], told[1], expected)]
        if other is not None:
            under = replace(task, plan_json=other.model_dump_json(), runs=task.runs[1:2])
            report_phase("verifying: resumed under another plan")
            (elsewhere,) = _run(workers, under, other.world_size)
            name = f"{types}, resumed under {_placed(other)}"
            sizes = microbatch_sizes(sum(course.sizes), other.microbatches)
            if sizes != course.sizes:
                again = course.plain(double=double, later=sizes)
                rounded = None if double else course.plain(double=False, later=sizes, rounded=True)
                expected = course.expected(again, double=double, own=rounded)
            compared += compare_run(name, elsewhere, expected, first=SAVED + 1, loaded=SAVED)
    if double and own is not None:
        expected = course.expected(plain, double=False, own=own)
        compared += _both(f"in {course.own_types}", told[2], told[3], expected)
    return compared


def _comparable(compared: Sequence[TrainComparison]) -> int | None:
    """Return the last step whose numbers agree, of a model that draws random ones; None if all do.

    What is missing or of another shape is not explained by draws.
    """
    steps = [c.step for c in compared if c.kind in OF_DRAWS and not c.agrees and not math.isinf(c.error)]
    return min(steps) - 1 if steps else None


def _both(
    name: str, saving: Sequence[RankRun], resumed: Sequence[RankRun], expected: ExpectedRun
) -> Iterator[TrainComparison]:
    """Compare a run, and what went on from its checkpoint."""
    yield from compare_run(name, saving, expected, first=1, stored=SAVED)
    marks = [rank.marks for rank in saving]
    yield from compare_saved(f"{name}, resumed, after loading", saving, resumed)
    yield from compare_run(f"{name}, resumed", resumed, expected, first=SAVED + 1, loaded=SAVED, marks=marks)


def _placement(
    run: str, plan: PlanData, graph: OpGraph, ranks: Sequence[RankRun]
) -> Iterator[TrainComparison]:
    """Compare who trains a parameter, or a block of it, with the plan, of whose devices rank r plays the r-th."""
    code = plan_code(plan, graph)
    wanted: list[set[tuple[str, Block | None]]] = [set() for _ in ranks]
    for name, devices in holders_of(code.graph, code.segmentation, code.shardings).items():
        part, sharding = code.graph.parts.get(name), code.shardings.get(name)
        whole = name if part is None else part.whole
        if whole not in graph.parameters:
            continue
        for device in devices:
            block = None if part is None else part.block
            if part is None and sharding is not None:
                block = sharding.owner_block(graph.parameters[name].shape, device)
            wanted[sorted(plan.used_devices).index(device)].add((whole, block))
    for rank, (told, own) in enumerate(zip(ranks, wanted, strict=True)):
        held = {(item.name, item.block) for item in told.last if item.kind == "parameter"}
        strange = sorted(name for name, _ in held - own)
        lost = sorted(name for name, _ in own - held)
        said = f"it does not train {lost[0]}, or its block of it, as the plan says" if lost else ""
        said = said or (f"it trains {strange[0]}, which the plan gives to other devices" if strange else "")
        off = float(len(lost) + len(strange))
        yield line(run, 0, rank, "placement", off, said)


def _run(workers: WorkerPool, task: TrainTask, world_size: int) -> list[list[RankRun]]:
    """Run the task on all ranks. Returns what they told, by run and rank; raises what they refuse alike as it is."""
    results = workers.run(
        train_rank, task, world_size=world_size, timeout_seconds=task.timeout_seconds * (1 + len(task.runs))
    )
    for result in results:
        if isinstance(result, PartitionerError):
            raise result
    return [list(ranks) for ranks in zip(*results, strict=True)]


def _other_plan(plan: PlanData, graph: OpGraph, most_ranks: int | None) -> PlanData | None:
    """Make the simplest other plan of the same trace: one device, or two stages where the plan has one device."""
    devices = 1 if plan.world_size > 1 else 2
    if most_ranks is not None and devices > most_ranks:
        return None
    options = PlanOptions(
        batch_size=plan.batch_size,
        optimizer_memory=plan.optimizer_memory,
        microbatches=plan.microbatches,
        min_stages=devices,
    )
    cluster = ClusterSpec.local(devices)
    try:
        return best_plan(PlanData, graph, cluster, options.requests(graph, plan.precision))
    except (InfeasibleError, TimeLimitError, UsageError):
        return None


def _placed(plan: PlanData) -> str:
    if plan.world_size == 1:
        return "a plan for one device"
    if len(plan.stages) == 1:
        return f"mesh {'×'.join(map(str, mesh_of_all(plan)))}"
    return f"{len(plan.stages)} stages on {plan.world_size} devices, {plan.schedule}"


def _refuse_too_large(plan: PlanData, model: nn.Module) -> None:
    """Raise UsageError where this machine has no memory for as many processes with such a model."""
    elements = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    needed = max(plan.world_size, 2) * (PROCESS_BYTES + COPIES * 8 * elements)
    free = free_memory_bytes()
    if free is not None and needed > free:
        raise UsageError(
            f"cannot train {plan.model.name} on this machine",
            [
                f"{plan.world_size} local processes with {elements:,} numbers in float64 need about "
                f"{format_bytes(needed)}, and {format_bytes(free)} are free"
            ],
            [
                "verify a small variant of the model (for bundled models: --set size=tiny), with a plan of its own",
                "verify without train=True runs one step with less",
            ],
        )
