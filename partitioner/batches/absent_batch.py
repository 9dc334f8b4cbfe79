"""The batch that a data loader hands to a rank that reads no input: a number of samples, and nothing else.

A middle stage of a pipeline computes with what its neighbours send. Loading, decoding and tokenizing the batch there
would be work for nothing, times the number of such ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from cost_models.errors import UsageError
from passes.graph.graph import OpGraph
from passes.graph.token_counts import user_leaves
from runtime.segment.code import BatchSpec


class AbsentBatch:
    """A stand-in for a batch of ``samples`` samples, without contents. ``train_step`` and ``eval_step`` take it."""

    def __init__(self, samples: int, graph: OpGraph, *, in_parts: bool = False) -> None:
        self.samples, self.in_parts = samples, in_parts
        """``in_parts``: the ranks that read it loaded parts of it."""
        self._graph = graph

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """Leaves of the right shapes and types, each of one element's memory: for counting, not for reading."""
        return self.leaves_of(user_leaves(self._graph.batch, self._graph.token_counts))

    def leaves_of(self, spec: BatchSpec) -> Mapping[str, Tensor]:
        """Return ``leaves`` under the names, and with the batch dimensions, of ``spec``."""
        sizes = dict.fromkeys((*spec.symbols, spec.batch_symbol), self.samples)
        return {
            name: torch.zeros((), dtype=leaf.dtype).expand(leaf.concrete(sizes))
            for name, leaf in spec.leaves.items()
        }

    def to(self, *_: Any, **__: Any) -> AbsentBatch:
        """Return itself: there is nothing to move."""
        return self

    def __repr__(self) -> str:
        return f"AbsentBatch(samples={self.samples})"

    def __getitem__(self, key: object) -> NoReturn:
        raise UsageError(f"this rank did not load the batch, so it has no {key!r}", _WHY, _TRY)

    def __iter__(self) -> NoReturn:
        raise UsageError("this rank did not load the batch", _WHY, _TRY)

    def __getattr__(self, name: str) -> NoReturn:
        text = f"this rank did not load the batch, so it has no {name!r}: {_WHY[0]}; {_TRY[0]}"
        raise AttributeError(text)


_WHY = ["its part of the model reads no input"]
_TRY = ["engine.dataloader(..., everywhere=True) loads every batch on every rank"]


def refuse_absent(needed: Collection[str]) -> None:
    """Raise UsageError where a rank reads leaves of a batch that it did not load."""
    if needed:
        raise UsageError(
            "this batch was not loaded, and it is read here",
            [f"this rank reads {', '.join(sorted(needed))}"],
            _TRY,
        )
