"""Local ops: what a rank computes where its part of an op is not the op on its shards.

A ``Choice`` names them as "function:role". ``LOCAL[function](op, axes, *args, **kwargs)`` is called in place of
``op(*args, **kwargs)``; ``axes`` has ``Peers`` per role: the ranks of all mesh axes with that role, taken together
(the first mesh axis outermost, as nested shards are), and this rank's place among them.

    function:role           operands                         result
    mean:terms              shards of what is averaged       P   the rank's own mean / ranks
    embedding:vocabulary    rows of the weight               P   zeros for rows of other ranks
    embedding_bag:vocabulary  the same                       P   sums of the rows that this rank has
    cross_entropy:classes   shards of the logits' classes    R   denominators and targets' logits are all-reduced
    cross_entropy:samples   shards of the samples, mean      P   the rank's sum / the valid weight of all ranks
    nll_loss:samples        shards of the samples, mean      P   as above
    batch_norm:samples      shards of the samples, training  S   statistics over all ranks' samples
    attention:queries, …    (``runtime.ops.attention``)      S   copies of the keys' heads that the rank's queries read
    random:shards           shards of anything               S   each rank draws its own numbers
    replayed:dim0, …        (verification)                   S   its part of what the unpartitioned model drew

Random numbers: replicated tensors draw equal numbers, since ranks run the same ops in the same order from the same seed.
``random:shards`` takes one number from that common stream, whatever the shard's size, and draws from a stream of its own.

A graph calls them by name (``run_local``), with the axis that plays each role. Several mesh axes may play one role
together: "data+tensor", the first outermost. Like bridges, such calls only name their axes until they are bound; on fake
tensors they tell shapes.

    run_local("cross_entropy", "aten.cross_entropy_loss.default", {"classes": "tensor"}, logits, target)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from cost_models.errors import InternalError
from runtime.ops.attention import attention, attention_of_shape
from runtime.ops.bags import of_own_rows
from runtime.ops.batch_norm import batch_norm
from runtime.ops.cross_entropy import cross_entropy, mean_nll_loss
from runtime.ops.peers import Peers
from runtime.ops.random import generators_of, mix, seeded
from runtime.ops.replay import replay_part

PeersByAxis: TypeAlias = Mapping[str, Peers]
LocalOp: TypeAlias = Callable[..., Any]


def _mean(op: LocalOp, axes: PeersByAxis, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs) / axes["terms"].size


def _embedding(
    op: LocalOp,
    axes: PeersByAxis,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    *rest: Any,
    **kwargs: Any,
) -> Tensor:
    """Look up indices (…) of all rows in this rank's weight (rows / ranks, width): (…, width), zeros for other rows."""
    first = axes["vocabulary"].rank * weight.shape[0]
    elsewhere = (indices < first) | (indices >= first + weight.shape[0])
    here = (indices - first).masked_fill(elsewhere, 0)
    padding = padding_idx - first if first <= padding_idx < first + weight.shape[0] else -1
    found: Tensor = op(weight, here, padding, *rest, **kwargs)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def _random(op: LocalOp, axes: PeersByAxis, *args: Any, **kwargs: Any) -> Any:
    device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
    seed = mix(int(torch.randint(1 << 62, ())), axes["shards"].rank)
    with seeded(generators_of(device), seed):
        return op(*args, **kwargs)


LOCAL: Mapping[str, LocalOp] = {
    "mean": _mean,
    "embedding": _embedding,
    "embedding_bag": of_own_rows,
    "cross_entropy": cross_entropy,
    "nll_loss": mean_nll_loss,
    "batch_norm": batch_norm,
    "attention": attention,
    "random": _random,
    "replayed": replay_part,
}

OF_SHAPE: Mapping[str, LocalOp] = {"attention": attention_of_shape}
"""Functions with the shapes of local ones that take no axes, where the op itself does not take what they do."""

LEADING = 3
"""Number of arguments of ``run_local`` before the op's own."""


def run_local(function: str, op: str, roles: Mapping[str, str], *args: Any, **options: Any) -> Any:
    """Stand for the op on shards, which has the same shapes. ``roles``: the axis that plays each role."""
    given = [a for a in args if isinstance(a, Tensor)]
    if not all(isinstance(a, FakeTensor) or a.is_meta for a in given):
        raise InternalError(f"the local form of {op} was run without its axes")
    return shaped(function, roles, op_called(op))(*args, **options)


def shaped(function: str, roles: Mapping[str, str], op: LocalOp) -> LocalOp:
    """Return a function with the shapes and the costs of the local form of ``op``."""
    return partial(OF_SHAPE[function], op, roles) if function in OF_SHAPE else op


def with_axes(axes: Mapping[str, Peers]) -> Callable[..., Any]:
    """Return ``run_local`` on ``axes``."""

    def bound(function: str, op: str, roles: Mapping[str, str], *args: Any, **options: Any) -> Any:
        played = {role: axes[name] for role, name in roles.items()}
        return LOCAL[function](op_called(op), played, *args, **options)

    bound.__name__ = bound.__qualname__ = run_local.__name__
    return bound


@lru_cache
def op_called(name: str) -> Callable[..., Any]:
    """Return an op by its name: ``torch.ops.aten.add.Tensor`` is "aten.add.Tensor"."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
