"""Orders of batches, what is drawn at random in them, and how a rank's loader makes them."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cost_models.errors import UsageError
from partitioner.batches.batch_check import SAMPLED, digest
from partitioner.batches.loader import EngineDataLoader
from partitioner.batches.order import BatchOrder, drawing
from partitioner.batches.part_batch import DataPlace
from partitioner.batches.sources import Indexed, collate_numbers
from partitioner.batches.step import BatchCuts


@given(
    length=st.integers(0, 60),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 5),
    world=st.integers(1, 4),
    microbatches=st.integers(1, 5),
)
def test_every_sample_is_in_one_batch_of_an_epoch_and_in_one_part_of_it(
    length: int, batch_size: int, shuffle: bool, drop_last: bool, epoch: int, world: int, microbatches: int
) -> None:
    order = BatchOrder(length, batch_size, shuffle, 5, drop_last)
    batches = [list(draw.indices) for draw in order.draws(epoch)]
    assert len(batches) == len(order)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    taken = list(chain(*batches))
    assert len(set(taken)) == len(taken) == (length // batch_size * batch_size if drop_last else length)
    if not shuffle:
        assert taken == list(range(len(taken)))
    places = [
        DataPlace(r, world, BatchCuts(batch_size * world, microbatches, multiple=world)) for r in range(world)
    ]
    parts = [[list(draw.indices) for draw in order.draws(epoch, 0, place)] for place in places]
    for batch, pieces in zip(batches, zip(*parts, strict=True), strict=True):
        if len(batch) % world or world == 1:
            assert all(piece == batch for piece in pieces), "too few to share: everybody loads them"
        else:
            assert sum(map(len, pieces)) == len(batch)
            assert sorted(chain(*pieces)) == sorted(batch)
    middle = len(batches) // 2
    assert list(order.draws(epoch, middle)) == list(order.draws(epoch))[middle:], "any batch at once"


def test_a_part_has_its_samples_of_every_micro_batch() -> None:
    """8 samples in 2 micro-batches, two ranks: 0 1 | 4 5 and 2 3 | 6 7; 4 samples are 2 micro-batches of 2."""
    order, places = BatchOrder(12, 8), [DataPlace(rank, 2, BatchCuts(8, 2, multiple=2)) for rank in range(2)]
    drawn = [list(order.draws(0, 0, place)) for place in places]
    assert [[draw.indices for draw in draws] for draws in drawn] == [
        [[0, 1, 4, 5], [8, 10]],
        [[2, 3, 6, 7], [9, 11]],
    ]
    assert len({draw.seed for draws in drawn for draw in draws}) == 4, "no two parts draw the same"


def test_epochs_and_seeds_make_other_orders_and_batches_other_draws() -> None:
    def indices(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(chain(*(draw.indices for draw in BatchOrder(50, 7, True, seed).draws(epoch))))

    assert len({indices(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16
    seeds = [draw.seed for e in range(4) for draw in BatchOrder(50, 7, True, 1).draws(e)]
    assert len(set(seeds)) == len(seeds)


def test_a_sampler_draws_the_same_whatever_was_drawn_before() -> None:
    orders = []
    for noise in range(3):
        torch.manual_seed(noise)
        sampler = torch.utils.data.WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 12)
        orders.append(list(BatchOrder(12, 5, seed=1, sampler=sampler).draws(2)))
    assert orders[0] == orders[1] == orders[2]


def test_a_sampler_that_is_not_as_long_as_it_says_is_refused() -> None:
    with pytest.raises(UsageError, match="yielded 3 indices, its length is 4"):
        list(BatchOrder(4, 2, sampler=[0, 1, 2]).draws(0))


def three() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_drawing_seeds_three_generators_and_puts_them_back() -> None:
    before = three()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = three()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    drawings = []

    def draw_and_fail() -> None:
        with drawing(9):
            drawings.append(three())
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            draw_and_fail()
    assert drawings[0] == drawings[1] != before
    assert three() == expected


class Noisy:
    """Draws something for every sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(()) + index, "y": [index, random.random()], "z": float(np.random.rand())}


def test_worker_processes_draw_what_the_process_itself_draws() -> None:
    """Also from the middle of an epoch, and where workers stay."""
    order = BatchOrder(10, 3, True, 4)
    alone = Indexed(Noisy(), order, DataPlace(), collate_numbers, {})
    helped = Indexed(
        Noisy(), order, DataPlace(), collate_numbers, {"num_workers": 2, "persistent_workers": True}
    )
    for epoch, first in ((0, 0), (1, 2), (0, 3)):
        mine, theirs = list(alone(epoch, first)), list(helped(epoch, first))
        assert len(mine) == len(theirs) == 4 - first
        for one, other in zip(mine, theirs, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in ("x", "y", "z"))


def test_the_generators_of_the_script_stay_where_they_are() -> None:
    """An epoch that is resumed begins a second loop, and would draw twice."""
    before = torch.get_rng_state(), random.getstate()
    samples = Indexed(Noisy(), BatchOrder(10, 3, True, 4), DataPlace(), collate_numbers, {"generator": None})
    assert len(list(samples(0, 0))) == 4
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def loader(length: int = 10) -> EngineDataLoader:
    order = BatchOrder(length, 4, True)
    return EngineDataLoader(order, lambda epoch, first: iter([(epoch, n) for n in range(first, 3)]))


def test_a_loop_left_early_begins_another_epoch_and_a_loaded_one_goes_on() -> None:
    made = loader()
    assert next(iter(made)) == (0, 0)
    assert list(made) == [(1, 0), (1, 1), (1, 2)]
    states = [(batch, made.state_dict()) for batch in made]
    assert [(s["epoch"], s["position"]) for _, s in states] == [(2, 1), (2, 2), (2, 3)]
    assert (made.epoch, made.position) == (3, 0)
    for at, (_, state) in enumerate(states):
        again = loader()
        again.load_state_dict(state)
        again.set_epoch(2)  # as a loop over epochs does
        assert list(again) == [(2, n) for n in range(at + 1, 3)]
        assert list(again) == [(3, 0), (3, 1), (3, 2)]
    made.set_epoch(7)
    assert list(made) == [(7, 0), (7, 1), (7, 2)]


def test_lists_of_numbers_become_tensors_and_words_stay() -> None:
    made = collate_numbers([{"a": [1, 2], "b": 0.5, "c": "x"}, {"a": [3, 4], "b": 1.5, "c": "y"}])
    assert torch.equal(made["a"], torch.tensor([[1, 2], [3, 4]]))
    assert torch.equal(made["b"], torch.tensor([0.5, 1.5], dtype=torch.float64))
    assert made["c"] == ["x", "y"]
    nested = collate_numbers([{"a": [[1.0], [2.0]]}] * 3)["a"]
    assert (nested.shape, nested.dtype) == ((3, 2, 1), torch.float32)
    assert torch.equal(collate_numbers([(torch.ones(2), 1)] * 2)[0], torch.ones(2, 2))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float64]
)
def test_digests_tell_tensors_apart(dtype: torch.dtype) -> None:
    def made(seed: int, *shape: int) -> Tensor:
        numbers = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed))
        return (numbers > 4).to(dtype) if dtype == torch.bool else numbers.to(dtype)

    small, large = made(0, 8, 40), made(0, 3, SAMPLED)
    assert digest(small) == digest(small.clone()) == digest(small.t().contiguous().t())
    assert digest(large) == digest(large.clone())
    values = [
        digest(t)
        for t in (small, made(1, 8, 40), small.flip(0), small.reshape(4, 80), small[:7], large, large.flip(0))
    ]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**62 for value in values)
    assert digest(torch.zeros(0, 3)) != digest(torch.zeros(0, 4))
    assert digest(torch.zeros(2)) != digest(torch.zeros(2, dtype=torch.int32))
