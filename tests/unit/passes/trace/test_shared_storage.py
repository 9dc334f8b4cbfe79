"""Memory that tensors share: found on every device, kept as views of an owner, or refused with both names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cost_models.errors import ModelError
from cost_models.precision import Precision
from partitioner.engine.weights import StateKeys
from passes.graph.verify import verify_graph
from passes.trace.init_state import values_of
from passes.trace.names import state_names
from passes.trace.trace import trace


class Made(nn.Module):
    """A linear layer, what ``prepare`` adds to it, and ``run`` as its forward."""

    def __init__(self, prepare: Callable[[Any], object], run: Callable[[Any, Tensor], Tensor] | None = None):
        super().__init__()
        self.a = nn.Linear(4, 4)
        prepare(self)
        self._run = run or (lambda m, x: m.a(x))

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def squared(output: Tensor, batch: object) -> Tensor:
    return (output**2).mean()


def mirrored(m: Any) -> None:
    m.register_buffer("mirror", m.a.weight.data[:2])
    m.register_buffer("hidden", m.a.bias.detach(), persistent=False)
    m.plain = m.a.weight.detach().t()
    m.carries = m.a.weight[3]


def reads_all(m: Any, x: Tensor) -> Tensor:
    return m.a(x)[:, :2] + x @ m.mirror.t() + (x @ m.plain)[:, 2:] + (x * m.carries).sum() + m.hidden.sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_are_computed_from_their_owners(device: str) -> None:
    with torch.device(device):
        model = Made(mirrored, reads_all)
    graph = trace(model, torch.zeros(3, 4), loss_fn=squared)
    verify_graph(graph, after="trace")
    assert {name: str(view) for name, view in graph.views.items()} == {
        "mirror": "a.weight[0:2]",
        "hidden": "a.bias",
        "plain": "a.weight.permute(1, 0)",
        "carries": "a.weight[3]",
    }
    assert not graph.buffers
    assert not graph.constants
    assert {entry.name for entry in graph.inputs} == {"a.weight", "a.bias", "x"}
    detached = [n for n in graph.ops if n.target is torch.ops.aten.detach.default]
    assert len(detached) == 3, "all but the one that was taken with autograd on"
    assert isinstance(model.plain, Tensor)
    assert model.plain.device.type == device, "the model is as it was"


def test_writes_reach_views_in_the_order_of_the_code() -> None:
    def prepare(m: Any) -> None:
        m.register_buffer("table", torch.ones(4, 4))
        m.register_buffer("rows", m.table[1:3])

    def run(m: Any, x: Tensor) -> Tensor:
        before = m.rows.sum()
        m.table.add_(1.0)
        between = m.rows.sum()
        m.rows.mul_(3.0)
        return m.a(x) + before + 10 * between + 100 * m.table.sum()

    model = Made(prepare, run)
    graph = trace(model, torch.zeros(3, 4), loss_fn=squared)
    x = torch.randn(3, 4)
    state = {**dict(model.named_parameters()), "table": model.get_buffer("table").clone(), "x": x}
    loss, table = graph.module(*(state[entry.name] for entry in graph.inputs))
    assert torch.equal(loss, squared(model(x), None))
    assert torch.equal(table, model.get_buffer("table"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("prepare", "named"),
    [
        (lambda m: setattr(m, "b", nn.Parameter(m.a.weight.data[1:])), ("a.weight and b",)),
        (lambda m: setattr(m, "b", nn.Parameter(torch.zeros(1).expand(5))), ("b: several of its elements",)),
        (
            lambda m: m.register_buffer("bits", m.a.weight.data.view(torch.int32)),
            ("a.weight and bits", "torch.int32"),
        ),
        (
            lambda m: m.register_buffer("w", m.a.weight.data.as_strided((3, 4), (1, 1))),
            ("a.weight and w", "no view takes"),
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_with_both_names(
    device: str, prepare: Callable[[Any], object], named: tuple[str, ...]
) -> None:
    with torch.device(device):
        model = Made(prepare)
    with pytest.raises(ModelError, match="share their memory") as caught:
        trace(model, torch.zeros(3, 4), loss_fn=squared)
    assert all(text in str(caught.value) for text in named)


def part_of_a_buffer(m: Any) -> None:
    flat = torch.zeros(9)
    m.register_buffer("flat", flat)
    m.b = nn.Parameter(flat[:5])


def beside_each_other(m: Any) -> None:
    flat = torch.zeros(10)
    m.b, m.c = nn.Parameter(flat[::2]), nn.Parameter(flat[1::2])
    m.register_buffer("d", torch.zeros(6)[:3])


def over_one_array(m: Any) -> None:
    array = np.zeros(6, dtype=np.float32)
    m.b, m.c = nn.Parameter(torch.from_numpy(array[:4])), nn.Parameter(torch.from_numpy(array[2:]))


def test_memory_is_compared_by_elements_and_addresses() -> None:
    with pytest.raises(ModelError, match="b and flat"):
        state_names(Made(part_of_a_buffer))
    with pytest.raises(ModelError, match="b and c"):
        state_names(Made(over_one_array))
    assert not state_names(Made(beside_each_other)).views


def overlapping(m: Any) -> None:
    flat = torch.arange(9.0)
    m.register_buffer("left", flat[:5])
    m.register_buffer("right", flat[3:])


def test_buffers_that_overlap_are_refused_only_where_one_is_written() -> None:
    def writes(m: Any, x: Tensor) -> Tensor:
        m.left.add_(1.0)
        return m.a(x) * m.right.sum()

    trace(
        Made(overlapping, lambda m, x: m.a(x) * m.left.sum() * m.right.sum()),
        torch.zeros(3, 4),
        loss_fn=squared,
    )
    with pytest.raises(ModelError, match=r"left and right|right and left"):
        trace(Made(overlapping, writes), torch.zeros(3, 4), loss_fn=squared)


def test_buffers_beside_each_other_in_one_storage_are_written_apart() -> None:
    def prepare(m: Any) -> None:
        flat = torch.zeros(8)
        m.register_buffer("left", flat[:4])
        m.register_buffer("right", flat[4:])

    def run(m: Any, x: Tensor) -> Tensor:
        m.left.add_(1.0)
        return m.a(x) * m.left.sum() + m.right.sum()

    model = Made(prepare, run)
    graph = trace(model, torch.zeros(3, 4), loss_fn=squared)
    assert [output.name for output in graph.outputs if output.kind == "buffer"] == ["left"]


def test_writing_a_parameter_through_its_view_is_refused_with_both_names() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.mirror.mul_(0.5)
        return m.a(x)

    with pytest.raises(ModelError, match=r"writes a\.weight or mirror"):
        trace(Made(mirrored, run), torch.zeros(3, 4), loss_fn=squared)


def test_a_precision_that_reads_the_owner_in_another_type_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a\.weight and mirror.*bfloat16"):
        trace(
            Made(mirrored, reads_all), torch.zeros(3, 4), loss_fn=squared, precision=Precision(torch.bfloat16)
        )


def test_a_parameter_in_a_list_or_a_closure_is_the_parameter() -> None:
    model = Made(lambda m: setattr(m, "decayed", [m.a.weight]), lambda m, x: m.a(x) @ m.decayed[0])
    bias = model.a.bias
    graph = trace(model, torch.zeros(3, 4), loss_fn=lambda out, _: squared(out, _) + bias.pow(2).sum())
    assert {entry.name for entry in graph.inputs} == {"a.weight", "a.bias", "x"}
    assert graph.trained == {"a.weight", "a.bias"}


def test_state_dicts_have_the_views_and_owners_say_their_values() -> None:
    model = Made(mirrored)
    keys = StateKeys.of(model, Precision())
    assert keys.order == ("mirror", "a.weight", "a.bias")
    entry = keys.entries["mirror"]
    assert (entry.name, entry.shape, entry.own_shape) == ("a.weight", (4, 4), (2, 4))
    assert keys.first_key == {"a.weight": "a.weight", "a.bias": "a.bias"}
    given = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(dict(values_of(["a.weight", "a.bias"], model=model, state_dict=given))) == 2
    given["mirror"] += 1.0
    with pytest.raises(ModelError, match=r"mirror is a\.weight\[0:2\] in the model, and has other values"):
        list(values_of(["a.weight"], model=model, state_dict=given))


def test_a_tensor_computed_from_a_parameter_before_forward_is_refused() -> None:
    model = Made(lambda m: setattr(m, "scaled", m.a.weight * 2.0), lambda m, x: m.a(x) + x @ m.scaled)
    with pytest.raises(ModelError, match="scaled is the result of MulBackward0"):
        trace(model, torch.zeros(3, 4), loss_fn=squared)


def test_a_view_of_what_a_batch_norm_writes_is_refused_where_it_is_read() -> None:
    def prepare(m: Any) -> None:
        m.norm = nn.BatchNorm1d(4)
        m.register_buffer("seen", m.norm.running_mean[:2])

    assert trace(Made(prepare, lambda m, x: m.norm(m.a(x))), torch.zeros(3, 4), loss_fn=squared).views
    with pytest.raises(ModelError, match=r"a batch norm writes norm\.running_mean or seen"):
        trace(Made(prepare, lambda m, x: m.norm(m.a(x)) + m.seen.sum()), torch.zeros(3, 4), loss_fn=squared)
