"""Memory that NCCL's communicators take of a device, beside all tensors, by what a rank does with each.

A communicator has channels. A channel joins a rank to the ranks before and after it in a ring, to those above and below it
in a tree, and to each rank that it sends to or receives from. Each such connection has buffers of its own, and small tables
are pages of their own. Buffers are there from the first use on; software of 2023 makes those of rings and trees at once.

    c  channels of collectives   p  channels of messages, c rounded up to a power of two   q  those that one peer gets
    g  ranks of each node, k nodes

    always            3 pages a channel, 2 more; where the switch sums, a page for each of its channels, and 1 more
    rings             a buffer in, a page out, of each channel; of the g-th part of them, across nodes, two buffers
    trees (sums)      as much again where a node has a third rank; across more than two nodes up to 3 ways of 2 buffers
    the switch (sums) 2 steps of buffers for each of the g ranks and each of its channels
    a rank sent to    q pages; a rank received from: q buffers; across nodes one shared buffer for each direction
    before 2024       no pages, but the shared buffer for messages across nodes, used or not

Sources: NVIDIA/nccl, v2.28.9 (v2.18.5 for 2023): src/init.cc (buffer sizes, what is connected when), src/transport/p2p.cc,
net.cc, nvls.cc, src/channel.cc and src/include/alloc.h (each allocation is rounded up to pages), src/graph/connect.cc,
paths.cc and search.cc (numbers of channels). Beside measurements: ``tests/unit/cost_models/test_nccl_memory.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cost_models.gpu_collectives import DEVICES_IN_NETWORK

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec

PAGE_BYTES = 2 << 20
"""The unit that ``cuMemCreate`` rounds up to, 2 MiB; CUDA_IPC_MIN of src/include/comm.h is as much."""
BUFFER_BYTES = 10 << 20
"""A connection's buffers for the three protocols, 4 + 4.69 + 0.5 MiB (src/init.cc), in pages; across nodes two of them."""
SWITCH_CHANNELS = 16
"""NVLS_NCHANNELS_SM90 of src/transport/nvls.cc; later devices have 24 or 32."""
SWITCH_BUFFER_BYTES = 1 << 20
"""NCCL_NVLS_CHUNKSIZE of 128 KiB, in NCCL_STEPS = 8 steps."""
SHARED_STEPS = 16
"""NCCL_SHARED_STEPS of src/transport/net.cc: pieces of a channel's part of the buffer that messages across nodes share."""
NETWORK_PIECE_BYTES, NVLINK_PIECE_BYTES = 128 << 10, 512 << 10
"""NCCL_P2P_NET_CHUNKSIZE, also of PCIe, and NCCL_P2P_NVL_CHUNKSIZE of src/init.cc."""
CODE_BYTES = 96 << 20
"""NCCL's kernels, once a process: what the first communicator, of one rank with 64 channels, takes beside its tables: 484
MiB less 3 * 64 + 2 pages (NVIDIA/nccl pull request 2366, RTX 3090)."""
RING_BYTES_PER_SECOND = 20e9
"""The share of NVLink that a ring of NCCL's search carries: 20 GB/s on A100, 30 on H100, which has half as much again."""


@dataclass(frozen=True, slots=True)
class CommunicatorUse:
    """A rank's use of a communicator: the connections that it makes."""

    gathers: bool = False
    """All-gathers, sums of parts, broadcasts: they go round rings."""
    sums: bool = False
    """All-reduces: over rings where they are large, over trees where small, in the switch where it can."""
    sends: int = 0
    """Ranks that it sends messages to."""
    receives: int = 0
    """Ranks that it receives messages from."""

    def __or__(self, other: CommunicatorUse) -> CommunicatorUse:
        return CommunicatorUse(
            self.gathers or other.gathers,
            self.sums or other.sums,
            max(self.sends, other.sends),
            max(self.receives, other.receives),
        )


@dataclass(frozen=True, slots=True)
class CommunicatorShape:
    """The ranks of a communicator, as NCCL looks at them: the most in a node, and how these are joined."""

    per_node: int
    nodes: int
    inside_bytes_per_second: float
    between_bytes_per_second: float
    in_switch: bool
    """True where the switch of a node sums."""
    eager: bool = False
    """True where rings and trees are connected at once, used or not: software of 2023."""

    @property
    def channels(self) -> int:
        """c: twice the rings that the search finds (``connectRings``), which across nodes are as many as network cards."""
        if self.nodes > 1:  # a card of 25 GB/s and more carries two (``ncclTopoDupChannels``)
            rings = self.per_node * (2 if self.between_bytes_per_second >= 25e9 else 1)
            return min(16, 2 * rings)
        rings = round(self.inside_bytes_per_second / RING_BYTES_PER_SECOND)
        # 12 rings of 20 GB/s on A100 and of 30 on H100, 16 of 45 on B200: no more than what the device's links make
        return 2 * min(max(rings, 1), 12 if rings < 25 else 16)

    @property
    def message_channels(self) -> int:
        """p (``ncclTopoComputeP2pChannels``)."""
        return _power_of_two(self.channels)

    @property
    def channels_of_peer(self) -> int:
        """q: all inside a node; else one for each 14 GB/s of a card (NCCL_P2P_PER_CHANNEL_NET_BW), fewer for many ranks."""
        if self.nodes == 1:
            return self.message_channels
        found = _power_of_two(-int(-self.between_bytes_per_second // 14e9))
        peers = -(-self.per_node * self.nodes // 8)  # NCCL_MAX_DEV_WORK_P2P_PER_BATCH
        while found > 1 and found * peers > self.message_channels:
            found //= 2
        return min(found, self.message_channels)

    @property
    def shared_bytes(self) -> int:
        """The buffer that messages across nodes share, for one direction (``sharedNetBuffersInit``)."""
        nvlink = self.nodes == 1 and self.inside_bytes_per_second > 2 * RING_BYTES_PER_SECOND
        return self.message_channels * SHARED_STEPS * (NVLINK_PIECE_BYTES if nvlink else NETWORK_PIECE_BYTES)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def shape_bytes(shape: CommunicatorShape, use: CommunicatorUse) -> int:
    """Return the bytes of one communicator on a rank that has the most of it."""
    g, k, c = shape.per_node, shape.nodes, shape.channels
    inside, across = BUFFER_BYTES + PAGE_BYTES, 2 * BUFFER_BYTES
    on_switch = shape.in_switch and g > 1
    total = 0
    if not shape.eager:
        total += (3 * shape.message_channels + 2) * PAGE_BYTES
        total += (SWITCH_CHANNELS + 1) * PAGE_BYTES if on_switch else 0
    if use.gathers or use.sums or shape.eager:
        total += c * inside if k == 1 else c * ((g - 1) * inside + across) // g
    if use.sums or shape.eager:
        total += c * inside if g > 2 else 0
        total += 3 * c * across // g if k > 2 else 0
    if use.sums and on_switch and g >= DEVICES_IN_NETWORK:
        total += 2 * SWITCH_CHANNELS * SWITCH_BUFFER_BYTES * g
    if k == 1:
        total += shape.channels_of_peer * (use.sends * PAGE_BYTES + use.receives * BUFFER_BYTES)
        total += shape.shared_bytes if shape.eager else 0
    else:  # an exchange reaches some peers of its node beside those across
        near = shape.channels_of_peer * PAGE_BYTES * min(use.sends, g - 1)
        near += shape.channels_of_peer * BUFFER_BYTES * min(use.receives, g - 1)
        total += near + shape.shared_bytes * ((use.sends > 0 or shape.eager) + (use.receives > 0))
    return total


def communicator_bytes(ranks: Sequence[int], cluster: ClusterSpec, use: CommunicatorUse) -> int:
    """Return the bytes that a communicator of ``ranks`` takes of each one's device; none of a single rank's, or on CPUs."""
    return _communicator_bytes(tuple(ranks), cluster, use)


@lru_cache(maxsize=4096)
def _communicator_bytes(ranks: tuple[int, ...], cluster: ClusterSpec, use: CommunicatorUse) -> int:
    devices = [cluster.devices[rank] for rank in ranks]
    if len(devices) < 2 or any(device.communicators == "none" for device in devices):
        return 0
    return shape_bytes(_shape(ranks, cluster), use)


@lru_cache(maxsize=4096)
def _shape(ranks: tuple[int, ...], cluster: ClusterSpec) -> CommunicatorShape:
    devices = [cluster.devices[rank] for rank in ranks]
    counts = Counter(device.node for device in devices)
    node, most = max(counts.items(), key=lambda item: item[1])
    near = [device.rank for device in devices if device.node == node]
    away = next((device.rank for device in devices if device.node != node), None)
    inside = cluster.path(near[0], near[1]) if most > 1 else None
    across = None if away is None else cluster.path(near[0], away)
    in_switch = inside is not None and all(
        cluster.links[link].in_network_bytes_per_second for link in inside.links
    )
    return CommunicatorShape(
        most,
        len(counts),
        inside.bandwidth_bytes_per_second if inside else 0.0,
        across.bandwidth_bytes_per_second if across else 0.0,
        in_switch,
        any(device.communicators == "eager" for device in devices),
    )
