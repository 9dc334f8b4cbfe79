"""Numbers of micro-batches that a batch can be cut into, or an error that says which would do."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.errors import UsageError
from cost_models.units import counted
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples


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
