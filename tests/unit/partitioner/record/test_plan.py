"""Plan files: what is saved loads as the same plan, and nothing else loads."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError, PlanError
from cost_models.precision import Precision
from partitioner.plan import Plan
from tests.support.made_plans import made_hybrid_plan, made_plan, made_sharded_plan
from tests.support.matrix import drawn

PLAN = made_plan(ClusterSpec.parse("A100-40GB:2"))
DATA: dict[str, Any] = json.loads(PLAN.model_dump_json())


SHARDED = made_sharded_plan(ClusterSpec.parse("A100-40GB:4"), {"outer": 2, "inner": 2}, layers=2)
SHARDED_DATA: dict[str, Any] = json.loads(SHARDED.model_dump_json())


def changed(path: str, value: Any, plan: dict[str, Any] = DATA) -> str:
    """The plan's JSON with one entry replaced: "stages.0.ops"."""
    data = json.loads(json.dumps(plan))
    target = data
    *parents, last = path.split(".")
    for key in parents:
        target = target[int(key)] if isinstance(target, list) else target[key]
    target[last] = value
    return json.dumps(data)


def test_a_saved_plan_loads_as_the_same_plan(tmp_path: Path) -> None:
    for cluster, ranks in (
        (ClusterSpec.preset("dgx-h100", nodes=2), tuple(range(16))),
        (PLAN.cluster, (1, 0)),
    ):
        plan = made_plan(cluster, ranks)
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        assert str(loaded) == str(plan)
        assert loaded.diff(plan) == ""
    SHARDED.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == SHARDED


def test_the_file_has_every_documented_field() -> None:
    assert {
        "schema_version", "model", "cluster", "strategy", "batch_size", "microbatches", "schedule", "stages",
        "transfers", "prediction", "certificate", "alternatives",
    } <= set(DATA)  # fmt: skip
    assert {"name", "fingerprint", "parameters"} <= set(DATA["model"])
    assert {"devices", "ops", "modules", "parameter_bytes", "forward_seconds", "backward_seconds"} <= set(
        DATA["stages"][0]
    )
    assert {
        "step_seconds", "samples_per_second", "tokens_per_second", "mfu", "bubble_fraction",
        "peak_memory_bytes", "communication_bytes", "confidence",
    } <= set(DATA["prediction"])  # fmt: skip
    assert {
        "objective", "objective_seconds", "bound_seconds", "gap", "simulated_lower_bound_seconds", "space",
        "whole_ops_bound_seconds", "method", "solver_status", "search_seconds",
    } == set(DATA["certificate"])  # fmt: skip
    assert {
        "strategy", "feasible", "reason", "step_seconds", "peak_memory_bytes", "chance_of_not_fitting",
    } == set(DATA["alternatives"][0])  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "data"),
    [
        (Precision(), {}),
        (
            Precision(compute=torch.float16, master=torch.float32, loss_scale="dynamic"),
            {"compute": "float16", "master": "float32", "loss_scale": "dynamic"},
        ),
    ],
)
def test_the_precision_is_kept_in_words(precision: Precision, data: dict[str, str]) -> None:
    plan = PLAN.model_copy(update={"precision": precision})
    assert plan.to_dict()["precision"] == data
    assert Plan.from_json(plan.model_dump_json()).precision == precision


def test_saving_replaces_the_file_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text("before")
    PLAN.save(target)
    assert Plan.load(target) == PLAN
    assert os.listdir(tmp_path) == ["plan.json"]
    with pytest.raises(PlanError, match="cannot write the plan"):
        PLAN.save(tmp_path / "missing" / "plan.json")
    with pytest.raises(PlanError, match="cannot write the plan"):
        PLAN.save(tmp_path)
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("batch_size", 0, "batch_size: input should be greater than or equal to 1, got 0"),
        ("batch_size", "8", 'batch_size: input should be a valid integer, got "8"'),
        ("batch_size", 8.5, "batch_size: input should be a valid integer"),
        ("batch_size", True, "batch_size: input should be a valid integer, got true"),
        ("batch_size", 10**400, "batch_size: inf is no finite number"),
        ("batch_size", 1 << 63, "batch_size: 9.22e+18 is too large"),
        ("microbatches", 34, "microbatches: 34 pieces of a batch of 33"),
        ("schedule", "random", "schedule: 'random' is not one of gpipe"),
        ("optimizer_memory", "lion", "optimizer_memory: 'lion' is not one of none"),
        ("precision", {"compute": "int8"}, "compute='int8' is not one of bf16"),
        ("precision", {"computer": "bfloat16"}, "'computer' is not one of compute"),
        ("precision", {"master": "bfloat16"}, "keep no more than 16-bit parameters do"),
        ("precision", {"compute": 16}, "an object such as"),
        ("precision", "bfloat16", "an object such as"),
        ("strategy", "magic", "strategy: input should be 'layer'"),
        ("prediction.step_seconds", float("nan"), "prediction.step_seconds: nan is no finite number"),
        ("prediction.step_seconds", float("inf"), "prediction.step_seconds: inf is no finite number"),
        ("prediction.step_seconds", 0.0, "prediction.step_seconds: input should be greater than 0"),
        ("prediction.peak_memory_bytes", {"0": 1}, "prediction.peak_memory_bytes.1: is missing"),
        ("prediction.peak_memory_bytes", {"0": 1, "1": 1, "x": 1}, "peak_memory_bytes.x: no rank of 2"),
        ("prediction.extra", 1, "prediction.extra: is no key of a plan"),
        ("state_bytes", {"0": -1, "1": 0}, "state_bytes.0: input should be greater than or equal to 0"),
        ("stages", [], "stages: there is none"),
        ("stages.0.devices", [], "stages[0].devices: there is none"),
        ("stages.0.devices", [7], "stages[0].devices: rank 7 is not in the cluster of 2"),
        ("stages.0.devices", [0, 1], "stages[0].devices: a stage without sharding has one device, not 2"),
        ("stages.0.devices", [-1], "stages[0].devices[0]: input should be greater than or equal to 0"),
        ("stages.0.ops", ["op1"], "stages[1].ops: 'op1' stands in stage 0 as well"),
        ("stages.0.ops", "op0", 'stages[0].ops: input should be a valid array, got "op0"'),
        ("values.0.producer", 1, "values[0]: goes from stage 1 to [1] of 2"),
        ("values.0.consumers", [5], "values[0]: goes from stage 0 to [5] of 2"),
        ("transfers.0.target", 9, "transfers[0]: goes from rank 0 to 9 in a cluster of 2"),
        (
            "tied",
            [{"name": "w", "ranks": [0, 4], "size_bytes": 1}],
            "tied[0].ranks: [0, 4] are not two or more",
        ),
        ("tied", [{"name": "w", "ranks": [], "size_bytes": 1}], "tied[0].ranks: [] are not two or more"),
        ("cluster", {}, "cluster.nodes: is missing"),
        (
            "cluster.nodes.0.count",
            10**9,
            "cluster.nodes[0].count: input should be less than or equal to 65536",
        ),
        ("notes", [["a"]], "notes[0]: input should be a valid string"),
        ("schema_version", 3, "its schema_version is 3, this partitioner reads 1 and 2"),
        ("schema_version", "1", 'its schema_version is "1", this partitioner reads 1'),
        ("schema_version", True, "its schema_version is true, this partitioner reads 1 and 2"),
        ("schema_version", 1.0, "its schema_version is 1.0, this partitioner reads 1 and 2"),
    ],
)
def test_a_damaged_plan_is_refused_with_the_key(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(changed(path, value), source="plan.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("error[plan]: plan.json is")


SHARDING = "stages.0.sharding"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("stages.0.sharding", None, "stages: a feature-wise plan has one, with a sharding"),
        ("strategy", "layer", "stages: a plan of strategy 'layer' has none with a sharding"),
        ("stages.0.devices", [0, 1, 2], "stages[0].sharding.axes: 2×2 is not 3 devices"),
        ("stages.0.devices", [0, 1, 2, 2], "stages[0].devices: [0, 1, 2, 2] names a rank twice"),
        ("stages.0.devices", [0, 1, 2, 9], "stages[0].devices: rank 9 is not in the cluster of 4"),
        ("microbatches", 3, "samples_multiple: 64 samples in 3 micro-batches are no multiples of 2 each"),
        (
            f"{SHARDING}.samples_multiple",
            5,
            "samples_multiple: 64 samples in 2 micro-batches are no multiples of 5",
        ),
        (f"{SHARDING}.samples_multiple", 0, "samples_multiple: input should be greater than or equal to 1"),
        (f"{SHARDING}.axes", {}, "axes: 0 axes, expected 1 to 3"),
        (f"{SHARDING}.axes", {"a": 4}, "choices.op0: 2 choices for 1 axes"),
        (f"{SHARDING}.axes", {"a": 1, "b": 2, "c": 2, "d": 1}, "axes: 4 axes, expected 1 to 3"),
        (
            f"{SHARDING}.axes",
            {"outer": 4, "inner": 0},
            "axes.inner: input should be greater than or equal to 1",
        ),
        (f"{SHARDING}.axes", {"outer": 2, "in+ner": 2}, "axes: 'in+ner' is no name of an axis"),
        (f"{SHARDING}.choices.op0", ["S0 -> S0"], "choices.op0: 1 choices for 2 axes"),
        (f"{SHARDING}.choices.op0", ["S0 S0", "R"], "choices.op0[0]: 'S0 S0' is no choice such as"),
        (
            f"{SHARDING}.choices.op0",
            ["Q -> R", "R -> R"],
            "choices.op0[0]: 'Q' is not R, P, or S and a dimension",
        ),
        (f"{SHARDING}.choices.ghost", ["R -> R", "R -> R"], "choices.ghost: the stage does not run this op"),
        (f"{SHARDING}.stored", {"w": "S0"}, "stored.w: 'S0' does not name 2 placements, one per axis"),
        (f"{SHARDING}.stored", {"w": "S0 S99"}, "stored.w: 'S99' is not R, P, or S and a dimension"),
        (
            f"{SHARDING}.stored",
            {"w": "P R"},
            "stored.w: 'P R': what is kept, given or sent is whole or split",
        ),
        (f"{SHARDING}.state", {"w": "R R R"}, "state.w: 'R R R' does not name 2 placements"),
        (
            f"{SHARDING}.batch",
            {"ids": "P P"},
            "batch.ids: 'P P': what is kept, given or sent is whole or split",
        ),
        (
            f"{SHARDING}.collectives.0.axis",
            "sideways",
            "collectives[0].axis: 'sideways' is no axis of the mesh",
        ),
        (f"{SHARDING}.collectives.0.axis", "inner+inner", "collectives[0].axis: 'inner+inner' is no axis"),
        (f"{SHARDING}.collectives.0.kind", "broadcast", "collectives[0].kind: input should be 'all_reduce'"),
        (
            f"{SHARDING}.collectives.0.sent_bytes",
            -1.0,
            "collectives[0].sent_bytes: input should be greater than",
        ),
        (f"{SHARDING}.sums.0.axes", [], "sums[0].axes: [] are no axes of the mesh"),
        (f"{SHARDING}.sums.0.size_bytes", [1], "sums[0].size_bytes: not one per parameter"),
        (f"{SHARDING}.gathers.0.axis", "up", "gathers[0].axis: 'up' is no axis of the mesh"),
        (
            f"{SHARDING}.replicated_matmul_share",
            1.5,
            "replicated_matmul_share: input should be less than or equal",
        ),
        (f"{SHARDING}.layouts.0.stored", "X", "layouts[0].stored: 'X' is not R, P, or S and a dimension"),
    ],
)
def test_a_damaged_sharding_is_refused_with_the_key(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(changed(path, value, SHARDED_DATA), source="plan.json")
    assert message in str(caught.value)


def test_groups_of_devices_that_overlap_are_refused() -> None:
    plan = made_hybrid_plan(ClusterSpec.parse("A100-40GB:4"), ({"all": 2}, {"all": 2}), crossing=True)
    data = json.loads(plan.model_dump_json())
    Plan.from_json(changed("stages.1.devices", [2, 3], data))
    for devices, message in (([1, 2], "and [0, 1] of stages[0], overlap"), ([1, 0], "overlap")):
        with pytest.raises(PlanError, match=re.escape(message)):
            Plan.from_json(changed("stages.1.devices", devices, data))
    Plan.from_json(changed("stages.1.devices", [0, 1], data))


OPTIONAL = (
    "schema_version",
    "splits",
    "views",
    "opaque",
    "one_queue",
    "outline",
    "state_parts",
    "update_bytes",
    "risk",
)


@pytest.mark.parametrize("key", [key for key in DATA if key not in OPTIONAL])
def test_a_missing_key_is_named(key: str) -> None:
    text = json.dumps({k: v for k, v in DATA.items() if k != key})
    with pytest.raises(PlanError, match=f"{key}: is missing"):
        Plan.from_json(text)


def test_every_problem_is_told_at_once() -> None:
    data = {**DATA, "batch_size": 0, "microbatches": "x", "colour": "red"}
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert len(caught.value.because) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"\xff\xfe", "byte 0 is not UTF-8 text"),
        (b"nodes: 3", "line 1, column 1"),
        (b"[1, 2]", "expected an object, got a list of 2"),
        (b"7", "expected an object, got 7"),
        (b"{}", "it has no schema_version; its keys are none"),
        (b'{"nodes": []}', 'its keys are "nodes"'),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"schema_version": 1, "model": ' + b'{"a":' * 60 + b"1" + b"}" * 61, "nested more than 40 deep"),
        (b'{"schema_version": ' + b"9" * 10_000 + b"}", "its schema_version is inf"),
    ],
    ids=range(11),
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.load(file)
    assert message in str(caught.value)


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is a directory"):
        Plan.load(tmp_path)
    with pytest.raises(PlanError, match="no such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="null byte"):
        Plan.load("a\0b")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
EXAMPLES = 100
KEYS = [key for key in DATA if key not in ("schema_version", "splits", "opaque")]


def use(text: str) -> None:
    """Whatever needs no model, on what loads; what does not load is a PlanError with a reason."""
    try:
        plan = Plan.from_json(text)
    except PlanError as error:
        if not error.because:
            raise
        return
    str(plan)
    plan.diff(PLAN)
    plan.launch_command()
    with suppress(PartitionerError):  # such as a gradient that is owed and never sent
        plan.simulate()


@drawn(EXAMPLES)
@given(st.sampled_from(KEYS), JSON)
def test_whatever_stands_at_a_key_the_outcome_is_a_plan_or_a_plan_error(key: str, value: Any) -> None:
    use(changed(key, value))


@drawn(EXAMPLES)
@given(st.data())
def test_whatever_stands_deeper_the_outcome_is_a_plan_that_works_or_an_error_of_ours(
    data: st.DataObject,
) -> None:
    plan = data.draw(st.sampled_from([DATA, SHARDED_DATA]))
    path: list[str] = []
    target = plan
    while isinstance(target, dict | list) and target and (not path or data.draw(st.integers(0, 3))):
        key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
        path.append(str(key))
        target = target[key]
    parent = plan
    for key in path[:-1]:
        parent = parent[int(key)] if isinstance(parent, list) else parent[key]
    if isinstance(parent, list):
        path = path[:-1]
    if not path or path == ["schema_version"]:
        return
    use(changed(".".join(path), data.draw(JSON), plan))
