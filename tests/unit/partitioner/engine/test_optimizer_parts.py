"""Optimizers of parameters that ranks hold in parts. No processes: each rank's optimizer is made here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError, PlanError, UsageError
from partitioner.engine.optimizer import make_engine_optimizer
from partitioner.plan import Plan
from passes.graph.graph import OpGraph
from runtime.mesh.sharding import Block
from runtime.state.gather import pieces_of
from runtime.state.rank_state import RankState, TensorPart
from tests.support.made_plans import made_plan
from tests.support.split_model import SIZES, model, traced, workload
from tests.support.split_model import split as split_graph

CPU = torch.device("cpu")
RANK_OF_PART = (0, 1, 0)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return traced(workload())


@pytest.fixture(scope="module")
def split(graph: OpGraph) -> OpGraph:
    return split_graph(graph)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return made_plan(ClusterSpec.local(2))


def state_of(rank: int, split: OpGraph) -> RankState:
    holders = {
        name: (RANK_OF_PART[int(name[-1])] if name in split.parts else 1,)
        for name in (*split.parameters, *split.buffers)
    }
    values = dict(model().named_parameters())
    own = {}
    for name in split.parameters:
        if holders[name] == (rank,):
            part = split.parts.get(name)
            value = values[name] if part is None else part.block.of(values[part.whole])
            own[name] = nn.Parameter(value.detach().clone())
    return RankState(rank, own, own, {}, holders, parts=split.parts)


def test_it_is_made_of_whole_parameters_and_steps_parts(graph: OpGraph, split: OpGraph, plan: Plan) -> None:
    shapes = {name: tuple(p.shape) for name, p in model().named_parameters()}

    def by_name(named: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
        assert {name: tuple(p.shape) for name, p in named} == shapes
        assert all(p.is_meta for name, p in named if name.startswith("fc1"))
        found = dict(named)
        return torch.optim.AdamW(
            [
                {"params": [("fc1.weight", found["fc1.weight"])], "weight_decay": 0.5},
                {"params": named[1:], "lr": 0.3},
            ]
        )

    for rank, expected in ((0, ["fc1.weight#0", "fc1.weight#2"]), (1, ["fc1.weight#1"])):
        state = state_of(rank, split)
        optimizer = make_engine_optimizer(by_name, {}, plan, graph, state, 0.1, CPU)
        first, second = optimizer.param_groups
        assert first["param_names"] == expected
        assert all(p is state.parameters[name] for p, name in zip(first["params"], expected, strict=True))
        assert [p for g in (first, second) for p in g["params"] if p.is_meta] == []
        assert len(first["params"]) + len(second["params"]) == len(state.parameters)
        assert len(second["params"]) == len(second["param_names"])


ALIKE = [
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
]


@pytest.mark.parametrize("cls", ALIKE, ids=lambda cls: cls.__name__)
def test_parts_become_what_the_whole_becomes(cls: Any, graph: OpGraph, split: OpGraph, plan: Plan) -> None:
    """Adagrad and others have state before their first step."""
    net = model()
    whole = cls(net.parameters(), lr=0.1)
    states = [state_of(rank, split) for rank in (0, 1)]
    optimizers = [make_engine_optimizer(cls, {"lr": 0.1}, plan, graph, state, 0.1, CPU) for state in states]
    for step in range(2):
        gradients = {n: torch.sin(p.detach() + step) for n, p in net.named_parameters()}
        for name, parameter in net.named_parameters():
            parameter.grad = gradients[name]
        for state in states:
            for name, parameter in state.parameters.items():
                gradient = gradients[state.whole_of(name)]
                parameter.grad = split.parts[name].block.of(gradient) if name in split.parts else gradient
        for optimizer in (whole, *optimizers):
            optimizer.step()
    for state in states:
        for name, parameter in state.parameters.items():
            expected: Tensor = dict(net.named_parameters())[state.whole_of(name)]
            expected = split.parts[name].block.of(expected) if name in split.parts else expected
            assert torch.allclose(parameter, expected, rtol=1e-12), name


def test_one_with_state_from_the_start_that_cannot_be_made_for_a_part(
    graph: OpGraph, split: OpGraph, plan: Plan
) -> None:
    class Eager(torch.optim.SGD):
        def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
            super().__init__([p for _, p in named], lr=0.1)
            for _, p in named:
                self.state[p]["sum"] = torch.zeros_like(p)

    with pytest.raises(UsageError, match="cannot be made for a part alone"):
        make_engine_optimizer(lambda named: Eager(named), {}, plan, graph, state_of(0, split), 0.1, CPU)


def test_memory_counts_each_ranks_parts(graph: OpGraph, split: OpGraph) -> None:
    """fc1.weight and fc2.weight have 6 numbers a neuron each; rank 0 has 5 neurons of 8-byte numbers."""
    sgd = made_plan(ClusterSpec.local(2), optimizer_memory="momentum")

    def heavy(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        mine = [p for name, p in named if name.startswith("fc1") or name == "fc2.weight"]
        return torch.optim.AdamW(mine)

    said = set()
    for rank in (0, 1):
        with pytest.raises(PlanError) as caught:
            make_engine_optimizer(heavy, {}, sgd, graph, state_of(rank, split), 0.1, CPU)
        said.add(str(caught.value))
    (text,) = said
    assert f"({2 * 12 * 5 * 8} bytes) of state" in text.replace(",", "")


def test_a_state_dict_of_parts_that_are_not_the_whole_is_an_error(split: OpGraph) -> None:
    state = state_of(0, split)
    pieces = pieces_of(state, "fc1.weight", (10, 6))
    assert [(p.rank, p.name, p.block.offsets, p.block.shape[0]) for p in pieces] == [
        (0, "fc1.weight#0", (0, 0), SIZES[0]),
        (1, "fc1.weight#1", (3, 0), SIZES[1]),
        (0, "fc1.weight#2", (8, 0), SIZES[2]),
    ]
    fewer = {"fc1.weight#0": TensorPart("fc1.weight", Block((0, 0), (3, 6)))}
    lacking = RankState(0, {}, {}, {}, state.holders, parts=fewer)
    with pytest.raises(InternalError, match=r"parts of fc1\.weight are not the whole"):
        pieces_of(lacking, "fc1.weight", (10, 6))
