"""Numbers of micro-batches that a batch can be cut into, or an error that says which would do; and what cutting costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from cost_models.errors import UsageError
from cost_models.units import counted
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.shard.couplings import why_whole

SPREAD = 6
"""Numbers that are looked at where there are many to choose from: a limit of work."""


def accepted_counts(graph: OpGraph, batch_size: int, counts: Sequence[int]) -> list[int]:
    """Choose the ``counts`` whose smallest micro-batch the model accepts.

    Raises UsageError where none is left, naming the op that needs more samples.
    """
    least, reason = least_samples(graph)
    accepted = [count for count in counts if batch_size // count >= max(1, least)]
    if accepted:
        return accepted
    needs = f"{reason} needs {counted(least, 'sample')} or more in every micro-batch"
    if batch_size >= least:
        way = f"at most {counted(batch_size // max(1, least), 'micro-batch')}"
    else:
        way = f"a batch of {counted(least, 'sample')} or more"
    raise UsageError(
        f"cannot train {graph.model_name} on {counted(batch_size, 'sample')} in {counted(counts[0], 'micro-batch')}",
        [needs if reason else "every micro-batch needs a sample"],
        [way],
    )


def may_cost_less(graph: OpGraph, microbatches: int | Literal["auto"]) -> bool:
    """Tell whether a batch may take less in the micro-batches that are wanted than whole.

    Else a micro-batch takes its share of the whole batch's seconds, or more. Not so where samples are coupled: the products
    of all pairs (z @ z.T) are half as many in two halves.
    """
    return microbatches != 1 and bool(why_whole(graph))


def spread(numbers: Sequence[int]) -> list[int]:
    """Return the first, the last and some between them, ``SPREAD`` at most, as far from each other as can be."""
    if not numbers:
        return []
    chosen = np.unique(np.linspace(0, len(numbers) - 1, SPREAD).round().astype(int))
    return [numbers[i] for i in chosen.tolist()]
