"""The way from a user's batch to the tensors that a plan takes, and refusal of values that are not as they were traced."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from cost_models.errors import PlanError
from partitioner.batches.part_batch import AbsentBatch, PartBatch, refuse_absent
from partitioner.models.workload import Workload
from passes.trace.batch import flatten_batch, forward_constants, forward_names


class BatchReader:
    """Reads batches for the model of a workload, whose example was traced: its plain values are kept."""

    def __init__(self, model_name: str, workload: Workload) -> None:
        self._model_name, self._workload = model_name, workload
        self._leaf_names = forward_names(workload.model)
        self._constants = self._constants_of(workload.example_inputs)

    def leaves(self, batch: Any, needed: Collection[str]) -> Mapping[str, Tensor]:
        """Return every tensor of ``batch`` by leaf name. Raises PlanError where plain values differ from the traced ones.

        It may lack tensors that this rank does not read; ``needed``: those it does. A batch in parts gives this rank's.
        """
        if isinstance(batch, AbsentBatch):
            refuse_absent(needed)
            return batch.leaves
        if isinstance(batch, PartBatch):
            batch = batch.batch
        leaves = flatten_batch(batch, self._leaf_names)
        self._refuse_other_constants(batch)
        return leaves

    def _constants_of(self, batch: Any) -> Mapping[str, object]:
        has_loss_fn = self._workload.loss_fn is not None
        return forward_constants(self._workload.model, batch, has_loss_fn, partial=True)

    def _refuse_other_constants(self, batch: Any) -> None:
        """Raise PlanError where a number (or word, or None) that forward gets is not the one that was traced."""
        if not self._constants:
            return
        given = self._constants_of(batch)
        changed = [
            f"{name} is {given[name]!r}, traced with {traced!r}"
            if name in given
            else f"{name} is a tensor or not given, traced with {traced!r}"
            for name, traced in self._constants.items()
            if name not in given or not same_constant(given[name], traced)
        ]
        if changed:
            raise PlanError(
                f"this batch does not fit the plan for {self._model_name}",
                because=changed,
                suggestions=[
                    "make it a tensor, if it changes from step to step",
                    "plan again with this value",
                ],
            )


def same_constant(a: object, b: object) -> bool:
    """Tell whether a trace with ``a`` is one with ``b``: equal and of one kind (1, 1.0 and True compute other types).

    nan is itself here.
    """
    if _kind(a) is not _kind(b):
        return False
    return a == b or (a != a and b != b)


def _kind(value: object) -> type | None:
    return next((kind for kind in (bool, int, float, complex, str) if isinstance(value, kind)), None)
