"""Gathers of parameters beside the ops before them, as the executor starts them (``runtime.ops.gather_ahead``).

    steps     norm's parameters   up's   down's        of blocks that backward computes again: all of a block
    beside    the ops from where the step before is read to where this one is: up's beside the norm, down's beside up, …

On the way back the sums of a step's gradients run beside the backward of the same ops. Which parameters are in parts is not
known where one is looked at: all are taken to be, and a parameter has its part, by size, of what its step runs beside; but
for small ones beside large ones, which are gathered by themselves where these are whole, and for steps of vectors alone
(norms): other steps reach back past them, as vectors are whole wherever memory allows. The first step that there is
begins beside nothing. Which that is depends on which are in parts, so all k steps bear it in equal shares, and those of all
pieces of a model that are alike; what is before the first is taken to be what is behind the last.

    hidden = (1 − 1/(n·k)) · (hidden_seconds(g, C) + hidden_seconds(h, D))
        g, h   seconds of its gather, and of what runs back         n   pieces alike; 1: a whole model
        C, D   of its part of these ops on one rank                 k   steps in a piece

Gradients that are summed once per step and by themselves (``passes.shard.state.ALONE_BYTES``) are so beside the last
micro-batch's backward, each beside its part by size, or what is left once it is there. The step starts those of a first
stage in it (``runtime.program.early``), others while the stages before are at theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

import numpy as np

from cost_models.arrays import FloatArray
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph, once_per_graph, tensor_specs
from passes.search.recomputed import Recomputed
from passes.shard.state import ALONE_BYTES


@dataclass(frozen=True)
class ComputedBeside:
    """The ops that run while a parameter is on its way."""

    part: float
    """The part of their seconds that the parameter is given, others of its step the rest."""
    ops: tuple[tuple[int, int], ...]
    """Indices of unlike ones, and how often each is there."""
    often: float
    """The part of all such gathers that they run beside: others are the first that there are."""

    def seconds(self, forward: FloatArray, backward: FloatArray) -> tuple[float, float]:
        """Seconds forward and backward in the parameter's part. Arrays: [ops], ``shared_seconds``."""
        ways = (math.fsum(count * float(each[op]) for op, count in self.ops) for each in (forward, backward))
        first, second = (self.part * seconds for seconds in ways)
        return first, second


def computed_beside(again: Recomputed) -> dict[str, ComputedBeside]:
    """Return what runs beside the gather of each parameter that one op reads, by the parameter's node."""
    graph, region_of = again.graph, again.region_of
    position = _positions(graph)
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
    begins, first_of, found = sorted(steps), _first_alike(again.costs), dict[str, ComputedBeside]()
    often = 1 - 1 / max(len(begins) * max(again.alike, 1), 1)
    with_matrix = {at for at, names in steps.items() if not all(_is_vector(graph, name) for name in names)}
    matrices = sorted(with_matrix)
    for end in begins:
        known = matrices if end in with_matrix else begins
        number = bisect_left(known, end)
        before = known[number - 1] if number else known[-1] - len(position)
        between = Counter(first_of[at] for at in range(before, end))
        if between and often:
            large = [name for name in steps[end] if _bytes(graph, name) >= ALONE_BYTES] or steps[end]
            elements = {name: graph.parameters[graph.input_of[name].name].elements for name in large}
            whole, ops = max(sum(elements.values()), 1), tuple(sorted(between.items()))
            found |= {name: ComputedBeside(own / whole, ops, often) for name, own in elements.items()}
    return found


def backward_beside(graph: OpGraph, parameter: str, backward: FloatArray) -> float:
    """Return the seconds of a step's last backward beside which the gradient of a parameter is summed by itself.

    ``parameter``: its node; ``backward``: [ops] ``shared_seconds``. What other parts compute before a part counts as left.
    """
    own = graph.parameters[graph.input_of[parameter].name].elements / _trained_elements(graph)
    if any(given.kind == "value" for given in graph.inputs):
        return own * float(backward.sum())
    position = _positions(graph)
    first = min(
        (position[user.name] for user in graph.nodes[parameter].users if user.name in position), default=0
    )
    return min(own * float(backward.sum()), float(backward[:first].sum()))


@once_per_graph
def _trained_elements(graph: OpGraph) -> int:
    """Return the number of elements of all parameters that have a gradient."""
    trained = (i for i in graph.inputs if i.kind == "parameter" and i.node in graph.needs_grad)
    return sum(graph.parameters[given.name].elements for given in trained)


@once_per_graph
def _positions(graph: OpGraph) -> dict[str, int]:
    return {node.name: index for index, node in enumerate(graph.ops)}


def _is_vector(graph: OpGraph, parameter: str) -> bool:
    (spec,) = tensor_specs(graph.nodes[parameter])
    return len(spec.shape) < 2


def _bytes(graph: OpGraph, parameter: str) -> int:
    """Return the size of a parameter, by its node, as ops read it."""
    (spec,) = tensor_specs(graph.nodes[parameter])
    return graph.parameters[graph.input_of[parameter].name].elements * spec.dtype.itemsize


def _first_alike(costs: GraphCosts) -> list[int]:
    """[ops] the first op of the same costs."""
    _, first, of = np.unique(costs.rates.signature_of, return_index=True, return_inverse=True)
    return [int(first[kind]) for kind in of]
