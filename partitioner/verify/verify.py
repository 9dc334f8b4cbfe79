"""``verify``: run the actual plan on local processes and compare every number with the unpartitioned model.

    plan ─► the same programs ─► Gloo workers on this machine, float64 ─┐
    model ─► eager (``partitioner.verify.eager``) ──────────────────────┴─► loss, gradients, buffers, parameters

Where the model is another one in float64 (its code refuses that type, or asks for types and takes another way), both sides
compute in its own types, and what rounding may do there is measured (``partitioner.verify.rounding``).

The reference is the user's own module, not our graph. Dropout is switched off on both sides; other random draws of the plan
are those of the model, and what ranks draw by themselves is compared among them (``partitioner.verify.draws``). Tolerances:
``passes.fidelity.agree``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.precision import Precision
from cost_models.units import counted
from partitioner.engine.optimizer import make_budgeted
from partitioner.models.as_graph import ModelOrTrace
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.record.rebuild import plan_code, plan_programs, plan_segments, ranks_in_order
from partitioner.verify.copies import workload_copy
from partitioner.verify.draws import (
    DRAWN,
    WRONGLY_DRAWN,
    RecordedDraws,
    compare_draws,
    cuts_of,
    own_draws,
    unmatched,
    with_own_draws,
    with_replayed,
)
from partitioner.verify.eager import EagerModel, why_in_pieces
from partitioner.verify.first_difference import TRACE_ALONE, first_difference
from partitioner.verify.rank import VerificationTask, run_rank_with_notes
from partitioner.verify.ranks import compare_ranks, put_together, with_views
from partitioner.verify.report import VerifyReport
from partitioner.verify.rounding import DRAWS, allowed_by_rounding, own_types, rounding_only, spacing
from partitioner.verify.samples import FailsInFloat64Error, on_samples, refuse_no_numbers
from partitioner.verify.subject import mesh_of_all, notes_on, trace_of, workload_to_verify
from passes.copies.dropout import random_ops, without_dropout
from passes.copies.float64 import in_float64
from passes.fidelity.agree import ComparedQuantity, StepResult
from passes.graph.graph import OpGraph
from passes.lower.placed_graph import PlacedGraph
from passes.progress import report_phase
from passes.trace.loss.reduction import loss_weights, step_batch
from passes.trace.watch import HOOKS_RUN
from runtime.ops.replay import DrawsByOp
from runtime.ranks.alone import alone
from runtime.ranks.launch import WorkerPool

LEARNING_RATE = 1e-3


@alone(threads=True)
def verify_plan(
    plan: PlanData,
    model: ModelOrTrace,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, list[int]] | None = None,
    pool: WorkerPool | None = None,
    graph: OpGraph | None = None,
    timeout_seconds: float = 120.0,
) -> VerifyReport:
    """Run ``plan`` on local Gloo processes in float64, or in the model's own types, and compare it with ``model``.

    ``model``: a module with real weights, or a Workload. ``batch_dims``, ``dynamic_dims``: those that :func:`partition`
    was given. ``pool``: workers to use instead of starting new ones. ``graph``: the model's training trace, to trace once
    for several plans.
    """
    workload = workload_to_verify(model, example_inputs, loss_fn)
    if graph is None:
        graph = trace_of(plan, workload, {"batch_dims": batch_dims, "dynamic_dims": dynamic_dims})
    verified = partial(_verified, plan, workload, graph, pool, timeout_seconds)
    try:
        report = verified()
    except FailsInFloat64Error as error:
        if plan.precision != Precision():
            raise
        return verified(f"in float64 it fails, {error.reason}")
    own = spacing(graph, plan.precision)
    if not (report.first_difference or "").startswith(TRACE_ALONE) or own > torch.finfo(torch.float32).eps:
        return report  # 16 bits would hide a percent
    said = (report.first_difference or "").removeprefix(TRACE_ALONE)
    again = verified(f"in float64 it computes something else than its graph {said}")
    if again.passed:
        return again
    worst = again.differences[0]
    too = f"in {again.types} it differs too: {worst.kind} {worst.name}, {worst.error:.3e}, allowed {worst.allowed:.3e}"
    return replace(report, notes=(*report.notes, too))


def _verified(
    plan: PlanData,
    workload: Workload,
    traced: OpGraph,
    pool: WorkerPool | None,
    timeout_seconds: float,
    why_own_types: str = "",
) -> VerifyReport:
    """Verify in float64; in the model's own types where ``why_own_types`` says why."""
    started = time.monotonic()
    double = not why_own_types
    plain, dropped = without_dropout(traced)
    graph = in_float64(plain) if double else plain
    code = plan_code(plan, traced, ranks_in_order(plan), run=graph)
    eager = EagerModel(workload, plain, partial(_optimizer, plan))
    notes = _notes(plan, graph, dropped, double=double)

    def step(leaves: Mapping[str, Tensor], sizes: tuple[int, ...], **manner: Any) -> StepResult:
        return eager.steps([(leaves, sizes)], double=double, **manner)[0]

    def tried(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], Mapping[str, Tensor], DrawsByOp, StepResult]:
        leaves, recorded = eager.grown(sum(sizes)), RecordedDraws(graph)
        result = step(leaves, sizes, recorded=recorded)
        refuse_no_numbers(result)
        return sizes, leaves, recorded.draws, result

    report_phase("verifying: the step of the whole model")
    (sizes, leaves, draws, expected), kept = on_samples(plan, workload, plain, code.multiple, tried)
    notes += kept
    state = model_state(workload_copy(workload, double=double).model, graph)
    batch = eager.batch(leaves, double=double)
    task = replace(_task(plan, graph, code, sizes, batch, state, timeout_seconds), double=double)
    drawing = frozenset(random_ops(traced))
    own = [draw for part in task.codes.values() for draw in own_draws(part, drawing)]
    codes = {index: with_replayed(part, draws, cuts_of(plan)) for index, part in task.codes.items()}
    task = replace(task, codes=codes, draws=draws)
    drawn = {index: with_own_draws(part, own) for index, part in codes.items()}
    if left := unmatched(graph, draws):
        notes.append(
            f"{len(left)} ops draw random numbers ({left[0]}, …): they may differ for that reason alone"
        )
    with nullcontext(pool) if pool is not None else WorkerPool(plan.world_size) as workers:
        run = partial(workers.run, world_size=plan.world_size, timeout_seconds=timeout_seconds)
        report_phase(f"verifying: the step on {counted(plan.world_size, 'local process')}")
        told = run(run_rank_with_notes, replace(task, codes=drawn))
        results = with_views(put_together([result for result, _ in told], task), graph.views)
        report_phase("verifying: comparing every number")
        if double:
            compared = compare_ranks(expected, results, state, LEARNING_RATE)
            in_other_order = partial(step, leaves, sizes, turned=True)
            compared, rounding = _without_rounding(compared, expected, in_other_order)
            notes += rounding
        else:
            spaced = spacing(traced, plan.precision)
            rounded = [step(leaves, sizes, rounded=seed) for seed in range(DRAWS)]
            compared = compare_ranks(expected, results, state, LEARNING_RATE, spaced)
            compared = allowed_by_rounding(compared, expected, rounded, LEARNING_RATE)
        compared += compare_draws(own, [noted for _, noted in told])
        differences = tuple(sorted((c for c in compared if not c.agrees), key=lambda c: -c.severity))
        first = WRONGLY_DRAWN.format(differences[0].name) if differences else None
        if double and any(c.kind != DRAWN for c in differences):
            report_phase("verifying: the first op that differs")
            first = first_difference(plan, graph, code.graph, task, expected, run)
    kinds = [c.kind for c in compared]
    return VerifyReport(
        model=plan.model.name,
        stages=len(plan.stages),
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        samples=sum(sizes),
        compared={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        differences=differences,
        worst=max(compared, key=lambda c: c.severity, default=None),
        seconds=time.monotonic() - started,
        notes=tuple(notes),
        first_difference=first,
        types="float64" if double else own_types(traced, plan.precision),
        why_own_types=why_own_types,
        mesh=mesh_of_all(plan),
    )


def _optimizer(plan: PlanData, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return make_budgeted(
        plan.optimizer_memory, [{"params": [parameter for _, parameter in named]}], LEARNING_RATE
    )


def _task(
    plan: PlanData,
    graph: OpGraph,
    code: PlacedGraph,
    sizes: tuple[int, ...],
    leaves: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    timeout_seconds: float,
) -> VerificationTask:
    """Say what every rank runs: the plan's own programs, on this batch and from this state."""
    ranks = ranks_in_order(plan)
    return VerificationTask(
        programs=plan_programs(plan, ranks),
        codes=code.lowered(),
        segments=plan_segments(plan, ranks),
        batch_specs=tuple(map(code.batch_of, range(plan.world_size))),
        batch=step_batch(graph, leaves, sizes),
        state=state,
        trainable=frozenset(name for name, spec in graph.parameters.items() if spec.requires_grad),
        microbatches=plan.microbatches,
        weights=tuple(loss_weights(graph.loss_reduction, sizes)),
        optimizer=plan.optimizer_memory,
        learning_rate=LEARNING_RATE,
        timeout_seconds=timeout_seconds,
        shardings=code.shardings,
        parts=code.graph.parts,
    )


def _notes(plan: PlanData, graph: OpGraph, dropped: int, *, double: bool) -> list[str]:
    """Note what is compared otherwise than it will be trained. ``dropped``: ops whose dropout was switched off."""
    notes = list(notes_on(plan, graph, dropped, double=double))
    if plan.precision != Precision():
        notes.append(f"verified in float64 throughout; the plan trains with {plan.precision}")
    if any(note.startswith(HOOKS_RUN) for note in notes):
        notes.append(
            "hooks on parameters' gradients are left out on both sides: gradients are compared before they run"
        )
    if plan.microbatches > 1 and (why := why_in_pieces(graph)):
        notes.append(f"compared micro-batch by micro-batch, not with the whole batch: {why}")
    return notes


def _without_rounding(
    compared: list[ComparedQuantity], expected: StepResult, in_other_order: Callable[[], StepResult]
) -> tuple[list[ComparedQuantity], list[str]]:
    """Return ``compared`` without what is rounding of the model itself, and a note that names that."""
    rounding = rounding_only([c for c in compared if not c.agrees], expected, in_other_order, LEARNING_RATE)
    if not rounding:
        return compared, []
    names = sorted({c.name for c in rounding})
    note = (
        f"{counted(len(names), 'parameter')} ({names[0]}{', …' if len(names) > 1 else ''}) by rounding alone: not more "
        "than the unpartitioned model differs with its samples in another order"
    )
    return [c for c in compared if c not in rounding], [note]


def model_state(model: nn.Module, graph: OpGraph) -> dict[str, Tensor]:
    """Return parameters, buffers and lifted constants by canonical name."""
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    state.update({name: tensor.detach() for name, tensor in model.named_buffers()})
    return {**graph.constants, **state}
