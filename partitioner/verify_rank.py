"""One rank's part of a verification: build the executor from the plan's own programs, run one step, return everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partitioner.compare import StepResult
from partitioner.optimizers import make_optimizer
from passes.double import float64_by_default
from runtime.execute import Executor
from runtime.program import Program, SegmentGraph
from runtime.record import Note, take_notes
from runtime.segment_code import BatchSpec, SegmentCode


@dataclass(frozen=True)
class VerificationTask:
    """What every rank needs for one step; each picks its own part."""

    programs: tuple[Program, ...]
    codes: Mapping[int, SegmentCode]
    segments: SegmentGraph
    batch_spec: BatchSpec
    batch: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    trainable: frozenset[str]
    microbatches: int
    weights: tuple[float, ...]
    """Of the micro-batches' losses."""
    optimizer: str
    learning_rate: float
    timeout_seconds: float


def run_rank(task: VerificationTask) -> StepResult:
    """One training step on this rank. Collective over the default process group.

    ``loss`` is nan on ranks that do not compute it.
    """
    executor, state, optimizer = build_rank(task)
    try:
        with float64_by_default():
            loss = executor.train_step(task.batch, task.microbatches, optimizer, weights=task.weights)
    finally:
        executor.close()
    return StepResult(
        loss=float("nan") if loss is None else float(loss),
        gradients={n: t.grad for n, t in state.items() if isinstance(t, nn.Parameter) and t.grad is not None},
        parameters={n: t.detach() for n, t in state.items() if isinstance(t, nn.Parameter)},
        buffers={n: t for n, t in state.items() if not isinstance(t, nn.Parameter)},
    )


def build_rank(task: VerificationTask) -> tuple[Executor, dict[str, Tensor], torch.optim.Optimizer | None]:
    """This rank's executor, its own copy of the state, and the optimizer over it. Collective."""
    rank = torch.distributed.get_rank()
    mine = {segment.index for segment in task.segments.segments if rank in segment.ranks}
    codes = {index: code for index, code in task.codes.items() if index in mine}
    state = own_state(codes, task.state, task.trainable)
    executor = Executor(
        task.programs[rank],
        codes,
        task.segments,
        state,
        task.batch_spec,
        timeout_seconds=task.timeout_seconds,
        programs=task.programs,
    )
    parameters = [tensor for tensor in state.values() if isinstance(tensor, nn.Parameter)]
    return executor, state, make_optimizer(task.optimizer, parameters, task.learning_rate)


def run_rank_with_notes(task: VerificationTask) -> dict[str, list[Note]]:
    """``run_rank`` on code with notes; what this rank's ops computed, per micro-batch."""
    take_notes()
    run_rank(task)
    return take_notes()


def own_state(
    codes: Mapping[int, SegmentCode], state: Mapping[str, Tensor], trainable: frozenset[str]
) -> dict[str, Tensor]:
    """Fresh copies of what ``codes`` name: trainable parameters as leaves that collect gradients."""
    own: dict[str, Tensor] = {}
    for code in codes.values():
        for name, kind in code.held.items():
            if name not in own:
                copy = state[name].detach().clone()
                own[name] = nn.Parameter(copy, name in trainable) if kind == "parameter" else copy
    return own
