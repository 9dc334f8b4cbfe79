"""Comparison of tensors that several ranks hold: they must start alike on all of them.

Their gradients are summed and every rank updates its own copy, so copies that differ at first differ for ever: a tied
embedding would silently be two. Models that each rank seeds for itself (``torch.manual_seed(rank)``) are the usual reason.

The copies of one block of a sharded tensor are compared: if ranks 0 1 2 3 hold blocks A B A B, 0 with 2 and 1 with 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cost_models.errors import UsageError
from partitioner.batches.batch_check import digest
from runtime.ranks.meeting import Meeting
from runtime.state.rank_state import RankState

_MOST = 10
"""The most tensors that are named."""


def refuse_unlike_copies(meeting: Meeting, state: RankState, seed: int) -> None:
    """Raise UsageError, on every rank, where copies differ (in what ``digest`` looks at). Collective.

    ``seed``: dropout's. Ranks that run one segment on shards must drop the same of what they all compute.
    """
    if not any(len(ranks) > 1 for ranks in state.holders.values()):
        return
    own = dict(_digests(state))
    if state.shardings:
        own["deploy(seed=)"] = seed
    differences = meeting.decide("copies", own, unlike_copies)
    if differences:
        raise UsageError(
            "ranks hold different values of the same tensors",
            [
                *differences[:_MOST],
                *([f"and {len(differences) - _MOST} more"] if differences[_MOST:] else []),
            ],
            [
                "seed all ranks alike before the model is made: torch.manual_seed(0); and give one seed= to deploy",
                "weights= or state_dict= gives every rank the same values",
            ],
        )


def _digests(state: RankState) -> Iterator[tuple[str, int]]:
    """Yield digests of what this rank has of tensors that others have as well; each name says which part it is."""
    for name, own in {**state.parameters, **state.buffers}.items():
        sharding = state.shardings.get(name)
        if len(state.holders[name]) > 1:
            yield _part(name, () if sharding is None else sharding.owner_part(state.rank)), digest(own)
        if sharding is not None and sharding.cuts:  # the first forward reads more than what the rank trains
            yield _part(f"{name}, stored", sharding.leaf_part(state.rank)), digest(state.leaves[name])


def _part(name: str, places: tuple[int, ...]) -> str:
    return f"{name} (part {' '.join(map(str, places))})" if places else name


def unlike_copies(digests: list[Any]) -> list[str]:
    """Name the tensors that are unlike. ``digests``: for each rank, by the names of the shared tensors that it holds."""
    found = []
    for name in dict.fromkeys(name for of_rank in digests for name in of_rank):
        values = {rank: of_rank[name] for rank, of_rank in enumerate(digests) if name in of_rank}
        first, *others = values
        different = [str(rank) for rank in others if values[rank] != values[first]]
        if different:
            found.append(f"{name}: rank {first} has other values than rank {', '.join(different)}")
    return found
