"""Process groups for the queues that a program's communications name.

NCCL runs the operations of one communicator one after another, so the queue decides what can block what:
each pair of ranks gets a communicator of its own, as the checker assumed. Gloo matches point-to-point
messages by tag, so the default group carries all of them. Groups are created in the order of their queues'
names, the same everywhere, by all ranks, and are kept for the next executor.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cost_models.errors import InternalError, UsageError
from runtime.program.program import Program, Recv, ReduceGradients, Send, group_queue

logger = logging.getLogger("partitioner")

TAG_BASE = 1 << 20
"""Lowest tag of programs; below it are those that other users of a shared group are likely to take."""

_HANG_UP_TAG = TAG_BASE - 2
"""Tag that nobody sends with, next to that of ``runtime.ranks.collective``."""

SETUP_SECONDS = 300.0
"""Seconds that ranks wait for each other to create a group: some load a model for longer than a step may take."""


@dataclass(frozen=True)
class Channel:
    """A process group and, for each rank of the program, its rank in that group."""

    group: Any
    rank_in_group: dict[int, int]


_created: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Channel]] = weakref.WeakKeyDictionary()


def create_channels(
    program: Program, group: Any, timeout_seconds: float, among: Iterable[tuple[int, ...]] = ()
) -> dict[str, Channel]:
    """Return a channel for each queue of ``program``. Collective: every rank of ``group`` calls it, with its own.

    ``among``: further sets of ranks, in ascending order; their channels are found under their ``group_queue``.
    """
    everyone = Channel(group, {r: r for r in range(dist.get_world_size(group))})
    tagged = dist.get_backend(group) == "gloo"
    channels: dict[str, Channel] = {}
    queues: dict[str, tuple[int, ...]] = {group_queue(ranks): ranks for ranks in among}
    for instruction in program.instructions:
        if isinstance(instruction, Send | Recv):
            if tagged:
                channels[instruction.queue] = everyone
                continue
            ranks = tuple(sorted((instruction.message.source, instruction.message.target)))
        elif isinstance(instruction, ReduceGradients):
            ranks = tuple(sorted(instruction.ranks))
        else:
            continue
        if queues.setdefault(instruction.queue, ranks) != ranks:
            raise InternalError(
                f"queue {instruction.queue} is used by two sets of ranks",
                because=[
                    f"ranks {queues[instruction.queue]} and ranks {ranks}, the latter for `{instruction}`"
                ],
            )
    known = _created.setdefault(group, {})
    for ranks in _wanted_by_any(set(queues.values()), group):
        if ranks not in known:
            known[ranks] = _new_channel(ranks, group, timeout_seconds)
    channels.update({queue: known[ranks] for queue, ranks in queues.items()})
    return channels


def hang_up(group: Any) -> None:
    """Make what waits in ``group``, and in groups created for it, fail at once: here, and on the peers.

    Gloo closes all connections of a group whose receive runs out of time; it has no other way to end a wait from
    another thread. NCCL's waits are polled. The groups are unusable afterwards.
    """
    for channel in (Channel(group, {}), *_created.get(group, {}).values()):
        member = channel.group
        if member is dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(member) != "gloo":
            continue
        nothing, here = torch.empty(1), dist.get_rank(member)
        for peer in set(range(dist.get_world_size(member))) - {here}:
            try:  # where that connection is closed already, it fails without a wait, and closes no other
                member.recv([nothing], peer, _HANG_UP_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                logger.debug("hung up on rank %d: %s", peer, error)


def _wanted_by_any(mine: set[tuple[int, ...]], group: Any) -> list[tuple[int, ...]]:
    """Return every set of ranks that some rank of ``group`` needs a communicator for, in the same order everywhere.

    Groups could be created by their members only, but torch then names them after the number of groups that a
    process is in already, and members in different numbers of groups would wait for each other under two
    names. So everybody takes part in every creation.
    """
    if dist.get_world_size(group) != dist.get_world_size():
        raise UsageError(
            "cannot create communicators for a part of the processes",
            because=[
                f"{dist.get_world_size(group)} of {dist.get_world_size()} ranks are in the executor's group"
            ],
            suggestions=["use the default process group"],
        )
    if dist.get_world_size(group) == 1:  # NCCL would make a communicator of half a GiB for it
        return sorted(mine)
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, sorted(mine), group=group)
    return sorted({ranks for wanted in everyones for ranks in wanted})


def _new_channel(ranks: tuple[int, ...], group: Any, timeout_seconds: float) -> Channel:
    created = dist.new_group(
        [dist.get_global_rank(group, r) for r in ranks], timeout=timedelta(seconds=SETUP_SECONDS)
    )
    if created is not dist.GroupMember.NON_GROUP_MEMBER:
        created.set_timeout(timedelta(seconds=timeout_seconds))
    return Channel(created, {r: position for position, r in enumerate(ranks)})
