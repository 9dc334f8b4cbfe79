"""Random draws that are replayed: verification gives every drawing op what the unpartitioned model drew.

    randn_like(x)                                            replay("randn_like")
    run_local("random", …), S0 on axis "data"                run_local("replayed", …, {"dim0": "data"}, "randn_like")

A draw is found by its op and its micro-batch, and a shard of it by its place. The micro-batch is told by the seed that
its segment's forward began with (``runtime.ops.random``), which a recomputed forward gets back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runtime.ops.peers import Peers
from runtime.ops.random import mix

DrawsByOp = Mapping[str, Sequence[Tensor]]
"""The draws of each op, by its name in the graph: one for each micro-batch."""

STEPS = 2
"""The first steps of a run, the only ones that are replayed."""

_draws: dict[str, Sequence[Tensor]] = {}
_microbatch_of: dict[int, int] = {}


@contextmanager
def replaying(draws: DrawsByOp, segments: Iterable[int], microbatches: int, seed: int = 0) -> Iterator[None]:
    """Replay ``draws`` in forwards of these segments meanwhile."""
    _draws.update(draws)
    _microbatch_of.update(
        {
            mix(seed, step, segment, microbatch): microbatch
            for step in range(STEPS)
            for segment in segments
            for microbatch in range(microbatches)
        }
    )
    try:
        yield
    finally:
        _draws.clear()
        _microbatch_of.clear()


def replay(name: str) -> Tensor:
    """Return what op ``name`` drew for the micro-batch whose forward runs."""
    return _draws[name][_microbatch_of[torch.default_generator.initial_seed()]].clone()


def replay_part(op: Callable[..., Any], axes: Mapping[str, Peers], name: str) -> Tensor:
    """Return this rank's part of what op ``name`` drew. ``axes``: the ranks that share each dimension, as "dim0"."""
    drawn = replay(name)
    for role, peers in axes.items():
        drawn = drawn.chunk(peers.size, int(role.removeprefix("dim")))[peers.rank]
    return drawn.contiguous()
