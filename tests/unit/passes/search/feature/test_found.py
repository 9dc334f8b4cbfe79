"""Known strategies are found without hints, on several models and over ranges of link speeds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import sympy
from torch import fx

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from cost_models.layout import Shard
from partitioner.models.bundled import bundled
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph, tensor_specs
from passes.lower.job import Job
from passes.search.feature.evaluate import FeatureCost
from passes.search.feature.graph import makes_values
from passes.search.feature.place import FeatureRequest, FeatureResult, place_features
from passes.shard.words import operands
from passes.trace.trace import trace
from tests.support.matrix import thinned
from tests.unit.passes.search.feature.test_place import cluster, graph_of, optimal, place, split

# --------------------------------------------------------------------------------------------------
# Small batch, fast links: no more traffic than Megatron's patterns.

COLUMN = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "c_attn",
    "c_fc",
    "query",
    "key",
    "value",
    "intermediate.dense",
    "fc1",
    "lm_head",
    "decoder",
    "classifier",
)
ROW = ("o_proj", "down_proj", "c_proj", "output.dense", "fc2")
NORMS = ("norm", "ln_1", "ln_2", "ln_f", "LayerNorm", "layernorm_before", "layernorm_after")


def megatron(graph: OpGraph, ranks: int, *, sequence: bool) -> dict[str, str]:
    """The textbook pattern on one axis: column, then row parallel products; between them everything whole, or norms by
    sequence (Narayanan et al. 2021; Korthikanti et al. 2022). What it says nothing of is planned around it, so that it
    costs no more than it must; a vocabulary that the ranks do not divide stays whole."""
    pins = {}
    for node in filter(makes_values, graph.ops):
        path, dims = str(node.meta.get("module_path", "")), len(tensor_specs(node)[0].shape)
        if any(word in str(node.target) for word in ("linear", "addmm")):
            divides = tensor_specs(node)[0].shape[-1] % ranks == 0
            if path.endswith(COLUMN):
                pins[node.name] = f"S{dims - 1}" if divides else "R"
            elif path.endswith(ROW):
                pins[node.name] = "P"
        elif "scaled_dot_product" in str(node.target) and tensor_specs(node)[0].shape[1] % ranks == 0:
            pins[node.name] = "S1"
        elif path.endswith(NORMS) and dims == 3:
            pins[node.name] = "S1" if sequence else "R"
    return pins


SAME = 1e-9
"""Relative difference of sums that is rounding."""


@cache
def two_layers(name: str) -> OpGraph:
    workload = bundled(name, layers=2, seq=0 if name in ("vit", "bert", "gpt2") else 1024)
    return trace(workload.model, workload.example_inputs)


def fast(ranks: int, bandwidth: float, memory_bytes: float = 80e9) -> ClusterSpec:
    device = {
        "kind": "cpu",
        "memory": f"{int(memory_bytes)}B",
        "memory_bandwidth": 3e12,
        "flops": dict.fromkeys(("float32", "bfloat16"), 1e14),
        "launch_overhead": 0.0,
    }
    links = {"default": {"bandwidth": bandwidth, "latency": 1e-6}}
    return ClusterSpec.from_dict({"nodes": [{"name": "n", "count": ranks, "device": device, "links": links}]})


def patterns(name: str, ranks: int, gigabytes_per_second: float) -> tuple[FeatureCost, list[FeatureCost]]:
    """What the plan for one sample costs, and the textbook patterns: column and row, sequence."""
    graph, machine = two_layers(name), fast(ranks, gigabytes_per_second * 1e9)
    costs = costs_of(graph, machine)

    def found(pins: dict[str, str]) -> FeatureCost:
        request = FeatureRequest(Job(1), mesh=(ranks,), pins=pins)
        result = place_features(graph, costs, machine, request)
        assert optimal(result)
        return result.cost

    both = [False] if name == "vit" else [False, True]  # ViT's 197 positions are divided by nothing
    textbook = [found(megatron(graph, ranks, sequence=sequence)) for sequence in both]
    if len(both) > 1 and gigabytes_per_second == 100:  # the public pattern is the textbook's
        assert found({"*": "sequence"}).communication_bytes == pytest.approx(
            textbook[1].communication_bytes, rel=SAME
        )
    return found({}), textbook


@pytest.mark.parametrize(
    ("name", "ranks", "gigabytes_per_second"),
    thinned(
        [
            ("llama-8b", 8, 25),
            ("llama-8b", 8, 100),
            ("llama-8b", 4, 100),
            ("vit", 4, 100),
            ("gpt2", 4, 100),
            ("bert", 8, 1600),
        ],
        [("vit", 4, 100)],
    ),
)
def test_small_batch_and_fast_links_give_no_more_traffic_than_megatron(
    name: str, ranks: int, gigabytes_per_second: float
) -> None:
    """One sample on two layers of full size: a fused query-key-value product (GPT-2), grouped queries (Llama), positions
    that nothing divides (ViT), norms after the sums (BERT)."""
    plan, textbook = patterns(name, ranks, gigabytes_per_second)
    for pattern in textbook:
        assert plan.seconds <= pattern.seconds * (1 + SAME)
        assert plan.communication_bytes <= pattern.communication_bytes * (1 + SAME)


@pytest.mark.parametrize(
    ("name", "ranks", "gigabytes_per_second"),
    thinned([("bert", 4, 100), ("bert", 4, 400), ("gpt2", 8, 400)], [("bert", 4, 400)]),
)
def test_more_traffic_than_megatron_only_where_it_saves_time(
    name: str, ranks: int, gigabytes_per_second: float
) -> None:
    """Others are in docs/06c-feature-wise.md: a pattern sends less, and takes longer."""
    plan, textbook = patterns(name, ranks, gigabytes_per_second)
    less = [p for p in textbook if p.communication_bytes < plan.communication_bytes * (1 - SAME)]
    assert less
    assert all(plan.seconds < pattern.seconds * (1 - 1e-3) for pattern in less)


# --------------------------------------------------------------------------------------------------
# Large batch, small model: data parallel; with less memory: sharded parameters.


def by_samples(result: FeatureResult, graph: OpGraph) -> list[str]:
    """Activations with samples and a gradient that are not split by samples, and by nothing else, on every axis."""
    symbol = graph.batch.batch_symbol
    wrong = []
    for node in graph.ops:
        if node.name not in result.placement.choices or node.name not in graph.needs_grad:
            continue
        for output, spec in enumerate(tensor_specs(node)):
            dims = [
                d for d, s in enumerate(spec.shape) if isinstance(s, sympy.Basic) and symbol in s.free_symbols
            ]
            ways = [choice.outputs[output] for choice in result.placement.choices[node.name]]
            if dims and any(way != Shard(dims[0]) for way in ways):
                wrong.append(node.name)
    return wrong


def read_without_samples(graph: OpGraph) -> set[str]:
    """Parameters that meet samples only as a sum: tables of positions."""
    symbol = graph.batch.batch_symbol

    def has_samples(node: fx.Node) -> bool:
        return any(
            isinstance(size, sympy.Basic) and symbol in size.free_symbols
            for spec in tensor_specs(node)
            for size in spec.shape
        )

    readers: dict[str, list[fx.Node]] = {}
    for node in filter(makes_values, graph.ops):
        for source in operands(node):
            readers.setdefault(source.name, []).append(node)
    return {
        given.name
        for given in graph.inputs
        if given.kind == "parameter" and not any(map(has_samples, readers.get(given.node, ())))
    }


@pytest.mark.parametrize(
    ("name", "bandwidth", "mesh"),
    thinned(
        [
            (name, *links)
            for name in ("gpt2", "llama-8b", "vit", "bert")
            for links in ((1e7, (2, 2)), (1e9, (4,)))
        ],
        [("gpt2", 1e9, (4,)), ("vit", 1e7, (2, 2))],
    ),
)
def test_large_batch_and_small_model_give_data_parallelism(
    name: str, bandwidth: float, mesh: tuple[int, ...]
) -> None:
    """Over links that differ a hundredfold: samples are split, and parameters whole where computing stands still while
    something is sent. Two micro-batches, since with one it costs the same to gather parameters before use (ZeRO-3) as to
    gather them after the update (ZeRO-1)."""
    machine = cluster(4, bandwidth, contention=100.0)
    fixed: dict[str, Any] = {"batch_size": 512, "microbatches": 2, "mesh": mesh}
    result, graph = place(name, machine, **fixed), graph_of(name)
    assert optimal(result)
    assert result.origins.replicated_matmul_share == 0.0
    assert by_samples(result, graph) == []
    whole_anyway = read_without_samples(graph)
    stored = result.placement.stored
    assert not [n for n in graph.parameters if split(stored[n]) and n not in whole_anyway]
    # Gradients are summed in pieces and what each rank updated is gathered: no more bytes than one all-reduce, less work.
    patterns = [place(name, machine, pins={"*": pattern}, **fixed).cost for pattern in ("data", "zero1")]
    for pattern in patterns:
        assert result.cost.seconds <= pattern.seconds * (1 + 1e-6)
        assert result.cost.communication_bytes <= pattern.communication_bytes * (1 + 1e-6)


def whole_bytes(result: FeatureResult) -> int:
    """Of the parameters that every rank keeps whole."""
    stored = result.placement.stored
    return sum(
        p.size_bytes for p in result.problem.space.graph.parameters.values() if not split(stored[p.name])
    )


@pytest.mark.parametrize(("name", "batch"), thinned([("vit", 32), ("gpt2", 8), ("bert", 16)], [("gpt2", 8)]))
def test_memory_cut_until_data_parallelism_does_not_fit_shards_the_parameters(name: str, batch: int) -> None:
    """One byte less than data parallelism needs: state in parts. As much as it needs with parameters in parts (ZeRO-3), too
    little for any plan that keeps parameters whole: parameters in parts. Never slower than the pattern that fits."""
    graph = two_layers(name)
    costs = costs_of(graph, fast(4, 1e9))
    request = FeatureRequest(Job(batch), microbatches=2, mesh=(4,))

    def found(memory_bytes: float, pins: dict[str, str]) -> FeatureResult:
        result = place_features(graph, costs, fast(4, 1e9, memory_bytes), replace(request, pins=pins))
        assert optimal(result)
        assert result.cost.memory_bytes <= memory_bytes
        return result

    known = {pattern: found(1e12, {"*": pattern}).cost for pattern in ("data", "zero1", "zero3")}
    less = found(known["data"].memory_bytes - 1, {})
    assert less.cost.seconds <= known["zero1"].seconds * (1 + SAME)
    assert less.placement.sharded_state or whole_bytes(less) < whole_bytes_of(graph)
    least = known["zero3"].memory_bytes
    with pytest.raises(InfeasibleError):
        found(least, dict.fromkeys(graph.parameters, "R"))
    plan = found(least, {})
    assert less.cost.seconds <= plan.cost.seconds <= known["zero3"].seconds * (1 + SAME)
    assert whole_bytes(plan) < whole_bytes(less)


def whole_bytes_of(graph: OpGraph) -> int:
    return sum(p.size_bytes for p in graph.parameters.values())


# --------------------------------------------------------------------------------------------------
# AlexNet.


@pytest.mark.parametrize("bandwidth", thinned([5e8, 2e9, 8e9], [2e9]))
def test_alexnet_splits_convolutions_by_batch_and_fully_connected_layers_by_feature(bandwidth: float) -> None:
    """One weird trick for parallelizing convolutional neural networks (Krizhevsky 2014); on one teraflop per second, over
    links that differ sixteenfold."""
    machine = cluster(4, bandwidth, flops=1e12)
    result = place("alexnet", machine, batch_size=64, microbatches=1, mesh=(4,))
    assert optimal(result)
    ways: dict[str, list[str]] = {"conv": [], "linear": []}
    for node in graph_of("alexnet").ops:
        for kind, found in ways.items():
            if kind in str(node.target):
                found.append(str(result.placement.choices[node.name][0]))
    assert ways["conv"] == ["S0 R~ R~ -> S0"] * 5
    # Before the first, the parts of samples become parts of features, or all is gathered and the way back is hidden.
    assert ways["linear"][0] in ("S1 S1 P -> P", "R~ S0 S0 -> S1")
    assert ways["linear"][1:] == ["R~ S0 S0 -> S1", "S1 S1 P -> P"]
