"""flex_attention in forward: the graph's ATen ops beside torch's own definition, and what a row without keys gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from passes.fidelity.steps import Subject, eager_step, graph_step
from passes.graph.nodes import op_name
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

        samples = len(x) if self.documents else None
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
        ({"documents": True, "score_mod": False, "sums": False}, {"scaled_dot_product_attention"}),
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
    if not model["documents"]:
        (attention,) = (n for n in graph.ops if op_name(n) == "scaled_dot_product_attention")
        assert attention.args[3] is None  # the mask became is_causal
        assert attention.args[5] is True
    subject = Subject(module, batch, flatten_batch(batch), None)
    expected, found = eager_step(subject), graph_step(graph, subject, lambda tensor: tensor)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-12)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)


def test_torch_is_left_as_it_was() -> None:
    x = torch.randn(1, 1, 8, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(x, x, x)
