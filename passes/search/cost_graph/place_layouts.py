"""Lay out every op of a profile over all devices so that a step is shortest.

problem ─► minimum cut: the best by samples and features ─► no op can be split by inputs, or one device: done
                                                         └► integer program: the best by samples, features and inputs
"""

from __future__ import annotations

import math

from cost_models.errors import GraphError
from passes.search.cost_graph.layouts import Sharded, ShardedProblem
from passes.search.cost_graph.layouts_cut import cut_layouts
from passes.search.cost_graph.layouts_ilp import improve_layouts


def place_sharded(problem: ShardedProblem, time_limit: float = 60.0, *, by_inputs: bool = True) -> Sharded:
    """The best layouts, with proof. ``by_inputs``: whether ops may be split by their inputs too."""
    _check_prices(problem)
    found = cut_layouts(problem)
    splits = any(problem.can_be(v, "inputs") for v in range(len(problem.ops)))
    if not (by_inputs and splits) or problem.devices == 1 or found.step_seconds == 0:
        return found
    return improve_layouts(problem, found, time_limit)


def _check_prices(problem: ShardedProblem) -> None:
    problems = [
        f"{op.id}: {op.activation_bytes:g} bytes of output, {op.parameter_bytes:g} of parameters"
        for v, op in enumerate(problem.ops)
        if not math.isfinite(problem.gather_seconds(v) + problem.reduce_seconds(v))
    ]
    if problems:
        raise GraphError(
            f"at {problem.bytes_per_second:g} B/s sending takes longer than numbers can say",
            problems[:5],
            ["give a larger --bandwidth, or correct the file"],
        )
