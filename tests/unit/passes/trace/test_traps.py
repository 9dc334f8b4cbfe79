"""What went silently wrong, or failed, on real models before trace handled it. One test per trap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from cost_models.errors import ModelError
from passes.trace.trace import trace
from tests.support.traced_models import run, small, small_gpt2


def mean_loss(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def test_input_ids_and_labels_may_be_one_object() -> None:
    workload = small("gpt2")
    ids = workload.example_inputs["input_ids"]
    graph = trace(workload.model, {"input_ids": ids, "labels": ids})
    assert {i.name for i in graph.inputs if i.kind == "batch"} == {"input_ids", "labels", "loss_normalizer"}
    batch = small("gpt2", batch=3, seed=5).example_inputs
    assert not torch.equal(batch["input_ids"], batch["labels"])
    torch.testing.assert_close(run(graph, workload.model, batch)[0], workload.model(**batch).loss)


def test_use_cache_is_off_while_tracing_only_and_noted() -> None:
    workload, graph = small_gpt2()
    assert workload.model.config.use_cache is True
    assert any("use_cache" in note for note in graph.notes)


def test_use_cache_comes_back_after_a_failed_trace() -> None:
    workload = small("gpt2")
    workload.model.eval()
    with pytest.raises(ModelError, match="no loss"):
        trace(workload.model, {"input_ids": workload.example_inputs["input_ids"]})
    assert workload.model.config.use_cache is True
    assert workload.model.training is False


class Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[1].eval()
        return self


def test_a_module_in_evaluation_mode_trains_and_is_noted_unless_the_model_keeps_it_there() -> None:
    batch = {"input": torch.rand(4, 3)}
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)]
    model = nn.Sequential(*layers)
    model[1].eval()
    noted = trace(model, batch, loss_fn=mean_loss)
    assert any("1: in evaluation mode in the model, in training mode" in note for note in noted.notes)
    assert any(output.kind == "buffer" for output in noted.outputs)
    assert [module.training for module in model] == [True, False, True]
    frozen = trace(Frozen(*layers), batch, loss_fn=mean_loss)
    assert not any("evaluation mode" in note for note in frozen.notes)
    assert not any(output.kind == "buffer" for output in frozen.outputs)
    loaded = trace(model.eval(), batch, loss_fn=mean_loss)
    assert not any("evaluation mode" in note for note in loaded.notes), "as from_pretrained leaves a model"


def test_a_tokenizers_batch_encoding_is_a_batch() -> None:
    workload, graph = small_gpt2()
    batch = transformers.BatchEncoding(dict(workload.example_inputs))
    assert trace(workload.model, batch).fingerprint == graph.fingerprint


def test_a_loss_sees_the_users_own_batch_type() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        assert type(batch) is transformers.BatchEncoding
        return F.mse_loss(output, batch["target"])

    batch = transformers.BatchEncoding({"input": torch.randn(2, 4), "target": torch.randn(2, 3)})
    graph = trace(nn.Linear(4, 3), batch, loss_fn=loss)
    assert graph.batch.batch_dims == {"input": 0, "target": 0}


def test_a_batch_of_one_sample_is_traced_as_two() -> None:
    workload, graph = small_gpt2()
    one = {name: leaf[:1] for name, leaf in workload.example_inputs.items()}
    alone = trace(workload.model, one)
    assert alone.example_batch_size == 2
    assert alone.example_shapes["input_ids"] == (1, 8)
    assert alone.fingerprint == graph.fingerprint


class Twice(nn.Module):
    """Two inputs whose sizes the code never compares: export leaves two symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x).mean() + (self.a(y) * y.shape[0]).mean()


def test_two_batch_symbols_become_one() -> None:
    model = Twice()
    graph = trace(model, (torch.randn(3, 4), torch.randn(3, 4)))
    symbols = {
        symbol
        for node in graph.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor)
        for size in value.shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    assert symbols == {graph.batch.batch_symbol}
    assert set(graph.batch.symbols) == symbols
    assert any("y" in note and "size alone" in note for note in graph.notes)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    torch.testing.assert_close(run(graph, model, (x, y))[0], model(x, y))


class Positions(nn.Module):
    """A (seq,) input beside a (batch, seq) one, in whichever order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.position = nn.Embedding(10, 4)

    def forward(self, positions: Tensor, tokens: Tensor) -> Tensor:
        return (self.embed(tokens) * self.position(positions)).mean()


def test_a_leaf_without_samples_is_broadcast_even_if_its_size_equals_the_batch() -> None:
    model = Positions().double()
    tokens = torch.randint(10, (4, 4))
    for batch in (
        {"tokens": tokens, "positions": torch.arange(4)},
        {"positions": torch.arange(4), "tokens": tokens},
    ):
        graph = trace(model, batch)
        assert graph.batch.batch_dims == {"tokens": 0, "positions": None}
        assert any("positions has no batch dimension" in note for note in graph.notes)
        other = {"tokens": torch.randint(10, (3, 4)), "positions": torch.arange(4)}
        torch.testing.assert_close(run(graph, model, other)[0], model(**other))


def test_a_leaf_of_one_row_is_broadcast() -> None:
    graph = trace(Positions(), {"tokens": torch.randint(10, (3, 4)), "positions": torch.arange(4).view(1, 4)})
    assert graph.batch.batch_dims == {"tokens": 0, "positions": None}


class TimeMajor(nn.Module):
    """(time, batch, features), unrolled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 3)
        for step in range(x.shape[0]):
            state = torch.tanh(self.cell(torch.cat([x[step], state], dim=-1)))
        return state


@pytest.mark.parametrize("shape", [(4, 2, 3), (4, 1, 3), (2, 2, 3), (1, 2, 3)])
def test_time_major_batches_are_found(shape: tuple[int, int, int]) -> None:
    model = TimeMajor()
    graph = trace(model, torch.randn(shape), loss_fn=mean_loss)
    assert graph.batch.batch_dims == {"x": 1}
    assert shape[0] == 1 or graph.notes[0].startswith(
        "dimension 1 of x is taken for its samples, as the code fixes"
    )
    other = torch.randn(shape[0], 5, 3)
    torch.testing.assert_close(run(graph, model, other)[0], mean_loss(model(other), other))


def test_batch_dims_overrides_the_guess() -> None:
    graph = trace(TimeMajor(), torch.randn(4, 2, 3), loss_fn=mean_loss, batch_dims={"x": 1})
    assert graph.batch.batch_dims == {"x": 1}
    assert graph.example_batch_size == 2
    given = trace(
        Twice(), (torch.randn(3, 4), torch.randn(3, 4)), batch_dims={"y": None}, name="one of two is shared"
    )
    assert given.batch.batch_dims == {"x": 0, "y": None}


def test_a_fixed_batch_dimension_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(ModelError) as caught:
        trace(TimeMajor(), torch.randn(4, 2, 3), loss_fn=mean_loss, batch_dims={"x": 0})
    assert "batch_dims" in str(caught.value)
    assert "x" in caught.value.because[0]


def test_no_free_dimension_at_all() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(2, 12).sum(1).reshape(2, 1)

    with pytest.raises(ModelError, match="no batch dimension found") as caught:
        trace(Fixed(), torch.randn(2, 3, 4), loss_fn=mean_loss)
    assert any("batch_dims" in text for text in caught.value.suggestions)


def test_a_sequence_length_can_be_dynamic() -> None:
    workload = small("llama-1b")
    graph = trace(workload.model, workload.example_inputs, dynamic_dims={"input_ids": [1]})
    assert ("input_ids", 1) in graph.batch.symbols.values()
    assert {where[1] for where in graph.batch.symbols.values()} == {0, 1}
    ids = torch.randint(60, (3, 11))
    batch = {"input_ids": ids, "labels": ids.flip(0)}
    torch.testing.assert_close(run(graph, workload.model, batch)[0], workload.model(**batch).loss)


def test_a_dynamic_size_that_the_code_fixes_is_an_error() -> None:
    with pytest.raises(ModelError, match="cannot keep these sizes"):
        trace(nn.Linear(4, 2), torch.randn(2, 4), loss_fn=mean_loss, dynamic_dims={"input": [1]})


def test_tied_weights_are_one_input_with_aliases() -> None:
    _, graph = small_gpt2()
    assert graph.aliases == {"lm_head.weight": "transformer.wte.weight"}
    names = [i.name for i in graph.inputs if i.kind == "parameter"]
    assert names.count("transformer.wte.weight") == 1
    assert "lm_head.weight" not in names
    assert (
        len(graph.nodes[next(i.node for i in graph.inputs if i.name == "transformer.wte.weight")].users) == 2
    )


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return y.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_in_the_code_is_noted(reentrant: bool) -> None:
    graph = trace(Checkpointed(reentrant), torch.randn(2, 4))
    assert graph.checkpointing == "torch.utils.checkpoint was called"
    assert trace(Twice(), (torch.randn(2, 4), torch.randn(2, 4))).checkpointing is None


def test_gradient_checkpointing_enable_is_noted() -> None:
    workload = small("gpt2")
    workload.model.gradient_checkpointing_enable()
    graph = trace(workload.model, workload.example_inputs)
    assert graph.checkpointing is not None
    assert "gradient checkpointing is enabled" in graph.checkpointing


class Nested(nn.Module):
    def forward(self, x: Mapping[str, Tensor], scale: list[Tensor], offset: Tensor | None = None) -> Tensor:
        return (x["a"] * scale[0] + x["b"] * scale[1]).mean()


def test_nested_inputs_have_dotted_names() -> None:
    batch = {
        "x": {"a": torch.randn(2, 3), "b": torch.randn(2, 3)},
        "scale": [torch.randn(3), torch.randn(2, 3)],
    }
    model = Nested()
    graph = trace(model, {**batch, "offset": None})
    assert graph.batch.batch_dims == {"x.a": 0, "x.b": 0, "scale.0": None, "scale.1": 0}
    torch.testing.assert_close(run(graph, model, batch)[0], model(**batch))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:-1]:
            x = layer(x)
        return x


def test_layers_of_a_slice_keep_their_own_paths() -> None:
    graph = trace(Layers(), torch.randn(2, 4), loss_fn=mean_loss)
    assert {n.meta["module_path"] for n in graph.ops} == {"layers.1.0", "layers.2.0", ""}


class Assigning(nn.Module):
    """Replaces its buffer instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        before = self.seen
        self.seen = 0.5 * self.seen + x.detach().mean(0)
        return self.linear(x) * self.seen + before


def test_assigning_a_buffer_is_a_write() -> None:
    model = Assigning()
    buffer = model.seen
    graph = trace(model, torch.randn(2, 4), loss_fn=mean_loss)
    assert model.seen is buffer
    assert buffer.abs().sum() == 0
    assert [(o.kind, o.name) for o in graph.outputs] == [("loss", "loss"), ("buffer", "seen")]
    x = torch.randn(3, 4)
    loss, seen = run(graph, model, x)
    torch.testing.assert_close(loss, mean_loss(model(x), x))
    torch.testing.assert_close(seen, model.seen)


class DependsOnBatchSize(nn.Module):
    def __init__(self, rule: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2 if self.rule(x) else self.linear(x)


@pytest.mark.parametrize("rule", [lambda x: x.shape[0] > 3, lambda x: x.shape[0] % 2 == 0])
def test_code_that_branches_on_the_batch_size_is_refused(rule: Callable[[Tensor], bool]) -> None:
    """Its graph would be silently wrong for micro-batches of another size."""
    with pytest.raises(ModelError, match="depends on the batch size"):
        trace(DependsOnBatchSize(rule), torch.randn(6, 4), loss_fn=mean_loss)


class Halves(nn.Module):
    """Works on the halves of the batch apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(half) for half in x.chunk(2)]).square().mean()


def test_halving_the_batch_is_no_branch_on_its_size() -> None:
    model = Halves()
    graph = trace(model, torch.randn(8, 4))
    for size in (2, 3, 4, 9):
        x = torch.randn(size, 4)
        torch.testing.assert_close(run(graph, model, x)[0], model(x))


def test_an_exception_for_one_batch_size_is_noted() -> None:
    graph = trace(DependsOnBatchSize(lambda x: x.shape[0] == 8), torch.randn(6, 4), loss_fn=mean_loss)
    assert any("other than 8" in note for note in graph.notes)


def test_a_batch_dependent_constant_is_recomputed_for_every_size() -> None:
    """``new_zeros(batch)`` and divisions by the batch size must stay expressions."""
    model = TimeMajor()
    graph = trace(model, torch.randn(3, 4, 3), loss_fn=lambda output, batch: output.sum() / output.shape[0])
    x = torch.randn(3, 9, 3)
    torch.testing.assert_close(run(graph, model, x)[0], model(x).sum() / 9)


def test_a_sparse_batch_is_refused() -> None:
    with pytest.raises(ModelError, match=r"x is torch\.sparse_coo"):
        trace(nn.Linear(4, 3), {"x": torch.eye(4).to_sparse()}, loss_fn=lambda output, batch: output.sum())


class TwiceBesideNoGrad(nn.Module):
    """A parametrized layer at two places whose result nobody reads, and a buffer that is written without gradients."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = parametrizations.weight_norm(nn.Linear(4, 4))
        self.again = self.twice
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        self.again(self.twice(y))
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.25)
        return y - self.mean


def test_readers_that_torch_forgets_are_there() -> None:
    graph = trace(TwiceBesideNoGrad(), torch.randn(8, 4), loss_fn=mean_loss)
    unknown = [n for n in graph.graph.nodes for source in n.all_input_nodes if n not in source.users]
    assert not unknown
