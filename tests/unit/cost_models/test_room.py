"""Rooms: the share of memory that a risk leaves, the cluster that has it, and the chance that follows from a peak."""

from __future__ import annotations

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.intervals import Spread
from cost_models.room import FILLS, at_risk, chance_of_not_fitting, room_share
from cost_models.spreads import PEAK_BYTES
from cost_models.variants import part_of


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs whose peaks are above the predicted ones, workers whose peaks are far below."""
    monkeypatch.setitem(PEAK_BYTES, "cuda", Spread(0.1, 0.1, 4, 7, 2))  # type: ignore[attr-defined]
    monkeypatch.setitem(PEAK_BYTES, "cpu", Spread(-0.5, 0.1, 4, 7, 2))  # type: ignore[attr-defined]


@pytest.mark.usefixtures("biased")
@pytest.mark.parametrize("risk", [0.001, 0.05, 0.2, 0.49])
def test_a_plan_that_fills_its_room_has_the_chance_that_is_allowed(risk: float) -> None:
    share = room_share("cuda", risk)
    assert share < 1
    assert PEAK_BYTES["cuda"].chance_above(share, 1.0) == pytest.approx(risk)


@pytest.mark.usefixtures("biased")
def test_room_is_never_more_than_the_memory_and_all_of_it_from_a_half_on() -> None:
    assert room_share("cpu", 0.2) == 1.0
    assert room_share("cuda", FILLS) == room_share("cuda", 1.0) == 1.0


def test_a_cluster_at_a_risk_keeps_its_memory_and_its_parts_keep_their_room() -> None:
    cluster = ClusterSpec.parse("dgx-h100:2")
    roomy = at_risk(cluster, 0.05)
    device = roomy.devices[9]
    assert device.memory_bytes == cluster.devices[9].memory_bytes == cluster.devices[9].room_bytes
    assert device.room_bytes == int(device.memory_bytes * room_share("cuda", 0.05))
    assert [d.room_bytes for d in part_of(roomy, [3, 8]).devices] == [device.room_bytes] * 2
    assert device.speed_alone == cluster.devices[9].speed_alone
    assert roomy.to_dict() == cluster.to_dict()


def test_the_risk_that_is_asked_for_last_counts() -> None:
    cluster = ClusterSpec.parse("dgx-h100:1")
    assert at_risk(cluster, FILLS) is cluster
    roomy = at_risk(cluster, 0.05)
    assert at_risk(roomy, 0.05) is roomy
    assert at_risk(roomy, 0.2).devices == at_risk(cluster, 0.2).devices
    assert at_risk(roomy, FILLS).devices == cluster.devices


@pytest.mark.usefixtures("biased")
def test_the_chance_is_that_of_the_device_with_the_largest() -> None:
    """A worker is fuller than a GPU, which is less sure."""
    gpu, worker = ClusterSpec.parse("A100-40GB:1").devices[0], ClusterSpec.local(1, "1GiB").devices[0]
    peaks = [(0.9 * gpu.memory_bytes, gpu), (0.5 * gpu.memory_bytes, gpu), (1.0 * 2**30, worker)]
    assert chance_of_not_fitting(peaks) == pytest.approx(PEAK_BYTES["cuda"].chance_above(0.9, 1.0))
    assert chance_of_not_fitting([(0, gpu)]) == 0.0
