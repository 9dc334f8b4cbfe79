"""The solvers of placement problems against definitions and against all placements of small random problems."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from passes.search.anywhere.anneal import anneal
from passes.search.anywhere.bound import simple_bound, work_bound
from passes.search.anywhere.pairs import divided
from passes.search.anywhere.placements import PlacementBatch
from passes.search.anywhere.problem import Home, Net, PlacementProblem, evaluate, legal
from passes.search.anywhere.program import alike, solve_program
from tests.support.matrix import some
from tests.unit.passes.search.anywhere.samples import brute_force, random_problem


def sample(seed: int) -> PlacementProblem:
    """Unlike devices and links, memory, pins, ties and nets that are paid once, in turn."""
    return random_problem(
        seed,
        units=4 + seed % 3,
        devices=2 + seed % 2,
        tight=seed % 5 == 0,
        pinned=seed % 7 == 0,
        alike=seed % 3 == 0,
        ties=seed % 4 != 0,
        once=seed % 4 == 1,
    )


def anywhere(problem: PlacementProblem) -> Home:
    """Each unit on the first device that it may be on."""
    return tuple(problem.allowed.argmax(axis=0).tolist())


def annealed(problem: PlacementProblem, steps: int) -> Home:
    line = [range(problem.units)]
    starts = [anywhere(problem)] * 4
    return anneal(problem, starts, line, steps=steps, hottest=0.03, seed=1, deadline=math.inf)[0]


def test_loads_by_hand() -> None:
    """u0 -> u1, u2: on devices 0, 1, 1 the value is sent once, and both ends pay."""
    problem = random_problem(0, units=3, devices=2, ties=False)
    problem = replace(
        problem,
        seconds=np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]),
        nets=(Net(0, (1, 2)),),
        messages=np.array([2.0]),
        net_bytes=np.array([10.0]),
        received_bytes=np.array([5.0]),
        unit_bytes=np.array([1.0, 1.0, 1.0]),
        latency=np.array([[0.0, 0.5], [0.5, 0.0]]),
        seconds_per_byte=np.array([[0.0, 0.1], [0.1, 0.0]]),
    )
    loads = evaluate(problem, [0, 1, 1])
    assert loads.seconds.tolist() == [1.0 + 2.0, 10.0 + 2.0]
    assert loads.message_seconds.tolist() == [2.0, 2.0]
    assert loads.memory_bytes.tolist() == [1.0, 2.0 + 5.0]
    assert evaluate(problem, [1, 1, 1]).seconds.tolist() == [0.0, 12.0]


def test_who_pays_for_a_net_that_two_devices_read() -> None:
    """u0 -> u1, u2, apart: each message is paid at both ends, or each device pays once."""
    problem = random_problem(0, units=3, devices=3, ties=False, alike=True)
    problem = replace(
        problem, seconds=np.zeros((3, 3)), nets=(Net(0, (1, 2)),), messages=np.zeros(1),
        net_bytes=np.array([5.0]), received_bytes=np.zeros(1),
    )  # fmt: skip
    assert evaluate(problem, [0, 1, 2]).seconds.tolist() == [10.0, 5.0, 5.0]
    once = replace(problem, paid_once=np.array([1.0, 1.0, 0.0]))
    assert evaluate(once, [0, 1, 2]).seconds.tolist() == [5.0, 5.0, 0.0]
    assert evaluate(once, [1, 1, 1]).seconds.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", some(range(24)))
def test_moves_keep_the_loads_that_the_definition_has(seed: int) -> None:
    problem, draw = sample(seed), np.random.default_rng(seed)
    now = PlacementBatch(problem, draw.integers(0, problem.devices, (3, problem.units)).tolist())
    for step in range(20):
        units = draw.choice(problem.units, 1 + step % 3, replace=False).tolist()
        trial = now.trial(units, draw.integers(0, problem.devices, (len(units), 3)))
        now.accept(trial, draw.random(3) < 0.7)
        if step == 10:
            now.copy(np.array([0]), np.array([2]))
        for r, home in enumerate(now.homes()):
            loads = evaluate(problem, home)
            assert np.allclose(loads.seconds, now.load[r], atol=1e-9)
            assert np.allclose(loads.memory_bytes, now.memory[r], atol=1e-9)


@pytest.mark.parametrize("seed", some(range(40)))
def test_the_program_finds_and_proves_the_optimum(seed: int) -> None:
    problem = sample(seed)
    problem = replace(problem, sum_bytes=np.zeros(len(problem.ties)))  # the program leaves sums out
    best = brute_force(problem)
    start = anywhere(problem)
    value = 3 * sum(problem.seconds.max(axis=0)) + 100.0
    solution = solve_program(problem, start, value)
    if best is None:
        assert solution.home is None
        return
    assert solution.home is not None
    assert legal(problem, solution.home)
    assert evaluate(problem, solution.home).objective_seconds == pytest.approx(best[0], rel=1e-5)
    assert solution.bound_seconds <= best[0] * (1 + 1e-9)
    assert solution.bound_seconds == pytest.approx(best[0], rel=1e-4)
    again = solve_program(problem, best[1], best[0])
    assert again.bound_seconds == pytest.approx(best[0], rel=1e-4), "from the optimum itself"


@pytest.mark.parametrize("seed", some(range(20)))
def test_a_neighbourhood_is_solved_at_best(seed: int) -> None:
    problem = random_problem(seed, units=6, devices=3, ties=False, alike=seed % 2 == 0)
    draw = random.Random(seed)
    home = tuple(draw.randrange(3) for _ in range(6))
    free = draw.sample(range(6), 3)
    best = min(
        evaluate(problem, other).objective_seconds
        for other in (
            tuple(choice[free.index(u)] if u in free else home[u] for u in range(6))
            for choice in [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
        )
    )
    solution = solve_program(problem, home, evaluate(problem, home).objective_seconds, free=free)
    found = solution.home or home
    assert all(found[u] == home[u] for u in range(6) if u not in free)
    assert evaluate(problem, found).objective_seconds == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", some(range(60)))
def test_no_placement_is_below_the_bounds(seed: int) -> None:
    problem = sample(seed)
    best = brute_force(problem)
    if best is None:
        return
    assert 0 < simple_bound(problem).seconds <= best[0] * (1 + 1e-9)


def test_the_work_bound_is_the_relaxation_of_unlike_devices() -> None:
    """Two units of 6 and 2 seconds, twice as fast on device 1: shared without loss, 8·2/(2+4)."""
    problem = random_problem(0, units=2, devices=2, ties=False)
    problem = replace(problem, seconds=np.array([[6.0, 2.0], [3.0, 1.0]]))
    assert work_bound(problem) == pytest.approx(8 / 3, rel=1e-2)
    assert work_bound(problem) <= 8 / 3


@pytest.mark.parametrize("seed", some(range(12)))
def test_annealing_finds_the_optimum_of_small_problems_and_keeps_to_pins(seed: int) -> None:
    problem = random_problem(seed, units=7, devices=2 + seed % 2, tight=True, pinned=True, once=seed % 4 == 2)
    best = brute_force(problem)
    if best is None:
        return
    home = annealed(problem, 1200)
    assert legal(problem, home)
    assert evaluate(problem, home).objective_seconds <= best[0] * 1.1
    assert annealed(problem, 300) == annealed(problem, 300)


@pytest.mark.parametrize("seed", some(range(12)))
def test_pairs_of_devices_are_divided_anew_and_nothing_gets_worse(seed: int) -> None:
    """Of two devices, that is the optimum."""
    problem = random_problem(
        seed, units=6, devices=2 + seed % 2, ties=False, tight=seed % 3 == 0, once=seed % 2 == 0
    )
    best, start = brute_force(problem), anywhere(problem)
    home = divided(problem, start, math.inf)
    assert evaluate(problem, home).rank <= evaluate(problem, start).rank
    if best is not None and problem.devices == 2:
        assert evaluate(problem, home).objective_seconds == pytest.approx(best[0], rel=1e-5)


def test_alike_devices_are_recognized() -> None:
    problem = random_problem(1, units=4, devices=3, alike=True)
    assert alike(problem) == [[0, 1, 2]]
    problem.allowed[2, 0] = False
    assert alike(problem) == [[0, 1]]
    assert alike(random_problem(1, units=4, devices=3)) == []
