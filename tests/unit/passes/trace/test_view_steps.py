"""The steps of views: whatever slices, transposes and reshapes make of a tensor is made again from its layout alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from passes.trace.view_steps import StridedLayout, view_steps
from runtime.state.state_view import StateView, taken


def sliced(view: Tensor, draw: random.Random) -> Tensor:
    dim = draw.randrange(view.dim())
    start = draw.randrange(view.size(dim))
    end = draw.randint(start + 1, view.size(dim))
    return view[(slice(None),) * dim + (slice(start, end, draw.choice([1, 1, 2, 3])),)]


MOVES: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    sliced,
    lambda view, draw: view.select(dim := draw.randrange(view.dim()), draw.randrange(view.size(dim))),
    lambda view, draw: view.permute(draw.sample(range(view.dim()), view.dim())),
    lambda view, draw: view.reshape(-1) if view.is_contiguous() else view,
    lambda view, draw: view.unsqueeze(0).expand(2, *view.shape),
    lambda view, draw: view.unflatten(-1, (2, -1)) if view.size(-1) % 2 == 0 else view,
)


def test_random_views_are_taken_again_of_any_tensor_of_the_same_shape() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        size = [draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(1, 4))]
        owner = torch.arange(torch.Size(size).numel()).reshape(size)
        owner = owner.permute(draw.sample(range(len(size)), len(size)))
        view = owner
        for _ in range(draw.randint(0, 3)):
            if view.dim():
                view = draw.choice(MOVES)(view, draw)
        steps = view_steps(StridedLayout.of(owner), StridedLayout.of(view, view.storage_offset()))
        assert steps is not None, (owner.shape, view.shape, view.stride())
        again = taken(steps, owner.contiguous())  # ranks hold owners in other orders of memory
        assert again.shape == view.shape
        assert torch.equal(again, view)


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (lambda w: w, "w"),
        (lambda w: w[2:], "w[2:4]"),
        (lambda w: w[1, ::2], "w[:, 0:6:2][1]"),
        (lambda w: w.t(), "w.permute(1, 0)"),
        (lambda w: w.view(-1)[4:10], "w.reshape(24)[4:10]"),
    ],
)
def test_a_view_is_written_as_indexing(view: Callable[[Tensor], Tensor], text: str) -> None:
    owner = torch.zeros(4, 6)
    made = view(owner)
    steps = view_steps(StridedLayout.of(owner), StridedLayout.of(made, made.storage_offset()))
    assert steps is not None
    assert str(StateView("w", steps, tuple(made.shape))) == text


def test_no_steps_lead_to_elements_that_no_view_op_takes() -> None:
    owner = StridedLayout.of(torch.zeros(12))
    assert view_steps(owner, StridedLayout((3, 4), (1, 1))) is None, "windows that overlap"
    assert view_steps(owner, StridedLayout((3,), (1,), -2)) is None, "before the owner's first element"
    assert view_steps(StridedLayout((2, 2), (6, 1)), StridedLayout((4,), (1,))) is None, "in the owner's gaps"
