"""Gathers of parameters beside the ops before them, as the executor starts them (``runtime.ops.gather_ahead``).

    steps     norm's parameters   up's   down's        of blocks that backward computes again: all of a block
    beside    the ops from where the step before is read to where this one is: up's beside the norm, down's beside up, …

On the way back the sums of a step's gradients run beside the backward of the same ops. Which parameters are in parts is not
known where one is looked at: all are taken to be, and a parameter has its part, by size, of what its step runs beside. What
is before the first step of a part of a model is taken to be what is behind its last, as parts in a row are mostly alike.

    hidden = hidden_seconds(g, C / n) + hidden_seconds(h, D / n)      g, h   seconds of its gather, and of what runs back
                                                                      C, D   of its part of these ops, on one of n ranks

Sums of gradients that happen once per step count in full: those of first stages alone run beside their last backward
(``runtime.program.early``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.compute import ComputeDevice
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph


@dataclass(frozen=True)
class ComputedBeside:
    """The ops that run while a parameter is on its way."""

    part: float
    """The part of their seconds that the parameter is given, others of its step the rest."""
    ops: tuple[tuple[int, int], ...]
    """Indices of unlike ones, and how often each is there."""

    def seconds(
        self, costs: GraphCosts, samples: int, devices: Sequence[ComputeDevice], ranks: int
    ) -> tuple[float, float]:
        """Seconds forward and backward on each of so many ranks that share the work."""
        each = [costs.exact(samples).seconds(samples, device) for device in devices]
        forward = max(math.fsum(count * float(s.forward[op]) for op, count in self.ops) for s in each)
        backward = max(
            math.fsum(count * float(s.backward_input[op] + s.backward_weight[op]) for op, count in self.ops)
            for s in each
        )
        return forward * self.part / ranks, backward * self.part / ranks


def computed_beside(
    graph: OpGraph, costs: GraphCosts, region_of: Mapping[str, int]
) -> dict[str, ComputedBeside]:
    """Return what runs beside the gather of each parameter that one op reads, by the parameter's node; none of the first.

    ``region_of``: the block of each op that backward computes again.
    """
    position = {node.name: index for index, node in enumerate(graph.ops)}
    begin = dict[int, int]()
    for name, region in region_of.items():
        begin[region] = min(position[name], begin.get(region, len(position)))
    steps: dict[int, list[str]] = {}
    for given in graph.inputs:
        users = graph.nodes[given.node].users
        if given.kind == "parameter" and len(users) == 1:
            reader = next(iter(users)).name
            if reader in position:
                at = begin[region_of[reader]] if reader in region_of else position[reader]
                steps.setdefault(at, []).append(given.node)
    begins, first_of = sorted(steps), _first_alike(costs)
    arrives = any(given.kind == "value" for given in graph.inputs)
    found = {}
    for number, end in enumerate(begins):
        start = begins[number - 1] if number else begins[-1] - len(position) if arrives else end
        ops = Counter(first_of[at] for at in range(start, end))
        whole = sum(graph.parameters[graph.input_of[name].name].elements for name in steps[end])
        for name in steps[end]:
            part = graph.parameters[graph.input_of[name].name].elements / max(whole, 1)
            found[name] = ComputedBeside(part, tuple(sorted(ops.items())))
    return {name: own for name, own in found.items() if own.ops}


def _first_alike(costs: GraphCosts) -> list[int]:
    """[ops] the first op of the same costs."""
    _, first, of = np.unique(costs.rates.signature_of, return_index=True, return_inverse=True)
    return [int(first[kind]) for kind in of]
