"""Pass simplify: wrappers become detaches and casts, noise goes, control flow on data is refused."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cost_models.errors import ModelError
from passes.trace.normal.simplify import _NAMES, simplify
from tests.support import toy_models as models
from tests.support.rewritten_graphs import difference, eager, export, lowered, run, shuffled_order

aten = torch.ops.aten


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] > 1)
        unused = torch.rand(3) + 1  # noqa: F841
        whole = x[:, :].to(x.dtype)
        values, _ = whole.max(1)
        return (values * torch.tensor([2.0])).sum() + x.size(1)


def test_noise_goes_and_projections_stay() -> None:
    gm = simplify(export(Noise(), {"x": torch.randn(3, 4)}).graph)
    assert targets(gm) == [aten.max.dim, operator.getitem, aten.mul.Tensor, aten.sum.default, aten.add.Tensor]
    gm.graph.lint()


def test_second_names_are_those_of_the_same_op() -> None:
    for second, first in _NAMES.items():
        for packet in (second, f"{second}_"):
            for name in getattr(aten, packet).overloads() if hasattr(aten, packet) else ():
                if "out" in name.lower() or "names" in name.lower() or "Dimname" in name:
                    continue
                schema = getattr(getattr(aten, packet), name)._schema
                same = getattr(getattr(aten, packet.replace(second, first)), name)._schema
                assert str(schema).partition("(")[2] == str(same).partition("(")[2], schema


class SecondNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.concatenate([x.multiply(self.weight), x.absolute()], 1).negative()
        return torch.true_divide(torch.special.expit(y.subtract_(0.5)), 2.0).sum()


def test_an_op_of_two_names_is_called_by_one() -> None:
    inputs = {"x": torch.randn(3, 4)}
    program = export(SecondNames(), inputs)
    gm, _ = lowered(program)
    names = [target._schema.name.removeprefix("aten::") for target in targets(gm)]
    assert names == ["mul", "abs", "cat", "neg", "sub", "sigmoid", "div", "sum"]
    assert difference(run(program, gm, inputs), eager(program.model, inputs, lambda loss: loss)) == 0


class TypesOfOthers(nn.Module):
    """x [b, 4] in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        y = torch.ops.aten.to.other(x.float().square().type_as(x), x.float(), copy=True)
        return (y.type_as(x.float()) + (x > 0).type_as(y)).sum()


def test_casts_name_their_type_instead_of_reading_a_tensor_of_it() -> None:
    inputs = {"x": torch.randn(3, 4, dtype=torch.bfloat16)}
    program = export(TypesOfOthers(), inputs)
    gm, _ = lowered(program)
    assert {aten.type_as.default, aten.to.other}.isdisjoint(targets(gm))
    casts = [node for node in gm.graph.nodes if node.target == aten.to.dtype]
    assert [node.args[1] for node in casts] == [
        torch.float32, torch.bfloat16, torch.float32, torch.float32
    ]  # fmt: skip
    assert difference(run(program, gm, inputs), eager(program.model, inputs, lambda loss: loss)) == 0


def test_the_input_graph_is_left_as_it_is() -> None:
    program = export(models.FrozenBranch(), {"x": torch.randn(3, 4)})
    before = str(program.graph.graph)
    simplify(program.graph)
    assert str(program.graph.graph) == before


def test_no_grad_becomes_detach_with_values_and_origin() -> None:
    program = export(models.FrozenBranch(), {"x": torch.randn(3, 4)})
    gm = simplify(program.graph)
    assert not any(isinstance(target, torch._ops.HigherOrderOperator) for target in targets(gm))
    assert not any(node.op == "get_attr" for node in gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert node.meta["val"] is not None
            assert node.meta["nn_module_stack"]
            assert "stack_trace" in node.meta
    detached = [node.args[0] for node in gm.graph.nodes if node.target == aten.detach.default]
    assert detached
    assert all(user.target == aten.detach.default for source in detached for user in source.users)


class Heads(nn.Module):
    """x [b, 4, 16]: what attention returns here is in one piece once transposed, so the exporter sees no ``contiguous``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.size(0), 4, 2, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads)
        return y.transpose(1, 2).contiguous().view(x.size(0), 4, 16)


def test_a_view_of_moved_dimensions_takes_any_order_in_memory() -> None:
    gm = simplify(export(Heads(), {"x": torch.randn(3, 4, 16)}).graph)
    views = [
        t for t in targets(gm) if t in (aten.view.default, aten.reshape.default, aten.contiguous.default)
    ]
    assert views == [aten.view.default, aten.reshape.default]


class LostNoGrad(nn.Module):
    """The exporter loses ``no_grad`` inside ``autocast``: its own module trains ``frozen``."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.head(x)
            with torch.no_grad():
                feature = self.frozen(h)
            h = h * feature
        return h.float().pow(2).sum()


def test_no_grad_that_the_exporter_loses_is_kept() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(3, 4)}
    program = export(LostNoGrad(), inputs)
    expected = eager(program.model, inputs, lambda loss: loss)
    gm, _ = lowered(program)
    assert difference(run(program, gm, inputs), expected) == 0
    exporters = program.program.module()
    exporters(**inputs).backward()
    gradient = exporters.get_parameter("frozen.weight").grad
    assert gradient is not None
    assert expected.gradients["frozen.weight"] is None


def test_autocast_as_explicit_casts_equals_eager_exactly() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(3, 8), "label": torch.tensor([0, 1, 2])}
    program = export(models.AutocastModel(), inputs)
    gm, _ = lowered(program)
    assert not any(isinstance(target, torch._ops.HigherOrderOperator) for target in targets(gm))
    for size in (3, 2, 5):
        batch = {key: torch.cat([value, value])[:size] for key, value in inputs.items()}
        expected = eager(program.model, batch, lambda loss: loss)
        assert difference(run(program, gm, batch), expected) == 0
        for seed in range(3):  # gradients then add up in another order, in bfloat16
            found = run(program, gm, batch, shuffled_order(gm.graph, seed))
            assert torch.equal(found.outputs[0], expected.outputs[0])
            assert difference(found, expected) < 0.02


def test_every_traced_dtype_is_what_the_casts_produce() -> None:
    program = export(models.AutocastModel(), {"x": torch.randn(3, 8), "label": torch.tensor([0, 1, 2])})
    gm = simplify(program.graph)
    found = run(program, gm, {"x": torch.randn(3, 8), "label": torch.tensor([0, 1, 2])})
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            assert found.values[node.name].dtype == node.meta["val"].dtype, node


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 3


class Hidden(nn.Module):
    """Backwards that an exported graph does not show, and control flow on data; ``kind`` picks one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.kind == "function":
            h = StraightThrough.apply(h)
        elif self.kind == "reentrant":
            h = checkpoint(self.linear, h, use_reentrant=True)
        elif self.kind == "cond":
            h = torch.cond(h.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (h,))
        return F.relu(h).sum()


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("function", "autograd.Function"),
        ("reentrant", "use_reentrant=False"),
        ("cond", "torch.where"),
    ],
)
def test_what_the_graph_cannot_say_is_an_error_that_names_the_line(kind: str, advice: str) -> None:
    program = export(Hidden(kind), {"x": torch.randn(3, 4)})
    with pytest.raises(ModelError) as caught:
        lowered(program)
    assert advice in str(caught.value)
    assert caught.value.because


def test_autocast_of_a_device_that_the_trace_does_not_run_on_is_refused() -> None:
    program = export(LostNoGrad(), {"x": torch.randn(3, 4)})
    for node in program.graph.graph.nodes:
        if str(node.target) == "wrap_with_autocast":
            node.args = ("cuda", *node.args[1:])
    with pytest.raises(ModelError, match=r"x\.device\.type"):
        simplify(program.graph)


def test_checkpoint_without_reentry_passes() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.linear, x, use_reentrant=False)
            return result.sum()

    inputs = {"x": torch.randn(3, 4)}
    program = export(Plain(), inputs)
    gm, _ = lowered(program)
    assert difference(run(program, gm, inputs), eager(program.model, inputs, lambda loss: loss)) == 0
