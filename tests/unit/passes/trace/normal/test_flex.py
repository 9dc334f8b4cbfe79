"""flex_attention in forward: the graph's ops beside torch's own definition, rows without keys, and what is priced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

from passes.costs.costs import cost_graph
from passes.fidelity.steps import EagerSubject, eager_step, graph_step
from passes.graph.nodes import argument, op_name, tensors_of
from passes.trace.batch import flatten_batch
from passes.trace.trace import trace

HEADS, KEY_HEADS, POSITIONS = 4, 2, 12


class Attention(nn.Module):
    """Grouped heads, causal within a sample's documents where it gets some."""

    def __init__(self, *, documents: bool, score_mod: bool, sums: bool) -> None:
        super().__init__()
        self.documents, self.score_mod, self.sums = documents, score_mod, sums
        self.query, self.pair = nn.Linear(16, 16), nn.Linear(16, 16)
        self.slopes = nn.Parameter(torch.rand(HEADS))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (document[b, i] == document[b, j]) & (j < i) if self.documents else i >= j

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.tanh(value - self.slopes[h] * (i - j).abs())

        samples = x.shape[0] if self.documents else None
        mask = create_block_mask(visible, samples, None, POSITIONS, POSITIONS, device=x.device)
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (t.unflatten(-1, (KEY_HEADS, -1)).transpose(1, 2) for t in self.pair(x).chunk(2, -1))
        options: dict[str, Any] = {"enable_gqa": True, "score_mod": score if self.score_mod else None}
        if not self.sums:
            return flex_attention(query, key, value, block_mask=mask, **options).square().mean()
        out, sums = flex_attention(query, key, value, block_mask=mask, return_lse=True, **options)
        return (out * sums.exp().unsqueeze(-1)).square().mean()


@pytest.mark.parametrize(
    ("model", "ops"),
    [
        ({"documents": False, "score_mod": False, "sums": False}, {"scaled_dot_product_attention"}),
        ({"documents": True, "score_mod": False, "sums": False}, {"flex_attention", "flex_blocks"}),
        ({"documents": True, "score_mod": True, "sums": True}, {"matmul", "softmax", "logsumexp"}),
    ],
    ids=["causal", "documents", "scores and sums"],
)
def test_its_graph_computes_what_torch_defines(model: dict[str, bool], ops: set[str]) -> None:
    """Of a document's first position no key is visible: its output is 0, and so is its gradient."""
    torch.manual_seed(0)
    module = Attention(**model).double()
    batch = {
        "x": torch.randn(3, POSITIONS, 16, dtype=torch.float64),
        "document": torch.arange(POSITIONS).repeat(3, 1) // 5,
    }
    graph = trace(module, batch)
    names = {op_name(node) for node in graph.ops}
    assert ops <= names
    assert any("keep 4 x 12 x 12 scores" in note for note in graph.notes) == model["score_mod"]
    if not model["documents"]:
        (attention,) = (n for n in graph.ops if op_name(n) == "scaled_dot_product_attention")
        assert attention.args[3] is None  # the mask became is_causal
        assert attention.args[5] is True
    subject = EagerSubject(module, batch, flatten_batch(batch), None)
    expected, found = eager_step(subject), graph_step(graph, subject, lambda tensor: tensor)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-12)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)


class Layers(nn.Module):
    """Two layers that read one mask: a window, or documents; scores changed by a table that is a buffer."""

    def __init__(self, *, documents: bool) -> None:
        super().__init__()
        self.documents = documents
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(2))
        self.register_buffer("slopes", torch.rand(HEADS))
        self.slopes: Tensor

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j < 100)

        def packed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (document[b, i] == document[b, j])

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return value - self.slopes[h] * (i - j) if self.documents else value

        samples, positions = x.shape[:2]
        function, count = (packed, samples) if self.documents else (window, None)
        mask = create_block_mask(function, count, None, positions, positions, device=x.device)
        for layer in self.layers:
            query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            x = x + flex_attention(query, key, value, score, mask).transpose(1, 2).flatten(2)
        return x.square().mean()


def packed_batch(length: int, positions: int = 512) -> dict[str, Tensor]:
    return {"x": torch.zeros(2, positions, 64), "document": torch.arange(positions).repeat(2, 1) // length}


def test_one_list_of_blocks_serves_all_layers_and_nothing_has_a_number_per_pair() -> None:
    """Of a score function that changes nothing, as transformers gives one, nothing is left."""
    graph = trace(Layers(documents=False), packed_batch(512))
    assert [op_name(node) for node in graph.ops].count("flex_blocks") == 1
    attentions = [node for node in graph.ops if op_name(node) == "flex_attention"]
    assert [node.args[6] for node in attentions] == [[]] * 2
    assert attentions[0].args[5] == [
        "ge.Tensor %0 %1", "sub.Tensor %0 %1", "lt.Scalar $1 100", "__and__.Tensor $0 $2"
    ]  # fmt: skip
    assert not [node for node in graph.ops for t in tensors_of(node) if list(t.shape[-2:]) == [512, 512]]


def test_hidden_blocks_cost_nothing_where_torchs_kernel_runs() -> None:
    """Of 16 blocks a window of 100 leaves seven, four documents four: of the batch's own only the example can tell.

    Neither mask nor scores are kept: q, k and v (one storage), the result, a number per row in 32 bits, lists of blocks.
    """
    window, documents = (
        trace(Layers(documents=False), packed_batch(9)),
        trace(Layers(documents=True), packed_batch(128)),
    )
    assert not [note for note in window.notes if "blocks" in note]
    assert "25% of its blocks" in " ".join(documents.notes)
    whole = 2 * 2 * HEADS * 512 * 512 * 32
    for graph, seen in ((window, 7 / 16), (documents, 4 / 16)):
        costs = cost_graph(graph, device_kind="cuda", only_size=2)
        at = [op_name(node) for node in graph.ops].index("flex_attention")
        blocks = next(node for node in graph.ops if op_name(node) == "flex_blocks").meta["val"]
        assert costs.at(2).forward_flops[at] == seen * whole
        assert costs.at(2).backward_input_flops[at] == 2.5 * seen * whole
        samples = 1 if graph is window else 2
        lists = 4 * samples * blocks.shape[-1]
        rows = 2 * HEADS * 512
        assert costs.saved_bytes([at], 2) == 4 * (4 * rows * 16 + rows) + lists
    on_cpu = cost_graph(graph, device_kind="cpu", only_size=2)
    assert on_cpu.at(2).forward_flops[at] == whole  # the dense form


def test_what_the_examples_documents_are_is_not_what_the_model_is() -> None:
    """A plan made with one batch is for all: but what shows another mask is another model."""
    first, second = (trace(Layers(documents=True), packed_batch(length, 256)) for length in (128, 256))
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != trace(Layers(documents=False), packed_batch(128, 256)).fingerprint


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation="flex_attention",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double()


def test_masks_of_transformers_are_causal_or_hide_padding() -> None:
    """Without padding it makes masks of packed samples, which hide nothing more; of padding it asks if there is any."""
    tokens = torch.randint(0, 30, (3, 20))
    plain = trace(llama(), {"input_ids": tokens, "labels": tokens.clone()})
    (attention,) = (node for node in plain.ops if "attention" in op_name(node))
    assert op_name(attention) == "scaled_dot_product_attention"
    assert argument(attention, "is_causal")
    padding = torch.ones(3, 20, dtype=torch.long)
    padding[1, 12:] = 0
    batch = {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": padding}
    module = llama()
    graph = trace(module, batch)
    assert "flex_attention" in [op_name(node) for node in graph.ops]
    subject = EagerSubject(module, batch, flatten_batch(batch), None)
    expected, found = eager_step(subject), graph_step(graph, subject, lambda tensor: tensor)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-12)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-9, atol=1e-12)


def test_torch_is_left_as_it_was() -> None:
    x = torch.randn(1, 1, 8, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(x, x, x)
