"""What the allocator reserves beyond a rank's tensors: programs of hand-made allocations, and a plan for GPUs."""

from __future__ import annotations

import torch
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.memory import StateBytes
from passes.costs.allocations import RELEASED, Allocations
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.reserved import RankAllocations, allocator_bytes
from passes.search.judge import Judge
from passes.trace.trace import trace
from runtime.program.program import Backward, Forward, Instruction, OptimizerStep

MIB = 1 << 20


def rank(own: Allocations, instructions: list[Instruction], **state: StateBytes) -> RankAllocations:
    return RankAllocations(instructions, {0: own}, state, 0, {}, "momentum")


def step(microbatches: int) -> list[Instruction]:
    """One forward, one backward after the other."""
    pairs = [each for m in range(microbatches) for each in (Forward(0, m), Backward(0, m))]
    return [*pairs, OptimizerStep()]


def test_saved_tensors_of_8_mib_lie_in_segments_of_20() -> None:
    own = Allocations(tuple((slot, 8 * MIB) for slot in range(4)), (), ())
    assert allocator_bytes(rank(own, step(1))) == 8 * MIB


def test_equal_microbatches_find_what_one_before_them_left() -> None:
    own = Allocations(((0, 12 * MIB),), ((1, 30 * MIB), (0, RELEASED)), ())
    few, many = (allocator_bytes(rank(own, step(count))) for count in (2, 64))
    assert few == many == 0


def test_a_gradient_stays_and_later_ones_are_added_to_it() -> None:
    """12 MiB of parameters, with gradients of as much; then with gradients that are cast to 24 MiB.

    Momentum takes the place of the narrow gradient. In the second step that is cut from the 24 MiB of the first wide one,
    of which 12 MiB stay free: the wide one needs a segment of its own.
    """
    held = StateBytes(parameters=12 * MIB, gradients=12 * MIB, optimizer_state=12 * MIB, trained=12 * MIB)
    own = Allocations((), ((-1, 12 * MIB),), ("weight",))
    assert allocator_bytes(rank(own, step(1), weight=held)) == 0
    assert allocator_bytes(rank(own, step(2), weight=held)) == 0
    cast = StateBytes(parameters=12 * MIB, gradients=24 * MIB, optimizer_state=12 * MIB, trained=12 * MIB)
    assert allocator_bytes(rank(own, step(1), weight=cast)) == 12 * MIB


def tower() -> OpGraph:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(1000, 1000), nn.Tanh())))
    return trace(model, (torch.randn(2, 1000),), loss_fn=lambda y, x: y.square().mean())


def test_plans_for_gpus_have_it_and_plans_for_workers_have_not() -> None:
    graph, job = tower(), Job(8, "sgd")
    ops = {node.name: 0 for node in graph.ops}
    for cluster in (ClusterSpec.local(1), ClusterSpec.parse("A100-40GB:1")):
        judge = Judge(graph, costs_of(graph, cluster), cluster, job)
        found = judge.simulate(Candidate(ops, ((0,),), 1, "1f1b"))
        carried = judge.carried(found.candidate)
        (own,) = carried.realized.simulation.process
        plain = judge.carry(found.candidate).realized.simulation.peak_bytes[0]
        assert found.peak_bytes[0] == plain + own.allocator
        if cluster.devices[0].kind == "cpu":
            assert own.allocator == 0
        else:  # 4 weights of 4 MB and as many gradients: at least what is left of segments of 20 MiB
            assert 2 * MIB < own.allocator < 44 * MIB
