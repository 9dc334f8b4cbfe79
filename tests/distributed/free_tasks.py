"""From a placement given by hand to what workers run, below the public face: any placement of any graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from partitioner.verify.rank import VerificationTask, build_rank, run_rank
from partitioner.verify.ranks import compare_ranks, put_together
from passes.fidelity.agree import ComparedQuantity, StepResult
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.lower.lower import lower
from passes.lower.segment import by_reach
from runtime.check.check import check
from runtime.ranks.groups import TAG_BASE
from runtime.schedules import SCHEDULES
from runtime.segment.microbatch import microbatch_sizes
from tests.support.random_graphs import RandomModel
from tests.support.rank_programs import build_programs
from tests.unit.passes.lower.test_segment import summary


def free_task(
    graph: OpGraph,
    rank_of: Mapping[str, int],
    state: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    ranks: int,
    microbatches: int,
    schedule: str = "list",
) -> VerificationTask:
    """One step without an optimizer. ``state``: whole tensors by the model's names. Raises if it could deadlock."""
    recomputed = recomputed_ops(graph)
    segmentation = by_reach(graph, {name: (rank,) for name, rank in rank_of.items()}, recomputed)
    segments, tied = summary(RandomModel(graph, {}), segmentation, ranks)
    orders = SCHEDULES[schedule].order(segments, microbatches)
    programs = build_programs(segments, orders, microbatches, transfer_seconds=lambda *_: 1e-3, tied=tied)
    check(programs, segments, microbatches, tied=tied)
    whole = {name: part.whole for name, part in graph.parts.items()}
    samples = next(batch[name].shape[dim] for name, dim in graph.batch.batch_dims.items() if dim is not None)
    return VerificationTask(
        programs=programs,
        codes=lower(graph, segmentation),
        segments=segments,
        batch_specs=(graph.batch,) * ranks,
        batch=batch,
        state=state,
        trainable=frozenset(whole.get(n, n) for n, spec in graph.parameters.items() if spec.requires_grad),
        microbatches=microbatches,
        weights=tuple(size / samples for size in microbatch_sizes(samples, microbatches)),
        optimizer="none",
        learning_rate=0.0,
        timeout_seconds=60.0,
        parts=graph.parts,
    )


def run_tasks(tasks: Sequence[VerificationTask]) -> list[StepResult]:
    """In a worker: one step of each, one after another."""
    return [run_rank(task) for task in tasks]


def count_sent(task: VerificationTask) -> dict[tuple[int, int], int]:
    """In a worker: the bytes of programs' messages that it gives process groups in one step, by (source, target)."""
    sent: Counter[tuple[int, int]] = Counter()
    send, own, here = dist.ProcessGroup.send, vars(dist.ProcessGroup)["send"], dist.get_rank()

    def counted(self: Any, tensors: list[Tensor], target: int, tag: int) -> Any:
        if tag >= TAG_BASE:  # others are collectives that Gloo makes of messages
            sent[here, target] += sum(tensor.nbytes for tensor in tensors)
        return send(self, tensors, target, tag)

    setattr(dist.ProcessGroup, "send", counted)  # noqa: B010  # for mypy it is a method for good
    try:
        executor, *_ = build_rank(task)
        sent.clear()  # of what was sent to get ready
        executor.train_step(task.batch, task.microbatches, weights=task.weights)
        executor.close()
    finally:
        setattr(dist.ProcessGroup, "send", own)  # noqa: B010
    return dict(sent)


def differences(
    task: VerificationTask, loss: float, gradients: Mapping[str, Tensor], results: Sequence[StepResult]
) -> list[ComparedQuantity]:
    """Where ranks found another loss, gradient or parameter, each copy by itself; parts of a tensor make one copy."""
    expected = StepResult(loss, gradients, task.state)
    found = compare_ranks(expected, put_together(results, task), task.state, 0.0)
    return [c for c in found if not c.agrees]
