"""What else could have been, and what a rank runs: each way's cost is that of the whole graph evaluated anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError, UsageError
from cost_models.room import FILLS
from cost_models.units import format_bytes
from partitioner import Plan, partition, trace
from partitioner.explain.explain import _why
from partitioner.pictures.dot import to_dot
from partitioner.pictures.plan_drawing import rank_drawing
from passes.costs.costs import costs_of
from passes.lower.job import Job
from passes.search.feature.evaluate import evaluate
from passes.search.feature.explain import alternatives
from passes.search.feature.setting import Setting
from passes.shard.words import FeaturePlacement, read_choice, read_placements
from tests.distributed.sharded_models import Gpt, Mlp, gpt_batch
from tests.support.made_plans import made_hybrid_plan


class Smaller(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 8)


Golden = Callable[[str, str], None]
BATCH = {name: torch.randn(4, 8) for name in ("x", "y")}
COLUMN_ROW = {"up.weight": "S0", "down.weight": "S1", "x": "R", "y": "R"}


def made(cluster: str = "A100-40GB:2", batch_size: int = 8, **options: object) -> Plan:
    return partition(
        Mlp(),
        ClusterSpec.parse(cluster),
        strategy="feature",
        example_inputs=BATCH,
        batch_size=batch_size,
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return made(pins=COLUMN_ROW)


def test_a_stage_of_several_says_how_it_runs() -> None:
    """What other layouts would cost is known where the whole graph is one stage."""
    planned = made_hybrid_plan(ClusterSpec.parse("A100-40GB:3"), ({}, {"all": 2}), crossing=True)
    found = planned.explain("op5")
    assert found.facts["runs in"].startswith("stage 1 on ranks 1-2 (model.layers.2-3")
    assert found.facts["layout"] == "stage 1: op5 R~ S0 -> S2"
    assert not found.ways
    assert "layout" not in planned.explain("op1").facts


def test_a_stage_on_a_group_says_what_else_it_could_be() -> None:
    """With the model: its layouts on the stage's own devices, everything else as it is."""
    graph = trace(Gpt(tied=False), gpt_batch(4))
    planned = partition(
        graph,
        ClusterSpec.parse("A100-40GB:4"),
        strategy="hybrid",
        fix="pipeline=2 tensor=2 microbatch=2",
        batch_size=8,
    )
    value = next(value for value in planned.values if value.consumers == (1,))
    found = planned.explain("h.1.up.weight")
    assert (found.facts["stage"], found.facts["chosen"]) == (
        "stage 1 on ranks 2-3; the others as they are",
        "stored S0",
    )
    assert {way.layout for way in found.ways} > {"stored S0", "stored S1"}
    assert planned.explain(value.name).facts["stage"].startswith("stage 0")


def test_a_plan_on_fast_devices_is_not_explained_by_slow_ones() -> None:
    """Devices that a plan leaves out slow nothing down; by the slow one's speed it would take 8 times as long."""
    wide = Mlp()
    wide.up, wide.down = nn.Linear(2048, 2048), nn.Linear(2048, 2048)
    fast = {"name": "fast", "count": 2, "device": "H100-80GB", "links": "NVLink4"}
    nodes = [fast, {"name": "slow", "count": 1, "device": "V100-16GB"}]
    cluster = ClusterSpec.from_dict({"version": 1, "nodes": nodes, "network": {"preset": "Ethernet-25G"}})
    batch = {name: torch.zeros(4, 2048) for name in BATCH}
    planned = partition(wide, cluster, strategy="hybrid", example_inputs=batch, batch_size=8192)
    assert [stage.devices for stage in planned.stages] == [(0, 1)]
    chosen = next(way for way in planned.explain("down.weight").ways if way.chosen)
    assert chosen.step_seconds == pytest.approx(planned.prediction.step_seconds, rel=0.1)


def changed(placement: FeaturePlacement, name: str, equals: tuple[str, ...], layout: str) -> FeaturePlacement:
    """``placement`` with the layout that an explanation names."""
    if "->" in layout:
        ways = tuple(map(read_choice, layout.split(" | ")))
        return replace(placement, choices={**placement.choices, **dict.fromkeys(equals, ways)})
    if not layout.startswith("stored"):
        return replace(placement, batch={**placement.batch, name: read_placements(layout)})
    stored, _, state = layout.removeprefix("stored ").partition(", gradient and state ")
    states = {n: p for n, p in placement.sharded_state.items() if n not in equals}
    states |= dict.fromkeys(equals, read_placements(state)) if state else {}
    kept = {**placement.stored, **dict.fromkeys(equals, read_placements(stored))}
    return replace(placement, stored=kept, sharded_state=states)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("name", ["linear", "linear_1", "add", "x", "up.weight", "down.bias"])
def test_every_way_costs_what_the_whole_graph_costs_with_it(name: str, mesh: tuple[int, ...]) -> None:
    ranks = 2 ** len(mesh)
    planned = made(f"A100-40GB:{ranks}", mesh=mesh, batch_size=16, microbatches=2)
    graph = planned._made_with.graph
    assert graph is not None
    (stage,) = planned.stages
    assert stage.sharding is not None
    placement = stage.sharding.placement(stage.devices, 2)
    setting = Setting(planned.cluster, Job(16, "adamw", planned.precision))
    costs = costs_of(graph, planned.cluster)
    found = alternatives(graph, costs, placement, setting, name)
    assert found.chosen.step_seconds == pytest.approx(planned.certificate.objective_seconds, rel=1e-9)
    assert found.ways[0].chosen, "nothing was pinned, and all fits"
    for way in found.ways:
        other = changed(placement, name, found.equals, way.layout)
        cost = evaluate(graph, costs, other, setting)
        assert way.step_seconds == pytest.approx(cost.seconds, rel=1e-9), way.layout
        assert way.memory_bytes == pytest.approx(cost.memory_bytes, rel=1e-9), way.layout


def test_a_plan_from_a_file_is_explained_with_the_model_and_not_without(plan: Plan) -> None:
    loaded = Plan.from_json(plan.model_dump_json())
    assert loaded.explain("linear", Mlp(), example_inputs=BATCH) == plan.explain("linear")
    with pytest.raises(UsageError, match="cannot explain linear without the model"):
        loaded.explain("linear")
    with pytest.raises(PlanError, match="does not fit"):
        loaded.explain("linear", Smaller(), example_inputs=BATCH)


def test_a_tied_parameter_is_explained_by_any_of_its_names() -> None:
    model = Mlp()
    model.tied = model.up  # a module under two names
    tied = partition(
        model, ClusterSpec.parse("A100-40GB:2"), strategy="feature", example_inputs=BATCH, pins=COLUMN_ROW
    )
    assert tied.explain("tied.weight") == tied.explain("up.weight")


def test_reasons(plan: Plan) -> None:
    assert (
        "it was fixed by a pin, or the search ended early: "
        in made(pins={"up.weight": "S1"}).explain("up.weight").why
    )
    assert plan.explain("linear").why.startswith("the cheapest of ")
    assert "The next, " in plan.explain("linear").why
    text = str(plan.explain("linear"))
    assert text.splitlines()[0] == "explained   linear, linear in up"
    assert "\n*  R R R -> R" in text
    data = plan.explain("linear").to_dict()
    assert sum(way["chosen"] for way in data["ways"]) == 1


def test_memory_is_a_reason() -> None:
    """On devices that hold no more than the smallest way, some other ways would be faster."""
    planned = made(mesh=(2,), batch_size=64)
    (stage,) = planned.stages
    assert stage.sharding is not None
    graph = planned._made_with.graph
    assert graph is not None
    placement = stage.sharding.placement(stage.devices, planned.microbatches)
    placement = changed(placement, "up.weight", ("up.weight",), "stored S0")
    setting = Setting(planned.cluster, Job(64, "adamw", planned.precision))
    found = alternatives(graph, costs_of(graph, planned.cluster), placement, setting, "up.weight")
    assert _why(found, FILLS).startswith("it was fixed by a pin")
    tight = replace(found, capacity_bytes=found.chosen.memory_bytes)
    assert not any(map(tight.fits, tight.cheaper))
    assert _why(tight, FILLS).startswith("the cheapest that fits: ")
    room = format_bytes(int(tight.capacity_bytes))
    assert _why(tight, 0.05).endswith(f"on a device, where 5% risk leaves room for {room}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("liner", "did you mean linear"),
        ("up", "'up' is a module of 3 ops and parameters"),
        ("zzzz", "there is no op, parameter or input 'zzzz'"),
    ],
)
def test_names_that_mean_nothing(plan: Plan, name: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan.explain(name)
    assert words in str(caught.value)


def test_a_layer_wise_plan_says_where_and_why() -> None:
    planned = partition(
        Mlp(), ClusterSpec.parse("A100-40GB:2"), example_inputs=BATCH, batch_size=8, pins={"up": 0, "down": 1}
    )
    found = planned.explain("down.weight")
    assert found.facts["runs in"].startswith("stage 1 on rank 1 (down)")
    assert found.ways == ()
    loaded = Plan.from_json(planned.model_dump_json())
    assert "to stage 1" in loaded.explain("gelu").facts["sent"]
    assert loaded.explain("down.weight") == planned.explain("down.weight")
    assert loaded.explain("down") == planned.explain("down")
    with pytest.raises(UsageError, match="parameters and modules are known with the model"):
        loaded.model_copy(update={"outline": None}).explain("down.weight")


def test_an_edited_plan_is_not_explained(plan: Plan) -> None:
    data = plan.to_dict()
    data["stages"][0]["sharding"]["choices"]["linear"] = ["S0 S0 R -> S0"]
    edited = Plan.from_json(json.dumps(data))
    with pytest.raises(PlanError, match="in ways that would give other numbers"):
        edited.explain("linear", Mlp(), example_inputs=BATCH)


def test_what_a_rank_runs(plan: Plan, golden: Golden) -> None:
    graph = plan.graph(rank=1)
    golden("rank_graph_column_row", str(graph))
    assert graph.bridges
    assert all("__" in name for name in graph.bridges)
    drawing = rank_drawing(plan.graph(rank=0).networkx())
    golden("rank_graph_dot", to_dot(drawing))
    assert [node.ops[0] for node in drawing.nodes if node.bridge] == list(graph.bridges)
    with pytest.raises(UsageError, match="there is no graph of rank 2"):
        plan.graph(rank=2)


def test_what_a_rank_of_a_pipeline_runs(golden: Golden) -> None:
    planned = partition(
        Mlp(), ClusterSpec.parse("A100-40GB:2"), example_inputs=BATCH, batch_size=8, pins={"up": 0, "down": 1}
    )
    golden("rank_graph_stages", "\n\n".join(str(planned.graph(rank=rank)) for rank in (0, 1)))
