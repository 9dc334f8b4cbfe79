"""One segment's forward and backward, many micro-batches in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from cost_models.errors import InternalError
from runtime.segment.code import SegmentCode, SegmentInput, SegmentOutput
from runtime.segment.runner import SegmentRunner, as_leaf, gradient_of

aten = torch.ops.aten


def two_values(w: Tensor, h: Tensor, skip: Tensor, ids: Tensor) -> Any:
    y = aten.mul.Tensor(aten.mul.Tensor(h, w), h)
    z = aten.add.Tensor(y, aten.detach.default(skip))
    return y, z, aten.add.Scalar(ids, 1)


CODE = SegmentCode(
    3,
    fx.symbolic_trace(two_values),
    (
        SegmentInput("parameter", "w"),
        SegmentInput("value", "h", True),
        SegmentInput("value", "skip", True),
        SegmentInput("batch", "ids"),
    ),
    (SegmentOutput("value", "y", True), SegmentOutput("value", "z", True), SegmentOutput("value", "n")),
)


def test_gradients_of_all_outputs_are_summed_and_unused_inputs_get_zeros() -> None:
    w = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    runner = SegmentRunner(CODE, {"w": w})
    assert runner.value_names == ["h", "skip"]
    assert runner.leaf_names == ["ids"]
    assert runner.root_positions == [0, 1]
    h, skip = as_leaf(torch.tensor([1.0, 5.0]), True), as_leaf(torch.ones(2), True)
    outputs = runner.forward(0, [h, skip], [torch.tensor([7])])
    assert [t.tolist() for t in outputs] == [[2.0, 75.0], [3.0, 76.0], [8]]
    runner.backward(0, [torch.tensor([1.0, 1.0]), torch.tensor([10.0, 0.0])])
    # dy/dh = 2 h w, and the gradients of y and z add up: 11, 1
    assert gradient_of(h).tolist() == [2 * 1 * 2 * 11, 2 * 5 * 3 * 1]
    assert gradient_of(skip).tolist() == [0.0, 0.0]
    assert w.grad is not None
    assert w.grad.tolist() == [11.0, 25.0]


def test_micro_batches_in_flight_do_not_mix_and_parameter_gradients_accumulate() -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    runner = SegmentRunner(CODE, {"w": w})
    leaves = [
        [as_leaf(torch.tensor([1.0, 1.0]) * (m + 1), True), as_leaf(torch.ones(2), True)] for m in range(3)
    ]
    for m in range(3):
        runner.forward(m, leaves[m], [torch.tensor([0])])
    for m in (1, 0, 2):
        runner.backward(m, [torch.ones(2), None])
    assert [gradient_of(pair[0]).tolist() for pair in leaves] == [[2, 2], [4, 4], [6, 6]]
    assert w.grad is not None
    assert w.grad.tolist() == [1 + 4 + 9] * 2
    with pytest.raises(KeyError):
        runner.backward(1, [torch.ones(2), None])  # its state is gone


def test_no_gradient_at_all_runs_no_backward() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    runner = SegmentRunner(CODE, {"w": w})
    runner.forward(0, [as_leaf(torch.ones(2), True), as_leaf(torch.ones(2), True)], [torch.tensor([0])])
    runner.backward(0, [None, None])
    assert w.grad is None


def running_mean(buffer: Tensor, x: Tensor) -> Any:
    y = aten.mul.Tensor(x, buffer)
    return y, aten.mul.Scalar(aten.add.Tensor(buffer, aten.mean.default(aten.detach.default(x))), 0.5)


def test_buffers_advance_once_per_micro_batch_and_reach_the_model_when_written() -> None:
    buffer = torch.tensor([8.0])
    code = SegmentCode(
        0,
        fx.symbolic_trace(running_mean),
        (SegmentInput("buffer", "mean"), SegmentInput("value", "x", True)),
        (SegmentOutput("value", "y", True), SegmentOutput("buffer", "mean")),
    )
    runner = SegmentRunner(code, {"mean": buffer})
    leaves = [as_leaf(torch.tensor([4.0]), True) for _ in range(2)]
    assert runner.forward(0, [leaves[0]], [])[0].tolist() == [32.0]
    assert runner.forward(1, [leaves[1]], [])[0].tolist() == [24.0]  # reads (8 + 4) / 2
    for m in range(2):
        runner.backward(m, [torch.ones(1)])
    assert [gradient_of(leaf).item() for leaf in leaves] == [8.0, 6.0]  # each saw its own contents
    assert buffer.tolist() == [8.0]
    runner.write_buffers()
    assert buffer.tolist() == [5.0]
    runner.forward(2, [leaves[0]], [])
    runner.discard()
    assert buffer.tolist() == [5.0]
    assert runner.forward(3, [leaves[0]], [])[0].tolist() == [20.0]


def test_what_is_written_once_a_step_is_read_as_it_was_by_all_its_micro_batches() -> None:
    buffer = torch.tensor([8.0])
    code = SegmentCode(
        0,
        fx.symbolic_trace(lambda steps, x: (aten.mul.Tensor(x, made := aten.add.Scalar(steps, 1)), made)),
        (SegmentInput("buffer", "steps"), SegmentInput("value", "x", True)),
        (SegmentOutput("value", "y", True), SegmentOutput("buffer", "steps", once=True)),
    )
    runner = SegmentRunner(code, {"steps": buffer})
    for m in range(3):
        assert runner.forward(m, [as_leaf(torch.tensor([4.0]), True)], [])[0].tolist() == [36.0]
    runner.write_buffers()
    assert buffer.tolist() == [9.0]


def test_values_are_emitted_from_inside_the_graph_in_order_of_production() -> None:
    seen: list[tuple[int, list[float]]] = []
    emitted = SegmentRunner(
        CODE,
        {"w": torch.nn.Parameter(torch.ones(2))},
        early=(0, 2),
        emit=lambda at, tensor: seen.append((at, tensor.tolist())),
    )
    outputs = emitted.forward(0, [torch.ones(2), torch.ones(2)], [torch.tensor([4])])
    assert seen == [(0, [1.0, 1.0]), (2, [5])]
    assert len(outputs) == 3


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(InternalError, match="no tensor for w"):
        SegmentRunner(CODE, {})
