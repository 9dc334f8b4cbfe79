"""The model's outline in a plan: what it says of the ops, and what damaged ones are refused for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cost_models.errors import PlanError
from partitioner import Plan
from tests.support.two_layers import two_layers


@pytest.fixture(scope="module")
def plan() -> Plan:
    return two_layers((4, 8, 2), batch_size=6, microbatches=2, strategy="layer")


def test_ops_have_their_modules_shapes_and_readers(plan: Plan) -> None:
    outline = plan.outline
    assert outline is not None
    assert [outline.modules[number] for number in outline.module_of][:3] == ["0", "1", "2"]
    first = outline.kinds[outline.kind_of[0]]
    assert (first.op, first.shape, first.dtype) == ("aten.linear.default", (3, 8), "float32")
    assert first.forward_flops == 2 * 3 * 4 * 8
    read = {outline.inputs[-1 - number].name for number in outline.reads_of()[0]}
    assert {"0.weight", "0.bias"} < read
    assert outline.reads_of()[1] == (0,)


def test_modules_have_the_names_of_their_classes(plan: Plan) -> None:
    assert plan.outline is not None
    classes = plan.outline.class_names()
    assert (classes[""], classes["0"], classes["1"]) == ("Sequential", "Linear", "ReLU")


def test_plans_from_before_classes_know_none(plan: Plan) -> None:
    data = json.loads(plan.model_dump_json())
    del data["outline"]["classes"], data["outline"]["class_of"]
    loaded = Plan.from_json(json.dumps(data))
    assert loaded.outline is not None
    assert loaded.outline.class_names() == {}


def test_a_plan_file_keeps_it(plan: Plan) -> None:
    assert Plan.from_json(plan.model_dump_json()).outline == plan.outline


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind_of", "0 1 x", "expected whole numbers"),
        ("kind_of", "0", "outline.kind_of: 1 numbers for"),
        ("module_of", "9 9 9 9 9", "outline.module_of: a number is none of outline.modules"),
        ("class_of", "0", "outline.class_of: 1 numbers for"),
        ("class_of", "99 0 0 0 0", "outline.class_of: a number is none of outline.classes"),
        ("read_counts", "1 1 1 1 1", "outline.read_counts: does not divide"),
        ("names", ["a", "b", "c", "d", "e"], "of the stages is not there"),
    ],
)
def test_damage_is_named(plan: Plan, field: str, value: Any, message: str) -> None:
    data = json.loads(plan.model_dump_json())
    data["outline"][field] = value
    with pytest.raises(PlanError) as error:
        Plan.from_json(json.dumps(data))
    assert message in " ".join(error.value.because)
