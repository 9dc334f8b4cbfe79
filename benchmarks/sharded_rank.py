"""What each of the two workers of the sharded benchmark does: hold both sides, check that they agree, take turns.

Ours is the executor on the compiled program. Theirs is ``parallelize_module`` or ``DistributedDataParallel`` on the same
block, at its best: q, k and v are made at once, so that no layer communicates more than once each way; gradients are views
of the buckets. Both live in the same process and have its network threads as the executor sets them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.sharded_models import COLUMNS, RANKS, ROWS, BlockSpec, ShardedTask
from runtime.execute.context import RankProgram
from runtime.execute.execute import Executor

TOLERANCE = 1e-4
"""Largest difference of two gradients as a share of the largest entry: float32 sums in another order."""

TIMEOUT_SECONDS = 60.0


class Side(Protocol):
    """One rank's half of one way to train the block."""

    def step(self) -> Tensor:
        """Gradients to None, forward, backward, all sums of gradients; this rank's loss."""

    def gradients(self) -> dict[str, Tensor]:
        """By parameter: what this rank has."""

    def loss(self, own: Tensor) -> Tensor:
        """The batch's loss from this rank's."""

    def close(self) -> None:
        """Stop whatever runs beside."""


class Ours:
    """The executor."""

    def __init__(self, task: ShardedTask) -> None:
        rank = dist.get_rank()
        self._parameters: dict[str, nn.Parameter] = {
            name: nn.Parameter(task.shardings[name].leaf_block(whole.shape, rank).of(whole).clone())
            for name, whole in task.state.items()
        }
        self._batch = task.batch
        self._executor = Executor(
            RankProgram(
                task.programs,
                rank,
                task.codes,
                task.segments,
                self._parameters,
                task.spec,
                shardings=task.shardings,
            ),
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def step(self) -> Tensor:
        loss = self._executor.train_step(self._batch, 1)
        assert loss is not None
        return loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def loss(self, own: Tensor) -> Tensor:
        total = own.clone()  # ranks have parts of a sum
        dist.all_reduce(total)
        return total

    def close(self) -> None:
        self._executor.close()


class _Theirs:
    """A wrapped module, called with its own part of the batch."""

    def __init__(self, module: nn.Module, inner: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self._module, self._inner, self._batch = module, inner, batch

    def step(self) -> Tensor:
        self._module.zero_grad(set_to_none=True)
        loss: Tensor = self._module(**self._batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for name, p in self._inner.named_parameters()
            if p.grad is not None
        }

    def close(self) -> None:
        """Nothing to stop."""


class ColumnRow(_Theirs):
    """``parallelize_module``."""

    def __init__(self, spec: BlockSpec) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        styles: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
        styles |= {name: RowwiseParallel() for name in ROWS}
        module = parallelize_module(spec.build(), mesh, styles)
        super().__init__(module, module, spec.batch())

    def loss(self, own: Tensor) -> Tensor:
        return own


class DataParallel(_Theirs):
    """``DistributedDataParallel``."""

    def __init__(self, spec: BlockSpec) -> None:
        inner = spec.build()
        module = DistributedDataParallel(inner, gradient_as_bucket_view=True)
        rank = dist.get_rank()
        super().__init__(module, inner, {n: t.chunk(RANKS)[rank].clone() for n, t in spec.batch().items()})

    def loss(self, own: Tensor) -> Tensor:
        total = own / RANKS
        dist.all_reduce(total)
        return total


THEIRS: Mapping[str, type[ColumnRow] | type[DataParallel]] = {"column_row": ColumnRow, "data": DataParallel}


@dataclass
class Turn:
    """Of each step of one alternation on this rank: (seconds, seconds of processor time over all threads)."""

    ours: list[tuple[float, float]] = field(default_factory=list)
    theirs: list[tuple[float, float]] = field(default_factory=list)


_pairs: dict[str, tuple[Side, Side]] = {}


def prepare(case: str, spec: BlockSpec, task: ShardedTask) -> dict[str, float]:
    """Build both sides, and compare them."""
    return hold(case, Ours(task), THEIRS[case](spec))


def hold(case: str, ours: Side, theirs: Side) -> dict[str, float]:
    """Keep both sides for turns, run both some steps, and compare: {parameter or "loss": difference / largest entry}."""
    _pairs[case] = ours, theirs
    differences: dict[str, float] = {}
    for _ in range(3):  # DistributedDataParallel orders its buckets anew after the first
        pairs = [(side.loss(side.step()), side.gradients()) for side in (ours, theirs)]
        (our_loss, mine), (their_loss, others) = pairs
        if set(mine) != set(others):
            raise AssertionError(f"different gradients exist: {sorted(set(mine) ^ set(others))}")
        mine, others = {**mine, "loss": our_loss}, {**others, "loss": their_loss}
        for key, wanted in others.items():
            found = float((mine[key] - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
            differences[key] = max(found, differences.get(key, 0.0))
    return differences


def take_turn(case: str, steps: int, ours_first: bool) -> Turn:
    """``steps`` steps of one side, then as many of the other; a barrier before each."""
    turn = Turn()
    sides = list(zip((turn.ours, turn.theirs), _pairs[case], strict=True))
    for measured, side in sides if ours_first else sides[::-1]:
        for _ in range(steps):
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            side.step()
            measured.append((time.perf_counter() - started, time.process_time() - used))
    return turn


def close(case: str) -> None:
    """Forget one case."""
    for side in _pairs.pop(case):
        side.close()
