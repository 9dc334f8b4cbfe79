"""The hybrid search: stages on the groups that were fixed, in the patterns that were fixed, the rest filled in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from cost_models.layout import Partial, Replicate, Shard
from passes.compile import Compiled, compile_graph
from passes.costs.costs import costs_of
from passes.graph.blocks import GATHERS, block_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.placed_graph import on_meshes
from passes.search.hybrid.fix import read_fix
from passes.search.hybrid.request import HybridRequest
from passes.search.infeasible import overflow_bytes
from passes.search.judge import Judge, Simulated
from passes.search.place import place_stages
from passes.trace.trace import trace
from tests.distributed.sharded_models import Gpt, gpt_batch

SAMPLES = 8


class ReadsAgain(nn.Module):
    """The third stage reads the batch's first leaf a second time, and another one, of which the first knows the size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.second = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        y = self.first(x / noise.shape[0]).tanh()
        y = self.second[1](self.second[0](y) + x * noise)
        return self.second[3](self.second[2](y))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    torch.manual_seed(0)
    return trace(Gpt(tied=False, blocks=4), gpt_batch(SAMPLES))


def planned(graph: OpGraph, fix: str, world: int = 8, **further: object) -> Compiled:
    cluster = ClusterSpec.one_node("H100-80GB", world)
    return compile_graph(graph, cluster, HybridRequest(Job(SAMPLES), fix=read_fix(fix), **further))  # type: ignore[arg-type]


def test_stages_are_runs_of_blocks_on_groups_in_the_cluster_s_order(graph: OpGraph) -> None:
    found = planned(graph, "pipeline=2 tensor=2 microbatch=1")
    candidate = found.outcome.best.candidate
    assert candidate.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (candidate.microbatches, candidate.schedule) == (4, "1f1b")
    stages: dict[str, set[int]] = {}
    for op, block in block_of(graph).items():
        stages.setdefault(block, set()).add(candidate.stage_of[op])
    assert [stages[f"h.{number}"] for number in range(4)] == [{0}, {0}, {1}, {1}]
    for sharding in candidate.shardings.values():
        assert (sharding.mesh.axes, sharding.mesh.shape) == (("data", "tensor"), (2, 2))
        assert all(isinstance(layout[0], Shard) and layout[0].dim == 0 for layout in sharding.values.values())


def test_products_go_by_columns_then_by_rows_in_every_stage(graph: OpGraph) -> None:
    candidate = planned(graph, "pipeline=2 tensor=4 borders=h.2").outcome.best.candidate
    for sharding in candidate.shardings.values():
        made = [ways[0].outputs[0] for op, ways in sharding.choices.items() if op.startswith("linear")]
        assert Partial() in made
        assert any(isinstance(layout, Shard) for layout in made)


def test_patterns_are_those_of_the_whole_model_in_a_stage_without_embeddings(graph: OpGraph) -> None:
    """The second stage alone does not know which dimension counts positions."""
    candidate = planned(graph, "pipeline=2 sequence=4 borders=h.2").outcome.best.candidate
    for sharding in candidate.shardings.values():
        norms = {ways[0].outputs[0] for op, ways in sharding.choices.items() if op.startswith("layer_norm")}
        assert norms == {Shard(1)}
        assert {layout[0] for layout in sharding.values.values()} == {Shard(1)}


def test_interleaved_stages_go_round_the_groups(graph: OpGraph) -> None:
    candidate = planned(graph, "pipeline=2 interleave=2 tensor=4").outcome.best.candidate
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)
    assert (candidate.groups, candidate.schedule) == ((first, second, first, second), "interleaved")


@pytest.mark.parametrize("fix", ["pipeline=2 interleave=2 data=4", "pipeline=2 interleave=2"])
def test_stages_of_a_group_read_batches_on_one_mesh_in_one_layout(fix: str) -> None:
    """The stages of a group read unlike leaves of a batch, or the same ones: a rank cuts a batch once."""
    own = trace(ReadsAgain(), (torch.ones(SAMPLES, 8), torch.ones(SAMPLES, 8)), loss_fn=lambda y, b: y.mean())
    found = planned(own, f"{fix} borders=first.2,second.0,second.2")
    candidate = found.outcome.best.candidate
    assert len({s.mesh for number, s in candidate.shardings.items() if number % 2 == 0}) == 1
    placed = on_meshes(own, found.realized.segmentation, candidate.shardings)
    (again, noise) = (given.name for given in own.inputs if given.kind == "batch")
    for rank in range(8):
        spec = placed.batch_of(rank)
        stages = [k for k, group in enumerate(candidate.groups) if rank in group]
        read = {i.name for k in stages for i in placed.graph_of(k).inputs if i.kind == "batch"}
        assert read == ({again, noise} if rank < 4 else set())
        if "data" in fix:
            assert spec.placements == dict.fromkeys(read, (Shard(0),))


class ReservingJudge(Judge):
    """The allocator reserves half of the first device beyond tensors, unless five products of eight are there."""

    def measure(self, candidate: Candidate) -> Simulated:
        found, devices = super().measure(candidate), self.cluster.devices
        first = sum(op.startswith("linear") and stage == 0 for op, stage in candidate.stage_of.items())
        more = [0 if first == 5 else devices[0].memory_bytes // 2, 0]
        peak = [own + extra for own, extra in zip(found.peak_bytes, more, strict=True)]
        over = overflow_bytes(peak, devices)
        return replace(found, peak_bytes=peak, overflow_bytes=over, allocator_bytes=more, beside_bytes=more)


def test_what_the_allocator_reserves_of_one_stage_does_not_rule_out_others() -> None:
    """Five products take more tensors than four do, and are all that fits: smaller devices have no room for them."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    products = trace(model, torch.randn(2, 256), loss_fn=lambda output, _: output.square().mean())
    costs = costs_of(products, cluster := ClusterSpec.local(2))
    request = HybridRequest(Job(16, risk=0.5), fix=read_fix("pipeline=2"), microbatches=4)
    roomy = place_stages(request, Judge(products, costs, cluster, request.job)).best
    memory = round(1.4 * max(roomy.peak_bytes))
    tight = ClusterSpec.local(2, memory=memory)
    best = place_stages(request, ReservingJudge(products, costs, tight, request.job)).best
    assert sum(op.startswith("linear") and not stage for op, stage in best.candidate.stage_of.items()) == 5


def test_unequal_groups_get_work_by_their_devices() -> None:
    model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(8)))
    products = trace(model, torch.randn(2, 768), loss_fn=lambda output, _: output.square().mean())
    request = HybridRequest(Job(6144), fix=read_fix("groups=1,3"))
    candidate = compile_graph(products, ClusterSpec.local(4), request).outcome.best.candidate
    assert candidate.groups == ((0,), (1, 2, 3))
    ops = list(candidate.stage_of.values())
    assert ops.count(0) < ops.count(1)
    assert candidate.shardings.keys() == {1}


def test_borders_are_where_the_user_puts_them(graph: OpGraph) -> None:
    candidate = planned(graph, "borders=h.3", 2).outcome.best.candidate
    first = {op for op, stage in candidate.stage_of.items() if stage == 0}
    paths = {str(graph.nodes[op].meta["module_path"]) for op in first}
    paths = {path.split(".")[1] for path in paths if path.startswith("h.")}
    assert paths == {"0", "1", "2"}
    with pytest.raises(UsageError, match=r"no op of 'h\.9'"):
        planned(graph, "borders=h.9", 2)


def test_pins_of_one_stage_are_of_that_stage_only(graph: OpGraph) -> None:
    pins = {"stage 0:h.0.up.weight": "R"}
    fix = "pipeline=2 tensor=2 microbatch=4"
    stored = planned(graph, fix, 4, pins=pins).outcome.best.candidate.shardings[0].stored
    assert stored["h.0.up.weight"] == (Replicate(),)
    assert stored["h.1.up.weight"] != (Replicate(),)
    with pytest.raises(UsageError, match="the plan has stages 0 to 1"):
        planned(graph, fix, 4, pins={"stage 2:*": "column_row"})
    with pytest.raises(UsageError, match="matches no parameter"):
        planned(graph, fix, 4, pins={"nothing.*": "R"})


def test_zero_and_recompute_are_tried_where_they_are_open_and_memory_is_short(graph: OpGraph) -> None:
    fix, many = "data=2 microbatch=256", Job(512)

    def on(memory_bytes: int, fix: str) -> Compiled:
        device = {"preset": "H100-80GB", "memory": memory_bytes, "memory_process": 0}
        node = {"name": "n", "count": 2, "device": device, "links": "NVLink4"}
        return compile_graph(
            graph, ClusterSpec.from_dict({"nodes": [node]}), HybridRequest(many, fix=read_fix(fix))
        )

    easy = on(2**30, fix)
    best = easy.outcome.best.candidate
    assert not best.recomputed_blocks
    assert not best.shardings[0].sharded_state
    needed = int(max(easy.realized.simulation.peak_bytes))
    assert on(needed - 2**10, fix).outcome.best.candidate.recomputed_blocks
    slightly = on(needed - 2**10, f"{fix} recompute=none").outcome.best.candidate
    own = slightly.shardings[0]
    kept = [*own.stored.values(), *own.sharded_state.values()]
    assert any(isinstance(placement, Shard) for layout in kept for placement in layout), "ZeRO-1 or 3"
    assert not slightly.recomputed_blocks
    with pytest.raises(InfeasibleError, match="does not fit cluster with data=2"):
        on(needed // 2, f"{fix} zero=0 recompute=none")


@pytest.mark.parametrize("memory_bytes", [2**30, 2**20])
def test_replicas_keep_parameters_whole_that_they_cannot_part(graph: OpGraph, memory_bytes: int) -> None:
    """Only the head's 24 rows divide by three: no other is in parts, be there memory enough or not."""
    device = {"preset": "H100-80GB", "memory": memory_bytes, "memory_process": 0}
    node = {"name": "n", "count": 3, "device": device, "links": "NVLink4"}
    cluster = ClusterSpec.from_dict({"nodes": [node]})
    request = HybridRequest(Job(3072), fix=read_fix("data=3 microbatch=1024 recompute=full"))
    if memory_bytes == 2**20:
        with pytest.raises(InfeasibleError, match="does not fit cluster with data=3"):
            compile_graph(graph, cluster, request)
        return
    sharding = compile_graph(graph, cluster, request).outcome.best.candidate.shardings[0]
    assert {name for name, layout in sharding.stored.items() if layout != (Replicate(),)} <= {"head.weight"}


def test_parameters_are_gathered_again_before_blocks_are_computed_again() -> None:
    """A small batch: what ZeRO-3 gathers is most of what is kept."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    graph = trace(model, torch.randn(2, 512), loss_fn=lambda output, _: output.square().mean())
    fix, few = "data=2 zero=3 microbatch=4", Job(32)

    def on(memory_bytes: int, fix: str) -> Compiled:
        device = {"preset": "H100-80GB", "memory": memory_bytes, "memory_process": 0}
        node = {"name": "n", "count": 2, "device": device, "links": "NVLink4"}
        return compile_graph(
            graph, ClusterSpec.from_dict({"nodes": [node]}), HybridRequest(few, fix=read_fix(fix))
        )

    kept, again = (on(2**30, f"{fix} recompute={kind}") for kind in ("none", "gathers"))
    assert again.outcome.best.candidate.recomputed_blocks == ((GATHERS,),)
    needed = int(max(again.realized.simulation.peak_bytes))
    assert needed < max(kept.realized.simulation.peak_bytes)
    assert kept.realized.simulation.step_seconds < again.realized.simulation.step_seconds
    assert on(2**30, fix).outcome.best.candidate.recomputed_blocks == ()
    assert on(needed + 2**12, fix).outcome.best.candidate.recomputed_blocks == ((GATHERS,),)


def test_choosing_where_to_recompute_is_never_slower_than_recomputing_everywhere(graph: OpGraph) -> None:
    fix = "pipeline=2 interleave=2 tensor=1 microbatch=256"

    def on(memory_bytes: int, fix: str) -> Compiled:
        device = {"preset": "H100-80GB", "memory": memory_bytes, "memory_process": 0}
        node = {"name": "n", "count": 2, "device": device, "links": "NVLink4"}
        request = HybridRequest(Job(2048), fix=read_fix(fix))
        return compile_graph(graph, ClusterSpec.from_dict({"nodes": [node]}), request)

    none, full = (on(2**30, f"{fix} recompute={kind}").realized.simulation for kind in ("none", "full"))
    most, least = max(none.peak_bytes), max(full.peak_bytes)
    assert least < most
    for memory_bytes in (int(least), int(least + most) // 2):
        found = on(memory_bytes, fix)
        assert any(found.outcome.best.candidate.recomputed_blocks)
        assert found.realized.simulation.step_seconds <= full.step_seconds


def test_a_schedule_that_the_groups_cannot_have_is_refused(graph: OpGraph) -> None:
    with pytest.raises(UsageError, match="interleaved on 2 groups needs"):
        planned(graph, "pipeline=2", 4, schedule="interleaved")


def test_gpus_may_have_one_queue_for_everything(graph: OpGraph) -> None:
    """Receives then come late enough, and the proof says so; the user may say that there are several queues."""
    fix = "pipeline=2 tensor=2 microbatch=2"
    one, several = planned(graph, fix, 4), planned(graph, f"{fix} queues=several", 4)
    assert one.outcome.best.candidate.one_queue
    assert not several.outcome.best.candidate.one_queue
    assert any("for everything" in rule for rule in one.proof.rules)
    assert not any("for everything" in rule for rule in several.proof.rules)


class Headed(nn.Module):
    """Two products and a head of 5 classes, which 4 devices cannot share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, width), nn.Linear(width, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.head(self.down(self.up(x).relu())).flatten(0, 1), x[..., 0].flatten().long()
        )


def test_a_degree_must_hold_in_one_stage_and_in_others_where_it_can() -> None:
    example = {"x": torch.rand(SAMPLES, 4, 8)}
    found = planned(
        trace(Headed(16), example, loss_reduction="mean"), "pipeline=2 tensor=4 borders=head"
    ).outcome.best
    first, second = (found.candidate.shardings[number] for number in range(2))
    assert first.stored["up.weight"] == (Shard(0),)
    assert second.stored["head.weight"] == (Replicate(),)
    with pytest.raises(UsageError, match="cannot shard any stage so"):
        planned(trace(Headed(5), example, loss_reduction="mean"), "pipeline=2 tensor=4 borders=down")
