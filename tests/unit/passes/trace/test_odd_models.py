"""What a traced graph cannot say is refused by name and line, or noted; single samples where they mean something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

from cost_models.cluster import ClusterSpec
from partitioner import ModelError, UsageError, Workload, partition, trace
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.trace.opaque.sizes import APPLY


class Odd(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self._run = forward
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


class Normalized(nn.BatchNorm1d):
    """Branches on numbers, which no trace can."""

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return x if x.sum() < 1e9 else -x


def squared(output: Tensor, batch: object) -> Tensor:
    return (output**2).mean()


def traced(forward: Callable[[Any, Tensor], Tensor]) -> OpGraph:
    return trace(Odd(forward), torch.randn(8, 6), loss_fn=squared)


class Rounded(torch.autograd.Function):
    """A straight-through estimate: export would cut its gradient without a word."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Energy(nn.Module):
    """Forces: the derivative of an energy, as physics has them."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        if self.function:
            return torch.func.grad(lambda y: self.a(y).tanh().sum())(x)
        x = x.clone().requires_grad_()
        (forces,) = torch.autograd.grad(self.a(x).tanh().sum(), x, create_graph=True)
        return forces


def scanned(x: Tensor) -> Tensor:
    """Sum up along the features, by an op that torch differentiates while it traces it."""
    summed: Tensor = scan(lambda h, y: (h + y, h + y), torch.zeros_like(x[:, 0]), x, dim=1)[1]
    return summed


def shrinking(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.weight.mul_(0.5)
    result: Tensor = m.a(x)
    return result


def averaging(m: Any, x: Tensor) -> Tensor:
    """Move a frozen teacher towards the trained weights, in one of the two ways that are usual."""
    with torch.no_grad():
        m.b.weight.lerp_(m.a.weight, 0.1)
        m.b.bias.data = 0.9 * m.b.bias + 0.1 * m.a.bias
    result: Tensor = m.a(x) - m.b(x)
    return result


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_frozen_parameter_that_forward_writes_is_refused(device: str, inside: bool) -> None:
    with torch.device(device):
        model: nn.Module = Odd(averaging)
        model.b.requires_grad_(False)
        model = nn.Sequential(nn.Linear(6, 6), model) if inside else model
    with pytest.raises(ModelError) as caught:
        trace(model, torch.randn(8, 6), loss_fn=squared)
    for text in (
        "aten.lerp_",
        "aten.copy_",
        "(test_odd_models.py:",
        "keep it in a buffer, which forward may write",
    ):
        assert text in str(caught.value)


def test_distributions_need_no_look_at_their_values() -> None:
    def policy(m: Any, x: Tensor) -> Tensor:
        spread = torch.distributions.Normal(m.a(x), m.b(x).exp())
        return spread.log_prob(x) + torch.distributions.Categorical(logits=m.a(x)).entropy()[:, None]

    checked = torch.distributions.Distribution._validate_args  # torch.compile turns it off for good
    torch.distributions.Distribution.set_default_validate_args(True)
    try:
        graph = trace(Odd(policy), torch.randn(8, 6), loss_fn=squared)
        assert torch.distributions.Distribution._validate_args
    finally:
        torch.distributions.Distribution.set_default_validate_args(checked)
    assert not graph.notes


def test_a_refusal_names_no_line_of_this_project() -> None:
    def in_chunks(m: Any, x: Tensor) -> Tensor:
        return torch.cat([m.a(x[at : at + 4]) for at in range(0, len(x), 4)])

    with pytest.raises(
        ModelError, match=r"the code fixes x at 8 in dimension 0, in test_odd_models.py:"
    ) as caught:
        trace(Odd(in_chunks), torch.randn(8, 6), loss_fn=squared)
    assert "as_graph.py" not in str(caught.value)


@pytest.mark.parametrize("opaque", [False, True])
def test_data_that_is_replaced_is_written(opaque: bool) -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.a(x)
        m.seen.data = 0.9 * m.seen + y.detach().mean(0)
        return y - m.seen

    model = Odd(step)
    model.register_buffer("seen", torch.zeros(6))
    graph = trace(
        nn.Sequential(model, nn.Linear(6, 6)), torch.randn(8, 6), loss_fn=squared, opaque=["0"] * opaque
    )
    assert [output.name for output in graph.outputs if output.kind == "buffer"] == ["0.seen"]


@pytest.mark.parametrize("function", [False, True], ids=["autograd", "func"])
def test_a_model_that_asks_for_gradients_itself_runs_whole(function: bool) -> None:
    graph = trace(Energy(function), torch.randn(8, 6), loss_fn=squared)
    asked = "torch.func.grad" if function else "torch.autograd.grad"
    (note,) = (note for note in graph.notes if note.startswith("the model (Energy) runs whole"))
    assert f"{asked} is called in test_odd_models.py:" in note
    assert {entry.name for entry in graph.inputs if entry.kind == "parameter"} == {"a.weight", "a.bias"}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Odd(lambda m, x: torch.vmap(lambda row: m.a(row).sum())(x)), ["torch.vmap", "test_odd_models.py:"]),
        (Odd(lambda m, x: m.a(x) / x.abs().max().item()), ["no .item()", "test_odd_models.py:"]),
        (Odd(lambda m, x: m.a.weight), ["depends on the batch"]),
        (
            Odd(lambda m, x: m.a(x).mean(1).topk(max(1, x.shape[0] // 2)).values.mean()),
            ["batch//2", "in test_odd_models.py:"],
        ),
        (Odd(lambda m, x: scanned(m.a(x))), ["scan in the root module (test_odd_models.py:"]),
        (
            Odd(lambda m, x: m.a(x) * torch.rand(6, generator=torch.Generator())),
            ["a Generator is read by", "test_odd_models.py:"],
        ),
        (Odd(shrinking), ["write parameter a.weight outside of forward", "(test_odd_models.py:"]),
    ],
    ids=["vmap", "item", "no-batch", "half-batch", "scan", "generator", "write"],
)
def test_what_a_traced_graph_cannot_hold_is_refused_by_line(model: nn.Module, said: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        trace(model, torch.randn(8, 6), loss_fn=squared)
    for text in said:
        assert text in str(caught.value)
    assert torch.autograd.Function.__dict__["apply"] is APPLY


def test_parameters_that_are_not_there_yet_or_twice_are_refused() -> None:
    with pytest.raises(ModelError, match=r"0\.weight belongs to a lazy module"):
        trace(nn.Sequential(nn.LazyLinear(6)), torch.randn(8, 6), loss_fn=squared)
    halves = Odd(lambda m, x: m.b(m.a(x)))
    halves.b.weight = nn.Parameter(halves.a.weight.detach())
    with pytest.raises(ModelError, match=r"a\.weight and b\.weight: a plan would train two copies"):
        trace(halves, torch.randn(8, 6), loss_fn=squared)


def test_a_custom_function_that_carries_no_gradient_is_no_matter() -> None:
    graph = traced(lambda m, x: m.a(Rounded.apply(x)))
    assert any("round" in node.name for node in graph.ops)


def test_a_reentrant_checkpoint_is_traced_as_what_it_computes() -> None:
    graph = traced(lambda m, x: m.b(checkpoint(m.a, x * m.b.bias, use_reentrant=True)))
    assert graph.checkpointing == "torch.utils.checkpoint was called"
    assert {p.node for p in graph.inputs if p.kind == "parameter"} <= graph.needs_grad


def test_hooks_on_gradients_are_noted() -> None:
    def hooked(m: Any, x: Tensor) -> Tensor:
        h: Tensor = m.a(x)
        h.register_hook(lambda gradient: gradient * 2)
        return m.b(h)

    model = Odd(hooked)
    model.a.register_full_backward_hook(lambda *_: None)
    model.b.weight.register_hook(lambda gradient: gradient)
    graph = trace(model, torch.randn(8, 6), loss_fn=squared, check="off")
    (note,) = [note for note in graph.notes if note.startswith("hooks on gradients are not run")]
    assert "module a" in note
    assert "a tensor in test_odd_models.py:" in note
    assert "b.weight" not in note
    (supported,) = [
        note for note in graph.notes if note.startswith("hooks on parameters' gradients run once")
    ]
    assert "b.weight" in supported


def test_hooks_in_opaque_parts_are_run_and_not_noted() -> None:
    class Hooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            h.register_hook(lambda gradient: gradient * 2)
            return h if h.sum() < 1e9 else -h

    model = nn.Sequential(nn.Linear(6, 6), Hooked(6, 6))
    model[1].register_full_backward_hook(lambda *_: None)
    graph = trace(model, torch.randn(8, 6), loss_fn=squared, check="off")
    assert any(note.startswith("module '1' (") and "runs whole" in note for note in graph.notes)
    assert not any("hooks" in note for note in graph.notes)


def test_python_numbers_that_forward_changes_are_noted() -> None:
    def counting(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.a(x) * m.calls

    model = Odd(counting)
    model.calls = 3  # type: ignore[assignment]
    graph = trace(model, torch.randn(8, 6), loss_fn=squared, check="off")
    assert any("the Python number calls: 3 -> 4" in note for note in graph.notes)


# --------------------------------------------------------------------------------------------------
# Micro-batches of one sample


@pytest.mark.parametrize(
    ("model", "shape", "least"),
    [
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), (8, 6), 2),
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)), (8, 6), 2),
        (nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)), (8, 3, 5), 1),
        (Odd(lambda m, x: m.a(x).squeeze()), (8, 6), 2),
        (Odd(lambda m, x: m.a(x).squeeze(0)), (8, 6), 2),
        (Odd(lambda m, x: m.a(x).unsqueeze(1).squeeze(1)), (8, 6), 1),
        (Odd(lambda m, x: m.a(x) - m.a(x).var(0)), (8, 6), 2),
        (Odd(lambda m, x: m.a(x) - m.a(x).var(0, correction=0)), (8, 6), 1),
        (Odd(lambda m, x: m.a(x) / m.a(x).std(-1, keepdim=True)), (8, 6), 1),
        (Odd(lambda m, x: m.a(x) / m.a(x).std()), (8, 6), 1),
        (nn.Sequential(nn.Linear(6, 6), Normalized(6)), (8, 6), 2),  # an opaque part
    ],
)
def test_ops_that_refuse_a_single_sample(model: nn.Module, shape: tuple[int, ...], least: int) -> None:
    graph = trace(model, torch.randn(shape), loss_fn=squared)
    assert least_samples(graph)[0] == least


def test_a_plan_never_cuts_below_what_the_model_accepts() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    workload, cluster = Workload(model, torch.randn(8, 6), squared), ClusterSpec.local(2)
    for batch in (2, 3, 8):
        plan = partition(workload, cluster, batch_size=batch, strategy="layer")
        assert batch // plan.microbatches >= 2
    with pytest.raises(UsageError, match=r"batch_norm in module 1 needs 2 samples") as caught:
        partition(workload, cluster, batch_size=7, microbatches=4, strategy="layer")
    assert "at most 3 micro-batches" in str(caught.value)
    with pytest.raises(UsageError, match="a batch of 2 samples or more"):
        partition(workload, cluster, batch_size=1, strategy="layer")
