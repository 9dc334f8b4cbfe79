"""The batch that a verification runs on: as many samples as it takes, no two alike, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from passes.batch import flatten_batch, forward_names, map_tensors
from passes.graph import OpGraph

NOISE = 0.05


def to_double(batch: Any) -> Any:
    """Every floating-point tensor of the batch in float64."""
    return map_tensors(batch, lambda _, leaf: leaf.double() if leaf.is_floating_point() else leaf.clone())


def verification_batch(example: Any, graph: OpGraph, samples: int, seed: int = 0) -> Any:
    """``example`` grown or cut to ``samples`` samples along each leaf's batch dimension.

    Copies of a sample are told apart: floats get some noise, integers of several dimensions are rolled along the last
    one, which keeps them in range (token ids, masks). Leaves without a batch dimension stay.
    """
    generator = torch.Generator().manual_seed(seed)
    dims = list(graph.batch.batch_dims.items())
    position = iter(range(len(dims)))

    def grow(_: tuple[str, ...], leaf: Tensor) -> Tensor:
        index = next(position, None)
        dim = dims[index][1] if index is not None else None
        if dim is None:
            return leaf.clone()
        return _distinct(leaf, dim, samples, generator)

    return map_tensors(example, grow)


def rebuilt(batch: Any, leaves: Mapping[str, Tensor], model: nn.Module) -> Any:
    """``batch`` with its tensors replaced by ``leaves``, which are named as ``flatten_batch`` names them."""
    names = iter(flatten_batch(batch, forward_names(model)))
    return map_tensors(batch, lambda _, __: leaves[next(names)])


def _distinct(leaf: Tensor, dim: int, samples: int, generator: torch.Generator) -> Tensor:
    size = leaf.shape[dim]
    copies = []
    for sample in range(samples):
        one = leaf.select(dim, sample % size)
        if leaf.is_floating_point():
            one = one + NOISE * torch.randn(one.shape, generator=generator, dtype=leaf.dtype)
        elif sample >= size and one.dim() > 0:
            one = one.roll(sample // size, dims=-1)
        copies.append(one)
    return torch.stack(copies, dim)
