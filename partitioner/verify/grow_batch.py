"""Example batches grown to any size, no two samples alike: for verification (in float64), runs and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from passes.copies.float64 import wide
from passes.graph.graph import OpGraph
from passes.trace.batch import flatten_batch, forward_names, map_tensors

NOISE = 0.05


def to_double(batch: Any) -> Any:
    """Turn every floating-point tensor of the batch to float64, every complex one to complex128."""
    return map_tensors(batch, lambda _, leaf: wide(leaf.detach().clone()))


def grow_batch(
    example: Any, batch_dims: Mapping[str, int | None], model: nn.Module, samples: int, seed: int = 0
) -> Any:
    """Grow or cut ``example`` to ``samples`` samples along each leaf's batch dimension.

    Copies of a sample are told apart: floats get some noise, integers of several dimensions are rolled along the last
    one, which keeps them in range (token ids, masks). Leaves without a batch dimension stay.
    """
    generator = torch.Generator().manual_seed(seed)
    names = iter(flatten_batch(example, forward_names(model)))

    def grow(_: tuple[str, ...], leaf: Tensor) -> Tensor:
        dim = batch_dims.get(next(names))
        return leaf.clone() if dim is None else _distinct(leaf, dim, samples, generator)

    return map_tensors(example, grow)


def ignore_unevenly(leaves: Mapping[str, Tensor], graph: OpGraph) -> dict[str, Tensor]:
    """Ignore ever more labels of a batch from sample to sample: micro-batches get unlike numbers of valid ones.

    This is done in integer leaves that hold some already, where they are allowed, therefore.
    """
    counts = graph.token_counts
    ignored = {n.ignore_index for n in counts.normalizers if n.ignore_index is not None} if counts else set()
    changed = dict(leaves)
    if counts is None or len(ignored) != 1:
        return changed
    index = ignored.pop()
    for name in counts.leaves:
        leaf, dim = leaves[name], graph.batch.batch_dims[name]
        if dim is None or leaf.is_floating_point() or not bool((leaf == index).any()):
            continue
        samples = leaf.movedim(dim, 0).clone()
        for sample, row in enumerate(samples):
            share = 0.8 * sample / len(samples)
            row.view(-1)[: int(share * row.numel())] = index
        changed[name] = samples.movedim(0, dim)
    return changed


def _distinct(leaf: Tensor, dim: int, samples: int, generator: torch.Generator) -> Tensor:
    size = leaf.shape[dim]
    copies = []
    for sample in range(samples):
        one = leaf.select(dim, sample % size)
        if leaf.is_floating_point() or leaf.is_complex():
            one = one + NOISE * torch.randn(one.shape, generator=generator, dtype=leaf.dtype)
        elif sample >= size and one.dim() > 0:
            one = one.roll(sample // size, dims=-1)
        copies.append(one)
    return torch.stack(copies, dim)
