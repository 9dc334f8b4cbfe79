"""What a rank computes where its part of an op is not the op on its shards.

A ``Choice`` names them as "function:role". ``LOCAL[function](op, axes, *args, **kwargs)`` is called in place of
``op(*args, **kwargs)``; ``axes`` has an ``Axis`` per role: the ranks of all mesh axes with that role, taken together
(the first mesh axis outermost, as nested shards are), and this rank's place among them.

    function:role           operands                         result
    mean:terms              shards of what is averaged       P   the rank's own mean / ranks
    embedding:vocabulary    rows of the weight               P   zeros for rows of other ranks
    cross_entropy:classes   shards of the logits' classes    R   denominators and targets' logits are all-reduced
    cross_entropy:samples   shards of the samples, mean      P   the rank's sum / the valid weight of all ranks
    nll_loss:samples        shards of the samples, mean      P   as above
    batch_norm:samples      shards of the samples, training  S   statistics over all ranks' samples
    random:shards           shards of anything               S   each rank draws its own numbers

Random numbers: replicated tensors draw equal numbers, since ranks run the same ops in the same order from the same seed.
``random:shards`` takes one number from that common stream, whatever the shard's size, and draws from a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from runtime.ops.batch_norm import batch_norm
from runtime.ops.cross_entropy import cross_entropy, mean_nll_loss
from runtime.ops.random import mix


class Axis(Protocol):
    """Ranks that hold parts of one tensor, and which of them this is (``runtime.mesh.axis``, or threads in proofs).

    Collectives take no part in autograd.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """The sum or maximum over the ranks, in a tensor of its own."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(ranks, *shape): everybody's."""


Axes: TypeAlias = Mapping[str, Axis]
LocalOp: TypeAlias = Callable[..., Any]


def _mean(op: LocalOp, axes: Axes, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs) / axes["terms"].size


def _embedding(
    op: LocalOp, axes: Axes, weight: Tensor, indices: Tensor, padding_idx: int = -1, *rest: Any, **kwargs: Any
) -> Tensor:
    """weight (rows / ranks, width), indices (…) of all rows -> (…, width)."""
    first = axes["vocabulary"].rank * weight.shape[0]
    elsewhere = (indices < first) | (indices >= first + weight.shape[0])
    here = (indices - first).masked_fill(elsewhere, 0)
    padding = padding_idx - first if first <= padding_idx < first + weight.shape[0] else -1
    found: Tensor = op(weight, here, padding, *rest, **kwargs)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def _random(op: LocalOp, axes: Axes, *args: Any, **kwargs: Any) -> Any:
    device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
    generators = [torch.default_generator]
    seed = mix(int(torch.randint(1 << 62, ())), axes["shards"].rank)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        return op(*args, **kwargs)
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


LOCAL: Mapping[str, LocalOp] = {
    "mean": _mean,
    "embedding": _embedding,
    "cross_entropy": cross_entropy,
    "nll_loss": mean_nll_loss,
    "batch_norm": batch_norm,
    "random": _random,
}
