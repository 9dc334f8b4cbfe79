"""Mutated programs of real plans: the checker refuses what would hang or compute something else. A few of each kind."""

from __future__ import annotations

import pytest

from benchmarks.mutants import EDITS, Tally, accepted, mutant, subject, try_mutants
from runtime.program.program import ReduceGradients
from tests.support.matrix import thinned


@pytest.mark.parametrize("name", thinned(["tied", "zero"], ["tied"]))
def test_whatever_the_checker_accepts_computes_the_same(name: str) -> None:
    tally = Tally()
    try_mutants(subject(name), len(EDITS), 0, tally)
    assert tally.escapes == []
    assert tally.refused.total() >= len(EDITS) / 2, "most mutants are wrong"


def test_sums_along_two_axes_keep_their_order() -> None:
    """One parameter's gradient is scattered along one axis, and its parts are summed along the other."""
    zero = subject("zero")
    (first, *_) = zero.programs
    sums = [i for i in first.instructions if isinstance(i, ReduceGradients)]
    assert [i.scattered for i in sums] == sorted((i.scattered for i in sums), reverse=True)
    assert {True, False} == {i.scattered for i in sums}
    assert accepted(zero, zero.programs)
    swapped = [mutant(zero, "swap sums", seed) for seed in range(8)]
    assert any(swapped)
    refused = [m for m in swapped if m is not None and not accepted(zero, m)]
    assert refused
