"""The communicators of a step's programs on GPUs, as the executor makes them, and what a rank does with each.

    all         all ranks that run a part: sets of ranks are gathered (``runtime.ranks.groups``), losses and norms summed
    group       ranks that share collectives inside of segments, sum gradients, or gather parameters after the update
    messages    two ranks: torch gives each pair a communicator of its own, whatever else joins the two

A group's ranks have equally many, so its first rank, the leader, stands for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from cost_models.nccl_memory import CODE_BYTES, CommunicatorUse, communicator_bytes
from runtime.program.crossings import bundles_of_pieces
from runtime.program.program import Collective, ReduceGradients

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec
    from runtime.program.members import GroupPrograms

Key: TypeAlias = tuple[Literal["all", "group", "messages"], tuple[int, ...]]
"""The purpose of a communicator, and its ranks, ascending."""
Communicators: TypeAlias = Mapping[Key, CommunicatorUse]
"""The use that a rank makes of each of its communicators."""

GATHERS, SUMS = CommunicatorUse(gathers=True), CommunicatorUse(sums=True)
SENDS, RECEIVES = CommunicatorUse(sends=1), CommunicatorUse(receives=1)
EVERYONE = GATHERS | SUMS


class ProcessBytes(NamedTuple):
    """Bytes that a process holds of its device beside tensors."""

    context: int = 0
    """The driver's context."""
    communicators: int = 0
    """NCCL's communicators."""
    allocator: int = 0
    """The part that torch's allocator reserves beyond the tensors, at their peak (``passes.lower.reserved``)."""


def communicators_of_leaders(
    groups: GroupPrograms, gathers: Iterable[Collective] = ()
) -> dict[int, Communicators]:
    """Return the communicators of each group's leader. ``gathers``: collectives after the update."""
    graph, leaders = groups.graph, {segment.rank for segment in groups.graph.segments}
    everyone = tuple(sorted({rank for segment in graph.segments for rank in segment.ranks}))
    found: dict[int, defaultdict[Key, CommunicatorUse]] = {
        leader: defaultdict(CommunicatorUse) for leader in leaders
    }
    for leader in leaders if len(everyone) > 1 else ():
        found[leader]["all", everyone] = EVERYONE
        for instruction in groups.programs[leader].instructions:
            if isinstance(instruction, ReduceGradients) and leader in instruction.ranks:
                use = GATHERS if instruction.scattered else SUMS
                found[leader]["group", tuple(sorted(instruction.ranks))] |= use
    for inside, ranks in _inside(groups, gathers, leaders):
        for leader in leaders.intersection(ranks) if len(ranks) > 1 else ():
            found[leader]["group", tuple(sorted(ranks))] |= _use_of(inside, len(ranks))
    for _, pieces in bundles_of_pieces(graph):
        for source, target, _ in pieces:
            pair: Key = ("messages", (min(source, target), max(source, target)))
            for end, use in ((source, SENDS), (target, RECEIVES)):
                if end in found:
                    found[end][pair] |= use
    return {leader: dict(own) for leader, own in found.items()}


def _inside(
    groups: GroupPrograms, gathers: Iterable[Collective], leaders: set[int]
) -> Iterable[tuple[Collective, tuple[int, ...]]]:
    """Yield the collectives inside of segments and after the update with the groups of leaders, those alike once."""
    known: set[tuple[int, str, str, int]] = set()
    own = [(segment.index, item) for segment in groups.graph.segments for item in segment.collectives]
    for index, item in (*own, *((-1, item) for item in gathers)):
        key = (index, item.axis, item.kind, id(item.groups))
        if key not in known:
            known.add(key)
            for ranks in item.groups:
                if not leaders.isdisjoint(ranks):
                    yield item, ranks


def _use_of(collective: Collective, ranks: int) -> CommunicatorUse:
    if collective.kind == "all_to_all":  # NCCL sends each piece by itself
        return CommunicatorUse(sends=ranks - 1, receives=ranks - 1)
    return SUMS if collective.kind == "all_reduce" else GATHERS


def process_bytes(
    groups: GroupPrograms, cluster: ClusterSpec, gathers: Sequence[Collective] = ()
) -> tuple[ProcessBytes, ...]:
    """Return what each rank's process holds beside tensors; nothing of a rank that runs nothing, or on CPUs."""
    held = {
        leader: sum(communicator_bytes(ranks, cluster, use) for (_, ranks), use in own.items())
        for leader, own in communicators_of_leaders(groups, gathers).items()
    }
    runs = {rank for segment in groups.graph.segments for rank in segment.ranks}
    found = []
    for rank, leader in enumerate(groups.leader_of):
        own = held.get(leader, 0)
        context = cluster.devices[rank].context_bytes if rank in runs else 0
        found.append(ProcessBytes(context, own + CODE_BYTES if own else 0))
    return tuple(found)
