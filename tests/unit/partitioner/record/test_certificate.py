"""Certificates of pipelines, added up from the plan alone: sums by hand, and plans whose numbers do not add up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError
from partitioner.plan import Plan
from partitioner.record.certificate import added_up
from passes.search.certificate import BoundTerm, Certificate, PipelineTerms, StageTerms
from tests.support.made_plans import made_hybrid_plan


def terms(**changes: Any) -> PipelineTerms:
    """Two stages of 2 + 4/4 = 3 and one of 4 + 4/4 = 5 seconds, cuts of 1: 3 + (1 + 3) + (1 + 5) = 13, at most 5."""
    fields: dict[str, Any] = {
        "fill": 1.0,
        "microbatches": 4,
        "chunks": 1,
        "stages": (
            StageTerms(stages=1, microbatch_seconds=2.0, once_seconds=4.0, cut_seconds=0.0),
            StageTerms(stages=1, microbatch_seconds=2.0, once_seconds=4.0, cut_seconds=1.0),
            StageTerms(stages=1, microbatch_seconds=4.0, once_seconds=4.0, cut_seconds=1.0),
        ),
        "in_flight": (3, 2, 1),
        "options": (
            BoundTerm(option="3 groups", options=1, bound_seconds=27.0),
            BoundTerm(option="2 groups", options=1, bound_seconds=None),
            BoundTerm(option="others", options=7, bound_seconds=40.0),
        ),
    }
    return PipelineTerms(**{**fields, **changes})


def plan() -> Plan:
    made = made_hybrid_plan(ClusterSpec.parse("A100-40GB:3"), ({}, {}, {}), crossing=True)
    certificate = Certificate(
        **{
            **vars(made.certificate),
            "objective_seconds": 28.0,
            "bound_seconds": 27.0,
            "gap": 1 / 28,
            "terms": terms(),
        }
    )
    return made.model_copy(update={"certificate": certificate})


def test_sums_by_hand() -> None:
    """13 + (4 - 1) · 5 = 28. The second waits for 3 + 1 + 5 = 9, of which two are on their way: 4.5."""
    assert added_up(terms()) == (28.0, 27.0)
    assert added_up(terms(in_flight=(3, 1, 1))) == (13 + 3 * 9.0, 27.0)
    assert added_up(terms(in_flight=(2, 2, 1))) == (13 + 3 * 6.5, 27.0)
    assert added_up(terms(in_flight=(4, 4, 4))) == (28.0, 27.0)
    assert added_up(terms(fill=0.5, chunks=3)) == (6.5 + 3.5 * 3 * 5, 27.0)


def test_a_plan_that_adds_up_is_read_back() -> None:
    assert Plan.from_json(plan().model_dump_json()) == plan()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("objective_seconds", 28.1, "its terms make 28.0"),
        ("bound_seconds", 28.0, "its terms make 27.0"),
        ("gap", 0.0, "certificate.gap: 0.0, its terms make"),
        ("terms.stages.2.cut_seconds", 1.1, "certificate.objective_seconds: 28.0, its terms make"),
        ("terms.options.0.bound_seconds", 26.0, "certificate.bound_seconds: 27.0, its terms make 26.0"),
        ("terms.options.0.bound_seconds", 29.0, "none is below 29.0 s, and the plan has 28.0 s"),
        ("terms.stages.1.stages", 2, "4 stages, 3 of them in flight; the plan has 3"),
        ("terms.microbatches", 8, "microbatches: 8, the plan has 4"),
        ("terms.chunks", 3, "3 stages of each group do not make 3"),
        ("terms.fill", 0.5, "fill: 0.5, 1f1b has 1.0"),
        ("terms.in_flight", [3, 3, 1], "in_flight: [3, 3, 1], 1f1b has [3, 2, 1]"),
        ("terms.more", 1, "certificate.terms.more: is no key of a plan"),
        ("terms", 1, "certificate.terms: input should be an object, got 1"),
        ("terms.in_flight", [3, 2, 0], "in_flight[2]: input should be greater than or equal to 1"),
    ],
)
def test_a_plan_that_does_not_add_up_is_refused(path: str, value: Any, message: str) -> None:
    data = json.loads(plan().model_dump_json())
    *parents, key = path.split(".")
    at: Any = data["certificate"]
    for parent in parents:
        at = at[int(parent) if parent.isdigit() else parent]
    at[int(key) if key.isdigit() else key] = value
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert message in str(caught.value)
