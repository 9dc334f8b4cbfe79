"""Sizes that are divided by numbers: what the batch must be a multiple of, and what a rank then has."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from cost_models.layout import Shard
from passes.shard.sizes import LocalSizes, least_unit, splits_into
from runtime.segment.code import Dim

B = sympy.Symbol("b", integer=True, positive=True)
SIZES: dict[str, tuple[Dim, int, int | None]] = {
    "b": (B, 4, 4),
    "6 b": (6 * B, 4, 2),
    "b - b % 2": (B - Mod(B, 2), 4, 4),
    "b // 2 * 2": (2 * FloorDiv(B, 2), 4, 4),
    "(b + 1) // 2": (FloorDiv(B + 1, 2), 2, 4),
    "b // 3": (FloorDiv(B, 3), 2, 6),
    "b // 2 // 3 * 4 + 8": (4 * FloorDiv(FloorDiv(B, 2), 3) + 8, 4, 6),
    "b + 4": (B + 4, 4, 4),
    "b - 1": (B - 1, 2, None),
    "b // 3 + 1": (FloorDiv(B, 3) + 1, 2, None),
    "4 seq": (4 * sympy.Symbol("seq"), 2, 1),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_size_is_shared_where_all_batches_allow_it(case: str) -> None:
    size, parts, unit = SIZES[case]
    assert least_unit(size, parts, B) == unit
    if unit is None or case == "4 seq":
        return
    assert splits_into(size, parts, B, 2 * unit)
    assert unit == 1 or not splits_into(size, parts, B, unit + 1)
    (part,) = LocalSizes(B, unit, (parts,), {})._part((size,), (Shard(0),))
    for u in range(1, 20):
        whole = int(sympy.sympify(size).subs(B, unit * u))
        assert int(sympy.sympify(part).subs(B, u)) * parts == whole
