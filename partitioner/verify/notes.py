"""Notes on what is compared otherwise than it trains, for one step and for a training run."""

from __future__ import annotations

from collections.abc import Iterator

from partitioner.engine.optimizers import TAKE_SPARSE
from partitioner.record.data import PlanData
from passes.graph.graph import OpGraph
from passes.graph.nodes import argument


def notes_on(plan: PlanData, graph: OpGraph, dropped: int, *, double: bool = True) -> Iterator[str]:
    """Yield the notes of the trace, and what is changed for the comparison.

    ``dropped``: ops whose dropout is off; ``double``: float64 is compared.
    """
    yield from graph.notes
    if dropped:
        yield f"dropout switched off in {dropped} ops: two random draws cannot be compared"
    if double and any("grouped_mm" in str(op.target) for op in graph.ops):
        yield "experts are multiplied one after another in float64, of which torch has no grouped product"
    sparse = [op for op in graph.ops if argument(op, "sparse") is True]
    if sparse and plan.optimizer_memory not in TAKE_SPARSE:
        yield (
            f"sparse gradients ({sparse[0].name}) are made dense for {plan.optimizer_memory}, which takes no others: "
            "torch.optim.SparseAdam in your own loop computes something else"
        )
