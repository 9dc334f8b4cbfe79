"""Room for tensors, which searches plan with: what contexts and communicators of processes leave of that of devices.

A search knows of most communicators of a plan before it is simulated: that of all its ranks, those along a mesh's axes,
those of neighbours in a pipeline. It counts what they are at least, rings and messages; the simulation counts all of them
(``runtime.program.communicators``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from cost_models.cluster import ClusterSpec
from cost_models.layout import Mesh
from cost_models.nccl_memory import CODE_BYTES, communicator_bytes
from runtime.mesh.ranks_along import ranks_along
from runtime.program.communicators import EVERYONE, GATHERS, RECEIVES, SENDS


def least_communicators(
    cluster: ClusterSpec,
    everyone: Sequence[int],
    along: Iterable[Sequence[int]] = (),
    pairs: Iterable[Sequence[int]] = (),
) -> int:
    """Return the bytes of communicators that a rank of ``everyone`` holds at least, on GPUs.

    ``along``: the ranks that it shares collectives with, itself included; ``pairs``: itself and one that it exchanges
    values and their gradients with.
    """
    found = communicator_bytes(everyone, cluster, EVERYONE)
    found += sum(communicator_bytes(ranks, cluster, GATHERS) for ranks in along)
    found += sum(communicator_bytes(ranks, cluster, SENDS | RECEIVES) for ranks in pairs)
    return found + CODE_BYTES if found else 0


def least_room_bytes(cluster: ClusterSpec, ranks: Iterable[int]) -> int:
    """Return the least room of these devices that contexts leave for tensors and communicators."""
    devices = cluster.devices
    return min(devices[rank].room_bytes - devices[rank].context_bytes for rank in ranks)


def mesh_room_bytes(
    cluster: ClusterSpec, mesh: Mesh, everyone: Sequence[int] = (), peers: Iterable[int] = ()
) -> int:
    """Return what is left for tensors on the smallest device of ``mesh``, whose ranks share a stage over all its axes.

    ``everyone``: the ranks of all stages, if there are others; ``peers``: one rank of each neighbour.
    """
    first = mesh.ranks[0]
    along = [
        ranks_along(mesh, (name,), first)
        for name, size in zip(mesh.axes, mesh.shape, strict=True)
        if size > 1
    ]
    pairs = [tuple(sorted((first, peer))) for peer in peers]
    return least_room_bytes(cluster, mesh.ranks) - least_communicators(
        cluster, everyone or mesh.ranks, along, pairs
    )


def least_of_pipelines(cluster: ClusterSpec) -> int:
    """Return the least that communicators take of a device of a pipeline in file order: messages with one neighbour, and
    what all ranks share, be it these two alone."""
    nodes = cluster.ranks_per_node
    pairs = [ranks[:2] for ranks in nodes if len(ranks) > 1]
    pairs += [(before[-1], after[0]) for before, after in itertools.pairwise(nodes)]
    return min((least_communicators(cluster, pair, (), [pair]) for pair in pairs), default=0)
