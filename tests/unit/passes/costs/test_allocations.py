"""Allocations of a segment: what is there between forward and backward, and at most in backward, is what costs count."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from passes.costs.allocations import RELEASED, TensorChange, allocations
from passes.costs.backward_peak import backward_peak
from passes.costs.costs import cost_graph
from passes.trace.trace import trace
from tests.unit.passes.costs.test_backward_peak import branches, wide


def held(changes: Iterable[TensorChange], there: dict[int, int]) -> int:
    """Carry the changes out on the bytes by slot; return the most that was there, without gradients of parameters."""
    most = sum(there.values())
    for slot, size in changes:
        if size == RELEASED:
            del there[slot]
        elif slot >= 0:
            assert slot not in there
            there[slot] = size
        most = max(most, sum(there.values()))
    return most


@pytest.mark.parametrize("example", [wide, branches], ids=lambda f: f.__name__)
def test_what_is_held_is_what_costs_count(example):
    torch.manual_seed(0)
    model, batch = example()
    graph = trace(model.train(), batch)
    costs, ops = cost_graph(graph), range(len(graph.ops))
    size = next(iter(batch.values())).shape[0]
    made = allocations(graph, costs, ops, size, outputs=[graph.loss])
    there: dict[int, int] = {}
    held(made.forward, there)
    between = sum(there.values())
    loss_bytes = costs.at(size).output_bytes[-1]
    assert between == costs.saved_bytes(ops, size) + loss_bytes
    most = held(made.backward, there)
    gradients = sum(size for slot, size in made.backward if slot < 0)
    assert set(made.parameters) == set(graph.trained)
    assert most - between <= backward_peak(graph, costs, ops, size).later_bytes <= most - between + gradients


def test_a_block_that_is_computed_again_keeps_only_what_it_reads():
    torch.manual_seed(0)
    model, batch = wide()
    graph = trace(model.train(), batch)
    costs, ops = cost_graph(graph), range(len(graph.ops))
    first = [0, 1]  # linear, tanh
    kept, again = (
        allocations(graph, costs, ops, 8, outputs=[graph.loss], regions=regions) for regions in ((), (first,))
    )
    there: dict[int, int] = {}
    held(kept.forward, there)
    fewer: dict[int, int] = {}
    held(again.forward, fewer)
    assert sum(fewer.values()) == costs.held_bytes(ops, 8, regions=(first,)).saved + 4
    assert sum(size for slot, size in again.backward if slot >= 0 and size > 0) > sum(
        size for slot, size in kept.backward if slot >= 0 and size > 0
    )
