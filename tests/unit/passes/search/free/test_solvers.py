"""The parts of the free search against definitions and against all placements of small random problems."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from passes.search.free.anneal import Cooling, anneal
from passes.search.free.bound import simple_bound, work_bound
from passes.search.free.coarsen import levels
from passes.search.free.ilp import alike, solve_program
from passes.search.free.moves import Moves
from passes.search.free.problem import FreeProblem, Net, evaluate, legal
from tests.support.matrix import some
from tests.unit.passes.search.free.samples import brute_force, random_free_problem


def sample(seed: int) -> FreeProblem:
    """Unlike devices and links, memory, pins and ties, in turn."""
    return random_free_problem(
        seed,
        units=4 + seed % 3,
        devices=2 + seed % 2,
        tight=seed % 5 == 0,
        pinned=seed % 7 == 0,
        alike=seed % 3 == 0,
        ties=seed % 4 != 0,
    )


def anywhere(problem: FreeProblem) -> list[int]:
    """Each unit on the first device that it may be on."""
    return [int(d) for d in problem.allowed.argmax(axis=0)]


def test_loads_by_hand() -> None:
    """u0 -> u1, u2: on devices 0, 1, 1 the value is sent once, and both ends pay."""
    problem = random_free_problem(0, units=3, devices=2, ties=False)
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


@pytest.mark.parametrize("seed", some(range(24)))
def test_moves_keep_the_loads_that_the_definition_has(seed: int) -> None:
    problem, draw = sample(seed), random.Random(seed)
    moves = Moves(problem, [draw.randrange(problem.devices) for _ in range(problem.units)])
    for _ in range(30):
        moves.move(draw.randrange(problem.units), draw.randrange(problem.devices))
        loads = evaluate(problem, moves.home)
        assert np.allclose(loads.seconds, moves.load, atol=1e-9)
        assert np.allclose(loads.memory_bytes, moves.memory, atol=1e-9)


@pytest.mark.parametrize("seed", some(range(24)))
def test_a_coarse_placement_costs_what_it_costs_below(seed: int) -> None:
    problem, draw = random_free_problem(seed, units=9, devices=3, pinned=seed % 2 == 0), random.Random(seed)
    chain = levels(problem, 3)
    assert chain
    assert chain[-1].problem.units < problem.units
    for level in chain[:1]:
        home = [draw.randrange(3) for _ in range(level.problem.units)]
        above, below = evaluate(level.problem, home), evaluate(problem, level.down(home))
        assert np.allclose(above.seconds, below.seconds)
        assert np.allclose(above.memory_bytes, below.memory_bytes)
        assert level.up(level.down(anywhere(level.problem))) == tuple(anywhere(level.problem))


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
    problem = random_free_problem(seed, units=6, devices=3, ties=False, alike=seed % 2 == 0)
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
    problem = random_free_problem(0, units=2, devices=2, ties=False)
    problem = replace(problem, seconds=np.array([[6.0, 2.0], [3.0, 1.0]]))
    assert work_bound(problem) == pytest.approx(8 / 3, rel=1e-2)
    assert work_bound(problem) <= 8 / 3


@pytest.mark.parametrize("seed", some(range(12)))
def test_annealing_finds_the_optimum_of_small_problems_and_keeps_to_pins(seed: int) -> None:
    problem = random_free_problem(seed, units=7, devices=2 + seed % 2, tight=True, pinned=True)
    best = brute_force(problem)
    if best is None:
        return
    found = min(
        (
            anneal(problem, anywhere(problem), Cooling(1200, 0.03, 2e-5), number, math.inf)
            for number in range(3)
        ),
        key=lambda home: (not legal(problem, home), evaluate(problem, home).objective_seconds),
    )
    assert legal(problem, found)
    assert evaluate(problem, found).objective_seconds <= best[0] * 1.1
    assert anneal(problem, anywhere(problem), Cooling(300, 0.03, 2e-5), 1, math.inf) == anneal(
        problem, anywhere(problem), Cooling(300, 0.03, 2e-5), 1, math.inf
    )


def test_alike_devices_are_recognized() -> None:
    problem = random_free_problem(1, units=4, devices=3, alike=True)
    assert alike(problem) == [[0, 1, 2]]
    problem.allowed[2, 0] = False
    assert alike(problem) == [[0, 1]]
    assert alike(random_free_problem(1, units=4, devices=3)) == []
