"""A written buffer has one owning segment in free placements too, and pins that would part it are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError, UsageError
from partitioner import partition
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import owning_units
from passes.lower.job import Job
from passes.lower.segment import by_reach
from passes.search.free.model import read_free_model
from passes.search.free.request import FreeRequest, resolved_pins
from passes.trace.trace import trace

TWO = ClusterSpec.local(2)


class Average(nn.Module):
    """x [b, 4] -> a -> times a running average -> far -> o; the average is written after ``far``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.far, self.o = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        average = self.get_buffer("average")
        hidden = self.far(self.a(x) * average.clone())
        average.copy_(average * 0.5 + 0.5 * hidden.detach().mean(0))
        loss: Tensor = self.o(hidden).square().mean()
        return loss


class Twice(nn.Module):
    """One batch norm called twice, with ``far`` between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.far = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.norm(self.far(self.norm(x))).square().mean()
        return loss


class Shared(nn.Module):
    """first -> cell -> middle -> the same cell -> last"""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.middle, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.cell(self.middle(self.cell(self.first(x))))).square().mean()
        return loss


def _traced(model: nn.Module) -> OpGraph:
    return trace(model, (torch.randn(8, 4),))


def _users(graph: OpGraph) -> set[str]:
    """The ops of the largest unit."""
    units = owning_units(graph, recomputed_ops(graph))
    numbers = list(units.values())
    largest = max(numbers, key=numbers.count)
    return {name for name, number in units.items() if number == largest}


def test_what_reads_and_writes_a_buffer_runs_in_one_segment() -> None:
    """In two, the first would read what the buffer was before the step, in every micro-batch."""
    graph = _traced(Average())
    owned = _users(graph)
    assert {"clone", "mul", "linear_1", "mul_1", "add"} <= owned
    assert "linear" not in owned
    plan = partition(
        graph,
        TWO,
        strategy="free",
        batch_size=8,
        microbatches=4,
        pins={"a": 0, "far": 1, "o": 0},
        time_limit_seconds=0.5,
    )
    assert len({stage.devices for stage in plan.stages}) == 2
    assert [stage.ops for stage in plan.stages if owned & set(stage.ops)] == [
        tuple(node.name for node in graph.ops if node.name in owned)
    ]


def test_a_unit_on_two_devices_is_no_placement() -> None:
    graph = _traced(Average())
    recomputed = recomputed_ops(graph)
    units = owning_units(graph, recomputed)
    groups = {name: (int(name == "linear_1"),) for name in units}
    with pytest.raises(InternalError, match="on several devices"):
        by_reach(graph, groups, recomputed, units)


def test_pins_that_part_the_users_of_a_buffer_are_refused() -> None:
    with pytest.raises(UsageError, match="lie between ops that do, and must be in one rank"):
        partition(_traced(Twice()), TWO, strategy="free", batch_size=8, pins={"norm": 0, "far": 1})


@pytest.mark.parametrize("tasks", [1000, 4])
def test_calls_of_one_module_never_override_pins(tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large graph, a pinned op and a call beside it are one task."""
    graph = _traced(Shared())
    recomputed = recomputed_ops(graph)
    request = FreeRequest(Job(8), pins={"first": 0, "middle": 1})
    pins = resolved_pins(graph, recomputed, request, TWO)
    monkeypatch.setattr("passes.search.free.model.MOST_TASKS", tasks)
    model = read_free_model(graph, costs_of(graph, TWO), TWO, recomputed, Job(8), pins, 8)
    for units in (model.unit_of, model.exact_unit_of):
        allowed = model.problem(units, 8, 1).allowed
        assert {op: allowed[:, units[op]].tolist() for op in pins} == {
            op: [rank == 0, rank == 1] for op, rank in pins.items()
        }
