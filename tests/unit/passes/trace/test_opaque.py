"""Opaque parts: what becomes one, what is told of it, and that the graph computes what the model computes."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import partitioner
from cost_models.errors import ModelError, UsageError
from passes.costs.costs import cost_graph
from passes.graph.graph import OpGraph
from passes.trace.opaque import growth
from passes.trace.opaque.sizes import UnfitError, fit, points
from passes.trace.trace import trace
from runtime.ops.opaque import Opaque
from runtime.segment.portable import pack


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made if made.abs().sum() > 0.001 else -made


class Picking(nn.Module):
    """Returns as many rows as are positive: no size of the batch tells."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0]


class Counting(nn.Module):
    """Writes a buffer through ``data``, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen.data.add_(x.detach().sum(0))
        return x * torch.rand(len(x), 1).round() if x.sum() > -1e9 else x


class Looping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(60):
            x = torch.tanh(x)
        return x


class Decorated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return shifted(x) * 2


class Installing(nn.Linear):
    """Installs a hook that no pickle holds at its first call, as models of transformers do."""

    installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.installed = True
            self.register_forward_hook(lambda module, given, made: None)
        return super().forward(x)


class Unshaped(nn.Module):
    """Calls a custom op that does not tell what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.partitioner_tests.unshaped(x)
        return found


@torch.library.custom_op("partitioner_tests::unshaped", mutates_args=())
def unshaped(x: Tensor) -> Tensor:
    return x.sin()


unshaped.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Scanning(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return carry + x, (carry + x).tanh()

        sums: Tensor = scan(step, torch.zeros_like(x[:, 0]), x.t(), dim=0)[1]
        return sums.t()


@partitioner.opaque
def shifted(x: Tensor) -> Tensor:
    return x + float(len(x)) if len(x) > 3 else x


class Adjoint(torch.autograd.Function):
    """Keeps a module, and asks it again in backward, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            made: Tensor = layer(x).tanh()
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.layer(x).tanh(), [x, *parameters], gradients)


class Solving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Adjoint.apply(self.inner, x, *self.inner.parameters())
        return made


def net(part: nn.Module, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(width, 2))


def mean_square(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def parts(graph: OpGraph) -> list[Opaque]:
    return [node.target for node in graph.ops if isinstance(node.target, Opaque)]


def traced(model: nn.Module, **options: object) -> OpGraph:
    return trace(model, torch.randn(5, 4), loss_fn=mean_square, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [2, 7])
def test_the_graph_computes_what_the_model_computes_for_other_batches(samples: int) -> None:
    model = net(Branching(), 6)
    graph = traced(model)
    x = torch.randn(samples, 4)
    loss = mean_square(model(x), x)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    state = dict(model.named_parameters())
    (mine,) = graph.module(*(x if i.kind == "batch" else state[i.name] for i in graph.inputs))
    mine.backward()
    torch.testing.assert_close(mine, loss)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)


@pytest.mark.parametrize("part", [Unshaped(), Scanning()], ids=["custom-op", "scan"])
def test_ops_without_shapes_and_loops_of_torch_are_parts(part: nn.Module) -> None:
    model = net(part)
    graph = traced(model)
    assert [str(found) for found in parts(graph)] == ["opaque(1)"]
    x = torch.randn(5, 4)
    state = [value for kind in (model.named_parameters(), model.named_buffers()) for _, value in kind]
    expected, (actual,) = mean_square(model(x), None), graph.module(*state, x)
    torch.testing.assert_close(actual, expected)
    trained = list(model.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(actual, trained), torch.autograd.grad(expected, trained), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_backward_that_asks_a_module_again_sees_what_forward_saw() -> None:
    model = net(Solving(), 6)
    graph = traced(model)
    (part,) = parts(graph)
    assert part.own_backward
    assert not part.draws_backward
    weight = torch.randn(6, 4, requires_grad=True)  # not what the module had
    bias = torch.zeros(6, requires_grad=True)
    x = torch.randn(2, 4)
    (found,) = part(x, weight, bias)
    expected = nn.functional.linear(x, weight, bias).tanh()
    for a, b in zip(*(torch.autograd.grad(y.sum(), (weight, bias)) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_what_a_part_installs_in_itself_stays_in_its_process() -> None:
    model = net(Installing(4, 4))
    graph = traced(model, opaque=["1"])
    (part,) = parts(graph)
    assert part.code._running._forward_hooks
    assert not part.code.target._forward_hooks
    assert not model[1]._forward_hooks  # type: ignore[index]
    again = pickle.loads(pickle.dumps(part))  # noqa: S301 our own bytes
    given = [torch.randn(5, 4), *(p.detach() for p in model[1].parameters())]  # type: ignore[index]
    torch.testing.assert_close(again(*given), part(*given))


def test_a_part_without_values_says_which_tensor_has_none() -> None:
    model = net(Branching(), 6)
    model[1].to("meta")  # type: ignore[index]
    with pytest.raises(ModelError) as caught:
        traced(model)
    assert caught.value.because[-1] == (
        "module '1' (Branching) cannot run as one opaque op: 1.linear.weight has no values: it is on the meta device"
    )
    assert caught.value.suggestions[0] == "plan with a model that has weights: then the part is run"


def test_a_sparse_product_of_fixed_size_is_refused_for_what_it_needs() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.eye(6).to_sparse_coo())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.adjacency, x)  # type: ignore[arg-type]

    with pytest.raises(ModelError) as caught:
        trace(nn.Sequential(nn.Linear(4, 4), Spread()), torch.randn(6, 4), loss_fn=lambda y, x: y.sum())
    assert "module '1' (Spread) cannot run as one opaque op" in caught.value.because[-1]
    assert "our call, with input twice in a row, ends with RuntimeError: addmm" in caught.value.because[-1]


def test_it_is_named_with_reason_and_line_and_travels_to_other_processes() -> None:
    graph = traced(net(Branching(), 6))
    (part,) = parts(graph)
    (note,) = (note for note in graph.notes if "opaque op" in note)
    assert note.startswith(
        f"module '1' (Branching) runs whole, its own code as one opaque op ({part.source})"
    )
    assert "made.abs().sum() > 0.001" in note
    again = pickle.loads(pickle.dumps(part))  # noqa: S301 - as workers get it, from this process
    assert again == part
    assert (str(again), again.__name__) == ("opaque(1)", "opaque_1")
    assert [i.name for i in graph.inputs if i.kind == "parameter"] == [
        "0.weight",
        "0.bias",
        "1.linear.weight",
        "1.linear.bias",
        "2.weight",
        "2.bias",
    ]


def test_the_fingerprint_is_that_of_the_code_not_of_the_objects() -> None:
    assert traced(net(Branching(), 6)).fingerprint == traced(net(Branching(), 6)).fingerprint
    assert traced(net(Branching(), 6)).fingerprint != traced(net(nn.Linear(4, 6), 6)).fingerprint


def test_a_script_and_what_it_spawns_know_its_classes_by_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for name in ("train", "__main__", "__mp_main__"):
        monkeypatch.setattr(Branching, "__module__", name)
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__="/home/user/train.py"))
        found.add(traced(net(Branching(), 6)).fingerprint)
    assert len(found) == 1


def test_equal_parts_are_analysed_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 4), Branching()) for _ in range(3)))
    first, *others = parts(trace(model, torch.randn(5, 6), loss_fn=mean_square))
    assert len(others) == 2
    assert all(other == first and hash(other) == hash(first) for other in others)


def test_parts_are_named_by_hand_and_by_decorators() -> None:
    assert [str(part) for part in parts(traced(net(nn.Tanh()), opaque=["1"]))] == ["opaque(1)"]
    assert [str(part) for part in parts(traced(net(nn.Tanh()), opaque=["loss", "[02]"]))] == [
        "opaque(0)",
        "opaque(2)",
        "opaque(the loss function)",
    ]
    assert [part.source.partition(":")[0] for part in parts(traced(net(Decorated())))] == ["test_opaque.py"]
    with pytest.raises(UsageError, match="no module's path is like 'encoder'"):
        traced(net(nn.Tanh()), opaque=["encoder"])


def test_sizes_that_depend_on_numbers_cannot_leave_a_part() -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError) as caught:
        traced(net(Picking()))
    assert "test_opaque.py:" in str(caught.value)
    assert any("depend" in line for line in caught.value.because)


def test_written_buffers_are_outputs_and_the_model_stays_as_it_was() -> None:
    model = net(Counting())
    graph = traced(model)
    assert [o.name for o in graph.outputs if o.kind == "buffer"] == ["1.seen"]
    assert parts(graph)[0].random
    assert not model.get_buffer("1.seen").any()


def test_a_loop_that_unrolls_becomes_one_op() -> None:
    with mock.patch.object(growth, "MOST_NODES", 50):
        graph = traced(net(Looping()))
    assert len(parts(graph)) == 1
    assert any("adds more than 50 operations" in note for note in graph.notes)
    with mock.patch.object(growth, "MOST_NODES", 50), pytest.raises(ModelError, match="unrolls without end"):
        trace(Looping(), torch.randn(5, 4, requires_grad=True), loss_fn=mean_square)


@pytest.mark.parametrize("part", [Branching(), nn.Linear(4, 6)], ids=["measured", "on-fake-tensors"])
def test_the_costs_are_those_of_the_ops_inside(part: nn.Module) -> None:
    whole, piece = traced(net(nn.Linear(4, 6), 6)), traced(net(part, 6), opaque=["1"])
    at = [
        ops.index(next(o for o in ops if o.startswith(name)))
        for ops, name in (
            (cost_graph(whole).ops, "linear_1"),
            (cost_graph(piece).ops, "opaque"),
        )
    ]
    plain, opaque = (cost_graph(g).at(16) for g in (whole, piece))
    assert opaque.forward_flops[at[1]] == plain.forward_flops[at[0]] == 2 * 16 * 4 * 6
    backward = [
        t.backward_input_flops[i] + t.backward_weight_flops[i] for t, i in ((plain, at[0]), (opaque, at[1]))
    ]
    assert backward[0] == backward[1] == 2 * 2 * 16 * 4 * 6
    assert not cost_graph(piece).estimated


@pytest.mark.parametrize(
    ("base", "size"), [((3,), lambda b: 4 * b + 2), ((3, 5), lambda b, t: 2 * b * t + t - 1), ((), lambda: 7)]
)
def test_sizes_are_polynomials_of_the_open_sizes(base: tuple[int, ...], size: object) -> None:
    assert callable(size)
    found = fit({point: size(*point) for point in points(base)}, base)
    other = tuple(11 + 2 * i for i in range(len(base)))
    assert found.of(other) == size(*other)


def test_other_sizes_are_refused() -> None:
    for size in (lambda b: b * b, lambda b: b // 2, lambda b: 2**b):
        with pytest.raises(UnfitError):
            fit({point: size(*point) for point in points((5,))}, (5,))


def test_a_part_that_cannot_leave_the_process_says_so() -> None:
    graph = trace(
        nn.Linear(4, 2), torch.randn(5, 4), loss_fn=lambda output, batch: output.mean(), opaque=["loss"]
    )
    with pytest.raises(ModelError, match="the loss function cannot go to another process"):
        pack(graph.module)
