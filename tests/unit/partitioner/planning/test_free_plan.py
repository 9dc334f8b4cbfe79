"""Free plans through ``partition``: what they keep, refuse, predict and say; their files; the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, PlanError, UsageError
from partitioner import Plan, partition
from partitioner.cli import run_command
from partitioner.record.rebuild import plan_code
from passes.split.split import Split
from passes.trace.trace import trace
from tests.support import bad_workloads
from tests.support.made_plans import MIB, made_plan

WORKLOAD = f"{Path(bad_workloads.__file__)}:net"
TWO = ClusterSpec.parse("A100-40GB:2")
Golden = Callable[[str, str], None]


class Branches(nn.Module):
    """x [b, 8] -> two branches, a product of both, and a scale from the input at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        product = self.left(x).tanh() * self.right(x).sigmoid()
        loss: Tensor = (self.head(product) * x).square().mean()
        return loss


GRAPH = trace(Branches(), (torch.randn(4, 8),))
PINS = {"left": 0, "right": 1, "head": 0, "mul": 1}
SPLIT = {"left": (12, 4)}


def made(cluster: ClusterSpec = TWO, **options: Any) -> Plan:
    fixed: dict[str, Any] = {"strategy": "free", "batch_size": 8, "time_limit_seconds": 0.3}
    return partition(GRAPH, cluster, **{"strategy": "layer", **fixed, **options})


@pytest.fixture(scope="module")
def pinned() -> Plan:
    return made(pins=PINS)


@pytest.fixture(scope="module")
def split() -> Plan:
    return made(splits=SPLIT, pins={"linear_b0": 0, "linear_b1": 1})


def same(plan: Plan) -> None:
    """The file predicts what the plan does."""
    loaded = Plan.from_json(plan.model_dump_json())
    simulation = loaded.simulate()
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert simulation.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-12)
    assert int(sum(simulation.pair_bytes.values())) == plan.prediction.communication_bytes
    peaks = [int(peak) for peak in simulation.peak_bytes]
    assert peaks == [plan.prediction.peak_memory_bytes[str(rank)] for rank in range(len(peaks))]


# ------------------------------------------------------------------------------------------ pins


def test_pins_are_kept_and_the_devices_revisited(pinned: Plan) -> None:
    same(pinned)
    assert {name: pinned.placements[name] for name in ("linear", "tanh", "linear_1", "mul", "linear_2")} == {
        "linear": (0,),
        "tanh": pinned.placements["tanh"],
        "linear_1": (1,),
        "mul": (1,),
        "linear_2": (0,),
    }
    order = [stage.devices for stage in pinned.stages]
    assert order.count((0,)) > 1, "device 0 before and after device 1"
    sent = {(t.value, t.source, t.target) for t in pinned.transfers}
    assert ("mul", 1, 0) in sent


def test_a_pin_of_everything_is_the_plan_of_one_device() -> None:
    plan = made(pins={"*": 1})
    assert set(plan.placements.values()) == {(1,)}
    assert (plan.used_devices, plan.prediction.messages, len(plan.stages)) == ((1,), 0, 1)
    same(plan)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"left": 2}, "'left' is pinned to device 2; A100-40GB:2 has devices 0 to 1"),
        ({"left": -1}, "'left' is pinned to device -1; A100-40GB:2 has devices 0 to 1"),
        ({"left": "S0"}, "pin 'left': the device 'S0' is not a number"),
        ({"left": True}, "pin 'left': the device True is not a number"),
        ({"lefft": 0}, "'lefft' matches no module path and no op"),
        ({"left": 0, "linear": 1}, "linear matches 'left'"),
    ],
)
def test_pins_that_cannot_hold_are_refused(pins: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        made(pins=pins)
    assert words in str(caught.value)


class Pieces(nn.Module):
    """One product taken into three pieces, each with its own reader."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        p, q, r = self.first(x).chunk(3, dim=-1)
        loss: Tensor = (self.a(p) + self.b(q) * self.c(r)).square().mean()
        return loss


def test_a_tuple_is_taken_apart_where_it_was_made() -> None:
    """Its pieces go to different devices, so that by what they reach they would be segments of their own."""
    graph = trace(Pieces(), (torch.randn(4, 8),))
    plan = partition(
        graph,
        ClusterSpec.parse("A100-40GB:3"),
        strategy="free",
        batch_size=8,
        pins={"first": 0, "a": 1, "b": 2, "c": 0},
        time_limit_seconds=0.5,
    )
    same(plan)
    apart = next(stage.ops for stage in plan.stages if "chunk" in stage.ops)
    assert {"getitem", "getitem_1", "getitem_2"} <= set(apart)
    assert "send(%getitem" in str(plan.graph(rank=plan.placements["chunk"][0]))


# ------------------------------------------------------------------------------------------ objective, comparison


def test_latency_runs_the_batch_in_one_piece_and_never_slower_than_layers() -> None:
    plan = made(objective="latency")
    layers = partition(GRAPH, TWO, batch_size=8, microbatches=1, strategy="layer")
    assert plan.microbatches == 1
    assert plan.prediction.step_seconds <= layers.prediction.step_seconds * (1 + 1e-12)
    assert made(objective="latency", microbatches=2, pins={"*": 0}).microbatches == 2


@pytest.mark.parametrize("cluster", ["A100-40GB:1", "local:3"])
def test_never_slower_than_layers_whatever_the_devices(cluster: str) -> None:
    machine = ClusterSpec.parse(cluster)
    plan = made(machine)
    same(plan)
    layers = partition(GRAPH, machine, batch_size=8, strategy="layer")
    assert plan.prediction.step_seconds <= layers.prediction.step_seconds * (1 + 1e-12)
    assert plan.certificate.bound_seconds <= plan.certificate.objective_seconds * (1 + 1e-9)
    assert plan.certificate.simulated_lower_bound_seconds <= plan.prediction.step_seconds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "speed"}, "objective 'speed' is not one of: throughput, latency"),
        ({"strategy": "layer", "objective": "latency"}, "objective='latency' is for strategy \"free\""),
        ({"strategy": "feature", "splits": SPLIT}, 'is for strategy "free"'),
        ({"schedule": "1f1b"}, "schedule='1f1b' is about stages"),
        ({"min_stages": 2}, "min_stages=2 is about stages"),
        ({"mesh": (2,)}, "strategy 'free' has none"),
    ],
)
def test_options_of_another_strategy_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        made(**options)
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------ blocks of neurons


def test_blocks_lie_where_they_are_pinned(split: Plan) -> None:
    same(split)
    assert {record.op: record.sizes for record in split.splits} == dict.fromkeys(
        ("linear", "linear_1"), (12, 4)
    ), "the product of both branches asks for equal blocks"
    assert (split.placements["linear_b0"], split.placements["linear_b1"]) == ((0,), (1,))
    assert "linear" not in split.placements
    assert "free (2 ops in blocks of neurons)" in str(split)
    assert split.model.ops == len(GRAPH), "the model's own, not of what it is run as"


def test_an_op_is_split_by_its_name_as_well() -> None:
    plan = made(splits={"linear": (4, 4, 8)})
    assert [record.sizes for record in plan.splits] == [(4, 4, 8)]
    same(plan)


def test_a_dimension_of_an_op_is_split_by_its_number() -> None:
    plan = made(splits={"linear:1": (4, 12)})
    assert [(s.op, s.dim, s.sizes) for s in plan.splits] == [("linear", 1, (4, 12))]


def test_nothing_is_split_where_nothing_shall_be() -> None:
    assert made(splits={}).splits == ()


def test_blocks_fit_where_the_whole_does_not() -> None:
    """A layer of 300 x 300 with AdamW takes 1.4 MiB; no device has more than 1 MiB."""
    graph = trace(
        nn.Sequential(nn.Linear(300, 300)), (torch.randn(4, 300),), loss_fn=lambda y, x: y.square().mean()
    )
    machine = ClusterSpec.local(4, memory="1MiB")
    with pytest.raises(InfeasibleError, match="no free placement"):
        partition(
            graph, machine, strategy="free", batch_size=4, splits={"linear": (300,)}, time_limit_seconds=0.3
        )
    plan = partition(
        graph, machine, strategy="free", batch_size=4, splits={"linear": (75,) * 4}, time_limit_seconds=0.5
    )
    assert len(plan.used_devices) > 1
    assert max(plan.prediction.peak_memory_bytes.values()) <= 1 << 20
    same(plan)


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"left": (12, 5)}, "left has 16 neurons; 12+5 is 17"),
        ({"lefft": (8, 8)}, "'lefft' is no op, and matches nothing that can be split (close: left)"),
        ({"linear": (8, 9)}, "blocks of 8, 9 elements do not make up the 16"),
        ({"left": ()}, "split 'left': () are no sizes such as (60, 40)"),
        ({"left": (16, 0)}, "split 'left': (16, 0) are no sizes such as (60, 40)"),
        ({"left": (8.0, 8.0)}, "split 'left': (8.0, 8.0) are no sizes such as (60, 40)"),
        ({"left": 16}, "split 'left': 16 are no sizes such as (60, 40)"),
        ({0: (8, 8)}, "split 0: expected the name of an op"),
        ([("left", (8, 8))], "expected sizes by name such as {"),
        ({"mean": (1, 1)}, "mean"),
    ],
)
def test_splits_that_cannot_be_are_refused(splits: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        made(splits=splits)
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------ what is said


def test_what_changed_is_said(pinned: Plan, split: Plan) -> None:
    assert pinned.diff(pinned) == ""
    text = made(pins={**PINS, "mul": 0}).diff(pinned)
    assert "moved to another device: " in text
    assert "mul" in text
    blocks = pinned.diff(split)
    assert "only in the first: " in blocks
    assert "linear_b0" in blocks


def test_an_op_and_a_parameter_are_explained(pinned: Plan) -> None:
    facts = pinned.explain("mul").facts
    where = next(i for i, stage in enumerate(pinned.stages) if "mul" in stage.ops)
    assert facts["runs in"].startswith(f"stage {where} on rank 1")
    assert "mul (" in facts["sent"]
    assert pinned.explain("right.weight").facts["runs in"].endswith("a micro-batch")
    with pytest.raises(UsageError, match="there is no op"):
        pinned.explain("mull")


def test_other_devices_are_simulated_with_everything_else_as_it_is(pinned: Plan, split: Plan) -> None:
    explained = pinned.explain("mul")
    own = next(way for way in explained.ways if way.chosen)
    (other,) = [way for way in explained.ways if not way.chosen]
    assert own.layout.startswith("rank 1")
    assert own.step_seconds == pinned.prediction.step_seconds
    moved = made(pins={"left": 0, "right": 1, "head": 0, "mul": 0, **_rest(pinned)})
    assert other.step_seconds >= moved.prediction.step_seconds  # whose segments were merged
    assert other.layout in explained.why
    blocks = split.explain("left.weight")
    assert {way.layout[:6] for way in blocks.ways} == {"rank 0", "rank 1", "ranks "}


def _rest(plan: Plan) -> dict[str, int]:
    """Where everything else is."""
    fixed = {"mul"} | {op for stage in plan.stages for op in stage.ops if op.startswith("linear")}
    return {op: ranks[0] for op, ranks in plan.placements.items() if op not in fixed}


def test_what_a_rank_runs_and_sends(pinned: Plan, split: Plan) -> None:
    text = str(pinned.graph(rank=1))
    assert "send(%mul)" in text
    assert "parameter right.weight" in text
    assert "left.weight" not in text
    blocks = str(split.graph(rank=1))
    assert "%linear_b1" in blocks
    assert "[4, 8]" in blocks, "the part of left.weight that the device holds"
    assert "%linear_b0 " not in blocks
    with pytest.raises(UsageError):
        pinned.graph(rank=2)


@pytest.mark.usefixtures("fixed_spreads")
def test_the_table(golden: Golden) -> None:
    """Device 0 is revisited; one op is in blocks."""
    record = Split(op="up", dim=-1, sizes=(60, 40))
    certificate = replace(
        made_plan(TWO).certificate,
        objective="busiest device, messages included",
        gap=0.031,
        bound_seconds=0.2326,
        solver_status="stalled",
        space="every placement of 30 units (90 ops; what must share a device is one) on 2 devices, 8 micro-batches",
    )
    plan = made_plan(
        TWO,
        (0, 1, 0),
        peak_bytes=900 * MIB,
        strategy="free",
        schedule="list",
        splits=(record,),
        certificate=certificate,
    )
    golden("plan_free", str(plan))


# ------------------------------------------------------------------------------------------ files


def damaged(plan: Plan, change: Callable[[dict[str, Any]], None]) -> str:
    """The complaint about the plan's file after ``change``."""
    data = json.loads(plan.model_dump_json())
    change(data)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(strategy="layer"), "splits: a plan of strategy 'layer' has none"),
        (lambda data: data["splits"][0].update(sizes=[16, 0]), "splits[0].sizes[1]"),
        (lambda data: data["splits"][0].update(sizes=[]), "splits[0].sizes: there is none"),
        (lambda data: data["splits"][0].update(sizes=["12", "x"]), "splits[0].sizes"),
        (lambda data: data["splits"][0].update(dim="last"), "splits[0].dim"),
        (lambda data: data["splits"][0].update(kind="rows"), "splits[0].kind"),
        (
            lambda data: data["splits"].append(dict(data["splits"][0])),
            "splits[2].op: 'linear' is split by splits[0] as well",
        ),
        (lambda data: data.update(splits=3), "splits"),
        (lambda data: data["stages"][0].update(devices=[7]), "stages[0].devices: rank 7"),
    ],
)
def test_a_damaged_file_is_refused_with_its_key(
    split: Plan, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    assert words in damaged(split, change)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"op": "linear", "dim": -1, "sizes": (12, 5)}, "linear"),
        ({"op": "linear", "dim": 7, "sizes": (12, 4)}, "linear"),
        ({"op": "absent", "dim": -1, "sizes": (12, 4)}, "absent"),
    ],
)
def test_splits_that_the_model_does_not_have_are_refused(
    split: Plan, record: dict[str, Any], words: str
) -> None:
    plan = split.model_copy(update={"splits": (Split(**record),)})
    with pytest.raises(PlanError, match="splits ops in ways that") as caught:
        plan_code(plan, GRAPH)
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------ command line

PLAN = ["plan", WORKLOAD, "--cluster", "local:2", "--batch-size", "8", "--strategy", "free"]


def test_the_command_line_plans_freely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    options = ["--pin", "first=1", "--pin", "second=0", "--objective", "latency", "--time-limit", "0.5"]
    assert run_command([*PLAN, *options, "-o", str(file)]) == 0
    assert "free, " in capsys.readouterr().out
    plan = Plan.load(file)
    assert (plan.strategy, plan.microbatches) == ("free", 1)
    assert {plan.placements["linear"], plan.placements["linear_1"]} == {(1,), (0,)}
    same(plan)


def test_the_command_line_splits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*PLAN, "--split", "first=5,3", "--time-limit", "20", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [record["sizes"] for record in data["splits"]] == [[5, 3]]
    assert any("linear_b1" in stage["ops"] for stage in data["stages"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pin", "first=2"], "'first' is pinned to device 2"),
        (["--pin", "first=S0"], "is not a number from 0 up"),
        (["--split", "first=5,x"], "'first=5,x' is not NAME=SIZE,SIZE"),
        (["--split", "first=5,3", "--split", "first=4,4"], "'first' is split in two ways"),
        (["--split", "first=5,4"], "first has 8 neurons; 5+4 is 9"),
        (["--objective", "speed"], "objective 'speed' is not one of: throughput, latency"),
    ],
)
def test_the_command_line_refuses(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*PLAN, *options]) == 2
    assert words in capsys.readouterr().err
