"""The memory of communicators, beside what people measured of it."""

from __future__ import annotations

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.nccl_memory import (
    CODE_BYTES,
    CommunicatorShape,
    CommunicatorUse,
    communicator_bytes,
    shape_bytes,
)

MIB = 2**20
SUMS, MESSAGES = CommunicatorUse(sums=True), CommunicatorUse(sends=1, receives=1)


def a100s(count: int) -> CommunicatorShape:
    """Ranks behind an NVSwitch of A100s, with software of 2023."""
    return CommunicatorShape(count, 1, 235e9, 0.0, in_switch=False, eager=True)


def test_groups_of_a100s_as_measured() -> None:
    """NVIDIA/nccl issue 964: 544 MiB of two, 688 of three and four on rank 0, the end of the trees' chains: of the 12 MiB
    that trees add to a channel in their middle it has a buffer that is read, of 6."""
    assert shape_bytes(a100s(2), SUMS) == 544 * MIB
    in_the_middle = shape_bytes(a100s(4), SUMS)
    assert shape_bytes(a100s(3), SUMS) == in_the_middle
    assert in_the_middle - a100s(4).channels * (12 - 6) * MIB == 688 * MIB


def test_an_exchange_of_eight_h100s_as_measured() -> None:
    """NVIDIA/nccl issue 1685: 32 channels to each peer, a page and a buffer of 10 MiB for each; 3.28 GB more in all."""
    h100s = CommunicatorShape(8, 1, 365e9, 0.0, in_switch=True)
    assert (h100s.channels, h100s.channels_of_peer) == (24, 32)
    exchange = shape_bytes(h100s, CommunicatorUse(sends=7, receives=7))
    connected = exchange - shape_bytes(h100s, CommunicatorUse())
    assert connected == 7 * 32 * (2 + 10) * MIB
    assert exchange + CODE_BYTES == pytest.approx(3.28e9, rel=0.04)


def test_a_communicator_of_one_rank_as_measured() -> None:
    """NVIDIA/nccl pull request 2366: 484 MiB of one rank, 64 channels; 512 more if the shared buffer is made at once."""
    alone = CommunicatorShape(1, 1, 1280e9, 0.0, in_switch=False)
    tables = (3 * 64 + 2) * 2 * MIB
    assert tables + CODE_BYTES == 484 * MIB
    pairs = shape_bytes(alone, CommunicatorUse()) / alone.message_channels
    assert pairs == pytest.approx(6 * MIB, rel=0.03)
    assert CommunicatorShape(2, 1, 235e9, 0.0, False, True).shared_bytes * 64 == 32 * 512 * MIB


def test_what_is_not_used_is_not_connected_today() -> None:
    shape = CommunicatorShape(8, 2, 365e9, 50e9, in_switch=True)
    unused = shape_bytes(shape, CommunicatorUse())
    rings, sums = (shape_bytes(shape, use) for use in (CommunicatorUse(gathers=True), SUMS))
    assert unused < rings < sums
    early = CommunicatorShape(8, 2, 365e9, 50e9, in_switch=False, eager=True)
    assert shape_bytes(early, CommunicatorUse()) == shape_bytes(early, SUMS)


def test_communicators_across_nodes_have_as_many_channels_as_cards_carry() -> None:
    cluster = ClusterSpec.preset("dgx-h100", nodes=2)
    inside, across = (communicator_bytes(pair, cluster, MESSAGES) for pair in ((0, 1), (7, 8)))
    assert (inside, across) == (614 * MIB, 44 * MIB)
    assert communicator_bytes((0,), cluster, SUMS) == 0


@pytest.mark.parametrize(
    "device", ["cpu-worker", {"preset": "H100-80GB", "memory_process": "2GiB"}], ids=["cpu", "given"]
)
def test_none_are_counted_on_cpus_or_where_all_is_given(device: object) -> None:
    cluster = ClusterSpec.from_dict({"nodes": [{"count": 2, "device": device, "links": "NVLink4"}]})
    assert communicator_bytes((0, 1), cluster, SUMS) == 0
    expected = 0 if device == "cpu-worker" else 2 * 2**30
    assert cluster.devices[0].context_bytes == expected
