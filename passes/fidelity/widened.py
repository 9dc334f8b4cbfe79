"""A model widened to float64 where it stands, with its batch and what its code makes; afterwards all is what it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from passes.evaluate.float64 import code_in_float64, wide, widen_module
from passes.fidelity.steps import Subject
from passes.graph.graph import OpGraph
from passes.trace.batch import flatten_batch, forward_names, map_tensors
from passes.trace.python_state import PythonState, unchanged


def roots(subject: Subject) -> dict[str, object]:
    """Return what holds Python state."""
    return {"": subject.model, "loss_fn": subject.loss_fn}


@contextlib.contextmanager
def widened_to_float64(graph: OpGraph, subject: Subject) -> Iterator[tuple[Subject, PythonState]]:
    """Widen model and batch, and what code makes, to float64; yields them with their state."""
    with unchanged(roots(subject)):
        for parameter in subject.model.parameters():
            parameter.grad = None
        widen_module(subject.model)
        batch = map_tensors(subject.batch, lambda _, leaf: wide(leaf))
        widened = replace(subject, batch=batch, leaves=flatten_batch(batch, forward_names(subject.model)))
        with code_in_float64(graph), unchanged(roots(widened)) as state:
            yield widened, state
