"""The bound on simulated time: its closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from passes.search.bound import PhaseTimes, whole_ops_bound


def _chain(seconds: list[float], speeds: list[float]) -> PhaseTimes:
    n = len(seconds)
    each = np.array(seconds)[None, :] / np.array(speeds)[:, None]
    readers = tuple((u + 1,) if u + 1 < n else () for u in range(n))
    return PhaseTimes(readers, each, each, each, np.ones(n, dtype=bool), n - 1)


def test_equal_shares_of_many_small_ops() -> None:
    assert whole_ops_bound(_chain([1.0] * 8, [1.0, 1.0]), 100) == pytest.approx(100 * 8 * 3 / 2)


def test_proportional_devices_share_by_speed() -> None:
    assert whole_ops_bound(_chain([1.0] * 8, [3.0, 1.0]), 100) == pytest.approx(100 * 8 * 3 / 4)


def test_one_heavy_op_and_the_way_to_it_and_back() -> None:
    bound = whole_ops_bound(_chain([1.0, 1.0, 10.0], [1.0] * 3), 4)
    assert bound == pytest.approx(max(2 + 4 * 20 + 2, 2 + 4 * 30))


def test_one_micro_batch_there_and_back() -> None:
    assert whole_ops_bound(_chain([1.0] * 6, [1.0] * 6), 1) == pytest.approx(6 + 6)


def test_no_way_back_through_what_has_no_gradient() -> None:
    chain = _chain([5.0, 1.0, 1.0], [1.0] * 3)
    frozen = PhaseTimes(
        chain.readers,
        chain.forward,
        chain.backward_input,
        chain.backward_weight,
        np.array([True, False, True]),
        2,
    )
    # back from op 2 does not reach op 0: its gradient does not depend on op 2's
    assert whole_ops_bound(frozen, 1) == pytest.approx(max(5 + 1 + 1 + 5, 5 + 5 + 5))
