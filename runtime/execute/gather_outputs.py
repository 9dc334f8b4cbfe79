"""A model's outputs, gathered from the micro-batches and ranks that computed them.

    rank 1, micro-batches 3 2 2 samples: logits (3, s, v) (2, s, v) (2, s, v)  ──►  (7, s, v) on rank 0, or on all ranks

The parts of an output become one tensor:
    it has a batch dimension                      concatenated along it, in the order of the samples
    it has none, and depends on the samples       stacked: a new first dimension, one entry per micro-batch
    it has none, and does not                     as it is: every micro-batch has the same
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import sympy
import torch
from torch import Tensor

from cost_models.errors import InternalError, UsageError
from runtime.ranks.collective import Collectives
from runtime.segment.code import TensorSpec

Gather: TypeAlias = Literal["rank0", "all"]
"""Ranks that get the outputs."""

Joining: TypeAlias = Literal["concatenate", "stack", "same", "refuse"]
"""Way in which parts become one. ``refuse``: two dimensions grow with the batch, so parts cannot be put together."""


@dataclass(frozen=True)
class OutputPlace:
    """One of the model's outputs: its shape and type, and the rank that has it."""

    names: tuple[str, ...]
    """Names of the output; several where the model returns one tensor under several names."""
    spec: TensorSpec
    """Shape and type in one micro-batch."""
    joining: Joining
    batch_dim: int
    """Dimension along which it is concatenated; 0 where it is not."""
    rank: int | None
    """Rank that has it; None: every rank (an input of the model, or a constant)."""
    held: str = ""
    """Name of the parameter, buffer, constant or leaf of the batch that it is, where nothing computes it."""


def refuse_unjoinable(places: Sequence[OutputPlace], microbatches: int) -> None:
    """Raise UsageError for outputs that several micro-batches cannot make."""
    wrong = [place for place in places if place.joining == "refuse"]
    if wrong and microbatches > 1:
        raise UsageError(
            "cannot gather these outputs",
            because=[
                f"{', '.join(place.names)}: several of its dimensions grow with the batch, "
                f"and the batch is computed in {microbatches} micro-batches"
                for place in wrong
            ],
            suggestions=["evaluate as many samples at once as one micro-batch has", "call without gather"],
        )


def joined(place: OutputPlace, parts: Sequence[Tensor], foreign: frozenset[int]) -> Tensor:
    """Return the parts of all micro-batches as one tensor that shares memory with nothing in ``foreign``."""
    if place.joining == "stack":
        return torch.stack(list(parts))
    if place.joining == "concatenate" and len(parts) > 1:
        return torch.cat(list(parts), place.batch_dim)
    return parts[-1].clone() if memory_of(parts[-1]) in foreign else parts[-1]


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory."""
    return tensor.untyped_storage().data_ptr()


def whole_shape(place: OutputPlace, symbols: Sequence[Mapping[sympy.Symbol, int]]) -> tuple[int, ...]:
    """Return the shape once it is put together. ``symbols``: the numbers of each micro-batch's sizes."""
    shapes = [place.spec.concrete(numbers) for numbers in symbols]
    if place.joining == "stack":
        return (len(shapes), *shapes[0])
    if place.joining != "concatenate":
        return shapes[-1]
    length = sum(shape[place.batch_dim] for shape in shapes)
    return (*shapes[0][: place.batch_dim], length, *shapes[0][place.batch_dim + 1 :])


def gather_outputs(
    places: Sequence[OutputPlace],
    own: Mapping[str, Tensor],
    shapes: Sequence[tuple[int, ...]],
    gather: Gather,
    rank: int,
    collectives: Collectives,
) -> dict[str, Tensor] | None:
    """Return every output by name where ``gather`` says, on the rank's own device; None elsewhere. Collective.

    ``own``: this rank's tensors, by the first of an output's names. ``shapes``: the shape of each output.
    """
    wanted = gather == "all" or rank == 0
    found: dict[str, Tensor] = {}
    for place, shape in zip(places, shapes, strict=True):
        name = place.names[0]
        if place.rank is None:
            tensor = _plain(own[name]) if wanted else None
        else:
            tensor = _moved(place, own.get(name), shape, gather, rank, collectives)
        if wanted and tensor is not None:
            found.update(dict.fromkeys(place.names, tensor))
    return found if wanted else None


def _moved(
    place: OutputPlace,
    own: Tensor | None,
    shape: tuple[int, ...],
    gather: Gather,
    rank: int,
    collectives: Collectives,
) -> Tensor | None:
    """Return the output on the ranks that get it. Travels as bytes: no backend sends every data type."""
    source = place.rank
    assert source is not None
    if own is not None and (tuple(own.shape), own.dtype) != (shape, place.spec.dtype):
        raise InternalError(
            f"output {place.names[0]} is not what was promised",
            [f"promised {shape} of {place.spec.dtype}, found {tuple(own.shape)} of {own.dtype}"],
        )
    if gather == "rank0" and rank not in (0, source):
        return None
    if own is None:
        own = torch.empty(shape, dtype=place.spec.dtype, device=collectives.device)
    plain = _plain(own)
    if not math.prod(shape):
        return plain
    numbers = plain.view(-1).view(torch.uint8)
    what = f"output {place.names[0]}"
    if gather == "all":
        collectives.broadcast(numbers, source, what)
    else:
        collectives.move(numbers, source, 0, what)
    return plain


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor in its plain form, alike everywhere: what some ranks were sent, others have as a view."""
    return tensor.resolve_conj().resolve_neg().contiguous()
