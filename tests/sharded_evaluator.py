"""What a profile's step takes with its ops by samples or by features: shares no code with the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from passes.placement_sharded import ShardedProblem


def step_seconds(problem: ShardedProblem, by_features: Sequence[bool]) -> float:
    """Work, and bytes that a device sends, of n mini-batches. Infinite where an op cannot be split."""
    n, total, moved = problem.devices, 0.0, 0.0
    for v, op in enumerate(problem.ops):
        splits = op.kind != "samples" and (op.neurons is None or op.neurons >= n)
        if by_features[v] and not splits:
            return math.inf
        share = 1.0
        if by_features[v] and op.neurons:
            share = -(-op.neurons // n) * n / op.neurons
        total += (op.forward_seconds + op.backward_seconds) * share
        moved += 0.0 if by_features[v] else 2 * (n - 1) / n * op.parameter_bytes
        if op.kind == "input":
            continue
        readers = {w for u, w in problem.edges if u == v}
        whole = any(by_features[w] and problem.ops[w].kind == "neurons" for w in readers)
        forms = {by_features[w] for w in readers} if readers else {False}
        missing = n - 1 if whole else (n - 1) / n if forms != {by_features[v]} else 0.0
        moved += missing * op.activation_bytes * (2 if op.has_gradient else 1)
    return total + moved / problem.bytes_per_second
