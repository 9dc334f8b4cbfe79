"""Passes simplify, functional and sizes together: the rewritten graph computes what eager does, in any order.

Each model runs node by node in random orders that respect data edges and nothing else. Loss, parameter gradients and
buffers must equal those of the eager model; the exported graph itself does not pass this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from cost_models.errors import ModelError
from passes.graph.sizes import canonical_sizes
from passes.trace.normal import functional, simplify
from tests.support import toy_models as models
from tests.support.matrix import thinned
from tests.support.rewritten_graphs import Exported, difference, eager, export, lowered, run, shuffled_order
from tests.unit.passes.trace.normal.random_writes import RandomWrites

SEEDS = range(4)
BATCH_SIZES = (3, 2, 5)
Batch = dict[str, torch.Tensor]


def _own(make: Callable[[], nn.Module], **inputs: torch.Tensor) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return make().double(), inputs


def _make(name: str) -> tuple[nn.Module, Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    if name == "resnet":
        image = torch.randn(3, 3, 6, 6, dtype=torch.float64, generator=generator)
        return _own(models.SmallResNet, image=image, label=torch.tensor([0, 1, 2]))
    own = {
        "frozen": models.FrozenBranch,
        "views": models.Views,
        "rare": models.RareWrites,
        "buffers": models.Buffers,
    }
    if name in own:
        return _own(own[name], x=x)
    model, batch, _ = models.language_model(name)
    return model.double(), batch


@cache
def exported(name: str) -> tuple[Exported, Batch]:
    model, batch = _make(name)
    return export(model.train(), batch), batch


def loss_of(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result if isinstance(result, torch.Tensor) else result.loss
    return loss


def rewritten(program: Exported) -> tuple[fx.GraphModule, dict[str, str]]:
    gm, buffers = lowered(program)
    specs = program.program.graph_signature.input_specs
    return canonical_sizes(gm, [spec.arg.name for spec in specs if spec.target is None]), buffers


def assert_functional(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, node
        assert node.op == "output" or "val" in node.meta


@pytest.mark.parametrize(
    "name",
    thinned(
        ["resnet", "frozen", "views", "rare", "buffers", "t5", "whisper", "mixtral"],
        ["resnet", "frozen", "views", "rare", "buffers", "t5"],
    ),
)
def test_any_order_computes_what_eager_does(name: str) -> None:
    program, batch = exported(name)
    gm, buffers = rewritten(program)
    assert_functional(gm)
    for size in BATCH_SIZES:
        inputs = {key: torch.cat([value, value.flip(0)])[:size] for key, value in batch.items()}
        expected = eager(program.model, inputs, loss_of)
        for seed in SEEDS:
            found = run(program, gm, inputs, shuffled_order(gm.graph, seed), buffers)
            assert difference(found, expected) <= 1e-12, (size, seed)


@pytest.mark.parametrize("name", ["t5", "whisper", "views", "buffers"])
def test_the_exported_graph_itself_is_wrong_in_some_order(name: str) -> None:
    program, batch = exported(name)
    expected = eager(program.model, batch, loss_of)
    wrong = 0
    for seed in range(8):
        try:
            found = run(program, program.graph, batch, shuffled_order(program.graph.graph, seed))
            wrong += difference(found, expected) > 1e-6
        except RuntimeError as error:  # autograd may notice a tensor that was written too early
            wrong += "inplace operation" in str(error)
    assert wrong > 0


@pytest.mark.parametrize("name", ["whisper", "t5"])
def test_the_exported_graph_computes_another_loss_without_notice(name: str) -> None:
    program, batch = exported(name)
    expected = eager(program.model, batch, loss_of).outputs[0]
    losses = []
    for seed in range(16):
        with torch.no_grad():
            losses.append(
                run(program, program.graph, batch, shuffled_order(program.graph.graph, seed)).outputs[0]
            )
    assert any(abs(float(loss - expected)) > 1e-6 for loss in losses)


def test_dropping_no_grad_trains_the_frozen_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    program, batch = exported("frozen")
    expected = eager(program.model, batch, loss_of)
    assert expected.gradients["frozen.0.weight"] is None
    monkeypatch.setattr(simplify, "cut_gradients", lambda *args, **kwargs: None)
    monkeypatch.setattr(functional, "cut_gradients", lambda *args, **kwargs: None)
    gm, _ = lowered(program)
    found = run(program, gm, batch)
    assert found.gradients["frozen.0.weight"] is not None
    assert difference(found, expected) > 1e-3


def test_buffers_report_the_node_with_their_new_contents() -> None:
    program, batch = exported("buffers")
    gm, buffers = lowered(program)
    assert set(buffers) == {"ema", "steps", "ring"}  # not "untouched"
    found = run(program, gm, batch, buffer_nodes=buffers)
    assert int(found.buffers["steps"]) == 1
    assert float(found.buffers["ring"][1].abs().sum()) > 0
    assert float(found.buffers["ring"][0].abs().sum()) == 0
    assert not found.buffers["ema"].requires_grad


def test_batch_norm_counters_are_reported() -> None:
    program, _ = exported("resnet")
    _, buffers = lowered(program)
    assert set(buffers) == {f"blocks.{i}.norm.num_batches_tracked" for i in (0, 1)}


class Refused(nn.Module):
    """Writes that have no out-of-place form; ``kind`` picks one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)
        self.state = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.kind == "detached":
            h.detach().mul_(2)
        elif self.kind == "no_grad":
            with torch.no_grad():
                h.mul_(2)
        elif self.kind == "parameter":
            with torch.no_grad():
                self.linear.weight.clamp_(-1, 1)
        elif self.kind == "attribute":
            self.state.add_(1)
        elif self.kind == "fill_diagonal":
            h = h + self.linear.weight.clone().expand(4, 4, 4).contiguous().fill_diagonal_(0).sum()
        return h.sum()


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("detached", "under no_grad or detach"),
        ("no_grad", "under no_grad or detach"),
        ("parameter", "p_linear_weight"),
        ("attribute", "as a buffer"),
        ("fill_diagonal", "fill_diagonal_"),
    ],
)
def test_what_cannot_be_rewritten_is_an_error_that_names_the_line(kind: str, advice: str) -> None:
    program = export(Refused(kind), {"x": torch.randn(3, 4)})
    with pytest.raises(ModelError) as caught:
        lowered(program)
    assert "test_functional.py:" in str(caught.value)
    assert advice in str(caught.value)


def test_every_write_that_cannot_be_rewritten_is_listed() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                x.sum()
                + torch.zeros(4, 4, 4).fill_diagonal_(1).sum()
                + torch.ones(4, 4, 4).fill_diagonal_(2).sum()
            )

    with pytest.raises(ModelError) as caught:
        lowered(export(Two(), {"x": torch.randn(3, 4)}))
    assert len(caught.value.because) == 2


def test_rewriting_keeps_dynamic_sizes_dynamic() -> None:
    program, _ = exported("rare")
    gm, _ = lowered(program)
    mode = next(n.meta["val"].fake_mode for n in gm.graph.nodes if isinstance(n.meta["val"], torch.Tensor))
    assert not mode.shape_env.replacements


@pytest.mark.parametrize("gradient", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("seed", [0, 1, 3, 17])
def test_random_views_and_writes(seed: int, gradient: bool) -> None:
    """Seed 17 takes views again of a tensor whose rewritten form has other strides."""
    torch.manual_seed(seed)
    batch = {"x": torch.randn(3, 4, dtype=torch.float64)}
    model = RandomWrites(seed, steps=14, gradient=gradient).double()
    expected = eager(model, batch, loss_of)
    program = export(model, batch)
    gm, buffers = rewritten(program)
    assert_functional(gm)
    for order in (None, shuffled_order(gm.graph, seed)):
        assert difference(run(program, gm, batch, order, buffers), expected) <= 1e-10
