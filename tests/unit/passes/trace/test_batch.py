"""Batches: leaf names, what forward gets, guesses of the batch dimension."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.errors import ModelError, UsageError
from passes.trace.batch import (
    batch_dim_candidates,
    flatten_batch,
    forward_arguments,
    forward_constants,
    forward_names,
    forward_part,
    map_tensors,
    takes_whole,
)
from passes.trace.trace import trace


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


class Two(nn.Module):
    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        return image * mask


class Anything(nn.Module):
    def forward(self, x: Tensor, **rest: Any) -> Tensor:
        return x


Point = namedtuple("Point", "x y")


@dataclass
class Sample:
    pixels: Tensor
    label: int


def test_names_of_leaves() -> None:
    assert list(flatten_batch({"a": {"b": [zeros(1), zeros(2)]}, "c": zeros(3)})) == ["a.b.0", "a.b.1", "c"]
    assert list(flatten_batch((zeros(1), zeros(2)), ("image",))) == ["image", "batch.1"]
    assert list(flatten_batch(({"q": zeros(1)}, zeros(2)), ("image",))) == ["image.q", "batch.1"]
    assert list(flatten_batch(zeros(1), ("image", "mask"))) == ["image"]
    assert list(flatten_batch(zeros(1))) == ["batch.0"]
    assert list(flatten_batch({"p": Point(zeros(1), 3), "s": Sample(zeros(2), 1)})) == ["p.0", "s.pixels"]
    assert forward_names(Two()) == ("image", "mask")


def test_equal_names_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'a\.b'"):
        flatten_batch({"a.b": zeros(1), "a": {"b": zeros(1)}})


leaves = st.integers(1, 4).map(lambda n: torch.arange(n))
batches = st.recursive(
    leaves | st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(batches)
def test_mapping_keeps_the_structure_and_visits_in_the_order_of_flattening(batch: Any) -> None:
    seen: list[Tensor] = []

    def visit(path: tuple[str, ...], leaf: Tensor) -> Tensor:
        seen.append(leaf)
        return leaf + 1

    twin = map_tensors(batch, visit)
    flat = flatten_batch(batch)
    assert [id(t) for t in seen] == [id(t) for t in flat.values()]
    moved = flatten_batch(twin)
    assert list(moved) == list(flat)
    assert all(torch.equal(moved[name], leaf + 1) for name, leaf in flat.items())
    assert type(twin) is type(batch)


def test_own_mapping_types_survive_and_the_original_is_untouched() -> None:
    ordered = OrderedDict(a=zeros(2))
    twin = map_tensors(ordered, lambda path, leaf: leaf + 1)
    assert type(twin) is OrderedDict
    assert ordered["a"].sum() == 0
    frozen = MappingProxyType({"a": zeros(2)})
    assert map_tensors(frozen, lambda path, leaf: leaf)["a"].shape == (2,)
    point = map_tensors(Point(zeros(1), 2), lambda path, leaf: leaf + 1)
    assert isinstance(point, Point)
    assert point.y == 2


def test_what_forward_gets() -> None:
    a, b, c = zeros(1), zeros(2), zeros(3)
    batch = {"image": a, "mask": b, "label": c}
    assert forward_arguments(Two(), batch, has_loss_fn=True) == ((), {"image": a, "mask": b})
    assert forward_arguments(Anything(), {"x": a, "y": b}, has_loss_fn=False) == ((), {"x": a, "y": b})
    assert forward_arguments(Two(), (a, b, c), has_loss_fn=True)[0] == (a, b)
    assert forward_arguments(Two(), [a, b], has_loss_fn=False)[0] == (a, b)
    assert forward_arguments(nn.Linear(1, 1), a, has_loss_fn=True)[0] == (a,)


@pytest.mark.parametrize(
    ("model", "batch", "has_loss_fn", "text"),
    [
        (Two(), {"image": zeros(1)}, True, "needs mask"),
        (Two(), (zeros(1),), True, "does not fit"),
        (Two(), (zeros(1), zeros(1), zeros(1)), False, "does not fit"),
        (nn.LSTM(2, 2), (zeros(3, 2), zeros(3, 2)), True, "cannot tell"),
    ],
)
def test_batches_that_do_not_fit(model: nn.Module, batch: Any, has_loss_fn: bool, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        forward_arguments(model, batch, has_loss_fn)


def test_guesses_of_the_batch_dimension() -> None:
    found = list(batch_dim_candidates({"x": zeros(4, 2, 3), "y": zeros(4), "z": zeros(2), "s": zeros()}))
    assert [(g.dims, g.size, g.leading) for g in found] == [
        ({"x": 0, "y": 0, "z": None, "s": None}, 4, "x"),
        ({"x": 1, "y": None, "z": 0, "s": None}, 2, "x"),
        ({"x": 2, "y": None, "z": None, "s": None}, 3, "x"),
    ]


def test_overrides_leave_one_guess() -> None:
    given_dims = {"x": -2}
    (guess,) = batch_dim_candidates({"x": zeros(4, 2, 3), "y": zeros(2), "z": zeros(4)}, given_dims)
    assert guess.dims == {"x": 1, "y": 0, "z": None}
    only_none = list(batch_dim_candidates({"x": zeros(4, 2), "y": zeros(4)}, {"x": None}))
    assert only_none[0].dims == {"x": None, "y": 0}


def test_overrides_that_do_not_fit_name_every_problem() -> None:
    with pytest.raises(UsageError) as caught:
        list(batch_dim_candidates({"x": zeros(4)}, {"y": 0, "x": 3}))
    assert len(caught.value.because) == 2
    with pytest.raises(UsageError, match="differ in size"):
        list(batch_dim_candidates({"x": zeros(4), "y": zeros(3)}, {"x": 0, "y": 0}))


def test_no_batch_dimension_at_all() -> None:
    with pytest.raises(ModelError, match="batch dimension"):
        list(batch_dim_candidates({"x": zeros()}))
    with pytest.raises(ModelError, match="batch dimension"):
        list(batch_dim_candidates({"x": zeros(3)}, {"x": None}))


class Shares(MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its storage with the original."""

    def __init__(self, **items: Any) -> None:
        self.stored = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.stored[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.stored[key] = value

    def __delitem__(self, key: str) -> None:
        del self.stored[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def test_a_mapping_that_stores_its_items_elsewhere_is_not_written_through_its_twin() -> None:
    original = Shares(a=zeros(2), note="kept")
    twin = map_tensors(original, lambda path, leaf: leaf + 1)
    assert type(twin) is Shares
    assert twin["a"].sum() == 2
    assert original["a"].sum() == 0
    assert twin["note"] == "kept"
    same = map_tensors(original, lambda path, leaf: leaf)
    assert same["a"] is original["a"], "tensors themselves are never copied"


@dataclass(frozen=True)
class Pair:
    image: Tensor
    mask: Tensor
    label: int = 3


def test_a_dataclass_with_all_that_forward_needs_is_its_fields_and_any_other_is_an_argument() -> None:
    pair, sample = Pair(zeros(1), zeros(2)), Sample(zeros(3), 1)
    args, kwargs = forward_arguments(Two(), pair, has_loss_fn=True)
    assert args == ()
    assert kwargs == {"image": pair.image, "mask": pair.mask}
    assert forward_arguments(nn.Linear(1, 1), sample, has_loss_fn=True) == ((sample,), {})
    assert forward_constants(Two(), pair, has_loss_fn=True) == {}
    assert forward_constants(nn.Linear(1, 1), sample, has_loss_fn=True) == {"input.label": 1}


def test_a_part_of_a_batch_is_enough_for_its_constants() -> None:
    with pytest.raises(ModelError, match="needs mask"):
        forward_constants(Two(), {"image": zeros(1)}, has_loss_fn=False)
    assert forward_constants(Two(), {"image": 2.0}, has_loss_fn=False, partial=True) == {"image": 2.0}


class OfAll(nn.Module):
    """Takes the loader's mapping as its one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch: Any, scale: float = 1.0) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.linear(batch["x"]) * scale, batch["targets"]["y"])}


def test_a_forward_of_one_argument_that_no_key_names_gets_the_mapping() -> None:
    batch = {"x": torch.randn(6, 4), "targets": {"y": torch.randn(6, 2)}}
    assert forward_arguments(OfAll(), batch, False) == ((batch,), {})
    assert forward_part(OfAll(), batch, False) is batch
    graph = trace(OfAll(), batch)
    assert [(i.name, graph.batch.batch_dims[i.name]) for i in graph.inputs if i.kind == "batch"] == [
        ("x", 0),
        ("targets.y", 0),
    ]
    for keys in ({"batch": batch}, {"scale": 2.0, **batch}):  # named: by keys, as ever
        assert not takes_whole(OfAll(), keys)


def test_a_forward_that_wants_a_tensor_and_gets_the_mapping_is_told_by_name() -> None:
    batch = {"inputs": torch.randn(6, 4), "y": torch.randn(6, 2)}
    with pytest.raises(ModelError, match="needs input, which the batch does not have") as caught:
        trace(nn.Linear(4, 2), batch, loss_fn=lambda output, batch: F.mse_loss(output, batch["y"]))
    assert "with all of it as input, forward ends with TypeError" in caught.value.because[1]
