"""The diagnosis of a failed verification: the first op that computed something else, and where it ran.

First the unpartitioned *graph* is compared with the eager model: if these differ, the trace is wrong and not the
partition. Where ops were split into blocks, the graph of blocks is compared as well. Otherwise the plan runs again with a
note after each op, and the notes are held against the graph's own. Notes of ranks on their shards are put together first:

    y: S(0) on 2 ranks      sums add up, squares of norms too                       one whole value
    y: a part of a sum      sums add up; the norm of the sum is in no rank's note   one whole value, norm unknown
    y: whole                                                                        two whole values
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor, fx, nn

from cost_models.layout import Mesh, Partial, Replicate
from partitioner.record.data import PlanData
from partitioner.record.rebuild import ranks_in_order
from partitioner.verify.rank import VerificationTask, run_rank_with_notes
from partitioner.verify.ranks import put_together
from passes.copies.float64 import float64_by_default
from passes.fidelity.agree import StepResult, compare
from passes.fidelity.steps import run_graph
from passes.graph.graph import OpGraph
from passes.shard.words import Placements
from runtime.measure.record import Note, summarized, with_notes
from runtime.mesh.sharding import coordinates
from runtime.segment.code import SegmentCode
from runtime.segment.microbatch import Microbatches, batch_size_of

RELATIVE = 1e-9
Wholes: TypeAlias = Iterator[tuple[str, list[Note]]]
"""The copies of a value, each with its ranks in words and a note per micro-batch."""
TRACE_ALONE = "none of the partition: the traced graph alone differs from the eager model "


def first_difference(
    plan: PlanData,
    graph: OpGraph,
    split_graph: OpGraph,
    task: VerificationTask,
    expected: StepResult,
    run: Callable[..., Sequence[tuple[StepResult, Mapping[str, list[Note]]]]],
) -> str:
    """Say in one sentence what differs first.

    ``run(function, task)`` runs a function on every rank of the plan; ``split_graph``: the graph that they run, in which
    ops may be split into blocks.
    """
    own, noted = unpartitioned(graph, task)
    numbers = replace(expected, parameters={}, buffers={})
    if alone := _worst(numbers, own):
        return f"{TRACE_ALONE}{alone}"
    if split_graph.parts:
        graph, (own, noted) = split_graph, unpartitioned(split_graph, task)
        if alone := _worst(numbers, own):
            return f"none of the placement: the graph in blocks of neurons, on one rank, differs from the model {alone}"
    tensors = frozenset(node.name for node in graph.ops if isinstance(node.meta["val"], Tensor))
    per_rank = [notes for _, notes in run(run_rank_with_notes, replace(task, codes=_noted(task, tensors)))]
    stage_of = {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}
    copies = noted_copies(plan, per_rank)
    for node in graph.ops:
        for rank, notes in copies(node.name):
            for microbatch, (mine, theirs) in enumerate(zip(notes, noted.get(node.name, ()), strict=False)):
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


def _worst(expected: StepResult, own: StepResult) -> str:
    """Write the worst difference in brackets; "" if there is none."""
    different = [c for c in compare(expected, own) if not c.agrees]
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


def unpartitioned(graph: OpGraph, task: VerificationTask) -> tuple[StepResult, Mapping[str, Sequence[Note]]]:
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
            batch = {name: parts[index] for name, parts in pieces.items()}
            drawn = {name: every[index] for name, every in task.draws.items()}
            loss, written = run_graph(graph, state, batch, weight, _Noting(graph.module, notes, drawn).run)
            total += loss
            last = index == len(task.weights) - 1
            once = {o.name for o in graph.outputs if o.kind == "buffer" and o.once and not last}
            state.update({name: value for name, value in written.items() if name not in once})
    gradients = {n: t.grad for n, t in state.items() if isinstance(t, nn.Parameter) and t.grad is not None}
    result = StepResult(total, gradients, {})
    if graph.parts:
        parameters = {n: t for n, t in state.items() if isinstance(t, nn.Parameter)}
        (whole,) = put_together([replace(result, parameters=parameters)], replace(task, shardings={}))
        result = replace(whole, loss=total)
    return replace(result, parameters={}), notes


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


def noted_copies(plan: PlanData, per_rank: Sequence[Mapping[str, list[Note]]]) -> Callable[[str], Wholes]:
    """Return a function from an op to notes of its whole value, once per copy: each rank's own if no stage shares it."""
    shared: dict[str, tuple[Mesh, Placements]] = {}
    for stage in plan.stages:
        if stage.sharding is None:
            continue
        mesh = stage.sharding.mesh(ranks_in_order(plan).ranks(stage.devices))
        choices = stage.sharding.placement(stage.devices, plan.microbatches).choices
        shared |= dict.fromkeys(stage.ops, (mesh, (Replicate(),) * len(mesh.shape)))
        shared |= {op: (mesh, tuple(choice.outputs[0] for choice in ways)) for op, ways in choices.items()}

    def notes(op: str) -> Wholes:
        if op not in shared:
            yield from ((str(rank), notes.get(op, [])) for rank, notes in enumerate(per_rank))
            return
        mesh, layout = shared[op]
        copies: dict[tuple[int, ...], list[int]] = {}
        for rank in mesh.ranks:
            place = coordinates(mesh, rank)
            key = tuple(i for i, p in zip(place, layout, strict=True) if isinstance(p, Replicate))
            copies.setdefault(key, []).append(rank)
        summed = any(isinstance(p, Partial) for p in layout)
        for ranks in copies.values():
            parts = [per_rank[rank].get(op, []) for rank in ranks]
            yield "+".join(map(str, ranks)), [_together(each, summed) for each in zip(*parts, strict=False)]

    return notes


def _together(parts: Sequence[Note], summed: bool) -> Note:
    if len(parts) == 1:
        return parts[0]
    norm = math.inf if summed else math.sqrt(sum(note[1] ** 2 for note in parts))
    return sum(note[0] for note in parts), norm
