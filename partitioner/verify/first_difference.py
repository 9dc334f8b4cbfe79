"""The diagnosis of a failed verification: the first op that computed something else, and where it ran.

First the unpartitioned *graph* is compared with the eager model: if these differ, the trace is wrong and not the
partition. Where ops were split into blocks, the graph of blocks is compared as well. Otherwise the plan runs again with a
note after each op, and the notes are held against the graph's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx, nn

from partitioner.record.data import PlanData
from partitioner.verify.compare import StepResult, compare
from partitioner.verify.noted_shards import noted_copies
from partitioner.verify.rank import VerificationTask, run_rank_with_notes
from partitioner.verify.ranks import put_together
from passes.evaluate.float64 import float64_by_default
from passes.graph.graph import OpGraph
from runtime.measure.record import Note, summarized, with_notes
from runtime.segment.code import SegmentCode
from runtime.segment.microbatch import Microbatches, batch_size_of

RELATIVE = 1e-9
TRACE_ALONE = "none of the partition: the traced graph alone differs from the eager model "


def first_difference(
    plan: PlanData,
    graph: OpGraph,
    run_graph: OpGraph,
    task: VerificationTask,
    expected: StepResult,
    run: Callable[..., Sequence[tuple[StepResult, Mapping[str, list[Note]]]]],
) -> str:
    """Say in one sentence what differs first.

    ``run(function, task)`` runs a function on every rank of the plan; ``run_graph``: the graph that they run.
    """
    own = unpartitioned(graph, task)
    numbers = replace(expected, parameters={}, buffers={})
    if alone := _worst(numbers, own):
        return f"{TRACE_ALONE}{alone}"
    if run_graph.parts:
        graph, own = run_graph, unpartitioned(run_graph, task)
        if alone := _worst(numbers, own):
            return f"none of the placement: the graph in blocks of neurons, on one rank, differs from the model {alone}"
    tensors = frozenset(node.name for node in graph.ops if isinstance(node.meta["val"], Tensor))
    per_rank = [notes for _, notes in run(run_rank_with_notes, replace(task, codes=_noted(task, tensors)))]
    stage_of = {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}
    copies = noted_copies(plan, per_rank)
    for node in graph.ops:
        for rank, notes in copies(node.name):
            for microbatch, (mine, theirs) in enumerate(
                zip(notes, own.notes.get(node.name, ()), strict=False)
            ):
                if not _close(mine, theirs):
                    stage = stage_of.get(node.name)
                    place = (
                        f"stage {stage} on rank {rank}" if stage is not None else f"recomputed on rank {rank}"
                    )
                    return (
                        f"{node.name} ({place}, micro-batch {microbatch}; module "
                        f"{node.meta.get('module_path') or '(root)'}, {node.meta.get('source')})"
                    )
    return (
        "no forward op: every op's forward agrees, so the difference is in backward, reduction or optimizer"
    )


def _noted(task: VerificationTask, tensors: frozenset[str]) -> dict[int, SegmentCode]:
    """Return segments with notes. An op that several segments of one rank compute is noted in the first of them."""
    codes: dict[int, SegmentCode] = {}
    seen: dict[tuple[int, ...], set[str]] = {}
    for index, code in sorted(task.codes.items()):
        before = seen.setdefault(task.segments.segments[index].ranks, set())
        codes[index] = with_notes(code, tensors - before)
        before.update(node.name for node in code.module.graph.nodes if node.op == "call_function")
    return codes


def _worst(expected: StepResult, own: Unpartitioned) -> str:
    """Write the worst difference in brackets; "" if there is none."""
    different = [c for c in compare(expected, own.result, 0.0) if not c.agrees]
    if not different:
        return ""
    worst = max(different, key=lambda c: c.severity)
    return f"({worst.kind} {worst.name}: {worst.error:.2e}, allowed {worst.allowed:.2e})"


class _Noting(fx.Interpreter):
    """An interpreter that runs the graph and notes every tensor."""

    def __init__(
        self, module: fx.GraphModule, notes: dict[str, list[Note]], drawn: Mapping[str, Tensor]
    ) -> None:
        super().__init__(module)
        self.notes, self.drawn = notes, drawn

    def run_node(self, n: fx.Node) -> object:
        result = self.drawn[n.name] if n.name in self.drawn else super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor):
            self.notes.setdefault(n.name, []).append(summarized(result))
        return result


@dataclass(frozen=True)
class Unpartitioned:
    """The results of the whole graph in one process."""

    result: StepResult
    notes: dict[str, list[Note]]


def unpartitioned(graph: OpGraph, task: VerificationTask) -> Unpartitioned:
    """Compute loss, gradients and notes of the whole graph on the task's micro-batches."""
    state = {
        name: nn.Parameter(task.value(name).clone(), task.whole_of(name) in task.trainable)
        if name in graph.parameters
        else task.value(name).clone()
        for name in (*task.state, *graph.parts)
    }
    cuts = Microbatches.of(batch_size_of(task.batch, graph.batch), task.microbatches)
    pieces = {n: cuts.cut(leaf, graph.batch.batch_dims.get(n)) for n, leaf in task.batch.items()}
    notes: dict[str, list[Note]] = {}
    total = 0.0
    with float64_by_default():
        for index, weight in enumerate(task.weights):
            arguments = [pieces[i.name][index] if i.kind == "batch" else state[i.name] for i in graph.inputs]
            drawn = {name: every[index] for name, every in task.draws.items()}
            outputs = _Noting(graph.module, notes, drawn).run(*arguments)
            last = index == len(task.weights) - 1
            for output, value in zip(graph.outputs, outputs, strict=True):
                if output.kind == "loss":
                    if value.requires_grad:
                        (value * weight).backward()
                    total += float(value.detach()) * weight
                elif output.kind == "buffer" and (last or not output.once):
                    state[output.name] = value.detach()
    gradients = {n: t.grad for n, t in state.items() if isinstance(t, nn.Parameter) and t.grad is not None}
    result = StepResult(total, gradients, {})
    if graph.parts:
        parameters = {n: t for n, t in state.items() if isinstance(t, nn.Parameter)}
        (whole,) = put_together([replace(result, parameters=parameters)], replace(task, shardings={}))
        result = replace(whole, loss=total)
    return Unpartitioned(replace(result, parameters={}), notes)


def _close(mine: Note, theirs: Note) -> bool:
    """Tell whether two notes agree. ``mine``: its norm is infinite if that is not known."""
    if math.isinf(mine[1]) and math.isfinite(theirs[1]):
        mine = (mine[0], theirs[1])
    scale = max(abs(mine[1]), abs(theirs[1]), 1e-30)
    same = [
        a == b or (a != a and b != b) or abs(a - b) <= RELATIVE * scale * 10
        for a, b in zip(mine, theirs, strict=True)
    ]
    return all(same)
