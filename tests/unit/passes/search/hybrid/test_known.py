"""Recipes that people know by name: restrictions that every comparison shows, and that a plan is never slower than."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from passes.lower.candidate import Candidate
from passes.search.hybrid.known import KnownRecipe, recipes
from passes.search.hybrid.provider import GroupsProvider
from passes.search.judge import Judge, Simulated
from passes.search.provider import Proposal
from tests.support.traced_models import loaded

NODE = {"count": 2, "device": "A100-40GB", "links": "NVLink3"}
TWO_NODES = ClusterSpec.from_dict(
    {"nodes": [{"name": "a", **NODE}, {"name": "b", **NODE}], "network": "Ethernet-100G"}
)
ROWS = {"FSDP x4", "tensor 2 x data 2", "1F1B pipeline x4"}


def planned(cluster: ClusterSpec, **options: Any) -> Plan:
    plan: Plan = partition(loaded("gpt2")[1], cluster, strategy="hybrid", **{"batch_size": 8, **options})
    return plan


def rows(plan: Plan) -> dict[str, float]:
    """The step of each row that fits."""
    return {other.strategy: other.step_seconds or math.inf for other in plan.alternatives if other.feasible}


@pytest.mark.parametrize(
    ("cluster", "pieces", "expected"),
    [
        ("H100-80GB:1", 34, []),
        ("dgx-h100:1", 34, ["FSDP x8: data=8 zero=3", "tensor 8: tensor=8 data=1", "1F1B pipeline x8: pipeline=8 data=1"]),
        (
            "dgx-h100:8",
            34,
            [
                "FSDP x64: data=64 zero=3",
                "tensor 8 x data 8: tensor=8 data=8 zero=1",
                "1F1B pipeline x32 x data 2: pipeline=32 data=2 zero=1",
            ],
        ),
        ("dgx-h100:1", 1, ["FSDP x8: data=8 zero=3", "tensor 8: tensor=8 data=1"]),
    ],
)  # fmt: skip
def test_each_is_a_line_of_what_is_fixed(cluster: str, pieces: int, expected: list[str]) -> None:
    assert [f"{name}: {fix}" for name, fix in recipes(ClusterSpec.parse(cluster), pieces)] == expected


@pytest.fixture(scope="module")
def searched() -> tuple[Plan, list[float]]:
    """A plan, and the seconds that the search of it was asked to beat."""
    asked: list[float] = []
    found = GroupsProvider.proposals

    def noted(self: GroupsProvider, known_seconds: float, *further: float) -> Sequence[Proposal[Any]]:
        if not self.only_if:
            asked.append(known_seconds)
        return found(self, known_seconds, *further)

    with mock.patch.object(GroupsProvider, "proposals", noted):
        return planned(TWO_NODES), asked


def test_a_comparison_has_them_and_the_plan_is_no_slower(searched: tuple[Plan, list[float]]) -> None:
    plan, _ = searched
    steps = rows(plan)
    assert steps.keys() >= ROWS
    assert plan.prediction.step_seconds <= min(steps.values()) * (1 + 1e-9)
    fixed = planned(TWO_NODES, fix="tensor=2 data=2 zero=1")
    assert fixed.prediction.step_seconds <= steps["tensor 2 x data 2"] * (1 + 1e-9), (
        "it tries more than the row"
    )
    assert Plan.from_json(plan.model_dump_json()) == plan


def test_the_plan_is_one_of_them_where_the_search_finds_none_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = GroupsProvider.proposals

    def slowest(self: GroupsProvider, *asked: float) -> Sequence[Proposal[Any]]:
        proposals = found(self, *asked)
        return proposals if self.only_if else proposals[-1:]

    monkeypatch.setattr(GroupsProvider, "proposals", slowest)
    monkeypatch.setattr("passes.search.place.MOST_DEVICES_OF_A_MESH", 0)
    plan = planned(TWO_NODES)
    assert plan.prediction.step_seconds <= min(rows(plan).values()) * (1 + 1e-9)
    assert plan.certificate.bound_seconds <= plan.certificate.objective_seconds
    assert Plan.from_json(plan.model_dump_json()) == plan


def test_one_that_does_not_fit_says_by_how_much() -> None:
    plan = planned(ClusterSpec.local(4, memory="3MiB"), batch_size=32, microbatches=1)
    (row,) = [other for other in plan.alternatives if other.strategy == "1F1B pipeline x4"]
    assert not row.feasible
    assert row.reason.startswith("exceeds what is safe by ")
    assert row.peak_memory_bytes is not None
    assert row.peak_memory_bytes > 3 * 2**20
    assert rows(plan).keys() >= {"FSDP x4", "tensor 4"}


def test_one_that_overflows_and_is_slower_than_what_fits_is_not_solved_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured, again = Judge.measure, list[object]()

    def overflowing(self: Judge, candidate: Candidate) -> Simulated:
        simulated = measured(self, candidate)
        if len(candidate.groups) < 4:
            return simulated
        return replace(simulated, step_seconds=1.0, overflow_bytes=7 * 2**20)

    monkeypatch.setattr(Judge, "measure", overflowing)
    monkeypatch.setattr(KnownRecipe, "leaner", lambda *asked: again.append(asked))
    plan = planned(TWO_NODES)
    (row,) = [other for other in plan.alternatives if other.strategy == "1F1B pipeline x4"]
    assert row.step_seconds == 1.0
    slower = 1.0 / plan.prediction.step_seconds - 1
    assert row.reason == f"exceeds what is safe by 7.00 MiB, and is {slower:.1%} slower"
    assert not row.feasible
    assert not again


def test_the_search_looks_only_for_what_is_faster_than_these(searched: tuple[Plan, list[float]]) -> None:
    plan, asked = searched
    fastest = min(step for name, step in rows(plan).items() if name in ROWS)
    assert fastest <= asked[0] < math.inf  # its step, or its surrogate if that is above
