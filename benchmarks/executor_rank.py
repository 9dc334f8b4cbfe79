"""What each of the two worker processes does: hold both executors, check that they agree, take turns with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.executor_models import ModelSpec
from benchmarks.executor_ours import Ours
from benchmarks.executor_theirs import Theirs
from partitioner.verify.rank import VerificationTask

TOLERANCE = 1e-4
"""Largest difference of two gradients as a share of the largest entry: float32 sums in another order."""


@dataclass
class Pair:
    """Both executors of one case in this process, and the compute that both must do."""

    ours: Ours
    theirs: Theirs
    local: Callable[[], None]


@dataclass(frozen=True)
class Turn:
    """Seconds per step of one alternation, on this rank; one list entry per step."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)


_pairs: dict[str, Pair] = {}


def prepare(
    name: str, spec: ModelSpec, task: VerificationTask, schedule: str, stage_ranks: tuple[int, ...]
) -> dict[str, float]:
    """Build both sides, run both, and compare: {parameter or "loss": difference / largest entry}."""
    ours, theirs = Ours(task), Theirs(spec, schedule, stage_ranks)
    _pairs[name] = Pair(ours, theirs, _local_compute(spec, stage_ranks))
    differences: dict[str, float] = {}
    for _ in range(3):
        our_loss, their_loss = ours.step(), theirs.step()
        mine, others = ours.gradients(), theirs.gradients()
        if set(mine) != set(others) or (our_loss is None) != (their_loss is None):
            raise AssertionError(f"different gradients exist: {sorted(set(mine) ^ set(others))}")
        if our_loss is not None and their_loss is not None:
            mine, others = {**mine, "loss": our_loss}, {**others, "loss": their_loss}
        for key, gradient in others.items():
            found = float((mine[key] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30))
            differences[key] = max(found, differences.get(key, 0.0))
    return differences


def take_turn(name: str, steps: int, ours_first: bool, with_local: bool) -> Turn:
    """``steps`` steps of one side, then as many of the other; a barrier before each."""
    pair, turn = _pairs[name], Turn()
    sides: list[tuple[list[float], Callable[[], Any]]] = [
        (turn.ours, pair.ours.step),
        (turn.theirs, pair.theirs.step),
    ]
    if not ours_first:
        sides.reverse()
    if with_local:
        sides.append((turn.local, pair.local))
    for seconds, step in sides:
        for _ in range(steps):
            dist.barrier()
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
    return turn


def time_whole_model(spec: ModelSpec, steps: int) -> list[float]:
    """The unpartitioned model on the full batch in one process (rank 0), while the other waits."""
    seconds: list[float] = []
    if dist.get_rank() == 0:
        model, (x, target) = spec.build(), spec.batch()
        for _ in range(steps + 1):
            model.zero_grad(set_to_none=True)
            started = time.perf_counter()
            F.mse_loss(model(x), target).backward()  # type: ignore[no-untyped-call]
            seconds.append(time.perf_counter() - started)
    dist.barrier()
    return seconds[1:]


def close(name: str) -> None:
    """Forget one case."""
    pair = _pairs.pop(name)
    pair.ours.close()
    pair.theirs.close()


def _local_compute(spec: ModelSpec, stage_ranks: tuple[int, ...]) -> Callable[[], None]:
    """This rank's stages over all micro-batches, forward and backward, with nothing sent."""
    rank, stages, model = dist.get_rank(), len(stage_ranks), spec.build()
    own = [
        (nn.Sequential(*(model.layers[i] for i in spec.stage_layers(s, stages))), s)
        for s in range(stages)
        if stage_ranks[s] == rank
    ]
    x, target = spec.batch()
    pieces = list(zip(x.chunk(spec.microbatches), target.chunk(spec.microbatches), strict=True))
    seed = torch.ones_like(pieces[0][0])

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for piece, wanted in pieces:
            for module, stage in own:
                leaf: Tensor = piece.detach().requires_grad_(stage > 0)
                output = module(leaf)
                if stage == stages - 1:
                    F.mse_loss(output, wanted).backward()  # type: ignore[no-untyped-call]
                else:
                    torch.autograd.backward(output, seed)

    return run
