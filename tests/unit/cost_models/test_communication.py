"""Collectives against step-by-step counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import communication as comm
from cost_models.cluster import ClusterSpec
from cost_models.conversion import data_parallel_seconds

LINK = comm.AlphaBeta(latency_seconds=1e-3, bandwidth_bytes_per_second=1e6)


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    assert comm.point_to_point_seconds(2e6, LINK) == pytest.approx(2.001)


@given(st.integers(2, 9), st.integers(1, 4))
def test_the_ring_takes_as_long_as_its_steps_played_out(ranks, chunk):
    """Play the ring: in each of 2(p−1) steps every rank passes one chunk on; all end with the sum of all."""
    holds = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    seconds = 0.0
    for step in range(2 * (ranks - 1)):
        moving = []
        for rank in range(ranks):
            index = (rank - step) % ranks if step < ranks - 1 else (rank + 1 - (step - ranks + 1)) % ranks
            moving.append((rank, index, set(holds[rank][index])))
        for rank, index, contents in moving:
            holds[(rank + 1) % ranks][index] |= contents
        seconds += comm.point_to_point_seconds(chunk, LINK)
    assert all(contents == set(range(ranks)) for row in holds for contents in row)
    assert comm.ring_all_reduce_seconds(chunk * ranks, ranks, LINK) == pytest.approx(seconds)


def test_ring_halves():
    scatter = comm.ring_reduce_scatter_seconds(4e6, 4, LINK)
    assert scatter == pytest.approx(3 * 1e-3 + 3.0)
    assert scatter == comm.ring_all_gather_seconds(4e6, 4, LINK)
    assert comm.ring_all_reduce_seconds(4e6, 4, LINK) == 2 * scatter


def test_trees_win_for_small_tensors_and_rings_for_large():
    assert comm.tree_all_reduce_seconds(8, 64, LINK) < comm.ring_all_reduce_seconds(8, 64, LINK)
    assert comm.tree_all_reduce_seconds(1e9, 64, LINK) > comm.ring_all_reduce_seconds(1e9, 64, LINK)
    assert comm.tree_all_reduce_seconds(1e6, 8, LINK) == pytest.approx(2 * 3 * 1e-3 + 2.0)
    assert comm.tree_all_reduce_seconds(0, 5, LINK) == pytest.approx(6e-3)  # ⌈log₂ 5⌉ = 3


def test_hierarchy_sends_a_gth_between_nodes():
    inside, between = comm.AlphaBeta(0, 1e9), comm.AlphaBeta(0, 1e6)
    seconds = comm.hierarchical_all_reduce_seconds(8e6, 8, 4, inside, between)
    assert seconds == pytest.approx(2 * 7 / 8 * 8e6 / 1e9 + 2 * 3 / 4 * 1e6 / 1e6)
    same = comm.hierarchical_all_reduce_seconds(8e6, 1, 4, inside, between)
    assert same == comm.ring_all_reduce_seconds(8e6, 4, between)


def test_all_to_all():
    assert comm.all_to_all_seconds(4e6, 4, LINK) == pytest.approx(3 * (1e-3 + 1.0))


def test_all_to_all_between_nodes_sends_inside_meanwhile():
    fast, slow = comm.AlphaBeta(1e-6, 9e6), comm.AlphaBeta(1e-3, 1e6)
    # four ranks of two nodes, a piece of 1 MB each: one stays inside, two leave
    assert comm.hierarchical_all_to_all_seconds(4e6, 2, 2, fast, slow) == pytest.approx(1e-3 + 2.0)
    # the other way round, the piece inside takes longer than both outside
    assert comm.hierarchical_all_to_all_seconds(4e6, 2, 2, slow, fast) == pytest.approx(1e-3 + 1.0)
    flat = comm.all_to_all_seconds(4e6, 4, slow)
    assert comm.hierarchical_all_to_all_seconds(4e6, 4, 1, slow, fast) == flat  # one node


@pytest.mark.parametrize("collective", ["ring_all_reduce", "tree_all_reduce", "all_to_all"])
def test_one_rank_has_nobody_to_talk_to(collective):
    assert getattr(comm, f"{collective}_seconds")(1e6, 1, LINK) == 0


def test_data_parallel_on_one_rank_is_free_and_grows_with_bytes():
    assert data_parallel_seconds(1e9, ClusterSpec.local(1)) == 0
    two = ClusterSpec.local(2)
    assert data_parallel_seconds(2e9, two) > data_parallel_seconds(1e9, two) > 0
