"""What a step of a profile takes by its ops' layouts: from work and bytes alone, no code shared with the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.search.cost_graph.layouts import LayoutProblem


def step_seconds(problem: LayoutProblem, layouts: Sequence[str]) -> float:
    """Work, and bytes that a device sends, of n mini-batches. Infinite where an op cannot be split so."""
    n, total, moved = problem.devices, 0.0, 0.0
    for v, op in enumerate(problem.ops):
        parts = {"samples": None, "features": op.neurons, "inputs": op.inputs}[layouts[v]]
        kinds = {"features": ("neurons", "channels", "input"), "inputs": ("neurons",)}
        if layouts[v] != "samples" and op.kind not in kinds[layouts[v]]:
            return math.inf
        if parts is not None and parts < n:
            return math.inf
        share = 1.0 if parts is None else -(-parts // n) * n / parts
        total += (op.forward_seconds + op.backward_seconds) * share
        if layouts[v] == "samples":
            moved += 2 * (n - 1) / n * op.parameter_bytes
        if op.kind != "input":
            moved += _missing(problem, v, layouts) * op.activation_bytes * (2 if op.has_gradient else 1)
    return total + moved / problem.bytes_per_second


def _missing(problem: LayoutProblem, u: int, layouts: Sequence[str]) -> float:
    """How often a device's share of u's output it sends: the sum of parts, and what readers need and it does not hold."""
    n = problem.devices
    whole, forms = False, set()
    for v in {w for source, w in problem.edges if source == u}:
        if layouts[v] == "features" and problem.ops[v].kind == "neurons":
            whole = True
        else:
            forms.add(layouts[v] != "samples")
    if not whole and not forms:
        forms = {False}
    held = {"samples": [False], "features": [True], "inputs": [False, True]}[layouts[u]]
    read = n - 1 if whole else min(0 if forms == {form} else (n - 1) / n for form in held)
    return read + (n - 1 if layouts[u] == "inputs" else 0)
