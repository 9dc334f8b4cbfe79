"""Paths and how transfers share links."""

from __future__ import annotations

import math
import random

import pytest

from cost_models.links import SAME_DEVICE, Link, Path, fair_rates, least_fair_rate


def test_a_path_is_its_narrowest_link_and_the_sum_of_latencies() -> None:
    path = Path.over([Link("a", 50e9, 1e-6), Link("b", 10e9, 2e-6), Link("c", 20e9, 0.0)])
    assert path == Path(("a", "b", "c"), 10e9, 3e-6)
    assert path.transfer_seconds(10**7) == pytest.approx(3e-6 + 1e-3)
    assert path.transfer_seconds(0) == 3e-6


def test_from_a_rank_to_itself() -> None:
    assert Path.over([]) == SAME_DEVICE
    assert SAME_DEVICE.transfer_seconds(2**40) == 0.0


def _rates(capacities: dict[str, float], *routes: str) -> tuple[float, ...]:
    """Each letter of a route is a link."""
    links = {name: Link(name, capacity, 0.0) for name, capacity in capacities.items()}
    return fair_rates([Path.over(links[name] for name in route) for route in routes], links)


def test_alone_a_transfer_gets_its_narrowest_link() -> None:
    assert _rates({"a": 10, "b": 4}, "ab") == (4,)


def test_two_share_evenly_and_a_third_takes_what_is_left() -> None:
    # b is full with two at 2 each; a has 10 − 2 left for the transfer that only uses a
    assert _rates({"a": 10, "b": 4}, "ab", "b", "a") == (2, 2, 8)


def test_the_field_example_of_a_line_network() -> None:
    # One transfer over all three links, one over each (Bertsekas & Gallager): capacities 1, 1, 2
    assert _rates({"a": 1, "b": 1, "c": 2}, "abc", "a", "b", "c") == (0.5, 0.5, 0.5, 1.5)


def test_no_links_is_no_limit_and_no_transfers_are_no_rates() -> None:
    assert _rates({"a": 1}, "", "a") == (math.inf, 1)
    assert fair_rates([], {}) == ()


def test_rates_are_max_min_fair_on_random_networks() -> None:
    """Nobody can get more without taking from somebody who has no more: each transfer has a full link on which no
    other is faster. No link carries more than it can."""
    random_numbers = random.Random(0)
    for _ in range(200):
        capacities = {name: random_numbers.choice([1.0, 2.0, 3.0, 7.5]) for name in "abcdef"}
        routes = [
            "".join(random_numbers.sample("abcdef", random_numbers.randint(1, 4)))
            for _ in range(random_numbers.randint(1, 8))
        ]
        rates = _rates(capacities, *routes)
        load = {
            name: sum(r for r, route in zip(rates, routes, strict=True) if name in route) for name in "abcdef"
        }
        assert all(load[name] <= capacities[name] * (1 + 1e-9) for name in load)
        for rate, route in zip(rates, routes, strict=True):
            full = [name for name in route if load[name] >= capacities[name] * (1 - 1e-9)]
            fastest = [
                max(r for r, other in zip(rates, routes, strict=True) if name in other) for name in full
            ]
            assert any(rate >= most * (1 - 1e-9) for most in fastest)


def test_the_least_rate_is_that_of_the_link_that_is_full_first() -> None:
    random_numbers = random.Random(1)
    for _ in range(200):
        links = {name: Link(name, random_numbers.choice([1.0, 2.0, 3.0, 7.5]), 0.0) for name in "abcdef"}
        paths = [
            Path(tuple(random_numbers.choices("abcdef", k=random_numbers.randint(0, 4))), 1.0, 0.0)
            for _ in range(random_numbers.randint(1, 8))
        ]
        assert least_fair_rate(paths, links) == min(fair_rates(paths, links))
