"""Pieces between meshes: every element arrives once, from a rank that has it; counts by their closed form."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import InternalError
from cost_models.layout import Layout, Mesh, Partial, Placement, Replicate, Shard
from runtime.mesh.cross_mesh import MovedBlock, pieces
from runtime.mesh.sharding import Block, block_of, coordinates
from tests.support.matrix import drawn


def spread(first: int, *axes: tuple[int, Placement]) -> Layout:
    """A layout on ranks from ``first`` on: (size, placement) per axis."""
    count = math.prod(size for size, _ in axes)
    names = tuple(f"axis{index}" for index in range(len(axes)))
    mesh = Mesh(tuple(range(first, first + count)), tuple(size for size, _ in axes), names)
    return Layout(mesh, tuple(placement for _, placement in axes))


def test_the_drawing() -> None:
    found = pieces((12,), spread(0, (2, Shard(0))), spread(2, (3, Shard(0))))
    assert [(p.source, p.target, p.block.offsets[0], p.block.shape[0]) for p in found] == [
        (0, 2, 0, 4),
        (0, 3, 4, 2),
        (1, 3, 6, 2),
        (1, 4, 8, 4),
    ]


@pytest.mark.parametrize(("a", "b"), itertools.product((1, 2, 3, 4, 6, 8), repeat=2))
def test_split_along_one_dimension(a: int, b: int) -> None:
    found = pieces((5, 24), spread(0, (a, Shard(1))), spread(a, (b, Shard(1))))
    assert len(found) == a + b - math.gcd(a, b)
    assert sum(piece.elements for piece in found) == 5 * 24


@pytest.mark.parametrize(("a", "b"), itertools.product((1, 2, 4), repeat=2))
def test_parts_of_a_sum_go_to_everybody_who_adds_them_up(a: int, b: int) -> None:
    """A fully connected layer of a parts before one of b: a b pieces there, and a b back."""
    makes, takes = spread(0, (a, Shard(1))), spread(a, (b, Replicate()))
    gives = spread(a, (b, Partial()))
    there, back = pieces((5, 24), makes, takes), pieces((5, 24), gives, makes)
    assert len(there) == len(back) == a * b
    assert {(p.target, p.source, p.block) for p in back} == {(p.source, p.target, p.block) for p in there}
    assert sum(piece.elements for piece in back) == b * 5 * 24


def test_copies_of_a_part_share_the_sending() -> None:
    """Two parts, each on two ranks; two targets have all of the sum."""
    found = pieces((8,), spread(0, (2, Partial()), (2, Replicate())), spread(4, (2, Replicate())))
    assert [(p.source, p.target, p.elements) for p in found] == [(0, 4, 8), (2, 4, 8), (1, 5, 8), (3, 5, 8)]


def test_copies_share_the_sending() -> None:
    found = pieces((8, 3), spread(0, (4, Replicate())), spread(4, (8, Shard(0))))
    assert Counter(piece.source for piece in found) == {0: 2, 1: 2, 2: 2, 3: 2}
    whole = pieces((8, 3), spread(0, (2, Replicate())), spread(2, (3, Replicate())))
    assert [(p.source, p.target, p.elements) for p in whole] == [(0, 2, 24), (1, 3, 24), (0, 4, 24)]


def test_the_nearest_copy_sends() -> None:
    near = {(0, 3): 1.0, (1, 3): 2.0, (0, 2): 2.0, (1, 2): 1.0}
    found = pieces((4,), spread(0, (2, Replicate())), spread(2, (2, Replicate())), lambda a, b: near[a, b])
    assert [(piece.source, piece.target) for piece in found] == [(1, 2), (0, 3)]


def test_a_rank_of_both_groups_keeps_what_it_has() -> None:
    found = pieces((4, 2), spread(0, (2, Shard(0))), spread(1, (2, Shard(0))))
    assert found == (MovedBlock(0, 1, Block((0, 0), (2, 2))), MovedBlock(1, 2, Block((2, 0), (2, 2))))
    same = pieces((4, 2), spread(0, (2, Shard(0))), spread(0, (2, Replicate())))
    assert [(p.source, p.target) for p in same] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_numbers_without_dimensions_and_empty_tensors() -> None:
    assert pieces((), Layout.on(0), Layout.on(1)) == (MovedBlock(0, 1, Block((), ())),)
    assert pieces((0, 4), Layout.on(0), Layout.on(1)) == ()


def test_refused() -> None:
    with pytest.raises(InternalError, match="part of a sum"):
        pieces((4,), Layout.on(2), spread(0, (2, Partial())))
    with pytest.raises(InternalError, match="not divided"):
        pieces((5,), Layout.on(2), spread(0, (2, Shard(0))))


@st.composite
def layouts(draw: st.DrawFn, first: int, shape: tuple[int, ...], *, summed: bool = False) -> Layout:
    """A layout of one or two axes that divides ``shape``. ``summed``: it may be of parts of a sum."""
    left, axes = list(shape), []
    for _ in range(draw(st.integers(1, 2))):
        size = draw(st.sampled_from([1, 2, 3, 4]))
        whole: list[Placement] = [Replicate(), *([Partial()] if summed else [])]
        split = [Shard(dim) for dim, length in enumerate(left) if length % size == 0]
        placement = draw(st.sampled_from([*split, *whole]))
        axes.append((size, placement))
        if isinstance(placement, Shard):
            left[placement.dim] //= size
    return spread(first, *axes)


@given(st.data())
@drawn(200)
def test_every_element_arrives_once(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(24,), (12, 24), (24, 4, 12)]))
    source = data.draw(layouts(0, shape))
    target = data.draw(layouts(data.draw(st.sampled_from([0, 2, 16])), shape))
    found = pieces(shape, source, target)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for rank in target.ranks:
        wanted = block_of(shape, target.placements, target.mesh, rank)
        buffer, filled = torch.full(wanted.shape, -1), torch.zeros(wanted.shape, dtype=torch.int64)
        for piece in found:
            if piece.target == rank:
                has = block_of(shape, source.placements, source.mesh, piece.source)
                local = piece.block.within(has.offsets).of(has.of(whole))
                piece.block.within(wanted.offsets).of(buffer).copy_(local)
                piece.block.within(wanted.offsets).of(filled).add_(1)
        assert torch.equal(buffer, wanted.of(whole))
        assert bool((filled == 1).all())
    pairs = Counter((piece.source, piece.target) for piece in found)
    assert not pairs or max(pairs.values()) == 1 or set(source.ranks) & set(target.ranks)


@given(st.data())
@drawn(200)
def test_every_part_of_a_sum_arrives_once(data: st.DataObject) -> None:
    """From some rank that has it; and pieces of two parts lie on each other wholly or not at all."""
    shape = data.draw(st.sampled_from([(24,), (12, 24)]))
    source, target = data.draw(layouts(0, shape, summed=True)), data.draw(layouts(16, shape))
    found = pieces(shape, source, target)
    places = {rank: coordinates(source.mesh, rank) for rank in source.ranks}
    summed = [axis for axis, placement in enumerate(source.placements) if isinstance(placement, Partial)]
    parts = {tuple(places[rank][axis] for axis in summed) for rank in source.ranks}
    for rank in target.ranks:
        wanted = block_of(shape, target.placements, target.mesh, rank)
        came = {part: torch.zeros(wanted.shape, dtype=torch.int64) for part in parts}
        own = [piece for piece in found if piece.target == rank]
        for piece in own:
            has = block_of(shape, source.placements, source.mesh, piece.source)
            assert has.shared_with(piece.block) == piece.block
            part = tuple(places[piece.source][axis] for axis in summed)
            piece.block.within(wanted.offsets).of(came[part]).add_(1)
        assert all(bool((filled == 1).all()) for filled in came.values())
        for one, other in itertools.combinations(own, 2):
            assert one.block == other.block or one.block.shared_with(other.block) is None
