"""Pins of feature-wise plans: layouts, layouts of state, layouts where they can be had, and patterns."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.layout import Replicate, Shard
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.feature.pins import parse_layout
from passes.search.feature.place import FeatureRequest, FeatureResult, place_features
from passes.trace.trace import trace
from tests.distributed.sharded_models import Conv, Gpt

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


class Odd(nn.Module):
    """One weight that two ranks can share, one that they cannot: x [b, 6], y [b, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(6, 9, bias=False), nn.Linear(9, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = ((self.odd(torch.tanh(self.even(x))) - y) ** 2).mean()
        return loss


class Narrow(nn.Module):
    """Column and row, then a product that nobody can share: x [b, 5], y [b, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = (nn.Linear(i, o, bias=False) for i, o in ((5, 8), (8, 5), (5, 3)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = ((self.last(torch.tanh(self.down(torch.tanh(self.up(x))))) - y) ** 2).mean()
        return loss


@cache
def traced(name: str) -> OpGraph:
    if name == "gpt":
        ids = torch.zeros(2, 8, dtype=torch.long)
        return trace(Gpt(), {"ids": ids, "labels": ids})
    if name == "conv":
        return trace(Conv(), {"x": torch.zeros(2, 3, 8, 8), "y": torch.zeros(2, dtype=torch.long)})
    if name == "narrow":
        return trace(Narrow(), {"x": torch.zeros(2, 5), "y": torch.zeros(2, 3)})
    return trace(Odd(), {"x": torch.zeros(2, 6), "y": torch.zeros(2, 3)})


def placed(name: str, pins: dict[str, str], mesh: tuple[int, ...] = (2,), **fixed: Any) -> FeatureResult:
    machine = ClusterSpec.local(4 if mesh in ((2, 2), (4,)) else 2)
    graph = traced(name)
    request = FeatureRequest(Job(8), microbatches=2, pins=pins, mesh=mesh, **fixed)
    return place_features(graph, costs_of(graph, machine), machine, request)


def test_layouts_are_read() -> None:
    (rule,) = parse_layout("S1")
    assert str(rule) == "S1"
    first, second = parse_layout("R/S0, P ?")
    assert (str(first), str(second)) == ("R/S0", "P")


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"*": ""}, "it is empty"),
        ({"*": "S0/S1"}, "has its state in the same parts"),
        ({"*": "data S0"}, "'data' is a pattern, and stands beside other patterns only"),
        ({"*": "zero2"}, "zero1"),
        ({"*": "colum_row"}, "did you mean 'column_row'"),
        ({"ids": "R/S0"}, "matches no parameter"),
        ({"*": "data", "h.*": "zero3"}, "matches '\\*' \\(data\\) and 'h.\\*' \\(zero3\\)"),
        ({"labels": "column_row"}, "nothing that it matches is what 'column_row' is about"),
        ({"h.0.up.weight": "S0 R"}, "h.0.up.weight cannot be S0 R"),
        ({"ids": "S1"}, "ids cannot be S1"),
        ({"ids": "S1?"}, "nothing that matches 'ids' can be S1"),
    ],
)
def test_what_cannot_be_is_refused(pins: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        placed("gpt", pins)


def test_a_pattern_must_hold_for_something() -> None:
    with pytest.raises(UsageError, match="nothing that it matches is what 'sequence' is about"):
        placed("conv", {"*": "sequence"})
    with pytest.raises(
        UsageError, match="on a mesh of 4: nothing that matches '\\*' can be vocabulary on axis 0"
    ):
        placed("conv", {"*": "vocabulary"}, (4,))  # 10 classes


def test_a_layout_where_it_can_be_had() -> None:
    with pytest.raises(UsageError, match=r"even\.weight cannot be S0"):
        placed("odd", {"*.weight": "S0"})
    assert placed("odd", {"*.weight": "S1?"}).placement.stored == {"even.weight": (S1,), "odd.weight": (R,)}


def test_a_tied_parameter_goes_by_any_of_its_names() -> None:
    ((alias, name),) = traced("gpt").aliases.items()
    assert placed("gpt", {alias: "S1"}).placement.stored[name] == (S1,)


def test_state_apart_from_what_is_stored() -> None:
    found = placed("gpt", {"h.0.up.weight": "R/S0", "h.1.up.weight": "R/S1"}).placement
    assert found.stored["h.0.up.weight"] == found.stored["h.1.up.weight"] == (R,)
    assert found.sharded_state["h.0.up.weight"] == (S0,)
    assert found.sharded_state["h.1.up.weight"] == (S1,)
    assert "h.0.up.weight" not in placed("gpt", {"h.0.up.weight": "R/R"}).placement.sharded_state


def test_the_exact_goes_before_the_vague() -> None:
    found = placed("gpt", {"*": "zero3", "h.0.up.weight": "R/R", "h.0.down.weight": "S1?"}).placement
    assert found.stored["h.0.up.weight"] == (R,)
    assert found.stored["h.0.down.weight"] == (S1,)
    assert isinstance(found.stored["h.1.up.weight"][0], Shard)


def test_data_parallel_and_zero() -> None:
    for pattern in ("data", "zero1", "zero3"):
        found = placed("gpt", {"*": pattern}).placement
        assert found.batch["ids"] == found.batch["labels"] == (S0,)
        parts = {name: isinstance(p, Shard) for name, (p,) in found.stored.items()}
        assert all(parts.values()) if pattern == "zero3" else not any(parts.values())
        assert set(found.sharded_state) == (set(found.stored) if pattern == "zero1" else set())
        assert found.choices["linear"][0].outputs == (S0,)


def test_column_and_row() -> None:
    found = placed("gpt", {"*": "column_row"}).placement
    assert found.batch["ids"] == (R,)
    for block in ("h.0", "h.1"):
        assert [found.stored[f"{block}.{n}.weight"] for n in ("q", "k", "v", "up")] == [(S0,)] * 4
        assert [found.stored[f"{block}.{n}.weight"] for n in ("o", "down")] == [(S1,)] * 2
    assert found.choices["layer_norm"][0].outputs[0] == R


def test_sequence() -> None:
    found = placed("gpt", {"*": "sequence"}).placement
    norms = [ways[0].outputs[0] for op, ways in found.choices.items() if "layer_norm" in op]
    assert norms == [S1] * 5
    assert found.stored["h.0.up.weight"] == (S0,)
    assert found.choices["gelu"][0].outputs == (S2,)


def test_vocabulary() -> None:
    found = placed("gpt", {"*": "vocabulary"}).placement
    assert found.stored["wte.weight"] == (S0,)
    assert found.choices["embedding"][0].local == "embedding:vocabulary"
    (loss,) = [ways[0] for op, ways in found.choices.items() if "cross_entropy" in op]
    assert loss.local == "cross_entropy:classes"


def test_a_pattern_per_axis() -> None:
    found = placed("gpt", {"*": "zero3 column_row"}, (2, 2)).placement
    assert found.batch["ids"] == (S0, R)
    assert found.stored["h.0.up.weight"][1] == S0
    assert isinstance(found.stored["h.0.up.weight"][0], Shard)
    both = placed("gpt", {"*": "data"}, (2, 2)).placement
    assert both.batch["ids"] == (S0, S0)


def test_what_an_axis_cannot_have_is_left_free_there_only() -> None:
    found = placed("narrow", {"*": "data column_row"}, (2, 2)).placement
    assert found.stored == {"up.weight": (R, S0), "down.weight": (R, S1), "last.weight": (R, R)}
    assert found.batch["x"] == (S0, R)
