"""trace: the graph computes what the model computes, at every batch size, and knows where everything comes from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
from torch import Tensor, nn

from examples.alexnet import alexnet
from examples.lstm_seq2seq import lstm_seq2seq
from examples.unet import unet
from partitioner.models.hugging_face import build
from partitioner.models.workload import Workload
from passes.graph.graph import OpGraph, tensor_specs
from passes.trace.trace import trace
from tests.support.matrix import thinned
from tests.support.traced_models import eager_loss, run, small, small_gpt2, to_double, without_dropout


def own(name: str, batch: int, seed: int) -> Workload:
    if name == "unet":
        return unet(channels=4, depth=2, size=8, batch=batch, seed=seed)
    if name == "alexnet":
        return alexnet(classes=5, width=0.04, size=63, dropout=0.0, batch=batch, seed=seed)
    return lstm_seq2seq(
        vocabulary=20, hidden=8, layers=3, source_steps=3, target_steps=3, batch=batch, seed=seed
    )


@pytest.mark.parametrize(
    "name",
    thinned(
        ["gpt2", "llama-1b", "bert", "vit", "unet", "alexnet", "lstm_seq2seq"],
        ["gpt2", "vit", "alexnet", "lstm_seq2seq"],
    ),
)
def test_loss_and_gradients_equal_the_models_at_every_batch_size(name: str) -> None:
    ours = name in ("unet", "alexnet", "lstm_seq2seq")
    make = own if ours else small
    workload = make(name, 3, 0)
    model = workload.model.double()
    graph = trace(model, to_double(workload.example_inputs), loss_fn=workload.loss_fn)
    for size in (1, 2, 3, 5):
        batch = to_double(make(name, size, size).example_inputs)
        (loss,) = run(graph, model, batch)
        expected = eager_loss(workload, batch)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        used = [p for n, p in model.named_parameters() if any(i.name == n for i in graph.inputs)]
        found = torch.autograd.grad(loss, used, allow_unused=True)
        wanted = torch.autograd.grad(expected, used, allow_unused=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14)


def test_every_node_says_module_line_and_shape() -> None:
    workload, graph = small_gpt2()
    paths = {path for path, _ in workload.model.named_modules()}
    symbol = graph.batch.batch_symbol
    for node in graph.ops:
        assert node.meta["module_path"] in paths
        assert re.fullmatch(r"([\w.]+\.py:\d+)?", node.meta["source"])
        for value in tensor_specs(node):
            assert all(isinstance(d, int) or d.free_symbols == {symbol} for d in value.shape)
    assert any(n.meta["module_path"] == "transformer.h.1.attn.c_proj" for n in graph.ops)
    assert any(n.meta["source"].startswith("modeling_gpt2.py:") for n in graph.ops)


def test_a_meta_model_traces_to_the_same_graph_on_cpu_and_stays_meta() -> None:
    workload, graph = small_gpt2()
    twin = build(type(workload.model), workload.model.config, torch.float64, on_meta=True)
    without_dropout(twin)
    before = {id(p) for p in twin.parameters()}
    again = trace(twin, workload.example_inputs)
    assert again.fingerprint == graph.fingerprint
    assert {id(p) for p in twin.parameters()} == before
    assert all(p.is_meta for p in twin.parameters())
    assert all(
        value.device.type == "cpu"
        for n in again.graph.nodes
        if isinstance(value := n.meta.get("val"), Tensor)
    )


class Constants(nn.Module):
    """Numbers written into forward, which a trace on the meta device would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 2.0, 4.0], dtype=x.dtype, device=self.linear.weight.device)
        return (self.linear(x) * weights).mean()


def test_constants_of_the_code_survive_a_meta_trace() -> None:
    with torch.device("meta"):
        graph = trace(Constants(), torch.zeros(2, 3))
    (constant,) = graph.constants.values()
    torch.testing.assert_close(constant, torch.tensor([1.0, 2.0, 4.0]))
    model = Constants()
    x = torch.randn(4, 3)
    torch.testing.assert_close(run(graph, model, x)[0], model(x))


class Normed(nn.Module):
    """BatchNorm, dropout in a branch that its owner keeps in evaluation mode, an unused parameter, outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(2))

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        y = self.norm(x) + self.frozen(x)
        return {"loss": y.square().mean(), "parts": (y, x.sum(1))}


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = Normed()
    model.norm.eval()
    model.frozen[1].train()
    modes = [m.training for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = [id(t) for t in (*model.parameters(), *model.buffers())]
    for training in (True, False):
        trace(model, torch.randn(3, 4), training=training)
    assert [m.training for m in model.modules()] == modes
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == tensors
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_training_graph_has_the_loss_and_the_written_buffers() -> None:
    model = Normed().double()
    graph = trace(model, torch.randn(3, 4, dtype=torch.float64))
    assert next((o.kind, o.name) for o in graph.outputs) == ("loss", "loss")
    assert ("buffer", "norm.num_batches_tracked") in [(o.kind, o.name) for o in graph.outputs]
    assert "unused" in graph.parameters
    assert "unused" not in {i.name for i in graph.inputs}
    assert "frozen" in graph.frozen_modules
    assert not graph.parameters["frozen.0.weight"].requires_grad
    x = torch.randn(5, 4, dtype=torch.float64)
    written = dict(zip(graph.outputs, run(graph, model, x), strict=True))
    counter = next(v for o, v in written.items() if o.name == "norm.num_batches_tracked")
    assert counter.item() == 1


def test_evaluation_is_another_graph_with_the_models_outputs() -> None:
    model = Normed().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    graph = trace(model, x, training=False)
    assert [(o.kind, o.name) for o in graph.outputs] == [
        ("loss", "loss"),
        ("output", "parts.0"),
        ("output", "parts.1"),
    ]
    assert graph.fingerprint != trace(model, x).fingerprint
    found = run(graph, model, x)
    expected = model.eval()(x)
    torch.testing.assert_close(found, (expected["loss"], *expected["parts"]))


def test_inference_without_a_loss() -> None:
    graph = trace(nn.Linear(4, 2), torch.randn(2, 4), training=False)
    assert graph.loss is None
    assert [(o.kind, o.name) for o in graph.outputs] == [("output", "output")]


def test_tracing_under_no_grad_gives_the_same_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    with torch.no_grad():
        quiet = trace(model, torch.randn(2, 4), loss_fn=lambda output, batch: output.mean())
    loud = trace(model, torch.randn(2, 4), loss_fn=lambda output, batch: output.mean())
    assert quiet.fingerprint == loud.fingerprint
    assert quiet.needs_grad == loud.needs_grad != frozenset()


# --------------------------------------------------------------------------------------------------
# Fingerprint

_IN_A_PROCESS = """
import torch
from passes.trace.trace import trace
torch.manual_seed({seed})
model = torch.nn.Sequential(torch.nn.Linear(4, {width}), torch.nn.ReLU())
print(trace(model, torch.randn({batch}, 4), loss_fn=lambda output, batch: output.mean()).fingerprint)
"""


def _mlp(width: int = 3, batch: int = 2) -> OpGraph:
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU())
    return trace(model, torch.randn(batch, 4), loss_fn=lambda output, batch: output.mean())


def test_fingerprint_is_the_same_in_another_process_and_for_another_example_batch() -> None:
    code = _IN_A_PROCESS.format(seed=7, width=3, batch=6)
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == _mlp().fingerprint


def test_fingerprint_sees_shapes_constants_names_and_mode() -> None:
    def scaled(factor: float) -> OpGraph:
        return trace(
            nn.Linear(4, 3), torch.randn(2, 4), loss_fn=lambda output, batch: (output * factor).mean()
        )

    named = nn.Sequential()
    named.add_module("a", nn.Linear(4, 3))
    named.add_module("b", nn.ReLU())
    renamed = trace(named, torch.randn(2, 4), loss_fn=lambda output, batch: output.mean())
    frozen = nn.Linear(4, 3)
    frozen.bias.requires_grad_(False)
    kept = trace(frozen, torch.randn(2, 4), loss_fn=lambda output, batch: (output * 2.0).mean())
    graphs = [_mlp(), _mlp(width=5), scaled(2.0), scaled(3.0), renamed, kept]
    assert len({g.fingerprint for g in graphs}) == len(graphs)


def test_shapes_are_expressions_of_the_batch() -> None:
    graph = _mlp(batch=4)
    linear = next(n for n in graph.ops if "linear" in str(n.target))
    (spec,) = tensor_specs(linear)
    assert isinstance(spec.shape[0], sympy.Symbol)
    assert spec.concrete({graph.batch.batch_symbol: 7}) == (7, 3)
