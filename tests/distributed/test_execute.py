"""The executor on real Gloo processes against the unpartitioned model, in float64."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from cost_models.errors import UsageError
from runtime.check.check import check
from runtime.execute.context import RankProgram
from runtime.execute.execute import Executor
from runtime.program.program import (
    Backward,
    Forward,
    Program,
    Segment,
    SegmentCost,
    SegmentGraph,
    TiedGroup,
    Value,
)
from runtime.ranks.launch import WorkerPool
from runtime.ranks.network_threads import network_threads
from runtime.schedules import SCHEDULES
from runtime.segment.code import BatchSpec, SegmentCode, SegmentInput, SegmentOutput, TensorSpec
from runtime.segment.microbatch import Microbatches
from tests.distributed import hand_model as hand
from tests.support.matrix import thinned
from tests.support.rank_programs import build_programs

aten = torch.ops.aten

PLACEMENTS = {2: (0, 0, 1, 1), 3: (0, 1, 2, 0), 4: (0, 1, 2, 3)}
SAMPLES, MICROBATCHES = 14, 4  # cut 4 4 3 3


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, group_timeout_seconds=20) as workers:
        yield workers


def run_steps(kind: str, ranks: tuple[int, ...], steps: int, send_early: bool) -> dict[str, Any]:
    """In a worker: some steps; the last one's loss, gradients and buffers."""
    programs = hand.programs(kind, ranks, MICROBATCHES)
    tensors = hand.state()
    executor = Executor(
        RankProgram(programs, dist.get_rank(), hand.codes(), hand.graph(ranks), tensors, hand.BATCH),
        timeout_seconds=20,
        send_early=send_early,
    )
    for _ in range(steps):
        tensors["running"].fill_(1.0)
        loss = executor.train_step(hand.batch(SAMPLES), MICROBATCHES)
    executor.close()
    binder = executor._active
    assert not any(x is not None for kept in (binder.leaves, binder.outgoing, binder.works) for x in kept)
    assert not any(gradient is not None for gradient in binder.arrived)
    held = {i.name for s in executor._training.runners.values() for i in s.code.inputs if i.kind != "value"}
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


@pytest.mark.parametrize(
    ("kind", "world_size"),
    thinned(
        itertools.product(["forward-backward", "list", "halves"], [2, 3, 4]),
        [("forward-backward", 2), ("list", 3), ("halves", 4)],
    ),
)
def test_equals_the_unpartitioned_model(pool: WorkerPool, kind: str, world_size: int) -> None:
    ranks = PLACEMENTS[world_size]
    check(
        hand.programs(kind, ranks, MICROBATCHES),
        hand.graph(ranks),
        MICROBATCHES,
        tied=[TiedGroup((hand.TIED,), tuple(sorted({ranks[0], ranks[3]})))] if ranks[0] != ranks[3] else [],
    )
    results = pool.run(run_steps, kind, ranks, 2, True, world_size=world_size, timeout_seconds=60)
    assert_equal_to_reference(results)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("interleaved", (0, 1, 0, 1)), ("zb-v", (0, 1, 1, 0)), ("list", (1, 0, 1, 1))]
)
def test_several_chunks_per_rank(pool: WorkerPool, kind: str, ranks: tuple[int, ...]) -> None:
    results = pool.run(run_steps, kind, ranks, 1, True, world_size=2, timeout_seconds=60)
    assert_equal_to_reference(results)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("send_early", [False, True])
def test_published_orders(pool: WorkerPool, kind: str, send_early: bool) -> None:
    results = pool.run(run_steps, kind, PLACEMENTS[4], 1, send_early, timeout_seconds=60)
    assert_equal_to_reference(results)


# ------------------------------------------------------------------------------------------------------
# Unusual tensors


def make_unusual(w: Tensor, x: Tensor) -> Any:
    scaled = aten.mul.Tensor(x, w)
    half = aten.to.dtype(scaled, torch.bfloat16)
    turned = aten.transpose.int(scaled, 0, 1)  # not contiguous
    spun = aten.complex.default(scaled, aten.neg.default(scaled))
    empty = aten.slice.Tensor(scaled, 1, 0, 0)
    total = aten.sum.default(scaled)
    return half, turned, spun, empty, total


def use_unusual(half: Tensor, turned: Tensor, spun: Tensor, empty: Tensor, total: Tensor) -> Any:
    size = aten.real.default(aten.mul.Tensor(spun, aten.conj.default(spun)))
    terms = [aten.to.dtype(half, torch.float64), aten.transpose.int(turned, 0, 1), size]
    loss = aten.add.Tensor(total, aten.sum.default(empty))
    for number, term in enumerate(terms):
        loss = aten.add.Tensor(loss, aten.mean.default(aten.mul.Scalar(term, number + 1)))
    return (loss,)


UNUSUAL = {
    "half": TensorSpec((hand.B, 3), torch.bfloat16),
    "turned": TensorSpec((3, hand.B), torch.float64),
    "spun": TensorSpec((hand.B, 3), torch.complex128),
    "empty": TensorSpec((hand.B, 0), torch.float64),
    "total": TensorSpec((), torch.float64),
}


def run_unusual() -> tuple[float | None, Tensor | None]:
    """In a worker: the gradient of the first segment's parameter."""
    values = tuple(SegmentInput("value", name, True) for name in UNUSUAL)
    outputs = tuple(SegmentOutput("value", name, True) for name in UNUSUAL)
    codes = {
        0: SegmentCode(
            0,
            fx.symbolic_trace(make_unusual),
            (SegmentInput("parameter", "w"), SegmentInput("batch", "x")),
            outputs,
            UNUSUAL,
        ),
        1: SegmentCode(1, fx.symbolic_trace(use_unusual), values, (SegmentOutput("loss", "loss"),), UNUSUAL),
    }
    cost = SegmentCost(1.0, 1.0, 1.0)
    graph = SegmentGraph(
        (Segment(0, (0,), cost), Segment(1, (1,), cost)),
        tuple(Value(name, 0, (1,), 8, True) for name in UNUSUAL),
        2,
    )
    programs = build_programs(
        graph, SCHEDULES["1f1b"].order(graph, 3), 3, transfer_seconds=lambda a, b, n: 0.1
    )
    state = {"w": torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))}
    batch = BatchSpec({"x": 0}, hand.B, {hand.B: ("x", 0)})
    executor = Executor(
        RankProgram(programs, dist.get_rank(), codes, graph, state, batch), timeout_seconds=20
    )
    loss = executor.train_step({"x": torch.arange(15, dtype=torch.float64).view(5, 3)}, 3)
    executor.close()
    return None if loss is None else loss.item(), state["w"].grad


def test_values_of_every_kind_of_dtype_and_layout(pool: WorkerPool) -> None:
    (_, gradient), (loss, _) = pool.run(run_unusual, world_size=2, timeout_seconds=60)
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    expected = torch.zeros((), dtype=torch.float64)
    for x in torch.arange(15, dtype=torch.float64).view(5, 3).tensor_split(3):
        (part,) = use_unusual(*make_unusual(w, x))
        expected = expected + part * (x.shape[0] / 5)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, w.grad, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------
# The rest of a training loop


def train_and_evaluate(ranks: tuple[int, ...]) -> dict[str, Any]:
    """In a worker: two optimizer steps, then an evaluation."""
    rank = dist.get_rank()
    programs = hand.programs("1f1b", ranks, MICROBATCHES)
    state = hand.state()
    executor = Executor(
        RankProgram(programs, rank, hand.codes(), hand.graph(ranks), state, hand.BATCH), timeout_seconds=20
    )
    mine = [t for n, t in state.items() if t.requires_grad and n in HELD[rank]]
    optimizer = torch.optim.SGD(mine, lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        losses.append(executor.train_step(hand.batch(SAMPLES), MICROBATCHES))
        optimizer.step()
    loaded = executor.load(RankProgram(programs, rank, hand.codes(), hand.graph(ranks), state, hand.BATCH))
    evaluation = executor.evaluate(hand.batch(8, seed=5), Microbatches.of(8, MICROBATCHES), loaded=loaded)
    executor.unload(loaded)
    with pytest.raises(UsageError, match="made for 4 micro-batches"):
        executor.train_step(hand.batch(SAMPLES), 3)
    with pytest.raises(UsageError, match="cannot cut a batch of 3 samples into 4"):
        executor.train_step(hand.batch(3), MICROBATCHES)
    executor.close()
    return {
        "losses": losses,
        "evaluation": evaluation.loss,
        "state": {n: state[n].detach() for n in (*HELD[rank], *(("running",) if rank == 2 else ()))},
    }


HELD = (("embed", "w0", "b0", "wd"), ("w1", "b1"), ("w2",), ("embed",))


def test_optimizer_steps_and_evaluation(pool: WorkerPool) -> None:
    results = pool.run(train_and_evaluate, PLACEMENTS[4], timeout_seconds=60)
    state = hand.state()
    optimizer = torch.optim.SGD([t for t in state.values() if t.requires_grad], lr=0.05, momentum=0.9)
    for step in range(2):
        loss, gradients, buffers = hand.reference(state, hand.batch(SAMPLES), MICROBATCHES)
        torch.testing.assert_close(results[3]["losses"][step], loss, rtol=1e-12, atol=1e-12)
        for name, gradient in gradients.items():
            state[name].grad = gradient
        optimizer.step()
        state["running"].copy_(buffers["running"])
    for result in results:
        for name, tensor in result["state"].items():
            torch.testing.assert_close(tensor, state[name].detach(), rtol=1e-12, atol=1e-12)
    expected = hand.reference(state, hand.batch(8, seed=5), MICROBATCHES)[0]
    torch.testing.assert_close(results[3]["evaluation"], expected, rtol=1e-12, atol=1e-12)
    assert [r["evaluation"] is None for r in results] == [True, True, True, False]


def dropped(x: Tensor) -> Any:
    return (aten.mean.default(aten.dropout.default(x, 0.5, True)),)


def network_policies_with_an_executor() -> tuple[int, list[int]]:
    """In a worker: the policies of the computing thread and of Gloo's threads once an executor exists."""
    for thread in network_threads():
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    programs = hand.programs("forward-backward", (0, 0, 1, 1), MICROBATCHES)
    executor = Executor(
        RankProgram(
            programs, dist.get_rank(), hand.codes(), hand.graph((0, 0, 1, 1)), hand.state(), hand.BATCH
        )
    )
    executor.close()
    return os.sched_getscheduler(0), [os.sched_getscheduler(thread) for thread in network_threads()]


def test_the_network_threads_let_compute_go_first(pool: WorkerPool) -> None:
    """Fails as well where a new Gloo calls its threads otherwise: steps of small messages are slow then."""
    for computing, network in pool.run(network_policies_with_an_executor, world_size=2, timeout_seconds=60):
        assert computing == os.SCHED_OTHER
        assert network
        assert set(network) == {os.SCHED_BATCH}


def test_dropout_is_reproducible_in_one_process_without_a_process_group() -> None:
    code = SegmentCode(
        0,
        fx.symbolic_trace(dropped),
        (SegmentInput("batch", "x"),),
        (SegmentOutput("loss", "loss"),),
        {},
        True,
    )
    graph = SegmentGraph((Segment(0, (0,), SegmentCost(1.0, 1.0, 1.0)),), (), 1)
    program = Program(0, tuple(Forward(0, m) for m in range(2)) + tuple(Backward(0, m) for m in range(2)))
    batch = BatchSpec({"x": 0}, hand.B, {hand.B: ("x", 0)})
    x = {"x": torch.arange(40.0).view(20, 2)}

    def losses(seed: int, draws: int) -> list[float]:
        executor = Executor(RankProgram((program,), 0, {0: code}, graph, {}, batch), seed=seed)
        torch.rand(draws)  # what else the rank draws does not matter
        found = [executor.train_step(x, 2) for _ in range(2)]
        executor.close()
        return [loss.item() for loss in found if loss is not None]

    torch.manual_seed(3)
    first = losses(1, 0)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after)  # the global generator is as if nothing had happened
    assert losses(1, 7) == first
    assert first[0] != first[1]
    assert losses(2, 0) != first
