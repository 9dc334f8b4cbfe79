"""Leaf and owner of a parameter: what they share, what is summed where, and that nothing is kept twice."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from cost_models.memory import state_bytes
from cost_models.precision import Precision
from runtime.execute.reduce import GradientReduction
from runtime.segment.code import SegmentCode, SegmentInput, SegmentOutput
from runtime.segment.runner import SegmentRunner
from runtime.state.precision import LeavesAndOwners, gradient_dtype, leaf_and_owner
from runtime.state.rank_state import RankState
from tests.support.alive import AliveBytes

aten = torch.ops.aten
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def held(values: dict[str, Tensor], precision: Precision, frozen: tuple[str, ...] = ()) -> RankState:
    pairs = {
        name: leaf_and_owner(
            value.clone(), precision.of(value.dtype, trains=name not in frozen), name not in frozen
        )
        for name, value in values.items()
    }
    leaves = {name: leaf for name, (leaf, _) in pairs.items()}
    owners = {name: owner for name, (_, owner) in pairs.items()}
    return RankState(0, leaves, owners, {}, dict.fromkeys(values, (0,)))


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def test_one_tensor_where_one_type_is_enough():
    state = held({"w": torch.ones(3)}, Precision())
    assert state.leaves["w"] is state.parameters["w"]


def test_sixteen_bit_parameters_share_their_memory_and_sum_in_thirty_two():
    state = held({"w": torch.ones(3, dtype=BF16)}, Precision())
    leaf, owner = state.leaves["w"], state.parameters["w"]
    assert same_memory(leaf, owner)
    assert (leaf.dtype, owner.dtype, gradient_dtype(leaf)) == (BF16, BF16, F32)


def test_masters_and_frozen_parameters():
    state = held(
        {"w": torch.ones(3, dtype=BF16), "f": torch.ones(3, dtype=BF16)}, Precision(master=F32), ("f",)
    )
    assert (state.leaves["w"].dtype, state.parameters["w"].dtype) == (BF16, F32)
    assert state.leaves["f"] is state.parameters["f"]
    assert not state.parameters["f"].requires_grad
    mixed = held({"f": torch.full((3,), 1 / 3)}, Precision(compute=BF16), ("f",))
    assert torch.equal(
        mixed.parameters["f"], torch.full((3,), 1 / 3)
    )  # what a checkpoint keeps is not rounded
    assert not mixed.leaves["f"].requires_grad


def test_integer_parameters_stay():
    leaf, owner = leaf_and_owner(torch.arange(3), Precision(compute=BF16).of(torch.int64), False)
    assert leaf is owner
    assert owner.dtype == torch.int64


def test_micro_batches_are_summed_in_thirty_two_bits():
    """512 gradients of 1: a bfloat16 sum would stop at 256."""
    for precision, expected in ((Precision(), 512.0), (Precision(gradients=BF16), 256.0)):
        state = held({"w": torch.ones(1, dtype=BF16)}, precision)
        for _ in range(512):
            state.leaves["w"].sum().backward()
        LeavesAndOwners(state).collect()
        assert float(state.parameters["w"].grad) == expected


def test_collect_copies_nothing():
    state = held({"w": torch.ones(3)}, Precision(compute=BF16))
    (state.leaves["w"] * 2).sum().backward()
    summed = state.leaves["w"].grad
    LeavesAndOwners(state).collect()
    assert state.parameters["w"].grad is summed
    assert state.leaves["w"].grad is None


def test_any_step_of_the_optimizer_publishes_its_owners():
    state = held({"w": torch.ones(3)}, Precision(compute=BF16))
    pairs = LeavesAndOwners(state)
    optimizer = torch.optim.SGD(state.parameters.values(), lr=0.25)
    pairs.attach(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state.leaves["w"].sum().backward()
    pairs.collect()
    optimizer.step()
    scheduler.step()
    assert torch.equal(state.leaves["w"].detach(), torch.full((3,), 0.75, dtype=BF16))


def test_bfloat16_without_masters_loses_small_updates_and_with_masters_does_not():
    """AdamW with a learning rate of 1e-4 moves a weight of 1 by 1e-4 a step; bfloat16 next to 1 has 0.996."""
    ends = {}
    for precision in (Precision(), Precision(master=F32)):
        state = held({"w": torch.ones(4, dtype=BF16)}, precision)
        pairs = LeavesAndOwners(state)
        optimizer = torch.optim.AdamW(state.parameters.values(), lr=1e-4, weight_decay=0.0)
        pairs.attach(optimizer)
        for _ in range(100):
            state.parameters["w"].grad = None
            state.leaves["w"].float().sum().backward()
            pairs.collect()
            optimizer.step()
        ends[precision] = float(state.leaves["w"].detach()[0]), float(state.parameters["w"].detach()[0])
    assert ends[Precision()] == (1.0, 1.0)
    leaf, owner = ends[Precision(master=F32)]
    assert owner == pytest.approx(0.99, abs=1e-4)
    assert leaf == pytest.approx(0.99, abs=2e-3)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("own", "precision"),
    [
        (F32, Precision()),
        (F32, Precision(compute=BF16)),
        (BF16, Precision()),
        (BF16, Precision(gradients=BF16)),
        (BF16, Precision(master=F32)),
        (BF16, Precision(master=F32, gradients=BF16)),
        (F16, Precision(master=F32, loss_scale="dynamic")),
        (F64, Precision(compute=BF16)),
    ],
    ids=str,
)
def test_what_lives_after_a_step_is_what_was_budgeted(name, own, precision):
    values = {"w": torch.rand(64, 32).to(own), "v": torch.rand(100).to(own), "frozen": torch.rand(50).to(own)}
    expected = state_bytes(
        [(v.numel(), precision.of(own, trains=n != "frozen"), n != "frozen") for n, v in values.items()], name
    )
    with AliveBytes() as alive:
        state = held(values, precision, ("frozen",))
        pairs = LeavesAndOwners(state)
        trained = [state.parameters["w"], state.parameters["v"]]
        optimizer = (
            torch.optim.SGD(trained, 0.1) if name == "sgd" else torch.optim.AdamW(trained, foreach=False)
        )
        pairs.attach(optimizer)
        for _ in range(2):
            for owner in trained:
                owner.grad = None
            for _ in range(3):
                sum((leaf * leaf).sum() for leaf in state.leaves.values() if leaf.requires_grad).backward()
            pairs.collect()
            summed = alive.current_bytes
            optimizer.step()
        gc.collect()
        after = alive.current_bytes
    # Gradients that a step casts are budgeted by the wider of their two types.
    cast = [
        v.numel() * (precision.of(own).owner.itemsize - precision.of(own).gradient.itemsize)
        for n, v in values.items()
        if n != "frozen"
    ]
    assert after == expected.total - sum(max(0, -c) for c in cast)
    assert summed == expected.total - sum(max(0, c) for c in cast)


# --------------------------------------------------------------------------------------------------
# Split backward, tied parameters


def linear(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.linear.default(x, w, b),)


def addmm_t(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.addmm.default(b, x, aten.t.default(w)),)


def ordinary(w: Tensor, b: Tensor, x: Tensor) -> Any:
    return (aten.add.Tensor(aten.mul.Tensor(x, w), b),)


def batched(w: Tensor, b: Tensor, x: Tensor) -> Any:
    w3 = aten.view.default(w, [1, 4, 4])
    return (aten.add.Tensor(aten.bmm.default(aten.view.default(x, [1, 4, 4]), w3), b),)


def runner(function: Callable[..., Any], state: RankState) -> SegmentRunner:
    inputs = (SegmentInput("parameter", "w"), SegmentInput("parameter", "b"), SegmentInput("batch", "x"))
    code = SegmentCode(0, fx.symbolic_trace(function), inputs, (SegmentOutput("value", "y", True),))
    return SegmentRunner(code, state.leaves, split_backward=True)


@pytest.mark.parametrize("function", [linear, addmm_t, ordinary, batched])
@pytest.mark.parametrize(
    "precision", [Precision(), Precision(gradients=BF16), Precision(master=F32)], ids=str
)
def test_weight_halves_sum_as_the_whole_backward_does(function, precision):
    generator = torch.Generator().manual_seed(0)
    values = {
        "w": torch.rand(4, 4, generator=generator).to(BF16),
        "b": torch.rand(4, generator=generator).to(BF16),
    }
    gradient = torch.ones((1, 4, 4) if function is batched else (4, 4), dtype=BF16)
    found = []
    for split in (False, True):
        state = held(values, precision)
        run = runner(function, state)
        for micro in range(5):
            torch.manual_seed(micro)
            run.forward(micro, [], [torch.rand(4, 4).to(BF16)])
            if split:
                run.backward_input(micro, [gradient])
                run.backward_weight(micro)
            else:
                run.backward(micro, [gradient])
        LeavesAndOwners(state).collect()
        found.append({name: owner.grad for name, owner in state.parameters.items()})
    whole, halves = found
    wanted = BF16 if precision.gradients == BF16 else F32
    for name, gradient in whole.items():
        assert gradient.dtype == halves[name].dtype == wanted
        assert torch.equal(gradient, halves[name]), name


@pytest.mark.parametrize("missing", [False, True])
def test_gradients_of_tied_parameters_are_summed_over_ranks_in_their_own_type(missing):
    state = held({"w": torch.ones(2, dtype=BF16), "v": torch.ones(3, dtype=BF16)}, Precision())
    leaves = list(state.leaves.values())
    if not missing:
        sum((leaf * 1.0).sum() for leaf in leaves).backward()
    reduction, seen = GradientReduction(0, dict(state.leaves)), []

    class Done:
        def wait(self, *_: Any) -> None:
            pass

    def all_reduce(flat: Tensor) -> Done:
        seen.append(flat.dtype)
        flat += 1e-3  # the other rank's; a bfloat16 sum would lose it
        return Done()

    reduction.start(all_reduce).wait()
    reduction.finish()
    assert seen == [F32]
    assert leaves[0].grad is not None
    assert torch.allclose(leaves[0].grad, torch.full((2,), 1e-3 if missing else 1.001), rtol=1e-6)


def test_sparse_gradients_are_summed_in_thirty_two_bits():
    state = held({"w": torch.ones(5, 2, dtype=BF16)}, Precision())
    for _ in range(512):
        nn.functional.embedding(torch.tensor([1, 2]), state.leaves["w"], sparse=True).sum().backward()
    pairs = LeavesAndOwners(state)
    pairs.collect()
    gradient = state.parameters["w"].grad
    assert gradient.is_sparse
    assert gradient.to_dense()[1].tolist() == [512.0, 512.0]
    pairs.cast_gradients()
    assert state.parameters["w"].grad.dtype == BF16
    torch.optim.SGD(state.parameters.values(), lr=1.0).step()
    assert float(state.leaves["w"].detach()[1, 0]) == -512.0  # -511 in bfloat16
