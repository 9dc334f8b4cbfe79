"""Tracing in another precision: what is cast, what stays, and that the user's model is as it was."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from cost_models.errors import ModelError, UsageError
from cost_models.precision import Precision
from passes.copies.float64 import in_float64
from passes.graph.graph import OpGraph
from passes.graph.verify import verify_graph
from passes.trace.precision import check_precision, precision_notes
from passes.trace.trace import trace

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MIXED = Precision(compute=BF16)


class Net(nn.Module):
    """Tied weights, a batch norm, a buffer, a frozen and an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.shift = nn.Parameter(torch.tensor(2), requires_grad=False)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.relu(self.first(x * self.shift)))) * self.scale


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    assert batch["y"].dtype == F32
    return nn.functional.mse_loss(output, batch["y"])


def batch() -> dict[str, Tensor]:
    return {"x": torch.rand(4, 6), "y": torch.rand(4, 6)}


@pytest.fixture(scope="module")
def mixed() -> OpGraph:
    return trace(Net(), batch(), loss_fn=loss_fn, precision=MIXED)


def dtypes(graph: OpGraph, kind: str) -> dict[str, torch.dtype]:
    return {i.name: graph.nodes[i.node].meta["val"].dtype for i in graph.inputs if i.kind == kind}


def test_parameters_are_read_in_the_compute_type_and_everything_else_as_it_is(mixed):
    read = dtypes(mixed, "parameter")
    assert read["first.weight"] == read["second.bias"] == read["first.bias"] == BF16
    assert read["norm.weight"] == read["norm.bias"] == F32
    assert read["shift"] == torch.int64
    assert dtypes(mixed, "buffer")["scale"] == dtypes(mixed, "buffer")["norm.running_mean"] == F32
    assert dtypes(mixed, "batch") == {"x": F32, "y": F32}
    assert mixed.parameters["first.weight"].dtype == F32  # the model's own
    assert mixed.aliases == {"second.weight": "first.weight"}
    assert mixed.precision == MIXED
    verify_graph(mixed, after="trace")


def test_the_loss_is_computed_in_thirty_two_bits(mixed):
    assert mixed.nodes[mixed.loss].meta["val"].dtype == F32


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_model_is_not_touched(device):
    with torch.device(device):
        model = Net()
    before = {name: (id(t), t.dtype, t.device) for name, t in model.state_dict(keep_vars=True).items()}
    values = {name: t.clone() for name, t in model.state_dict().items()}
    graph = trace(model, batch(), loss_fn=loss_fn, precision=MIXED)
    assert {n: (id(t), t.dtype, t.device) for n, t in model.state_dict(keep_vars=True).items()} == before
    assert device == "meta" or all(torch.equal(values[n], t) for n, t in model.state_dict().items())
    assert dtypes(graph, "parameter")["first.weight"] == BF16


def test_traces_in_different_precisions_have_different_fingerprints(mixed):
    assert trace(Net(), batch(), loss_fn=loss_fn).fingerprint != mixed.fingerprint


def test_the_graph_computes_what_the_cast_model_computes(mixed):
    model, data = Net(), batch()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **mixed.constants, **data}
    arguments = [state[i.name].to(mixed.nodes[i.node].meta["val"].dtype) for i in mixed.inputs]
    found = mixed.module(*arguments)[[o.kind for o in mixed.outputs].index("loss")]
    for linear in (model.first, model.second):
        linear.bias = nn.Parameter(linear.bias.to(BF16))
    model.first.weight = model.second.weight = nn.Parameter(model.first.weight.to(BF16))
    assert torch.equal(found, loss_fn(model(data["x"].to(BF16)).float(), data))


def test_verification_widens_a_mixed_graph(mixed):
    wide = in_float64(mixed)
    verify_graph(wide, after="double")
    assert dtypes(wide, "parameter")["first.weight"] == torch.float64
    assert wide.precision == Precision()


def test_composes_with_autocast():
    """Casts of both are in the graph: autocast's for what it lists, the parameters' own for the rest."""

    def traced(precision: Precision | None) -> OpGraph:
        with torch.autocast("cpu", dtype=BF16):
            return trace(Net(), batch(), loss_fn=loss_fn, precision=precision)

    alone, both = traced(None), traced(MIXED)
    assert dtypes(alone, "parameter")["first.weight"] == F32
    assert dtypes(both, "parameter")["first.weight"] == BF16
    weights = [n for n in both.graph.nodes if n.op == "placeholder" and "first_weight" in n.name]
    assert all(
        "to" not in str(user.target) for node in weights for user in node.users
    )  # nothing left to cast
    verify_graph(both, after="trace")


def test_what_was_traced_under_autocast_runs_without():
    """The casts are the graph's own: else its products would meet operands of two types."""
    net, given = Net(), batch()
    with torch.autocast("cpu", dtype=BF16):
        graph = trace(net, given, loss_fn=loss_fn)
        expected = loss_fn(net(given["x"]), given)
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    pools = {"parameter": state, "buffer": state, "constant": graph.constants, "batch": given}
    assert any(node.target is torch.ops.aten.to.dtype for node in graph.ops)
    found = graph.module(*(pools[each.kind][each.name] for each in graph.inputs))
    loss = found[0] if isinstance(found, tuple) else found
    assert loss.dtype == expected.dtype
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


def test_a_bfloat16_model_needs_no_casts():
    graph = trace(Net().to(BF16), {"x": batch()["x"].to(BF16), "y": batch()["y"]}, loss_fn=loss_fn)
    assert set(dtypes(graph, "parameter").values()) == {BF16, torch.int64}


@pytest.mark.parametrize(
    ("model", "precision", "autocast"),
    [
        (Net, Precision(compute=F16), False),
        (lambda: Net().half(), Precision(), False),
        (Net, Precision(), True),
    ],
)
def test_float16_without_a_loss_scale_is_refused(model, precision, autocast):
    data = {name: t.half() if precision == Precision() and not autocast else t for name, t in batch().items()}
    half = precision == Precision() and not autocast
    with torch.autocast("cpu", dtype=F16, enabled=autocast):
        graph = trace(
            model(),
            data,
            loss_fn=(lambda o, b: nn.functional.mse_loss(o, b["y"])) if half else loss_fn,
            precision=precision,
        )
    with pytest.raises(UsageError, match=r"without a loss scale[\s\S]* in aten\.\w+"):
        check_precision(graph, precision, "sgd")
    scaled = Precision(compute=precision.compute, loss_scale="dynamic")
    check_precision(graph, scaled, "sgd")
    if half:
        with pytest.raises(UsageError, match="epsilon of 1e-8 is 0 in float16"):
            check_precision(graph, scaled, "adamw")
        check_precision(graph, Precision(master=F32, loss_scale="dynamic"), "adamw")


def test_what_adam_does_to_float16_parameters():
    """The reason for the refusal: a parameter with a gradient of 0 becomes NaN."""
    weight = nn.Parameter(torch.ones(2, dtype=F16))
    weight.grad = torch.zeros(2, dtype=F16)
    torch.optim.AdamW([weight], lr=1e-3).step()
    assert weight.isnan().all()


def test_another_precision_than_the_trace_s_is_refused_where_the_graph_differs(mixed):
    with pytest.raises(UsageError, match=r"first\.weight is traced in torch\.bfloat16"):
        check_precision(mixed, Precision(), "adamw")
    check_precision(mixed, Precision(compute=BF16, gradients=BF16), "adamw")
    with pytest.raises(UsageError, match="inputs are cast"):
        check_precision(trace(Net(), batch(), loss_fn=loss_fn), Precision(compute=F32), "adamw")


def test_sixteen_bit_parameters_without_masters_are_remarked(mixed):
    assert precision_notes(mixed, MIXED) == ()
    (note,) = precision_notes(trace(Net(), batch(), loss_fn=loss_fn), Precision(parameters=BF16))
    assert note.startswith("42 parameters are updated in bfloat16 without master copies")
    assert precision_notes(mixed, Precision(parameters=BF16, master=F32)) == ()


class WithPositions(nn.Module):
    """Adds a float32 buffer to activations of the compute type."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.first, self.after = nn.Linear(4, 4), after
        self.register_buffer("positions", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.first(x) + self.positions)


class Multiplied(nn.Module):
    """A product with a float32 matrix that forward makes of a buffer, as quantized weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16() @ (self.codes * 2.0)


@pytest.mark.parametrize("after", [nn.Linear(4, 4), nn.Conv1d(2, 2, 1), Multiplied()])
def test_products_of_unlike_types_are_cast_as_autocast_casts_them(after):
    model, x = WithPositions(after), torch.rand(3, 2, 4)
    graph = trace(model, x, loss_fn=lambda output, _: output.float().square().mean(), precision=MIXED)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": x}
    found = graph.module(*[state[i.name].to(graph.nodes[i.node].meta["val"].dtype) for i in graph.inputs])
    with torch.autocast("cpu", dtype=BF16):
        expected = model(x).float().square().mean()
    assert torch.equal(found[[o.kind for o in graph.outputs].index("loss")], expected)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (nn.LayerNorm(4), "layer_norm in module 'after'"),
        (nn.LSTM(4, 4), "module 'after' (LSTM)"),
    ],
)
def test_types_that_no_kernel_takes_together_are_refused_with_the_line(after, said):
    def mean(output: Tensor | tuple[Tensor, ...], _: object) -> Tensor:
        return (output[0] if isinstance(output, tuple) else output).mean()

    with pytest.raises(ModelError) as error:
        trace(WithPositions(after), torch.rand(3, 2, 4), loss_fn=mean, precision=MIXED)
    assert said in str(error.value)
    assert "buffer.to(x.dtype)" in str(error.value)
    with torch.autocast("cpu", dtype=BF16):  # what is suggested instead
        trace(WithPositions(after), torch.rand(3, 2, 4), loss_fn=mean)


def test_a_wider_norm_takes_narrower_activations():
    """The other way round there are kernels; what comes out is in the type of the activations."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    graph = trace(model, torch.rand(8, 4), loss_fn=lambda o, _: o.mean(), precision=MIXED)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), "input": torch.rand(8, 4)}
    graph.module(*[state[i.name].to(graph.nodes[i.node].meta["val"].dtype) for i in graph.inputs])
