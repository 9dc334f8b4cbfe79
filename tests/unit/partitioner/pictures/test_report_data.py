"""The data of a report against the plan and its simulated step: nothing drawn contradicts what was predicted."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError, UsageError
from partitioner.api import partition
from partitioner.commands.report import report
from partitioner.pictures import what_if
from partitioner.pictures.data import report_data
from partitioner.pictures.lanes import Lane, Lanes, Span, critical_path, lanes_of
from partitioner.pictures.ops import op_graph_data
from partitioner.pictures.summary import division, summary_data
from partitioner.plan import Plan
from partitioner.record.other_rates import on_cluster, with_links
from partitioner.record.outline import ModelOutline, OutlineKind
from partitioner.record.rebuild import at_costs_of, proved_programs, simulate_plan
from partitioner.report.sharding import collective_name
from passes.shard.sent import UpdateGather
from passes.trace.trace import trace
from tests.support.made_plans import made_hybrid_plan, made_plan

Data = dict[str, Any]
ROUNDED = 1e-4
"""The share of a step that the six digits of a picture's moments may be off, with room."""


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    graph = trace(Blocks(), torch.randn(8, 16))

    def planned(devices: int, **options: Any) -> Plan:
        given = {"batch_size": 8, "check": "off", "time_limit_seconds": 5.0, **options}
        return partition(graph, ClusterSpec.local(devices), **{"strategy": "layer", **given})

    return {
        "pipeline": planned(2, min_stages=2, schedule="zb-v", microbatches=4),
        "uneven": planned(2, min_stages=2, batch_size=9, microbatches=2, schedule="1f1b"),
        "one": planned(1),
        "sharded": planned(2, strategy="feature", mesh=(2,), pins={"*": "zero3"}, microbatches=2),
    }


@pytest.fixture(scope="module")
def drawn(plans: dict[str, Plan]) -> dict[str, Data]:
    return {name: report_data([plan])["plans"][0] for name, plan in plans.items()}


NAMES = ("pipeline", "uneven", "one", "sharded")


@pytest.mark.parametrize("name", NAMES)
def test_the_division_sums_to_the_step(plans: dict[str, Plan], drawn: dict[str, Data], name: str) -> None:
    division = drawn[name]["summary"]["division"]
    assert sum(row["seconds"] for row in division) == pytest.approx(plans[name].prediction.step_seconds)
    assert sum(row["share"] for row in division) == pytest.approx(1.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_critical_path_goes_from_the_start_to_the_end(plans: dict[str, Plan], name: str) -> None:
    lanes = lanes_of(simulate_plan(plans[name]))
    path, _ = critical_path(lanes)
    spans = [lanes.lanes[lane].spans[index] for lane, index in path]
    room = ROUNDED * lanes.step_seconds
    assert spans[0].start_seconds <= room
    assert spans[-1].end_seconds == pytest.approx(lanes.step_seconds)
    for before, after in pairwise(zip(path, spans, strict=True)):
        assert after[1].start_seconds >= before[1].end_seconds - room
        arrived = [
            transfer
            for transfer in lanes.transfers
            if lanes.lane_of[transfer.message.source] == before[0][0]
            and lanes.lane_of[transfer.message.target] == after[0][0]
            and transfer.end_seconds <= after[1].start_seconds + room
        ]
        assert arrived or after[1].start_seconds <= before[1].end_seconds + room


def test_lanes_hold_every_used_device_once(plans: dict[str, Plan], drawn: dict[str, Data]) -> None:
    for name, plan in plans.items():
        lanes = drawn[name]["timeline"]["lanes"]
        assert sorted(rank for lane in lanes for rank in lane["ranks"]) == list(plan.used_devices)


@pytest.mark.parametrize("name", NAMES)
def test_memory_stacks_sum_to_the_simulated_curve(
    plans: dict[str, Plan], drawn: dict[str, Data], name: str
) -> None:
    simulation = simulate_plan(plans[name])
    lanes = {lane["label"]: lane["ranks"][0] for lane in drawn[name]["timeline"]["lanes"]}
    for lane in drawn[name]["memory"]["lanes"]:
        rank, stacks = lanes[lane["label"]], np.array(lane["stacks"])
        curve = simulation.memory[rank]
        assert stacks.min() >= 0
        assert stacks.sum(axis=0).max() == pytest.approx(
            plans[name].prediction.peak_memory_bytes[str(rank)], abs=8
        )
        assert stacks.sum(axis=0)[-1] == pytest.approx(curve.bytes_held[-1], abs=8)
        assert stacks[lane["kinds"].index("activations"), -1] == 0


def test_a_single_stage_makes_no_values_for_others(drawn: dict[str, Data]) -> None:
    for name in ("one", "sharded"):
        (lane,) = drawn[name]["memory"]["lanes"]
        assert max(lane["stacks"][lane["kinds"].index("values between stages")]) <= len(lane["kinds"])


def test_modules_are_drawn_with_their_classes(drawn: dict[str, Data]) -> None:
    tree = drawn["one"]["graph"]["tree"]
    assert tree["class"] == "Blocks"
    (blocks,) = [child for child in tree["children"] if child["label"] == "blocks"]
    assert (blocks["class"], blocks["children"][0]["class"]) == ("ModuleList", "Sequential")


def test_the_page_explains_an_op_as_the_command_does(plans: dict[str, Plan], drawn: dict[str, Data]) -> None:
    plan, graph = plans["pipeline"], drawn["pipeline"]["graph"]
    loaded, known = Plan.from_json(plan.model_dump_json()), graph["explained"]
    for index, op in enumerate(graph["ops"]):
        name, stage = op[0], op[2]
        facts = dict(loaded.explain(name).facts)
        assert facts.pop("explained") == f"{name}, an op"
        shown = {
            "runs in": known["runs_in"][stage],
            "slowest": known["slowest"],
            "sent": known["sent"].get(str(index)),
            "why": known["why"],
            "try": (known["try"][stage] or "").replace("NAME", name),
        }
        wanted = shown if stage >= 0 else {"why": known["everywhere"]}
        assert facts == {label: text for label, text in wanted.items() if text}
    assert known["sent"]


def test_an_op_that_every_stage_computes_has_no_layout_of_one_of_them() -> None:
    plan = made_hybrid_plan(ClusterSpec.parse("A100-40GB:4"), ({"all": 2}, {"all": 2}))
    first = plan.stages[0].ops[0]
    names = tuple(op for stage in plan.stages for op in stage.ops)
    outline = ModelOutline(
        modules=("",), sources=("",), inputs=(), names=names,
        kinds=(OutlineKind(op="op", shape=(), dtype="", forward_flops=0, backward_flops=0, output_bytes=0, saved_bytes=0,
                      forward_seconds=0, backward_seconds=0),),
        kind_of=(0,) * len(names), module_of=(0,) * len(names), source_of=(0,) * len(names),
        read_counts=(0,) * len(names), reads=(),
    )  # fmt: skip
    stages = (plan.stages[0].model_copy(update={"ops": plan.stages[0].ops[1:]}), *plan.stages[1:])
    shared = plan.model_copy(update={"stages": stages, "recomputed": (first,)})
    for one, layout in ((plan, True), (shared, False)):
        graph = op_graph_data(one, outline)
        assert graph is not None
        assert (graph["ops"][0][6] >= 0) == layout


def test_every_bridge_of_the_plan_is_drawn(plans: dict[str, Plan], drawn: dict[str, Data]) -> None:
    for name, plan in plans.items():
        wanted = Counter[tuple[str, bool, int]]()
        for transfer in plan.transfers:
            ways = (False, True) if transfer.gradient else (False,)
            wanted.update(("send/recv", way, transfer.size_bytes) for way in ways)
        for stage in plan.stages:
            for item in () if stage.sharding is None else stage.sharding.collectives:
                wanted[collective_name(item.kind), item.backward, item.size_bytes] += 1
        bridges = drawn[name]["graph"]["bridges"]
        assert Counter((b["kind"], b["gradient"], b["size_bytes"]) for b in bridges) == wanted
        if name != "one":
            assert wanted


def test_bridges_between_stages_lie_between_the_stages_named(drawn: dict[str, Data]) -> None:
    graph = drawn["pipeline"]["graph"]
    for bridge in graph["bridges"]:
        source, target = (graph["ops"][bridge[end]][2] for end in ("from", "to"))
        assert source > target if bridge["gradient"] else source < target


def test_the_tree_holds_every_op_once_and_folds_equal_blocks(drawn: dict[str, Data]) -> None:
    def ops(node: Data) -> list[int]:
        if "members" in node:
            return [op for member in node["members"] for op in ops(member)]
        return [*node["ops"], *(op for child in node["children"] for op in ops(child))]

    for data in drawn.values():
        graph = data["graph"]
        assert sorted(ops(graph["tree"])) == list(range(len(graph["ops"])))
    (blocks,) = (c for c in drawn["one"]["graph"]["tree"]["children"] if c["name"] == "blocks")
    assert [child["label"] for child in blocks["children"]] == ["0–5 ×6"]


def test_blocks_in_other_layouts_are_no_fold(plans: dict[str, Plan]) -> None:
    plan = plans["sharded"]
    (stage,) = plan.stages
    assert plan.outline is not None
    assert stage.sharding is not None
    paths = [plan.outline.modules[module] for module in plan.outline.module_of]
    op = next(
        name for name, path in zip(plan.outline.names, paths, strict=True) if path.startswith("blocks.3.")
    )
    ways = dict(stage.sharding.choices)
    ways[op] = ("R R R -> R",) if ways[op] != ("R R R -> R",) else ("S0 R R -> S0",)
    sharding = stage.sharding.model_copy(update={"choices": ways})
    other = plan.model_copy(update={"stages": (stage.model_copy(update={"sharding": sharding}),)})
    tree = report_data([other])["plans"][0]["graph"]["tree"]
    (blocks,) = (child for child in tree["children"] if child["name"] == "blocks")
    assert [child["label"] for child in blocks["children"]] == ["0–2 ×3", "3", "4–5 ×2"]


@pytest.mark.parametrize("name", ["pipeline", "sharded"])
def test_the_same_links_give_the_same_step_and_faster_ones_a_shorter_one(
    plans: dict[str, Plan], name: str
) -> None:
    plan = plans[name]
    assert plan.cluster.path(0, 1).links  # worked out before: copies must not know it
    groups = proved_programs(plan)

    def step(factor: float) -> float:
        cluster = with_links(plan.cluster, factor)
        assert cluster is not None
        other = on_cluster(plan, cluster)
        return simulate_plan(other, at_costs_of(other, groups)).step_seconds

    assert step(1.0) == pytest.approx(plan.prediction.step_seconds)
    assert step(0.01) > step(1.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_what_if_curve_passes_through_the_plan(
    plans: dict[str, Plan], drawn: dict[str, Data], name: str
) -> None:
    for series in drawn[name]["what_if"]["series"]:
        (own,) = (point for point in series["points"] if point["x"] == 1)
        assert own["step_seconds"] == plans[name].prediction.step_seconds


def test_a_larger_batch_takes_more_memory(plans: dict[str, Plan]) -> None:
    plan = plans["pipeline"]
    batch = plan.state_parts["batch"]
    assert sum(batch.values())
    state = what_if._state_with(plan, 2.0)["state_bytes"]
    assert {rank: state[rank] - plan.state_bytes[rank] for rank in batch} == batch


def test_copies_of_a_plan_that_does_not_fit_do_not_fit(plans: dict[str, Plan]) -> None:
    plan = plans["pipeline"]
    peaks = dict.fromkeys(plan.prediction.peak_memory_bytes, 1 << 60)
    prediction = plan.prediction.model_copy(update={"peak_memory_bytes": peaks})
    for one, fits in ((plan, True), (plan.model_copy(update={"prediction": prediction}), False)):
        (curve,) = what_if._copies(one)
        assert {point["fits"] for point in curve["points"]} == {fits}


def test_the_reasons_are_in_plain_words_and_the_exact_ones_beside_them(drawn: dict[str, Data]) -> None:
    why = drawn["pipeline"]["summary"]["sentences"][0]
    assert "downsets" not in " ".join(why["text"])
    assert "cuts of the program order" in why["exactly"][0]


def test_whoever_waits_for_a_sum_of_gradients_is_told_for_whom() -> None:
    early = Lane((0,), (Span(0.0, 1.0, "B", 0, 0), Span(3.0, 4.0, "R", -1, -1)))
    late = Lane((1,), (Span(0.0, 3.0, "B", 1, 0), Span(3.0, 4.0, "R", -1, -1)))
    _, waits = critical_path(Lanes(4.0, (early, late), ()))
    assert waits == {(0, 1): "waits for rank 1, the last that comes to this sum of gradients"}


def test_a_faster_alternative_is_not_hidden_behind_the_word_best(plans: dict[str, Plan]) -> None:
    plan = plans["sharded"]
    why = summary_data(plan, lanes_of(simulate_plan(plan)))["sentences"][0]["text"]
    faster = [
        a for a in plan.alternatives if a.feasible and (a.step_seconds or 9) < plan.prediction.step_seconds
    ]
    assert any("it is faster, but not the kind" in line for line in why) == bool(faster)


def test_plans_from_before_outlines_have_no_graph_and_whole_state(plans: dict[str, Plan]) -> None:
    old = plans["pipeline"].model_copy(update={"outline": None, "state_parts": {}})
    (data,) = report_data([old])["plans"]
    assert data["graph"] is None
    assert data["memory"]["lanes"][0]["kinds"][0] == "state"


def test_parts_of_the_state_that_do_not_add_up_are_refused(plans: dict[str, Plan]) -> None:
    given = plans["pipeline"].to_dict()
    given["state_parts"].pop("optimizer")
    with pytest.raises(PlanError, match="bytes of rank 0 in all"):
        Plan.from_json(json.dumps(given))


def test_modules_without_end_inside_of_each_other_are_refused(plans: dict[str, Plan]) -> None:
    given = plans["pipeline"].to_dict()
    given["outline"]["modules"][0] = "a." * 5000 + "b"
    with pytest.raises(PlanError, match="inside of each other"):
        Plan.from_json(json.dumps(given))


def test_parameters_put_together_after_the_update_are_communication(plans: dict[str, Plan]) -> None:
    plan = plans["sharded"]
    (stage,) = plan.stages
    assert stage.sharding is not None
    (axis,) = stage.sharding.axes
    gather = UpdateGather(axis=axis, parameters=(), size_bytes=8, seconds=0.5)
    sharding = stage.sharding.model_copy(update={"gathers": (gather,)})
    update = {rank: seconds + 0.5 for rank, seconds in plan.optimizer_seconds.items()}
    stages = (stage.model_copy(update={"sharding": sharding}),)
    other = plan.model_copy(update={"stages": stages, "optimizer_seconds": update})
    before, after = (
        {row["kind"]: row["seconds"] for row in division(one, lanes_of(simulate_plan(one)))}
        for one in (plan, other)
    )
    assert after["communication"] == pytest.approx(before["communication"] + 0.5)
    assert after["optimizer"] == pytest.approx(before["optimizer"])


def test_links_between_nodes_that_nothing_is_sent_on_have_no_curve() -> None:
    cluster = ClusterSpec.preset("dgx-h100", nodes=2)
    for ranks, titles in (((0, 1), []), ((0, 8), ["Bandwidth between nodes"])):
        plan = made_plan(cluster, ranks)
        assert [series["title"] for series in what_if._links(plan, proved_programs(plan))] == titles


def test_a_report_never_takes_the_place_of_its_plan(plans: dict[str, Plan], tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    plans["one"].save(file)
    before = file.read_text()
    with pytest.raises(UsageError, match="would be lost"):
        report(file, quiet=True)
    assert file.read_text() == before
