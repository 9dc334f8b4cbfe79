"""Cut a batch into micro-batches.

    batch of 10 in 4 micro-batches: 3 3 2 2     (sizes differ by at most one; the larger ones come first)

Leaves without a batch dimension go whole to every micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy
import torch

from cost_models.errors import InternalError, UsageError
from runtime.segment.code import BatchSpec, TensorSpec


def microbatch_sizes(batch_size: int, microbatches: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the samples of each micro-batch: multiples of ``multiple``, which divides ``batch_size``."""
    small, larger = divmod(batch_size // multiple, microbatches)
    return ((small + 1) * multiple,) * larger + (small * multiple,) * (microbatches - larger)


@dataclass(frozen=True)
class Microbatches:
    """The micro-batches that a batch is cut into. ``sizes``: the samples of each."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, batch_size: int, count: int, multiple: int = 1) -> Microbatches:
        """Cut ``batch_size`` samples into ``count`` micro-batches, of multiples of ``multiple`` samples.

        Raises UsageError unless each gets a sample, or ``multiple`` of them where ranks share its samples.
        """
        title = f"cannot cut a batch of {batch_size} samples into {count} micro-batches"
        if multiple > 1 and (batch_size % multiple or batch_size < count * multiple):
            raise UsageError(
                title,
                because=[f"its samples are shared by ranks: a micro-batch needs a multiple of {multiple}"],
                suggestions=[
                    f"use batches of at least {count * multiple} samples, in multiples of {multiple}"
                ],
            )
        if count < 1 or batch_size < count:
            raise UsageError(
                title,
                because=["each micro-batch needs at least one sample"],
                suggestions=[f"use at most {batch_size} micro-batches, or a larger batch"],
            )
        return cls(microbatch_sizes(batch_size, count, multiple))

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def batch_size(self) -> int:
        """The samples of the batch."""
        return sum(self.sizes)

    def cut(self, leaf: torch.Tensor, dim: int | None, parts: int = 1) -> list[torch.Tensor]:
        """Return a leaf of the batch for each micro-batch: views along ``dim``; without it the whole of it each time.

        ``parts``: the number of parts of each micro-batch, of which ``leaf`` has one.
        """
        if dim is None:
            return [leaf] * len(self)
        sizes = [size // parts for size in self.sizes]
        if sum(sizes) != leaf.shape[dim] or sum(sizes) * parts != self.batch_size:
            raise InternalError(
                "cut a batch", [f"{leaf.shape[dim]} samples of 1 / {parts} of micro-batches of {self.sizes}"]
            )
        return list(torch.split(leaf, sizes, dim))


def batch_size_of(
    batch: Mapping[str, torch.Tensor], spec: BatchSpec, needed: Collection[str] | None = None
) -> int:
    """Return the number of samples in ``batch``; raise UsageError unless every leaf with a batch dimension agrees.

    ``needed``: the leaves that may not be missing (default: all).
    """
    missing = [name for name in spec.batch_dims if name not in batch and (needed is None or name in needed)]
    if missing:
        raise UsageError(
            "the batch lacks inputs that the model was traced with",
            because=[f"missing: {name}" for name in missing],
            suggestions=[f"pass a batch with the keys {', '.join(spec.batch_dims)}"],
        )
    strange = [
        text
        for name, leaf in spec.leaves.items()
        if name in batch and (text := mismatch(name, batch[name], leaf))
    ]
    if strange:
        raise UsageError(
            "the batch is not like the one that the model was traced with",
            because=strange,
            suggestions=[
                "give inputs of these shapes and data types, or plan again with such an example",
                "dynamic_dims={name: [dim]} leaves a size open",
            ],
        )
    sizes = {
        name: batch[name].shape[dim]
        for name, dim in spec.batch_dims.items()
        if dim is not None and name in batch
    }
    if len(set(sizes.values())) != 1:
        raise UsageError(
            "the inputs of a batch disagree on the number of samples"
            if sizes
            else "no input of the batch has a batch dimension",
            because=[
                f"{name}: {size} samples in dimension {spec.batch_dims[name]}" for name, size in sizes.items()
            ],
            suggestions=[
                "pass inputs of one batch size, or say batch_dims={name: None} for inputs without one"
            ],
        )
    return next(iter(sizes.values()))


def mismatch(name: str, leaf: torch.Tensor, spec: TensorSpec) -> str:
    """Tell what is wrong with a leaf; "" where nothing is. Open sizes may be anything."""
    sizes = zip(leaf.shape, spec.shape, strict=False)
    if leaf.dim() != len(spec.shape) or any(isinstance(want, int) and got != want for got, want in sizes):
        expected = ", ".join(str(size) if isinstance(size, int) else "any" for size in spec.shape)
        return f"{name} has the shape {tuple(leaf.shape)}, expected ({expected})"
    if leaf.dtype != spec.dtype:
        return f"{name} is {leaf.dtype}, expected {spec.dtype}"
    return ""


def symbol_sizes(
    spec: BatchSpec, shapes: Mapping[str, tuple[int, ...]], microbatch_size: int
) -> dict[sympy.Symbol, int]:
    """Return the number that each symbol stands for in a micro-batch of ``microbatch_size`` samples.

    ``shapes``: shapes of the whole batch's leaves.
    """
    microbatch_size //= spec.multiple
    sizes = {
        symbol: microbatch_size if spec.batch_dims.get(leaf) == dim else shapes[leaf][dim]
        for symbol, (leaf, dim) in spec.symbols.items()
    }
    sizes[spec.batch_symbol] = microbatch_size
    return sizes


def cut_at(tensor: torch.Tensor, dim: int | None, ends: Sequence[int]) -> list[torch.Tensor]:
    """Cut ``tensor`` in pieces that end before ``ends`` along ``dim``: views; without ``dim`` the whole of it each time."""
    if dim is None:
        return [tensor] * len(ends)
    return list(torch.tensor_split(tensor, list(ends[:-1]), dim))
