"""Which sizes are profiled: two and a check for a line, one more for a parabola, each size anew where neither fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cost_models.compute import OpWork
from passes.costs.saved import OpProfile, OpStructure
from passes.costs.size_model import fit


@pytest.mark.parametrize(
    ("flops", "profiled", "direct"),
    [
        (lambda b: 8 * b + 3, {2, 3, 8}, ()),
        (lambda b: 2 * b * b - b, {2, 3, 5, 8}, ()),
        (lambda b: (b + 9) // 2, {2, 3, 5, 8}, (0,)),
    ],
    ids=["line", "parabola", "neither"],
)
def test_as_many_sizes_as_the_numbers_need(
    flops: Callable[[int], int], profiled: set[int], direct: tuple[int, ...]
) -> None:
    asked: set[int] = set()

    def profiler(signature: int, size: int) -> OpProfile:
        asked.add(size)
        return OpProfile(OpStructure(), OpWork(forward_flops=flops(size)), 4 * size, 0, ())

    model = fit(1, profiler)
    assert (asked, model.direct) == (profiled, direct)
    for size in (1, 4, 7, 100):
        assert model.at(size)[0] == flops(size)


def test_a_structure_that_changes_with_the_size_fits_nothing() -> None:
    def profiler(signature: int, size: int) -> OpProfile:
        return OpProfile(OpStructure(own_storages=int(size == 3)), OpWork(), 0, 0, (0,) * (size == 3))

    assert fit(1, profiler).direct == (0,)
