"""The batch that a model and its trace are compared on: the example, made to tell samples apart, and cut if large.

The values of an example batch do not matter for a plan, so it may hold zeros, or no values at all (the meta device).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from passes.fidelity.steps import EagerSubject
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.trace.batch import flatten_batch, forward_names, map_tensors, tile
from passes.trace.export import LossFunction

MOST_WORK = 2**32
"""Parameters × numbers in a batch above which the batch is cut to the fewest samples that a step takes: about 10 s of one
CPU core at 10 GFLOP/s for a linear model, 6 FLOPs per parameter and number and four steps."""


def subject_of(
    graph: OpGraph,
    model: nn.Module,
    example_inputs: Any,
    loss_fn: LossFunction | None,
    *,
    drawn: bool,
    whole: bool = False,
) -> EagerSubject:
    """Make the batch on the model's device. ``drawn``: fill leaves that hold one number only with drawn ones.

    ``whole``: cut nothing. Leaves are tensors of their own, and at least two samples: an export has sizes of one baked in.
    """
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    names = forward_names(model)
    dims = graph.batch.batch_dims
    given = flatten_batch(example_inputs, names)
    samples = next(
        (given[name].shape[dim] for name, dim in dims.items() if dim is not None and name in given), 1
    )
    least = max(2, least_samples(graph)[0])
    parameters = sum(spec.elements for spec in graph.parameters.values())
    large = not whole and parameters * max((leaf.numel() for leaf in given.values()), default=1) > MOST_WORK
    order = iter(given)

    def made(_: tuple[str, ...], leaf: Tensor) -> Tensor:
        dim = dims.get(next(order))
        value = _values(leaf, generator, drawn).to(device)
        if dim is not None and samples == 1:
            value = tile(value, dim)
        elif dim is not None and large and samples > least:
            value = value.narrow(dim, 0, least).clone()
        return value

    batch = map_tensors(example_inputs, made)
    return EagerSubject(model, batch, flatten_batch(batch, names), loss_fn)


def another_batch(graph: OpGraph, subject: EagerSubject) -> EagerSubject | None:
    """Return the last half of the samples twice over, in reverse; None where no leaf has a batch dimension.

    Every sample is one of the batch, so values that the model takes stay so, and what belongs together does.
    """
    leaves = {}
    for name, leaf in subject.leaves.items():
        dim = graph.batch.batch_dims.get(name)
        if dim is None:
            leaves[name] = leaf
        else:
            size = leaf.shape[dim]
            chosen = size - 1 - torch.arange(size, device=leaf.device) // 2
            leaves[name] = leaf.index_select(dim, chosen)
    if all(leaf is subject.leaves[name] for name, leaf in leaves.items()):
        return None
    return replace(subject, leaves=leaves)


def has_example(example_inputs: Any) -> bool:
    """Tell whether all tensors of the example have values."""
    found: list[bool] = []

    def look(_: tuple[str, ...], leaf: Tensor) -> Tensor:
        found.append(not (leaf.is_meta or isinstance(leaf, FakeTensor)))
        return leaf

    map_tensors(example_inputs, look)
    return all(found)


def _values(leaf: Tensor, generator: torch.Generator, drawn: bool) -> Tensor:
    """Copy a leaf; one without values is drawn (zeros for integers), one that holds a single number if asked to."""
    if leaf.is_meta or isinstance(leaf, FakeTensor):
        empty = torch.zeros(tuple(leaf.shape), dtype=leaf.dtype)
        return _drawn(empty, generator)
    copied = leaf.detach().clone()
    if (
        drawn
        and copied.is_floating_point()
        and copied.numel() > 1
        and bool((copied == copied.flatten()[:1]).all())
    ):
        return _drawn(copied.cpu(), generator)
    return copied


def _drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    if not (like.is_floating_point() or like.is_complex()):
        return like
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)
