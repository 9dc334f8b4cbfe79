"""Memory binds; pins, meshes and limits hold; what was chosen is told. Known strategies: ``test_found``."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from cost_models.layout import Mesh, Replicate, Shard
from examples.alexnet import alexnet
from partitioner import partition
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph, tensor_specs
from passes.lower.job import Job
from passes.search.certificate import relative_gap
from passes.search.feature.explain import Alternatives, alternatives
from passes.search.feature.meshes import meshes, split_seconds
from passes.search.feature.place import (
    FeatureRequest,
    FeatureResult,
    _MeshSearch,
    place_features,
    survey_meshes,
)
from passes.search.feature.seconds import local_cost
from passes.search.feature.setting import Setting
from passes.shard.rules import choices
from passes.shard.words import operands
from passes.trace.trace import trace
from tests.support.traced_models import small


def cluster(
    ranks: int,
    bandwidth: float,
    latency: float = 0.0,
    memory: str = "8GiB",
    flops: float = 1e9,
    contention: float = 1.0,
) -> ClusterSpec:
    device = {
        "kind": "cpu",
        "memory": memory,
        "memory_bandwidth": flops,
        "flops": {"float64": flops, "float32": flops},
        "launch_overhead": 0.0,
    }
    links = {"default": {"bandwidth": bandwidth, "latency": latency}}
    nodes = [{"name": "n", "count": ranks, "device": device, "links": links}]
    return ClusterSpec.from_dict({"nodes": nodes, "host_costs": {"contention": contention}})


@cache
def graph_of(name: str) -> OpGraph:
    if name == "alexnet":
        workload = alexnet(batch=2)
        return trace(workload.model, workload.example_inputs, loss_fn=workload.loss_fn)
    if name == "uneven":
        return trace(Uneven(), {"x": torch.zeros(2, 64), "y": torch.zeros(2, 8)})
    workload = small(name)
    return trace(workload.model, workload.example_inputs)


def place(name: str, machine: ClusterSpec, batch_size: int, **fixed: Any) -> FeatureResult:
    graph = graph_of(name)
    return place_features(graph, costs_of(graph, machine), machine, FeatureRequest(Job(batch_size), **fixed))


@pytest.mark.parametrize(("ranks", "batch_size"), [(4, 8), (6, 8), (7, 8), (7, 14)])
def test_no_sharding_is_below_what_dimensions_split(ranks: int, batch_size: int) -> None:
    machine = cluster(ranks, 1e15)
    found = place("gpt2", machine, batch_size)
    setting, mesh = Setting(machine, Job(batch_size)), found.placement.mesh
    floor = split_seconds(found.problem.space, setting, mesh.shape, found.placement.microbatches)
    whole = found.problem.space.costs.least_work_seconds(batch_size, setting.devices)
    assert whole / ranks * (1 - 1e-9) <= floor <= found.cost.seconds * (1 + 1e-9)
    if (ranks, batch_size) == (7, 8):  # nothing but some sizes of heads is split by 7
        assert floor > whole / 2


class Uneven(nn.Module):
    """One big and sixteen small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(64, 4096, bias=False)
        self.small = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(15))
        self.down = nn.Linear(4096, 8, bias=False)
        self.down.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.down(torch.relu(self.big(x)))
        for layer in self.small:
            h = torch.tanh(layer(h))
        return torch.nn.functional.mse_loss(h, y)


def split(placements: tuple[Any, ...]) -> bool:
    return any(isinstance(p, Shard) for p in placements)


def optimal(result: FeatureResult) -> bool:
    return not result.proof.late and relative_gap(result.cost.seconds, result.proof.bound_seconds) <= 1e-6


def test_where_choices_come_from_is_reported() -> None:
    result = place("gpt2", cluster(2, 1e9), batch_size=4)
    found = result.origins
    assert found.by_rule + found.discovered + len(found.replicated) == len(result.placement.choices)
    assert found.by_rule > 90
    assert found.replicated_seconds <= 0.01 * result.cost.seconds


def test_one_big_and_sixteen_small_parameters() -> None:
    """Memory is bytes per device: a mean of shares would call sixteen small ones sharded and the big one whole enough."""
    fixed: dict[str, Any] = {"batch_size": 8, "microbatches": 1, "mesh": (4,)}
    free = place("uneven", cluster(4, 1e6, latency=1e-2), **fixed)
    assert not any(split(layout) for layout in free.placement.stored.values())
    big = graph_of("uneven").parameters["big.weight"]
    capacity = int(free.cost.memory_bytes - big.size_bytes)
    short = place("uneven", cluster(4, 1e6, 1e-2, f"{capacity}B"), **fixed)
    assert optimal(short)
    assert short.cost.memory_bytes <= capacity
    assert split(short.placement.sharded_state.get("big.weight", short.placement.stored["big.weight"]))


def test_memory_that_nothing_fits_in_is_said_with_numbers() -> None:
    with pytest.raises(InfeasibleError) as caught:
        place("gpt2", cluster(2, 1e9, memory="1MiB"), batch_size=64, microbatches=1)
    assert "of each device (proved)" in str(caught.value)


class Turned(nn.Module):
    """A product with the exponential of a matrix of 1 MiB, which nobody knows to compute in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ torch.linalg.matrix_exp(self.weight)).square().mean()


def test_what_a_missing_rule_holds_whole_is_told_and_proves_nothing() -> None:
    graph = trace(Turned(), {"x": torch.zeros(4, 512)})
    machine = cluster(2, 1e9, memory="5MiB")
    with pytest.raises(InfeasibleError) as caught:
        place_features(graph, costs_of(graph, machine), machine, FeatureRequest(Job(8)))
    text = str(caught.value)
    assert "every sharding that is known needs at least" in text
    assert "(proved)" not in text
    (line,) = {node.meta["source"] for node in graph.ops if "matrix_exp" in node.name}
    assert f"to run whole: `linalg_matrix_exp` at {line}, which reads 1.00 MiB of parameters" in text
    larger = partition(graph, cluster(2, 1e9, memory="1GiB"), strategy="feature", batch_size=8)
    (note,) = [note for note in larger.notes if "whole" in note]
    assert note.startswith(
        f"`linalg_matrix_exp` at {line} is run whole on every device: no rule says another way"
    )
    assert note.endswith("% of the step")


class Clicks(nn.Module):
    """A table of 1 MiB, of which nothing else is worth speaking."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table, self.top = nn.EmbeddingBag(2**14, 16, mode=mode), nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(ids)).square().mean()


@pytest.mark.parametrize(("mode", "pins"), [("sum", {}), ("mean", {"*": "vocabulary"}), ("max", {})])
def test_bags_of_a_table_that_no_device_holds(mode: str, pins: dict[str, str]) -> None:
    """Table, gradient and AdamW's state take 4 MiB."""
    graph = trace(Clicks(mode), {"ids": torch.zeros(4, 3, dtype=torch.long)})
    machine = cluster(2, 1e9, memory="3.5MiB")
    request = FeatureRequest(Job(8), pins=pins)
    placement = place_features(graph, costs_of(graph, machine), machine, request).placement
    by_rows = placement.choices["embedding_bag"][0].local == "embedding_bag:vocabulary"
    assert placement.stored["table.weight"] == (Shard(0 if by_rows else 1),)
    assert by_rows or not pins


def test_pins_hold_and_cost_what_they_cost() -> None:
    machine = cluster(2, 1e9)
    free = place("gpt2", machine, batch_size=4)
    pin = {"transformer.h.0.mlp.c_fc.weight": "S1"}
    pinned = place("gpt2", machine, batch_size=4, pins=pin)
    assert pinned.placement.stored["transformer.h.0.mlp.c_fc.weight"] == (Shard(1),)
    assert pinned.cost.seconds >= free.cost.seconds * (1 - 1e-9)
    assert optimal(pinned)
    leaf = place("gpt2", machine, batch_size=4, pins={"input_ids": "S0"})
    assert leaf.placement.batch["input_ids"] == (Shard(0),)
    both = place("gpt2", cluster(4, 1e9), batch_size=4, pins={"*.c_proj.weight": "R S0"}, mesh=(2, 2))
    assert both.placement.stored["transformer.h.1.attn.c_proj.weight"] == (Replicate(), Shard(0))


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"pins": {"nothing.like.it": "S0"}}, "matches no parameter"),
        ({"pins": {"input_ids": "Q"}}, "is not R, P"),
        ({"pins": {"input_ids": "S0", "input_*": "R"}}, "input_ids"),
        ({"pins": {"transformer.wte.weight": "S7"}}, "no mesh allows these pins"),
        ({"mesh": (3,)}, "it has 3 devices, the cluster 2"),
        ({"microbatches": 3}, "cannot train"),
    ],
)
def test_what_cannot_be_is_refused(fixed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        place("gpt2", cluster(2, 1e9), batch_size=4, **fixed)


def test_other_layouts_are_explained() -> None:
    graph, machine, job = graph_of("gpt2"), cluster(2, 1e9), Job(4)
    result = place("gpt2", machine, batch_size=4)

    def explained(name: str) -> Alternatives:
        setting = Setting(machine, job)
        return alternatives(graph, costs_of(graph, machine), result.placement, setting, name)

    found = explained(next(node.name for node in graph.ops if "addmm" in node.name))
    assert sum(way.chosen for way in found.ways) == 1
    assert found.chosen.step_seconds == pytest.approx(result.cost.seconds, rel=1e-6)
    assert all(way.step_seconds >= found.chosen.step_seconds * (1 - 1e-9) for way in found.ways)
    assert len(explained("transformer.wte.weight").ways) > 2
    with pytest.raises(UsageError, match="'nothing' to explain"):
        explained("nothing")


def test_out_of_time_gives_the_best_so_far() -> None:
    result = place("gpt2", cluster(4, 1e7), batch_size=64, time_limit_seconds=0.0)
    assert result.proof.bound_seconds <= result.cost.seconds
    assert result.proof.late


def test_what_is_begun_when_time_runs_out_is_bounded_by_its_share_of_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = _MeshSearch._begin

    def out_of_time(self: _MeshSearch, trial: Any, late: bool) -> None:
        begin(self, trial, late)
        self.deadline = 0.0

    monkeypatch.setattr(_MeshSearch, "_begin", out_of_time)
    graph, machine = graph_of("gpt2"), cluster(4, 1e7)
    request = FeatureRequest(Job(64), time_limit_seconds=1e6)
    survey = survey_meshes(graph, costs_of(graph, machine), machine, request, known_seconds=1e6)
    assert survey.best is None
    assert survey.proof.late
    assert survey.proof.bound_seconds > 0


def test_meshes_follow_the_hierarchy() -> None:
    shapes = [mesh.shape for mesh in meshes(ClusterSpec.preset("dgx-h100", 8), 2)]
    assert shapes == [(64,), (8, 8), (16, 4), (32, 2)]
    assert (2, 4, 8) in [mesh.shape for mesh in meshes(ClusterSpec.preset("dgx-h100", 8), 3)]
    assert [mesh.shape for mesh in meshes(ClusterSpec.one_node("H100-80GB", 4), 2)] == [(4,), (2, 2)]
    with pytest.raises(UsageError):
        meshes(ClusterSpec.one_node("H100-80GB", 4), 2, (3, 1))


def test_collectives_inside_ops_cost_what_they_send() -> None:
    """A loss over split classes all-reduces one number per sample, then two; a plan that has it agrees with its sum over
    the whole graph (``place_features`` refuses otherwise)."""
    graph, machine, mesh = graph_of("gpt2"), cluster(4, 1e6, 1e-3), Mesh((0, 1, 2, 3), (2, 2), ("a", "b"))
    node = next(n for n in graph.ops if "cross_entropy" in str(n.target))
    by_class = next(c for c in choices(node) if c.local == "cross_entropy:classes")
    symbols = {**graph.example_sizes, graph.batch.batch_symbol: 4}
    seconds, sent = local_cost(node, (by_class, by_class), mesh, symbols, machine, differentiable=True)
    logits, labels = (tensor_specs(operand)[0] for operand in operands(node)[:2])
    one_number = labels.concrete(symbols)[0] * logits.dtype.itemsize
    assert sent == pytest.approx(3 * one_number * 2 * 3 / 4)
    assert seconds > 2 * 1e-3
    result = place("gpt2", machine, batch_size=4, mesh=(2, 2), pins={"*": "vocabulary"})
    assert [c.local for c in result.placement.choices[node.name]] == ["cross_entropy:classes"] * 2
    assert result.cost.bridge_seconds >= seconds


def test_an_empty_tensor_stays_whole() -> None:
    class Halves(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = super().forward(x)
            return torch.cat(
                [made[:, :8].tanh(), made[:, 8:]], -1
            )  # nothing is left, as with full rotary embeddings

    graph = trace(Halves(8, 8), torch.zeros(4, 8), loss_fn=lambda output, batch: output.mean())
    machine = cluster(2, 1e9)
    request = FeatureRequest(Job(4), mesh=(2,), pins={"*": "data"})
    result = place_features(graph, costs_of(graph, machine), machine, request)
    assert str(result.placement.choices["linear"][0]) == "S0 R~ R~ -> S0"


class Wide(nn.Module):
    """x [b, 1024]: a weight whose gradient is large."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(1024, 2048, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.w(x).square().mean()
        return loss


def test_the_bound_counts_no_sum_over_ranks_that_have_no_parts() -> None:
    """A sum over 8 nodes of 8 is priced below one over the 8 nodes alone, 8 of which share the links: where the gradient is
    whole on a node, that is no way to sum it."""
    machine = ClusterSpec.parse("dgx-a100:8")
    graph = trace(Wide(), {"x": torch.zeros(2, 1024)})
    pins = {"w": "S0,R", "w.weight": "R,R"}
    request = FeatureRequest(Job(512), mesh=(8, 8), microbatches=1, pins=pins)
    found = place_features(graph, costs_of(graph, machine), machine, request)
    assert found.proof.bound_seconds == pytest.approx(found.cost.seconds, rel=1e-6)
