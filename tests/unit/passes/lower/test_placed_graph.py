"""Segments on groups of ranks: those on meshes run graphs of shards, each of its own ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError
from cost_models.layout import Mesh, Replicate, Shard
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.graph.part import part_of
from passes.graph.verify import verify_graph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.lower import crossing_values, lower
from passes.lower.placed_graph import PlacedGraph, on_meshes
from passes.lower.realize import realize
from passes.lower.segment import Segmentation, by_stage
from passes.lower.summarize import tied_groups
from passes.shard.shard import shard_graph
from passes.shard.words import FeaturePlacement
from passes.trace.trace import trace
from tests.distributed.sharded_models import BATCH, Mlp, place
from tests.support.towers import Towers, tower_of, traced

GRAPH = traced(Towers().double())
FOUR = Mesh((0, 1, 2, 3), (2, 2), ("outer", "inner"))
TWO = Mesh((5, 4), (2,), ("all",))


def segmentation(graph: OpGraph, *meshes: Mesh | None) -> Segmentation:
    """One stage per tower; on rank 6 where there is no mesh."""
    groups = [(6,) if mesh is None else mesh.ranks for mesh in meshes]
    return by_stage(graph, tower_of(graph), groups, frozenset(), (), meshes)


def placements(graph: OpGraph, *meshes: Mesh | None) -> dict[int, FeaturePlacement]:
    """By samples on every axis."""
    found = {}
    for index, mesh in enumerate(meshes):
        if mesh is not None:
            ops = [name for name, tower in tower_of(graph).items() if tower == index]
            found[index] = place(part_of(graph, ops), mesh, (BATCH,) * len(mesh.shape), 2)
    return found


def placed(*meshes: Mesh | None, unit: int = 1) -> PlacedGraph:
    return on_meshes(GRAPH, segmentation(GRAPH, *meshes), placements(GRAPH, *meshes), unit)


def test_the_part_of_all_ops_is_the_graph_itself() -> None:
    assert part_of(GRAPH, [node.name for node in GRAPH.ops]) is GRAPH


def test_a_part_has_what_its_ops_read_and_make() -> None:
    towers = tower_of(GRAPH)
    for index, (kind, name) in enumerate((("loss", "left"), ("metric", "right"))):
        part = part_of(GRAPH, [op for op, tower in towers.items() if tower == index])
        verify_graph(part, after="part_of")
        assert [node.name for node in part.ops] == [op for op, tower in towers.items() if tower == index]
        assert [output.kind for output in part.outputs] == [kind]
        assert {parameter.partition(".")[0] for parameter in part.parameters} == {name}
        assert {given.name for given in part.inputs if given.kind == "batch"} == ({"x", "y"}, {"x"})[index]


def test_every_mesh_runs_a_graph_of_its_own() -> None:
    made = placed(FOUR, TWO)
    assert [own.mesh for own in made.sharded.values()] == [FOUR, TWO]
    assert made.graph is GRAPH
    for index, own in made.sharded.items():
        verify_graph(own.graph, after="on_meshes")
        assert made.graph_of(index) is own.graph
    codes = made.lowered()
    assert [(code.index, code.mesh) for code in codes.values()] == [(0, FOUR), (1, TWO)]
    assert [{output.kind for output in code.outputs} for code in codes.values()] == [{"loss"}, {"metric"}]
    assert made.lowered(only=frozenset({1})).keys() == {1}
    assert made.shardings.keys() == GRAPH.parameters.keys()
    assert made.shardings["left.up.weight"].mesh == FOUR
    assert made.shardings["right.up.weight"].mesh == TWO


def test_all_count_samples_in_the_unit_that_serves_every_one() -> None:
    """A mesh of four along the samples needs multiples of four, one of two multiples of two."""
    four = Mesh((0, 1, 2, 3), (4,), ("all",))
    made = placed(four, TWO)
    assert made.multiple == 4
    assert [made.batch_of(rank).multiple for rank in (0, 3, 4, 5)] == [4] * 4
    assert [made.batch_of(rank).mesh for rank in (0, 3, 4, 5)] == [four, four, TWO, TWO]
    assert placed(four, TWO, unit=3).multiple == 12


def test_a_rank_alone_beside_meshes_counts_samples_as_they_do() -> None:
    made = placed(None, TWO)
    assert made.batch_of(6).multiple == made.batch_of(4).multiple == 2
    code = made.lowered()[0]
    assert code.mesh is None
    assert not code.interfaces
    alone = lower(GRAPH, made.segmentation, only=frozenset({0}))[0]
    assert [node.name for node in code.module.graph.nodes] == [node.name for node in alone.module.graph.nodes]


@pytest.mark.parametrize("meshes", [(FOUR, TWO), (None, TWO), (FOUR, None)], ids=["4-2", "1-2", "4-1"])
def test_values_between_meshes_leave_and_arrive_in_their_layouts(
    meshes: tuple[Mesh | None, Mesh | None],
) -> None:
    graph = trace(Mlp(), {name: torch.randn(4, 8) for name in ("x", "y")})
    half = len(graph) // 2
    stage_of = {node.name: int(number >= half) for number, node in enumerate(graph.ops)}
    groups = [(6,) if mesh is None else mesh.ranks for mesh in meshes]
    cut = by_stage(graph, stage_of, groups, frozenset(), (), meshes)
    (value, *others) = crossing_values(graph, cut)
    assert not others
    whole = {
        i: FeaturePlacement(
            mesh, {}, {}, {}, 1, values={value: (Shard(0), *[Replicate()] * (len(mesh.shape) - 1))}
        )
        for i, mesh in enumerate(meshes)
        if mesh is not None
    }
    made = on_meshes(graph, cut, whole)
    first, second = made.lowered().values()
    for code, other in ((first, second), (second, first)):
        interface = code.interfaces[value]
        assert interface.own.ranks == groups[code.index]
        assert interface.others == (other.interfaces[value].own,)
        mesh = meshes[code.index]
        parts = 1 if mesh is None else mesh.shape[0]
        assert code.values[value].shape[0] * parts == graph.batch.batch_symbol * made.multiple
    for own in made.sharded.values():
        verify_graph(own.graph, after="on_meshes")


class Tied(nn.Module):
    """Both towers have the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Towers().left

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"left": self.tower(x), "right": self.tower(2 * x)}


def test_a_parameter_of_two_meshes_is_whole_and_summed_over_the_ranks_of_both() -> None:
    graph = traced(Tied().double())
    cut = segmentation(graph, FOUR, TWO)
    made = on_meshes(graph, cut, placements(graph, FOUR, TWO))
    tied = {name for name in graph.parameters if name.startswith("tower.")}
    for own in made.sharded.values():
        assert own.shared == tied
        assert not tied.intersection(name for sync in own.syncs for name in sync.parameters)
    assert not tied & made.shardings.keys()
    (group,) = tied_groups(graph, cut)
    assert set(group.parameters) == tied
    assert group.ranks == (0, 1, 2, 3, 4, 5)


def test_blocks_of_what_two_meshes_read_are_refused() -> None:
    graph = traced(Tied().double())
    own = placements(graph, FOUR, TWO)
    own[1] = replace(own[1], stored={**own[1].stored, "tower.up.weight": (Shard(0),)})
    with pytest.raises(InternalError, match=r"tower.up.weight"):
        on_meshes(graph, segmentation(graph, FOUR, TWO), own)


class Averaged(nn.Module):
    """x [b, 3, 8] -> a number; a running average of what the first op makes, which it is also taken from."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.mean.lerp_(y.flatten(0, 1).mean(0).detach(), 0.25)
        return self.down(y - self.mean)  # type: ignore[no-any-return]


AVERAGED = trace(Averaged(), torch.randn(4, 3, 8), loss_fn=lambda y, x: y.square().mean())


def averaged_parts() -> list[list[str]]:
    """The linear layer; the view of its output; the average of that; the rest."""
    names = [node.name for node in AVERAGED.ops]
    flat, detached = names.index("flatten"), next(k for k, name in enumerate(names) if "detach" in name)
    return [names[:flat], [names[flat]], names[flat + 1 : detached + 1], names[detached + 1 :]]


def test_a_part_takes_the_first_op_s_value_and_others_beside_it() -> None:
    part = part_of(AVERAGED, averaged_parts()[3])
    verify_graph(part, after="part_of")
    known = {node.name for node in part.graph.nodes}
    assert known.issuperset(source.name for node in part.graph.nodes for source in node.all_input_nodes)
    assert len([given for given in part.inputs if given.kind == "value"]) == 2


def test_a_part_that_is_given_samples_and_positions_as_one_dimension() -> None:
    """Nothing that it is given counts samples alone."""
    part = part_of(AVERAGED, averaged_parts()[2])
    (given,) = (given for given in part.inputs if given.kind == "value")
    mesh = Mesh((0, 1), (2,), ("all",))
    placement = FeaturePlacement(mesh, {}, {}, {}, 1, values={given.name: (Shard(0),)})
    own = shard_graph(part, placement)
    verify_graph(own.graph, after="shard")
    assert own.graph.batch.multiple == 2
    assert own.graph.nodes[given.node].meta["val"].shape[0].node.expr == 3 * part.batch.batch_symbol


def test_a_stage_that_owes_a_gradient_has_a_backward() -> None:
    """The view of a value that needs a gradient: what is made of it needs none, and still it gives one back."""
    parts = averaged_parts()
    stage_of = {name: stage for stage, names in enumerate(parts) for name in names}
    placed = {1: FeaturePlacement(Mesh((1, 2), (2,), ("all",)), {}, {}, {}, 1)}
    candidate = Candidate(stage_of, ((0,), (1, 2), (3,), (0,)), 2, "list", shardings=placed)
    cluster = ClusterSpec.local(4)
    realized = realize(AVERAGED, costs_of(AVERAGED, cluster), cluster, Job(8), candidate)
    assert [segment.has_backward for segment in realized.segments.segments] == [True, True, False, True]


class Scaled(nn.Module):
    """x [b, 8] -> [b, 8] by twice the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (2 * self.weight).t()  # type: ignore[no-any-return]


def test_a_part_of_parameters_alone_reads_nothing_of_the_batch() -> None:
    graph = trace(Scaled(), torch.ones(4, 8), loss_fn=lambda y, x: y.mean())
    part = part_of(graph, ["mul"])
    verify_graph(part, after="part_of")
    assert [given.kind for given in part.inputs] == ["parameter"]
    mesh = Mesh((0, 1), (2,), ("all",))
    own = shard_graph(part, FeaturePlacement(mesh, {}, {}, {}, 1, values={"mul": (Shard(0),)}))
    verify_graph(own.graph, after="shard")
