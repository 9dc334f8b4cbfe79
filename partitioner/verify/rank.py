"""One rank's part of a verification: build the executor from the plan's own programs, run one step, return everything."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cost_models.precision import ParameterPrecision
from partitioner.engine.optimizer import make_optimizer
from passes.copies.float64 import float64_by_default
from passes.fidelity.agree import StepResult
from runtime.execute.context import RankProgram
from runtime.execute.execute import Executor
from runtime.measure.record import Note, take_notes
from runtime.mesh.sharding import Sharding
from runtime.ops.replay import DrawsByOp, replaying
from runtime.program.program import Program, SegmentGraph
from runtime.segment.code import BatchSpec, SegmentCode
from runtime.state.precision import leaf_and_owner
from runtime.state.rank_state import RankState, TensorPart
from runtime.state.sharded_owners import sharded_leaf_and_owner


@dataclass(frozen=True)
class VerificationTask:
    """Everything that ranks need for one step; each picks its own part."""

    programs: tuple[Program, ...]
    codes: Mapping[int, SegmentCode]
    segments: SegmentGraph
    batch_specs: tuple[BatchSpec, ...]
    """The way in which each rank reads the batch."""
    batch: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    trainable: frozenset[str]
    microbatches: int
    weights: tuple[float, ...]
    """The weights of the micro-batches' losses."""
    optimizer: str
    learning_rate: float
    timeout_seconds: float
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    """The shardings of parameters and buffers of which ranks hold blocks."""
    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    """The tensors in ``state`` that other names, which are not in it, are blocks of."""
    draws: DrawsByOp = field(default_factory=dict)
    """The draws of the unpartitioned model, for the ops in ``codes`` that replay it."""

    double: bool = True
    """True if all is in float64, what ops make as well."""

    def whole_of(self, name: str) -> str:
        """Return the model's own name of what ranks hold as ``name``."""
        return self.parts[name].whole if name in self.parts else name

    def value(self, name: str) -> Tensor:
        """Return the model's own values of what ranks hold as ``name``: a view."""
        whole = self.state[self.whole_of(name)].detach()
        return self.parts[name].block.of(whole) if name in self.parts else whole


def run_rank(task: VerificationTask) -> StepResult:
    """Run one training step on this rank. Collective over the default process group.

    ``loss`` is None on ranks that do not compute it.
    """
    executor, state, optimizer = build_rank(task)
    sharded = executor.sharded_owners(state)
    if optimizer is not None:
        sharded.attach(optimizer)
    try:
        segments = [segment.index for segment in task.segments.segments]
        with (
            float64_by_default() if task.double else nullcontext(),
            replaying(task.draws, segments, task.microbatches),
        ):
            loss = executor.train_step(task.batch, task.microbatches, weights=task.weights)
            sharded.collect()
            if optimizer is not None:
                optimizer.step()
    finally:
        executor.close()
    return StepResult(
        loss=None if loss is None else float(loss),
        gradients={n: p.grad for n, p in state.parameters.items() if p.grad is not None},
        parameters={n: state.leaves[n].detach() for n in state.parameters},
        buffers={n: t for n, t in state.leaves.items() if n not in state.parameters},
    )


def build_rank(task: VerificationTask) -> tuple[Executor, RankState, torch.optim.Optimizer | None]:
    """Build this rank's executor, its own copy of the state, and the optimizer over it. Collective."""
    rank = torch.distributed.get_rank()
    mine = {segment.index for segment in task.segments.segments if rank in segment.ranks}
    codes = {index: code for index, code in task.codes.items() if index in mine}
    state = own_state(codes, task, rank)
    executor = Executor(
        RankProgram(
            task.programs,
            rank,
            codes,
            task.segments,
            state.leaves,
            task.batch_specs[rank],
            shardings=state.shardings,
        ),
        timeout_seconds=task.timeout_seconds,
    )
    return (
        executor,
        state,
        make_optimizer(task.optimizer, list(state.parameters.values()), task.learning_rate),
    )


def run_rank_with_notes(task: VerificationTask) -> tuple[StepResult, dict[str, list[Note]]]:
    """Run code with notes, and return those of what this rank's ops computed as well, per micro-batch."""
    take_notes()
    return run_rank(task), take_notes()


def own_state(codes: Mapping[int, SegmentCode], task: VerificationTask, rank: int) -> RankState:
    """Copy what ``codes`` name, or this rank's blocks of it."""
    leaves: dict[str, Tensor] = {}
    owners: dict[str, nn.Parameter] = {}
    kinds = {name: kind for code in codes.values() for name, kind in code.held.items()}
    for name, kind in kinds.items():
        whole, sharding = task.value(name), task.shardings.get(name)
        own = whole if sharding is None else sharding.leaf_block(whole.shape, rank).of(whole)
        in_part = sharding is not None or name in task.parts
        leaves[name] = own.clone(memory_format=torch.contiguous_format if in_part else torch.preserve_format)
        if kind == "parameter":
            types = ParameterPrecision.plain(whole.dtype)
            trained = task.whole_of(name) in task.trainable
            if sharding is None:
                leaves[name], owners[name] = leaf_and_owner(leaves[name], types, trained)
            else:
                leaves[name], owners[name] = sharded_leaf_and_owner(
                    leaves[name], types, trained, sharding, rank
                )
    return RankState(rank, leaves, owners, {}, {}, {n: s for n, s in task.shardings.items() if n in leaves})
