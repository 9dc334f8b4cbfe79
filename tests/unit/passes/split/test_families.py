"""What can be dealt out: families of layers that occur in no bundled model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.split.families import Family, families
from passes.split.split import split_neurons
from tests.unit.passes.split.harness import check, traced
from tests.unit.passes.split.test_split import MLP, Attention, Experts, Gated


def shown(found: tuple[Family, ...]) -> list[tuple[str, str, int, tuple[str, ...]]]:
    return [(family.name, family.kind, family.units, family.ops) for family in found]


CASES = {
    "mlp": (MLP, (3, 6), [("", "neurons", 10, ("linear",)), ("fc2", "neurons", 4, ("linear_1",))]),
    "gated": (lambda: Gated(False), (3, 6), [("first.0", "neurons", 7, ("linear", "linear_1"))]),
    "fused gates": (lambda: Gated(True), (3, 6), [("first.0", "neurons", 7, ("linear",))]),
    "attention": (
        lambda: Attention(6, 6, False, "gqa"),
        (2, 3, 8),
        [("projections.0", "heads", 6, ("linear", "linear_1", "linear_2"))],
    ),
    "fused grouped attention": (
        lambda: Attention(6, 3, True, "gqa"),
        (2, 3, 8),
        [("projections.0", "heads", 3, ("linear",))],
    ),
    "grouped attention by products": (
        lambda: Attention(6, 2, True, "matmul"),
        (2, 3, 8),
        [("projections.0", "heads", 2, ("linear",))],
    ),
    "experts": (Experts, (3, 4), [("", "experts", 5, ("bmm",))]),
}


@pytest.mark.parametrize("case", CASES)
def test_families_of_small_models(case: str) -> None:
    make, shape, expected = CASES[case]
    torch.manual_seed(0)
    graph, state, leaves = traced(make(), {"x": torch.randn(*shape)})
    found = families(graph)
    seen = {(kind, units, ops) for _, kind, units, ops in shown(found)}
    assert {entry[1:] for entry in expected} <= seen
    splits = [split for family in found for split in family.splits((1, family.units - 1))]
    made = check(graph, splits, state, leaves)
    assert not {op for family in found for op in family.ops} & made.nodes.keys()
    assert families(made) is not None  # of a graph in blocks too


class Residual(nn.Module):
    """Two blocks beside a residual stream, each behind a norm of its own making (no op that reads it whole)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.up, self.down = (nn.ModuleList(nn.Linear(*s) for _ in "ab") for s in ((6, 8), (8, 6)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(F.relu(up(h * (h.pow(2).mean(-1, keepdim=True) + 1).rsqrt())))
        return h.pow(2).mean()


def test_the_residual_stream_does_not_tie_layers_into_one() -> None:
    graph, state, leaves = traced(Residual(), {"x": torch.randint(5, (2, 3))})
    found = families(graph)
    assert [(f.units, f.ops) for f in found] == [
        (6, ("embedding",)),
        (8, ("linear",)),
        (8, ("linear_2",)),
        (6, ("linear_3",)),  # the last one
    ]
    made = check(graph, found[0].splits((2, 4)), state, leaves)
    assert "embedding_whole" in made.nodes
    assert "linear_1" in made.nodes  # what is added to the stream is not sliced


def test_the_same_model_has_the_same_families_and_graph() -> None:
    def text() -> str:
        torch.manual_seed(0)
        graph, _, _ = traced(Attention(6, 2, True, "matmul"), {"x": torch.randn(2, 3, 8)})
        (family,) = (f for f in families(graph) if f.kind == "heads")
        return f"{family} {split_neurons(graph, family.splits((1, 1))).graph}"

    assert text() == text()
