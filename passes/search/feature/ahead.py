"""Gathers of parameters beside the ops before them, as the executor starts them (``runtime.ops.gather_ahead``).

    steps     norm's parameters   up's   down's        of blocks that backward computes again: all of a block
    beside    the ops from where the step before is read to where this one is: up's beside the norm, down's beside up, …

On the way back the sums of a step's gradients run beside the backward of the same ops. Which parameters are in parts is not
known where one is looked at: all are taken to be, and a parameter has its part, by size, of what its step runs beside. The
first step that there is begins beside nothing: of a whole model, the first of each kind of steps is taken to be it. What is
before the first step of a part of a model is taken to be what is behind its last, as parts in a row are mostly alike.

    hidden = hidden_seconds(g, C) + hidden_seconds(h, D)      g, h   seconds of its gather, and of what runs back
                                                              C, D   of its part of these ops on one rank

Gradients that are summed once per step and by themselves (``passes.shard.state.ALONE_BYTES``) are so beside all of the last
micro-batch's backward, each beside its part by size. The step starts those of a first stage in it
(``runtime.program.early``), others while the stages before are at theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cost_models.arrays import FloatArray
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph, once_per_graph


@dataclass(frozen=True)
class ComputedBeside:
    """The ops that run while a parameter is on its way."""

    part: float
    """The part of their seconds that the parameter is given, others of its step the rest."""
    ops: tuple[tuple[int, int], ...]
    """Indices of unlike ones, and how often each is there."""

    def seconds(self, forward: FloatArray, backward: FloatArray) -> tuple[float, float]:
        """Seconds forward and backward in the parameter's part. Arrays: [ops], ``shared_seconds``."""
        ways = (math.fsum(count * float(each[op]) for op, count in self.ops) for each in (forward, backward))
        first, second = (self.part * seconds for seconds in ways)
        return first, second


def computed_beside(
    graph: OpGraph, costs: GraphCosts, region_of: Mapping[str, int]
) -> dict[str, ComputedBeside]:
    """Return what runs beside the gather of each parameter that one op reads, by the parameter's node.

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
    is_part = any(given.kind == "value" for given in graph.inputs)
    found, kinds = dict[str, ComputedBeside](), set[object]()
    for number, end in enumerate(begins):
        start = begins[number - 1] if number else begins[-1] - len(position) if is_part else end
        ops = tuple(sorted(Counter(first_of[at] for at in range(start, end)).items()))
        elements = {name: graph.parameters[graph.input_of[name].name].elements for name in steps[end]}
        kind = ops, tuple(elements.values())
        if ops and (is_part or kind in kinds):
            whole = max(sum(elements.values()), 1)
            found |= {name: ComputedBeside(own / whole, ops) for name, own in elements.items()}
        kinds.add(kind)
    return found


@once_per_graph
def trained_elements(graph: OpGraph) -> int:
    """Return the number of elements of all parameters that have a gradient."""
    trained = (i for i in graph.inputs if i.kind == "parameter" and i.node in graph.needs_grad)
    return sum(graph.parameters[given.name].elements for given in trained)


def _first_alike(costs: GraphCosts) -> list[int]:
    """[ops] the first op of the same costs."""
    _, first, of = np.unique(costs.rates.signature_of, return_index=True, return_inverse=True)
    return [int(first[kind]) for kind in of]
