"""Groups of devices and tables by device, written briefly and read back; plans of the schema before."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError
from partitioner.plan import Plan
from tests.support.made_plans import made_hybrid_plan

PLAN = made_hybrid_plan(
    ClusterSpec.parse("A100-40GB:7"), ({"outer": 2, "inner": 2}, {"all": 2}, {}), crossing=True
)
DATA = json.loads(PLAN.model_dump_json())
SCHEMA_1 = Path(__file__).parents[3] / "data" / "plans" / "schema-1.json"


def test_groups_and_tables_are_written_briefly() -> None:
    assert [stage["devices"] for stage in DATA["stages"]] == [
        {"first": 0, "count": 4, "stride": 1},
        {"first": 4, "count": 2, "stride": 1},
        [6],
    ]
    assert "placements" not in DATA
    assert PLAN.placements == {op: stage.devices for stage in PLAN.stages for op in stage.ops}
    assert Plan.from_json(json.dumps(DATA)) == PLAN


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ([0, 1, 2, 3], (0, 1, 2, 3)),
        ({"first": 0, "count": 4, "stride": 1}, (0, 1, 2, 3)),
        ({"first": 0, "count": 4, "stride": 2}, "overlap"),
        ({"first": 0, "count": 4}, "expected a list of devices, or an object with first, count, stride"),
        ({"first": 0, "count": 1 << 40, "stride": 1}, "expected 1 to 1,048,576"),
        ({"first": 0, "count": 4, "stride": 0}, "1 or more apart"),
        ({"first": -1, "count": 4, "stride": 1}, "expected a list of devices"),
        ("0-3", "should be a valid array"),
    ],
)
def test_groups_are_read_in_both_ways_and_damage_is_named(given: object, ranks: object) -> None:
    data = json.loads(json.dumps(DATA))
    data["stages"][0]["devices"] = given
    if isinstance(ranks, tuple):
        assert Plan.from_json(json.dumps(data)).stages[0].devices == ranks
        return
    with pytest.raises(PlanError, match=str(ranks)):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"0-6": 5}, None),
        ({"0-3": 5, "4": 6, "5-6": 7}, None),
        ({"0-3": 5, "3-6": 6}, "is there twice"),
        ({"0-5": 5}, r"state_bytes.6: is missing"),
        ({"0-7": 5}, r"state_bytes.7: no rank of 7"),
        ({"6-0": 5}, "is no range of devices"),
        ({"0-999999999": 5}, "is no range of devices"),
        ({"0-6": -5}, "greater than or equal to 0"),
    ],
)
def test_tables_name_neighbours_together(table: dict[str, int], said: str | None) -> None:
    text = json.dumps({**DATA, "state_bytes": table})
    if said is not None:
        with pytest.raises(PlanError, match=said):
            Plan.from_json(text)
        return
    plan = Plan.from_json(text)
    assert plan.state_bytes.keys() == set(map(str, range(7)))
    assert json.loads(plan.model_dump_json())["state_bytes"] == table


def test_a_plan_of_schema_1_is_read_and_simulates_as_it_did() -> None:
    old = json.loads(SCHEMA_1.read_text())
    assert (old["schema_version"], "placements" in old) == (1, True)
    plan = Plan.load(SCHEMA_1)
    assert plan.placements == {op: tuple(ranks) for op, ranks in old["placements"].items()}
    assert math.isclose(plan.simulate().step_seconds, old["prediction"]["step_seconds"], rel_tol=1e-9)
    assert json.loads(plan.model_dump_json())["schema_version"] == 2
