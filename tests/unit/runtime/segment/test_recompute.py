"""A block computed again in backward: the same gradients, masks and statistics, and less memory in between."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from cost_models.errors import InternalError
from runtime.ops.random import Seeded
from runtime.segment.code import SegmentCode, SegmentInput, SegmentOutput
from runtime.segment.recompute import checkpointed, marked
from runtime.segment.runner import SegmentRunner, as_leaf
from tests.support.alive import AliveBytes

aten = torch.ops.aten


def network(w: Tensor, v: Tensor, mean: Tensor, var: Tensor, x: Tensor) -> Any:
    """A block with dropout, batch norm, parameters used twice, a view, a boolean and a complex result."""
    h = aten.linear.default(x, w, None)
    h = aten.tanh.default(aten.mul.Tensor(aten.dropout.default(h, 0.5, True), v))
    h = aten.batch_norm.default(h, v, None, mean, var, True, 0.1, 1e-5, False)
    positive = aten.gt.Scalar(h, 0.0)
    h = aten.add.Tensor(aten.linear.default(aten.relu.default(h), w, v), x)
    spectrum = aten.fft_fft.default(h)
    tail = aten.where.self(positive, h, aten.neg.default(h))
    tail = aten.linear.default(aten.tanh.default(tail), w, None)
    return tail, spectrum, positive


TRACED = fx.symbolic_trace(network)
NAMES = [node.name for node in TRACED.graph.nodes if node.op == "call_function"]
CODE = SegmentCode(
    0,
    TRACED,
    (
        SegmentInput("parameter", "w"),
        SegmentInput("parameter", "v"),
        SegmentInput("buffer", "mean"),
        SegmentInput("buffer", "var"),
        SegmentInput("value", "x", True),
    ),
    (
        SegmentOutput("value", "tail", True),
        SegmentOutput("value", "spectrum", True),
        SegmentOutput("value", "b"),
    ),
    random=True,
)
REGIONS = {
    "none": (),
    "one": (tuple(NAMES[:9]),),
    "two": (tuple(NAMES[:4]), tuple(NAMES[4:10])),
    "all": (tuple(NAMES),),
}


def state(trainable: bool = True) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    w, v = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((6, 6), (6,)))
    mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    return {
        "w": torch.nn.Parameter(w, trainable),
        "v": torch.nn.Parameter(v, trainable),
        "mean": mean,
        "var": var,
    }


def run(code: SegmentCode, held: dict[str, Tensor], split: bool, x_needs: bool = True) -> dict[str, Tensor]:
    """Two micro-batches in flight; the second goes back first."""
    runner = SegmentRunner(code, held, split_backward=split)
    seeded = Seeded(3, torch.device("cpu"))
    g = torch.Generator().manual_seed(2)
    leaves = [as_leaf(torch.randn(5, 6, generator=g, dtype=torch.float64), x_needs) for _ in range(2)]
    found: dict[str, Tensor] = {}
    outputs: list[Sequence[Any]] = []
    for m, leaf in enumerate(leaves):
        outputs.append(seeded.run(0, 0, m, partial(runner.forward, m, [leaf], [])))
        found |= {f"output {m}.{i}": t.detach().clone() for i, t in enumerate(outputs[m])}
    for m in (1, 0):
        seeds = [torch.cos(outputs[m][0].detach()), torch.ones_like(outputs[m][1])]
        if split:
            runner.backward_input(m, seeds)
        else:
            runner.backward(m, seeds)
    if split:
        runner.backward_weight(1)
        runner.backward_weight(0)
    found |= {f"x{m}": leaf.grad for m, leaf in enumerate(leaves) if leaf.grad is not None}
    found |= {f"d{name}": t.grad for name, t in held.items() if t.grad is not None}
    return found | {name: held[name].clone() for name in ("mean", "var")}


@pytest.mark.parametrize("split", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("regions", ["one", "two", "all"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_every_number_is_what_it_was(regions: str, split: bool, frozen: bool) -> None:
    expected = run(CODE, state(not frozen), split)
    generator = torch.get_rng_state()
    actual = run(replace(CODE, recomputed=REGIONS[regions]), state(not frozen), split)
    assert torch.equal(generator, torch.get_rng_state())
    assert expected.keys() == actual.keys()
    assert ("dw" in expected) is not frozen
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-13, msg=name)


def test_a_block_without_gradients_and_evaluation() -> None:
    code = replace(CODE, recomputed=REGIONS["all"])
    runner = SegmentRunner(code, state(trainable=False))
    x = torch.ones(5, 6, dtype=torch.float64)
    outputs = runner.forward(0, [x], [])
    assert not outputs[0].requires_grad
    runner.backward(0, [torch.ones_like(outputs[0]), None])
    with torch.no_grad():
        assert not SegmentRunner(code, state()).forward(0, [x], [], keep=False)[0].requires_grad


def test_it_travels() -> None:
    code = replace(CODE, recomputed=REGIONS["two"])
    assert copy.deepcopy(code).recomputed == REGIONS["two"]


def test_values_leave_after_their_block() -> None:
    emitted: list[int] = []
    code = replace(CODE, recomputed=REGIONS["one"])
    runner = SegmentRunner(code, state(), early=(1, 2), emit=lambda at, tensor: emitted.append(at))
    x = as_leaf(torch.ones(5, 6, dtype=torch.float64), True)
    outputs = runner.forward(0, [x], [])
    assert sorted(emitted) == [1, 2]
    runner.backward(0, [torch.ones_like(outputs[0]), None])
    assert sorted(emitted) == [1, 2]  # not again while the block is recomputed


def test_a_region_that_others_lead_back_into_is_refused() -> None:
    with pytest.raises(InternalError, match="before its region is complete"):
        SegmentRunner(replace(CODE, recomputed=((NAMES[0], NAMES[8]),)), state())


def chain(layers: int) -> SegmentCode:
    def forward(w: Tensor, x: Tensor) -> Any:
        for _ in range(layers):
            x = aten.tanh.default(aten.sin.default(aten.exp.default(aten.linear.default(x, w, None))))
        return (x,)

    graph = fx.symbolic_trace(forward)
    names = [node.name for node in graph.graph.nodes if node.op == "call_function"]
    regions = tuple(tuple(names[4 * i : 4 * i + 4]) for i in range(layers))
    inputs = (SegmentInput("parameter", "w"), SegmentInput("value", "x", True))
    return SegmentCode(0, graph, inputs, (SegmentOutput("value", "y", True),), recomputed=regions)


def test_memory_between_forward_and_backward_is_one_tensor_per_block() -> None:
    size = 64 * 64 * 4
    held = {}
    for recomputed in (True, False):
        code = chain(6)
        code = code if recomputed else replace(code, recomputed=())
        w = torch.nn.Parameter(torch.eye(64) * 0.1)
        runner = SegmentRunner(code, {"w": w})
        x = as_leaf(torch.zeros(64, 64), True)
        with AliveBytes([w, x]) as alive:
            before = alive.current_bytes
            outputs = runner.forward(0, [x], [])
            between = alive.current_bytes - before
            runner.backward(0, [torch.ones_like(outputs[0])])
        held[recomputed] = (between, alive.peak_bytes - before)
    assert (
        held[True][0] <= 6 * size + 4096
    )  # the blocks' inputs and the result, but the first input, which is given
    assert held[False][0] >= 12 * size
    assert held[True][1] < held[False][1]


def test_statistics_are_written_even_if_nobody_reads_the_block() -> None:
    def unread(w: Tensor, mean: Tensor, var: Tensor, x: Tensor) -> Any:
        aten.batch_norm.default(aten.tanh.default(x), w, None, mean, var, True, 0.1, 1e-5, False)
        return (aten.mul.Tensor(x, w),)

    traced = fx.symbolic_trace(unread)
    names = [node.name for node in traced.graph.nodes if node.op == "call_function"]
    mean, var = torch.zeros(6), torch.ones(6)
    module = checkpointed(marked(traced, (tuple(names[:2]),)), random=False)
    module(torch.ones(6, requires_grad=True), mean, var, torch.randn(8, 6))
    assert mean.abs().min() > 0
    assert (var - 1).abs().min() > 0
