"""Parts of a graph take the values of other parts, and compute what the whole does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from passes.graph.part import part_of
from passes.trace.trace import trace


class Skip(nn.Module):
    """Two values go over the cut behind ``norm``: ``hidden``, and ``norm``'s own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.up = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        loss: Tensor = (hidden + self.up(self.norm(hidden))).square().mean()
        return loss


def test_a_part_may_take_the_first_op_and_others() -> None:
    torch.manual_seed(0)
    model, ids = Skip().double(), torch.tensor([[0, 1], [2, 3], [4, 0]])
    graph = trace(model, {"ids": ids})
    first = [node.name for node in graph.ops][:2]
    assert first == ["embedding", "layer_norm"]
    part = part_of(graph, [node.name for node in graph.ops if node.name not in first])
    part.graph.lint()
    assert [given.name for given in part.inputs if given.kind == "value"] == first
    parameters = dict(model.named_parameters())
    hidden = model.embed(ids)
    values = {"embedding": hidden, "layer_norm": model.norm(hidden), "ids": ids}
    given = [parameters.get(i.name, values.get(i.name)) for i in part.inputs]
    (loss,) = part.module(*given)
    torch.testing.assert_close(loss, model(ids))
