"""What recompute is said to hold is what a real run holds, and what it computes again is what runs again."""

from __future__ import annotations

import pytest
import torch

from passes.costs.costs import GraphCosts, cost_graph
from passes.costs.recompute import computed_again, region_bytes
from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.lower.lower import lower
from passes.lower.segment import by_stage
from runtime.segment.runner import SegmentRunner
from tests.support.alive import AliveBytes
from tests.support.traced_models import small_gpt2


@pytest.fixture(scope="module")
def gpt2() -> tuple[OpGraph, GraphCosts, list[list[int]]]:
    _, graph = small_gpt2()
    index = {node.name: i for i, node in enumerate(graph.ops)}
    regions: dict[str, list[int]] = {}
    for name, block in block_of(graph).items():
        regions.setdefault(block, []).append(index[name])
    return graph, cost_graph(graph), list(regions.values())


def test_a_block_holds_what_it_reads(gpt2: tuple[OpGraph, GraphCosts, list[list[int]]]) -> None:
    graph, costs, (first, second) = gpt2
    ops = range(len(graph.ops))
    plain, again = (costs.held_bytes(ops, 4, regions=regions).saved for regions in ((), (first, second)))
    hidden = costs.at(4).output_bytes[second[0]]  # of a layer norm: as large as what it reads
    assert plain - again > 8 * hidden
    one = costs.held_bytes(ops, 4, regions=(first,)).saved
    assert plain - one == pytest.approx(one - again, rel=0.1)
    assert region_bytes(costs, first, 4) == pytest.approx(plain - one, abs=2 * hidden)


def test_the_second_forward_stops_at_the_last_saved_tensor(
    gpt2: tuple[OpGraph, GraphCosts, list[list[int]]],
) -> None:
    graph, costs, (first, _) = gpt2
    names = [str(graph.ops[op].target) for op in first]
    products = [op for op, name in zip(first, names, strict=True) if "addmm" in name or "linear" in name]
    # the last product saves its operands before it runs; split, it is an autograd function and saves them afterwards
    assert products[-1] not in computed_again(costs, first, deferring=False)
    assert products[-1] in computed_again(costs, first, deferring=True)
    assert products[-2] in computed_again(costs, first, deferring=False)
    assert computed_again(costs, [], deferring=False) == []


@pytest.mark.parametrize("recomputed", [False, True])
def test_held_as_predicted(gpt2: tuple[OpGraph, GraphCosts, list[list[int]]], recomputed: bool) -> None:
    graph, costs, regions = gpt2
    workload, _ = small_gpt2()
    stage_of = {node.name: 0 for node in graph.ops if node.name not in recomputed_ops(graph)}
    blocks = [tuple(dict.fromkeys(block_of(graph).values()))] if recomputed else []
    code = lower(graph, by_stage(graph, stage_of, [(0,)], recomputed_ops(graph), blocks))[0]
    state = {
        **dict(workload.model.named_parameters()),
        **dict(workload.model.named_buffers()),
        **graph.constants,
    }
    runner = SegmentRunner(code, state)
    size = graph.example_batch_size
    generator = torch.Generator().manual_seed(0)
    leaves = []
    for name in runner.leaf_names:
        spec = graph.batch.leaves[name]
        shape = spec.concrete(dict.fromkeys(graph.batch.symbols, size))
        leaf = torch.randint(0, 32, shape, generator=generator)
        leaves.append(leaf.to(spec.dtype) / 16 if spec.dtype.is_floating_point else leaf)
    with AliveBytes(state.values(), ignored=leaves) as alive:
        before = alive.current_bytes
        outputs = runner.forward(0, [], leaves)
        held = alive.current_bytes - before
        peak = alive.peak_bytes
        runner.backward(0, [torch.ones_like(outputs[p]) for p in runner.root_positions])
        most = alive.peak_bytes - before
    predicted = costs.held_bytes(range(len(graph.ops)), size, regions=regions if recomputed else ()).saved
    assert held == pytest.approx(predicted, rel=0.03)
    if recomputed:
        in_backward = predicted + max(region_bytes(costs, region, size) for region in regions)
        gradients = sum(p.numel() * p.itemsize for p in workload.model.parameters())
        assert peak - before < most
        assert most <= in_backward + gradients + 16 * outputs[0].nbytes + 64 * 1024
    for parameter in workload.model.parameters():
        parameter.grad = None
