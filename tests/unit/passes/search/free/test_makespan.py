"""The played makespan of tasks, by hand; predictions beside it."""

from __future__ import annotations

import numpy as np
import pytest

from passes.search.free.makespan import TaskGraph, makespan


def tasks(
    readers: tuple[tuple[int, ...], ...],
    forward: list[float],
    *,
    backward: float = 2.0,
    weight: float = 0.0,
    size: float = 0.0,
    devices: int = 2,
    latency: float = 0.0,
) -> TaskGraph:
    """Alike devices; a second per byte between them; each backward takes ``backward`` times the forward."""
    each = np.tile(np.array(forward), (devices, 1))
    off = 1.0 - np.eye(devices)
    count = len(readers)
    return TaskGraph(
        readers=readers,
        forward=each,
        backward=backward * each,
        weight=weight * each,
        sent_bytes=np.full(count, size),
        gradient_bytes=np.full(count, size),
        passes_gradient=np.ones(count, dtype=bool),
        latency=latency * off,
        seconds_per_byte=off,
    )


def test_a_chain_on_one_device_takes_its_sum() -> None:
    chain = tasks(((1,), (2,), ()), [1.0, 2.0, 3.0], weight=1.0)
    assert makespan(chain, [0, 0, 0]) == 6 + 12 + 6


def test_messages_delay_forward_and_backward() -> None:
    chain = tasks(((1,), ()), [1.0, 1.0], size=0.5, latency=0.25)
    assert makespan(chain, [0, 1]) == 1 + 0.75 + 1 + 2 + 0.75 + 2


def test_branches_run_beside_each_other() -> None:
    """0 -> 1, 2 -> 3 (a diamond): the branches of 4 and 4 seconds on two devices."""
    diamond = tasks(((1, 2), (3,), (3,), ()), [1.0, 4.0, 4.0, 1.0])
    assert makespan(diamond, [0, 0, 0, 0]) == 30
    assert makespan(diamond, [0, 0, 1, 0]) == 3 * (1 + 4 + 1)


def test_a_value_and_its_gradient_are_sent_once_per_device() -> None:
    """Three readers on the other device: one message there, one gradient back when the last is done."""
    fan = tasks(((1, 2, 3), (), (), ()), [1.0, 1.0, 1.0, 1.0], size=1.0)
    assert makespan(fan, [0, 1, 1, 1]) == 1 + 1 + 3 + 6 + 1 + 2


def test_weight_halves_wait_until_nothing_else_is_to_do() -> None:
    """F F | B wait B; device 1's weight half (2) runs while device 0 makes its backward (1) and its own weight half."""
    chain = tasks(((1,), ()), [1.0, 1.0], backward=1.0, weight=2.0)
    assert makespan(chain, [0, 1]) == 1 + 1 + 1 + 1 + 2


def test_a_pipeline_of_equal_stages_is_the_closed_form() -> None:
    """p = 2 stages, F = 1 and B = 2: (m + p - 1)·3 seconds."""
    chain = tasks(((1,), ()), [1.0, 1.0])
    for m in (1, 2, 4):
        assert makespan(chain, [0, 1], m) == (m + 1) * 3


def test_what_passes_no_gradient_has_no_backward() -> None:
    chain = tasks(((1,), ()), [1.0, 1.0])
    frozen = TaskGraph(
        **{
            **{name: getattr(chain, name) for name in chain.__dataclass_fields__},
            "passes_gradient": np.array([False, True]),
            "backward": np.array([[0.0, 2.0], [0.0, 2.0]]),
        }
    )
    assert makespan(frozen, [0, 1]) == 1 + 1 + 2


@pytest.mark.parametrize("seed", range(20))
def test_no_placement_is_faster_than_its_busiest_device_or_its_longest_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 12
    readers = tuple(tuple(v for v in range(u + 1, count) if rng.random() < 0.25) for u in range(count))
    graph = tasks(readers, rng.integers(1, 9, count).tolist(), weight=1.0, size=0.5, devices=3)
    home = rng.integers(0, 3, count)
    seconds = makespan(graph, home)
    each = (graph.forward + graph.backward + graph.weight)[0]
    assert seconds >= max(each[home == d].sum() for d in range(3)) - 1e-9
    assert seconds >= max(graph.urgency[:count]) - 1e-9
    assert makespan(graph, home, 3) <= 3 * seconds + 1e-9
