"""Of ways that cost the same, batches arrive in parts; nothing gets dearer by it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.layout import Replicate, Shard
from passes.costs.costs import GraphCosts, costs_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.feature import place as search
from passes.search.feature.evaluate import FeatureCost, evaluate
from passes.search.feature.place import FeatureRequest, FeatureResult, place_features
from passes.search.feature.setting import Setting
from passes.search.feature.ties import with_split_batch
from tests.support.matrix import thinned
from tests.unit.passes.search.feature.test_place import graph_of

_SLOW_GPU = {
    "kind": "cuda",
    "memory": "8GiB",
    "memory_bandwidth": 1e10,
    "flops": {"float64": 1e10, "float32": 1e10},
    "launch_overhead": 1e-5,
}
GPUS = ClusterSpec.from_dict(
    {
        "nodes": [
            {
                "name": "n",
                "count": 4,
                "device": _SLOW_GPU,
                "links": {"default": {"bandwidth": 1e9, "latency": 1e-6}},
            }
        ]
    }
)
"""Products take longer than their launches, shifting a few labels does not."""
REQUEST = FeatureRequest(Job(512), microbatches=1, mesh=(4,))
S0 = (Shard(0),)


@cache
def costs(name: str) -> GraphCosts:
    return costs_of(graph_of(name), GPUS)


def placed(name: str, request: FeatureRequest = REQUEST) -> FeatureResult:
    return place_features(graph_of(name), costs(name), GPUS, request)


def user_leaves(graph: OpGraph) -> list[str]:
    """Leaves that users give; the divisor of a token mean is made by whoever runs a step."""
    made = graph.token_counts.made if graph.token_counts else frozenset()
    return [given.name for given in graph.inputs if given.kind == "batch" and given.name not in made]


def cost(result: FeatureResult) -> FeatureCost:
    space, setting = result.problem.space, Setting(GPUS, REQUEST.job)
    return evaluate(space.graph, space.costs, result.placement, setting)


@pytest.mark.parametrize(
    ("name", "tied"),
    thinned([("gpt2", "labels"), ("llama-8b", "labels"), ("bert", "labels")], [("gpt2", "labels")]),
)
def test_leaves_arrive_as_ops_by_samples_take_them(
    name: str, tied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs small ops take as long in parts as whole: without breaking the tie, labels are shifted whole and then cut."""
    after = placed(name)
    monkeypatch.setattr(search, "with_split_batch", lambda problem, options: tuple(options))
    before = placed(name)
    assert before.placement.batch[tied] != S0
    assert {after.placement.batch[leaf] for leaf in user_leaves(graph_of(name))} == {S0}
    assert cost(after).seconds <= cost(before).seconds * (1 + 1e-12)
    assert cost(after).memory_bytes <= cost(before).memory_bytes
    assert cost(after).communication_bytes <= cost(before).communication_bytes
    assert with_split_batch(after.problem, after.options) == after.options


def test_what_is_needed_whole_arrives_whole() -> None:
    """Gathering a leaf would take longer than loading it."""
    found = placed("gpt2", replace(REQUEST, pins={"*": "column_row"}))
    assert found.placement.batch["input_ids"] == (Replicate(),)
    fixed = placed("gpt2", replace(REQUEST, pins={"labels": "R"}))
    assert fixed.placement.batch["labels"] == (Replicate(),)
    assert fixed.placement.batch["input_ids"] == S0
