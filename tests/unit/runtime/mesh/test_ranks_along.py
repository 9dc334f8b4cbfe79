"""Groups along axes of a mesh are those that each rank names for itself."""

from __future__ import annotations

import itertools

import pytest

from cost_models.layout import Mesh
from runtime.mesh.ranks_along import all_ranks_along, ranks_along

NAMES = ("a", "b", "c")


@pytest.mark.parametrize("names", [n for k in (1, 2, 3) for n in itertools.permutations(NAMES, k)])
def test_all_groups_are_those_of_the_ranks_each_once(names: tuple[str, ...]) -> None:
    mesh = Mesh(tuple(range(7, 31))[::-1], (2, 3, 4), NAMES)
    assert all_ranks_along(mesh, names) == tuple(
        dict.fromkeys(ranks_along(mesh, names, rank) for rank in mesh.ranks)
    )
