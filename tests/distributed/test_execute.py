"""The executor on real Gloo processes against the unpartitioned model, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.check import check
from runtime.execute import Executor
from runtime.launch import WorkerPool
from tests.distributed import hand_model as hand

PLACEMENTS = {2: (0, 0, 1, 1), 3: (0, 1, 2, 0), 4: (0, 1, 2, 3)}
SAMPLES, MICROBATCHES = 14, 4  # cut 4 4 3 3


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, group_timeout_seconds=20) as workers:
        yield workers


def run_steps(
    kind: str, ranks: tuple[int, ...], steps: int, send_early: bool, know_all: bool
) -> dict[str, Any]:
    """In a worker: some steps; the last one's loss, gradients and buffers."""
    programs = hand.programs(kind, ranks, MICROBATCHES)
    tensors = hand.state()
    executor = Executor(
        programs[dist.get_rank()],
        hand.codes(),
        hand.graph(ranks),
        tensors,
        hand.BATCH,
        timeout_seconds=20,
        programs=programs if know_all else None,
        send_early=send_early,
    )
    for _ in range(steps):
        tensors["running"].fill_(1.0)
        loss = executor.train_step(hand.batch(SAMPLES), MICROBATCHES)
    executor.close()
    held = {i.name for s in executor._runners.values() for i in s.code.inputs if i.kind != "value"}
    return {
        "loss": loss,
        "gradients": {n: t.grad for n, t in tensors.items() if n in held and t.requires_grad},
        "buffers": {n: tensors[n] for n in ("running",) if n in held},
    }


def assert_equal_to_reference(results: list[dict[str, Any]], microbatches: int = MICROBATCHES) -> None:
    loss, gradients, buffers = hand.reference(hand.state(), hand.batch(SAMPLES), microbatches)
    losses = [r["loss"] for r in results if r["loss"] is not None]
    assert len(losses) == 1
    torch.testing.assert_close(losses[0], loss, rtol=1e-12, atol=1e-12)
    seen = set()
    for result in results:
        for name, gradient in result["gradients"].items():
            expected = gradients[name]
            if expected is None:  # nothing reaches the loss from here: zeros are right as well
                assert gradient is None or not gradient.any()
            else:
                torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
            seen.add(name)
        for name, buffer in result["buffers"].items():
            torch.testing.assert_close(buffer, buffers[name], rtol=1e-12, atol=1e-12)
            seen.add(name)
    assert seen == gradients.keys() | buffers.keys()


@pytest.mark.parametrize("kind", ["forward-backward", "list", "halves"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_the_unpartitioned_model(pool: WorkerPool, kind: str, world_size: int) -> None:
    ranks = PLACEMENTS[world_size]
    check(
        hand.programs(kind, ranks, MICROBATCHES),
        hand.graph(ranks),
        MICROBATCHES,
        tied=[((hand.TIED,), tuple(sorted({ranks[0], ranks[3]})))] if ranks[0] != ranks[3] else [],
    )
    results = pool.run(run_steps, kind, ranks, 2, True, True, world_size=world_size, timeout_seconds=60)
    assert_equal_to_reference(results)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("send_early", [False, True])
def test_published_orders(pool: WorkerPool, kind: str, send_early: bool) -> None:
    results = pool.run(run_steps, kind, PLACEMENTS[4], 1, send_early, False, timeout_seconds=60)
    assert_equal_to_reference(results)
