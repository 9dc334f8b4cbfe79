from __future__ import annotations

import pytest
import torch
from torch import nn

from cost_models.errors import ModelError
from passes.cheap import recomputed_ops
from passes.graph import OpGraph
from passes.reuse_placement import reuse_placement
from passes.trace import trace


class Net(nn.Module):
    def __init__(self, *, reverse_in_eval: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.5),
            nn.Linear(4, 4),
        )
        self.reverse_in_eval = reverse_in_eval

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reverse_in_eval and not self.training:
            return self.first(self.last(x))
        y = self.last(self.drop(self.norm(self.first(x))))
        return y if self.training else y.softmax(-1)


def traces(model: nn.Module) -> tuple[OpGraph, dict[str, int], OpGraph]:
    batch = (torch.randn(3, 4),)
    training = trace(model, batch, loss_fn=lambda output, _: output.sum())
    evaluation = trace(model, batch, training=False)
    stage_of = {node.name: int(node.meta["module_path"] in ("last", "")) for node in training.ops}
    return training, stage_of, evaluation


def test_evaluation_runs_where_training_was_placed() -> None:
    training, stage_of, evaluation = traces(Net())
    placed = reuse_placement(training, stage_of, evaluation, recomputed_ops(evaluation))
    by_module = {evaluation.nodes[name].meta["module_path"]: stage for name, stage in placed.items()}
    assert by_module["first"] == by_module["norm"] == 0
    assert by_module["last"] == by_module[""] == 1, "softmax at the root follows its input"
    for node in evaluation.ops:
        for user in node.users:
            assert placed.get(node.name, 0) <= placed.get(user.name, 1)


def test_another_order_of_modules_is_refused() -> None:
    training, stage_of, evaluation = traces(Net(reverse_in_eval=True))
    with pytest.raises(ModelError, match=r"in first needs stage \[0\] but reads from stage 1"):
        reuse_placement(training, stage_of, evaluation, frozenset())
