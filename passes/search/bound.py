"""Lower bounds on the seconds of any placement, and the method that proves them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray


class BoundMethod(Enum):
    """The argument behind a bound; the value is how people read it."""

    LARGEST_UNIT = "the largest unit"
    SHARED_WORK = "all work shared without loss (linear relaxation)"
    INTEGER_PROGRAM = "integer program over all units"
    SETS = "sets of one device, column generation"
    LONGEST_PATH = "longest path, work, largest op"


@dataclass(frozen=True)
class Bound:
    """Seconds that nothing in the space is below."""

    seconds: float
    method: BoundMethod


def weighted_work(seconds: FloatArray, weights: FloatArray) -> float:
    """Return Σ_u min_d λ_d·t_d(u), which Σ_d λ_d·load_d of no placement is below: each unit u is on some device d.

    ``seconds`` t, shape [devices, units]; ``weights`` λ ≥ 0, shape [devices]. The largest load is at least a weighted mean
    of all loads, so weighted work / Σ λ bounds it from below. Any weights give a bound; the best ones are the dual solution
    of the linear relaxation of sharing the work out.
    """
    return float((weights[:, None] * seconds).min(axis=0).sum())


@dataclass(frozen=True, eq=False)
class PhaseTimes:
    """Ops in a topological order, with their seconds by phase on each device. Shapes: [P devices, n ops]."""

    readers: tuple[tuple[int, ...], ...]
    """Ops that read each op's result."""
    forward: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray
    differentiable: NDArray[np.bool_]
    """[n] ops that a gradient passes; the others have no backward."""
    loss: int | None
    """The op that backward starts from."""


def whole_ops_bound(ops: PhaseTimes, microbatches: int) -> float:
    """Lower bound on any plan with every op whole on one device, whatever its schedule and links.

    The space is exactly that: layer-wise plans, and free ones without split ops. A sharded op, or one in blocks of
    neurons, is on several devices at once, and its parts may together be faster (``passes.search.any_plan`` has the bound
    that holds for them too).

    Times must be those of the *smallest* micro-batch if sizes differ. The largest of four bounds; none counts links, so
    free ones do not break it. Let t_d(u) = f + b + w be op u's seconds on device d, t(u) the least of them, m the number
    of micro-batches.

    work    Device d is busy m·Σ t_d(u) over its ops, and the step takes at least any weighted mean of the busy times.
            With weights λ_d ∝ 1/Σ_u t_d(u), Σ_d λ_d = 1:

                step ≥ m·Σ_u min_d λ_d·t_d(u)

            On identical devices this is m·Σt / P, on proportional ones total work over total speed.
    chain   One micro-batch passes the longest path of forwards into the loss, and after it a longest path of input
            halves, each op at its fastest.
    op      Op u runs m times on one device. Before its first forward lies the longest path into u, and after its last
            input half the longest way back, along edges that carry gradients:

                step ≥ into(u) + m·(f + b)(u) + back(u)

    late    Weight halves may run after all that, but on the same device:

                step ≥ into(u) + m·t(u)
    """
    if not len(ops.readers):
        return 0.0
    m = microbatches
    backward_input = np.where(ops.differentiable, ops.backward_input, 0.0)
    backward_weight = np.where(ops.differentiable, ops.backward_weight, 0.0)
    both = ops.forward + backward_input
    total = both + backward_weight
    busy = total.sum(axis=1)
    work = float(total.min(axis=0).sum()) / len(busy)
    if (busy > 0).all():
        weights = (1.0 / busy) / (1.0 / busy).sum()
        work = max(work, weighted_work(total, weights))
    forward, backward = ops.forward.min(axis=0), backward_input.min(axis=0)
    into = longest_into(ops.readers, forward)
    back = longest_into(_gradient_edges(ops), backward)
    chain = 0.0
    if ops.loss is not None:
        chain = float(into[ops.loss] + forward[ops.loss] + (back + backward).max())
    through = into + m * both.min(axis=0) + back
    late = into + m * total.min(axis=0)
    return max(m * work, chain, float(through.max()), float(late.max()))


def _gradient_edges(ops: PhaseTimes) -> tuple[tuple[int, ...], ...]:
    """Readers that send a gradient back to each op."""
    passes = ops.differentiable
    return tuple(
        tuple(v for v in readers if passes[v]) if passes[u] else () for u, readers in enumerate(ops.readers)
    )


def longest_into(readers: tuple[tuple[int, ...], ...], seconds: FloatArray) -> FloatArray:
    """[n] the longest path, in ``seconds``, of ops before each op."""
    longest = [0.0] * len(readers)
    each = seconds.tolist()
    for u, targets in enumerate(readers):
        end = longest[u] + each[u]
        for v in targets:
            longest[v] = max(longest[v], end)
    return np.array(longest)
