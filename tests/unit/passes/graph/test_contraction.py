"""Coarsening keeps the order, the groups and the pins, and treats equal blocks equally."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from passes.graph.contraction import OpArrays, clusters, intervals, list_downsets, united
from tests.support.matrix import drawn


def _blocks(blocks: int) -> OpArrays:
    """Residual blocks of six ops: norm, wide, view, act, narrow, add; the block's input skips to the add."""
    readers: list[tuple[int, ...]] = [(1,)]
    work, size = [0.1], [1.0]
    for _ in range(blocks):
        base = len(readers) - 1
        readers[base] = (base + 1, base + 6)
        readers += [(base + 2,), (base + 3,), (base + 4,), (base + 5,), (base + 6,), ()]
        work += [0.1, 3.0, 0.0, 0.2, 3.0, 0.1]
        size += [1.0, 4.0, 4.0, 4.0, 1.0, 1.0]
    return OpArrays(tuple(readers), np.array(work), np.array(size))


def _random(seed: int) -> OpArrays:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    readers = tuple(tuple(v for v in range(u + 1, n) if rng.random() < 2 / (v - u + 1)) for u in range(n))
    groups = tuple(tuple(sorted(int(x) for x in rng.integers(0, n, 2))) for _ in range(3))
    work = np.where(rng.random(n) < 0.3, 0.0, rng.random(n))
    return OpArrays(readers, work, rng.integers(1, 9, n).astype(float), groups)


def _quotient(ops: OpArrays, unit_of: tuple[int, ...]) -> set[tuple[int, int]]:
    return {
        (unit_of[u], unit_of[v]) for u, rs in enumerate(ops.readers) for v in rs if unit_of[u] != unit_of[v]
    }


def test_cuts_fall_between_residual_blocks_and_are_the_same_in_each() -> None:
    ops = _blocks(8)
    unit_of = intervals(ops, max_units=10)
    assert unit_of == (0, *(block + 1 for block in range(8) for _ in range(6)))
    finer = intervals(ops, max_units=60)
    per_block = [tuple(u - finer[6 * b + 1] for u in finer[6 * b + 1 : 6 * b + 7]) for b in range(8)]
    assert len(set(per_block)) == 1
    assert max(finer) > max(unit_of)


def test_a_view_stays_with_a_neighbour() -> None:
    unit_of = intervals(_blocks(3), max_units=1000)
    assert all(unit_of[6 * b + 3] in (unit_of[6 * b + 2], unit_of[6 * b + 4]) for b in range(3))


def test_pins_force_a_cut_where_none_would_be() -> None:
    ops = _blocks(2)
    pinned = OpArrays(ops.readers, ops.work, ops.crossing_bytes, (), {2: 0, 4: 1})
    unit_of = intervals(pinned, max_units=2)
    assert unit_of[2] != unit_of[4]
    unit_of = clusters(pinned, max_units=2)
    assert unit_of[2] != unit_of[4]


def test_two_towers_keep_their_branches() -> None:
    # 0 feeds two chains of four ops that meet in op 9
    readers = ((1, 5), (2,), (3,), (4,), (9,), (6,), (7,), (8,), (9,), ())
    ops = OpArrays(readers, np.ones(10), np.ones(10))
    unit_of = clusters(ops, max_units=10)
    downsets = list_downsets(max(unit_of) + 1, _quotient(ops, unit_of), limit=1000)
    assert downsets is not None
    assert len(downsets) == 1 + 5 * 5 + 1
    assert list_downsets(10, [], limit=1000) is None  # an antichain of ten has 1,024


def test_a_chain_has_one_downset_per_position() -> None:
    assert list_downsets(4, [(0, 1), (1, 2), (2, 3)], limit=10) == (0, 1, 3, 7, 15)


def test_a_group_on_a_path_between_another_s_ops_is_one_unit_with_it() -> None:
    # 2 -> 4 -> 5: once 0 is together with 5 and with 2, op 4 lies between ops of one unit, though 2 reads nothing
    readers: tuple[tuple[int, ...], ...] = ((5,), (), (4,), (), (5,), ())
    assert united(readers, [(0, 5), (0, 2)]) == (0, 1, 0, 2, 0, 0)
    # 1 -> 2 and 3 -> 4 with 1 beside 4 and 2 beside 3: neither group has a path of its own, both together have
    assert united(((), (2,), (), (4,), ()), [(1, 4), (2, 3)]) == (0, 1, 1, 1, 1)


@drawn(150)
@given(st.integers(0, 1 << 30), st.integers(1, 12))
def test_units_are_acyclic_and_keep_groups_together(seed: int, max_units: int) -> None:
    ops = _random(seed)
    for unit_of in (intervals(ops, max_units), clusters(ops, max_units)):
        assert sorted(set(unit_of)) == list(range(max(unit_of) + 1))
        assert all(u < v for u, v in _quotient(ops, unit_of))
        assert all(len({unit_of[op] for op in group}) == 1 for group in ops.together)
    assert list(intervals(ops, max_units)) == sorted(intervals(ops, max_units))
