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
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias, cast

from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, PartitionerError, TimeLimitError, UsageError
from cost_models.precision import Precision
from cost_models.units import counted, format_bytes
from partitioner.deployment.facts import free_memory_bytes
from partitioner.deployment.share import holders_of
from partitioner.models.as_graph import ModelOrTrace, as_graph
from partitioner.models.workload import Workload
from partitioner.planning.best import best_plan
from partitioner.planning.options import PlanOptions
from partitioner.record.data import PlanData
from partitioner.record.rebuild import plan_code, ranks_in_order
from partitioner.verify.notes import notes_on
from partitioner.verify.plain_loop import PlainStep
from partitioner.verify.samples import FailsInFloat64Error, NoNumberError, on_samples
from partitioner.verify.train_compare import Expected, compare_run, compare_saved
from partitioner.verify.train_course import (
    CLIPPED,
    ENDED,
    LEARNING_RATE,
    ORDER_SEED,
    RESUMED_TO,
    SAVED,
    Course,
)
from partitioner.verify.train_hooks import Hooked
from partitioner.verify.train_rank import (
    Given,
    RankRun,
    Run,
    TrainTask,
    train_rank,
)
from partitioner.verify.train_report import TrainComparison, TrainReport
from partitioner.verify.verify import (
    refuse_without_weights,
    workload_to_verify,
)
from passes.evaluate.copied_module import copied_with
from passes.evaluate.dropout import random_ops, without_dropout
from passes.graph.graph import OpGraph
from passes.progress import report_phase
from runtime.mesh.sharding import Block
from runtime.ranks.alone import alone
from runtime.ranks.launch import WorkerPool

PROCESS_BYTES = 400 * 2**20
"""Memory of a worker process without any model: torch, mostly."""
COPIES = 8
"""Copies of the parameters that a worker may hold at once: its models, state of three engines, what it tells."""


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
    refuse_without_weights(workload.model)
    _refuse_too_large(plan, workload.model)
    left_out: list[str] = []
    if source is None:
        source, left_out = _sent(workload)
    dims: dict[str, Any] = {"batch_dims": batch_dims, "dynamic_dims": dynamic_dims, "opaque": plan.opaque}
    if graph is None:
        graph = as_graph(
            workload,
            precision=plan.precision,
            loss_reduction=plan.loss_reduction,
            name=plan.model.name,
            **dims,
        )
    multiple = plan_code(plan, graph, ranks_in_order(plan)).multiple
    notes = [*_notes(plan, graph), *left_out]
    other = _other_plan(plan, graph, None if pool is None else pool.world_size)
    if other is None:
        notes.append("no other plan of this model was found to resume under")
    world_size = max(plan.world_size, 0 if other is None else other.world_size)
    report_phase("verifying: a plain loop over the model")

    def tried(double: bool, sizes: tuple[int, ...]) -> _Tried:
        course = Course.of(plan, workload, graph, sizes, hooks=not left_out)
        plain = course.plain(double=double)
        for number, step in enumerate(plain, 1):
            if not math.isfinite(step.loss):
                raise NoNumberError(f"its loss is {step.loss} in step {number} of a plain loop")
        if not double:
            return course, plain, course.plain(double=False, rounded=True)
        return course, plain, course.plain(double=False) if course.has_own_types else None

    double = True
    try:
        (course, plain, own), kept = on_samples(plan, workload, graph, multiple, partial(tried, True))
    except FailsInFloat64Error as error:
        if plan.precision != Precision():
            raise
        double = False
        (course, plain, own), kept = on_samples(plan, workload, graph, multiple, partial(tried, False))
        notes.append(f"compared in {course.own_types} alone: in float64 the model fails, {error.reason}")
    notes += kept
    bound = CLIPPED * plain[0].norm or 1.0
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="partitioner-verify-"))
        workers = stack.enter_context(nullcontext(pool) if pool is not None else WorkerPool(world_size))
        runs = _runs(double) if own is None or not double else (*_runs(True), *_runs(False))
        task = TrainTask(
            source,
            None if isinstance(source, Given) else workload.model.state_dict(),
            plan.model_dump_json(),
            dims,
            course.samples,
            sum(course.sizes),
            bound,
            LEARNING_RATE,
            ORDER_SEED,
            directory,
            timeout_seconds,
            runs,
        )
        report_phase(f"verifying: training on {counted(plan.world_size, 'local process')}")
        told = _run(workers, task, plan.world_size)
        types = "float64" if double else f"in {course.own_types}"
        expected = course.expected(plain, double=double, own=None if double else own)
        found = [*_placement(types, plan, graph, told[0]), *_both(types, told[0], told[1], expected)]
        if other is not None:
            under = replace(task, plan_json=other.model_dump_json(), runs=(runs[1],))
            report_phase("verifying: resumed under another plan")
            (elsewhere,) = _run(workers, under, other.world_size)
            name, sizes = f"{types}, resumed under {_placed(other)}", course.sizes_under(other)
            if sizes != course.sizes:
                again = course.plain(double=double, later=sizes)
                rounded = None if double else course.plain(double=False, later=sizes, rounded=True)
                expected = course.expected(again, double=double, own=rounded)
            found += compare_run(name, elsewhere, expected, first=SAVED + 1, loaded=SAVED)
        if double and own is not None:
            expected = course.expected(plain, double=False, own=own)
            found += _both(f"in {course.own_types}", told[2], told[3], expected)
    if double:
        found, rounding = course.without_rounding(found, plain)
        notes += rounding
    drawing = random_ops(without_dropout(graph)[0])
    comparable = _comparable(found) if drawing else None
    if comparable is not None:
        found = [c for c in found if c.kind not in OF_DRAWS or c.step <= comparable or math.isinf(c.error)]
        notes.append(
            f"{counted(len(drawing), 'op')} {'draws' if len(drawing) == 1 else 'draw'} random numbers ({drawing[0]}), "
            "and ranks draw others than a plain loop: numbers that follow from them are left out"
        )
    kinds = [c.kind for c in found]
    return TrainReport(
        model=plan.model.name,
        placed=_placed(plan),
        other_placed=None if other is None else _placed(other),
        steps=RESUMED_TO,
        samples=sum(course.sizes),
        optimizer=plan.optimizer_memory,
        compared={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        differences=tuple(c for c in found if not c.agrees),
        worst=max(found, key=lambda c: c.severity, default=None),
        seconds=time.monotonic() - started,
        notes=tuple(notes),
        comparable=comparable,
    )


_Tried: TypeAlias = tuple[Course, list[PlainStep], list[PlainStep] | None]
"""A course, the plain loop over it, and another whose rounding says what is allowed."""
OF_DRAWS = frozenset(
    {"loss", "gradient norm", "gradient", "parameter", "parameter as read", "buffer", "optimizer state"}
)
"""Kinds of what follows from the numbers that forward draws."""


def _comparable(found: Sequence[TrainComparison]) -> int | None:
    """Return the last step whose numbers agree, of a model that draws random ones; None if all do.

    What is missing or of another shape is not explained by draws.
    """
    steps = [c.step for c in found if c.kind in OF_DRAWS and not c.agrees and not math.isinf(c.error)]
    return min(steps) - 1 if steps else None


def _runs(double: bool) -> tuple[Run, Run]:
    """Return a run that saves, and one that goes on from there."""
    return Run(double, ENDED, save_after=SAVED), Run(double, RESUMED_TO, load=True)


def _both(
    name: str, saving: Sequence[RankRun], resumed: Sequence[RankRun], expected: Expected
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
        yield TrainComparison(run, 0, rank, "placement", "", off, 0.0, said)


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
    shapes = [() if s.sharding is None else tuple(s.sharding.axes.values()) for s in plan.stages]
    if len(shapes) == 1:
        return f"mesh {'×'.join(map(str, shapes[0]))}"
    return f"{len(plan.stages)} stages on {plan.world_size} devices, {plan.schedule}"


def _notes(plan: PlanData, graph: OpGraph) -> list[str]:
    _, dropped = without_dropout(graph)
    notes = list(notes_on(plan, graph, dropped))
    if plan.precision.loss_scale is not None:
        notes.append("in float64 nothing overflows, so the loss scale is tried in the plan's own types only")
    return notes


def _sent(workload: Workload) -> tuple[Given, list[str]]:
    """Return a copy of the workload that can be sent to other processes, with a note on what stays behind, or refuse it.

    Hooks on parameters go along if they can.
    """
    left_out: list[str] = []
    if Hooked(workload.model).has_hooks:
        try:
            both, loss_fn = copied_with(Hooked(workload.model), workload.loss_fn)
            hooked = cast("Hooked", both.cpu())
            source = Given(replace(workload, model=hooked.model, loss_fn=loss_fn), hooked)
            ForkingPickler.dumps(source)
            return source, []
        except Exception as error:  # noqa: BLE001 a user's hook may raise anything
            lines = str(error).splitlines() or ["no message"]
            left_out = [
                "hooks on parameters are left out of this comparison, on both sides: they cannot be sent to other "
                f"processes ({type(error).__name__}: {lines[0]}); functions that a module defines can"
            ]
    copied = workload.copied()
    source = Given(replace(copied, model=copied.model.cpu()))
    try:
        ForkingPickler.dumps(source)
    except Exception as error:  # whatever a user's class raises
        raise UsageError(
            f"cannot train {type(workload.model).__name__} on local processes",
            [f"it cannot be sent to them: {type(error).__name__}: {error}"],
            [
                "define its class, its loss and what it holds in a module, not in a function or a notebook",
                "partitioner verify PLAN file.py:factory --train makes the model in every process",
            ],
        ) from error
    return source, left_out


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
