"""Plans whose files were changed so that they would train other numbers: refused when the model is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError
from partitioner import Plan, partition, trace
from partitioner.record.rebuild import plan_code


class Tied(nn.Module):
    """Two layers with one weight, apart; a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.norm(self.first(x)).chunk(2, dim=-1)
        return self.last(torch.cat([right, left], dim=-1)).square().mean()


GRAPH = trace(Tied(), (torch.randn(4, 8),))
PLAN = partition(
    GRAPH,
    ClusterSpec.parse("A100-40GB:2"),
    batch_size=8,
    strategy="free",
    splits={},
    pins={"first": 0, "norm": 0, "last": 1},
)
Change = Callable[[dict[str, Any]], object]


def _moved(data: dict[str, Any], op: str, stage: int) -> None:
    """Put an op into another stage."""
    for each in data["stages"]:
        each["ops"] = [name for name in each["ops"] if name != op]
    data["stages"][stage]["ops"].append(op)


def _other_stage(data: dict[str, Any], op: str) -> int:
    """Another one than the op's."""
    own = next(i for i, stage in enumerate(data["stages"]) if op in stage["ops"])
    return own - 1 if own else own + 1


def _last_stage(data: dict[str, Any]) -> int:
    return len(data["stages"]) - 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda data: data.update(tied=[]),
            "tied: first.weight gets its gradient from ranks 0, 1; the plan says nothing",
        ),
        (lambda data: data["values"][0].update(needs_grad=False), "and its gradient back; the plan says"),
        (lambda data: data.update(values=data["values"][1:]), "and is missing"),
        (lambda data: data["values"][0].update(name="relu"), "values: nothing called relu crosses"),
        (lambda data: _moved(data, "linear", _last_stage(data)), "of the later stage"),
        (lambda data: _moved(data, "getitem", _other_stage(data, "getitem")), "must share a stage"),
    ],
    ids=["tied", "gradient", "value", "name", "order", "tuple"],
)
def test_a_changed_plan_is_refused_with_the_model(change: Change, words: str) -> None:
    assert PLAN.values
    plan_code(PLAN, GRAPH)
    data = json.loads(PLAN.model_dump_json())
    change(data)
    changed = Plan.from_json(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        plan_code(changed, GRAPH)
    assert words in str(caught.value)


def test_what_draws_random_numbers_is_computed_once() -> None:
    graph = trace(
        nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1)), (torch.randn(4, 8),), loss_fn=lambda y, _: y.mean()
    )
    plan = partition(graph, ClusterSpec.parse("A100-40GB:2"), batch_size=8, strategy="free", splits={})
    data = json.loads(plan.model_dump_json())
    for stage in data["stages"]:
        stage["ops"] = [op for op in stage["ops"] if op != "dropout"]
    data["recomputed"].append("dropout")
    with pytest.raises(PlanError, match="dropout may not be computed by every stage for itself"):
        plan_code(Plan.from_json(json.dumps(data)), graph)
