"""One stage piece by piece: the recipe of each piece as a mix has it, and the layouts at the joints that cost least so.

mix ─► price and recomputation of each piece ─► cheapest layouts at the joints ─► what the stage takes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.recipes.mixes import Mix
from passes.search.hybrid.recipes.pieces import Recipes
from passes.search.hybrid.recipes.ranges import Layouts

EQUAL = 1e-13
"""Relative difference of sums of some hundred costs up to which they count as equal: rounding."""
LEANER = 1e-10
"""Tie-break: of equally fast ways, the one with less memory. All bytes of a stage add this part of its seconds, far below
what the second count of the objective allows."""


@dataclass(frozen=True, eq=False)
class Step:
    """One piece of a stage: its recipes, the price among them, and how it arrives and leaves."""

    recipes: Recipes
    price: int
    again: bool
    arriving: int
    leaving: int

    @property
    def options(self) -> tuple[int, ...]:
        """The option of each unit."""
        return self.recipes.options(self.price, self.arriving, self.leaving)

    def amount(self, name: str) -> float:
        """Return what the piece takes of one of ``Amounts``."""
        found: FloatArray = getattr(self.recipes.amounts, name)
        return float(found[self.price, self.arriving, self.leaving])


def walk(
    composed: Composed, first: int, end: int, mix: Mix, held: int, room_bytes: float
) -> tuple[Step, ...]:
    """Walk pieces ``first`` … ``end`` - 1: the fastest that fits, of joints chosen at the price of either recipe.

    ``held``: micro-batches that the stage holds at once. Where neither fits, the one that needs less is returned.
    """
    found = [
        _walked(composed, first, end, mix, price, held)
        for price in dict.fromkeys((mix.price, mix.first_price))
    ]
    needed = {steps: needed_bytes(steps, held) for steps in found}
    fits = [steps for steps in found if needed[steps] <= room_bytes]
    return min(fits, key=seconds_per_step) if fits else min(found, key=lambda steps: needed[steps])


def _walked(
    composed: Composed, first: int, end: int, mix: Mix, price_of_joints: int, held: int
) -> tuple[Step, ...]:
    pieces, prices = composed.pieces, composed.prices
    layouts = Layouts([own for each in composed.recipes for own in each])
    chosen: list[tuple[Recipes, int, bool]] = []
    blocks = 0
    for piece in range(first, end):
        block = bool(pieces.blocks[piece])
        price, again = mix.of_piece(blocks, block=block)
        blocks += block
        chosen.append((composed.recipes[again][pieces.kind[piece]], price, again))
    costs, sizes = [], []
    for own, price, _ in chosen:
        a = own.amounts
        cost = a.seconds[price] + a.once_seconds[price]
        cost = cost + prices.state[price_of_joints] * a.state_bytes[price]
        cost = cost + prices.held[price_of_joints] * a.held_bytes[price]
        costs.append(layouts.square(own, cost[None], np.inf)[0])
        sizes.append(layouts.square(own, (a.state_bytes + held * a.held_bytes)[price][None], 0.0)[0])
    leaner = LEANER * sum(cost.min() for cost in costs) / max(1.0, sum(size.max() for size in sizes))
    joints = _cheapest([cost + leaner * size for cost, size in zip(costs, sizes, strict=True)])
    steps = []
    for (own, price, again), before, behind in zip(chosen, joints, joints[1:], strict=False):
        arriving, leaving = (
            next(i for i, layout in enumerate(side) if layouts.number[layout] == joint)
            for side, joint in ((own.arriving, before), (own.leaving, behind))
        )
        steps.append(Step(own, price, again, arriving, leaving))
    return tuple(steps)


def seconds_per_step(steps: Sequence[Step]) -> float:
    """Return the seconds of a stage in all micro-batches, and of what it does once."""
    return sum(step.amount("seconds") + step.amount("once_seconds") for step in steps)


def needed_bytes(steps: Sequence[Step], held: int) -> float:
    """Return the bytes of a stage, but for what is made anew while a block is computed again."""
    always = sum(step.amount("state_bytes") + held * step.amount("held_bytes") for step in steps)
    return always + max(step.amount("buffer_bytes") for step in steps)


def _cheapest(costs: Sequence[FloatArray]) -> list[int]:
    """Return the cheapest row of layouts, of which each pair in turn costs what a matrix says.

    Of equal cost, the first each time: equal layers then have equal layouts, and equal stages are sharded once.
    """
    least = np.zeros(len(costs[0]))
    before = []
    for cost in costs:
        total = least[:, None] + cost
        before.append(_first_least(total))
        least = total.min(axis=0)
    joints = [int(_first_least(least))]
    for step in reversed(before):
        joints.append(int(step[joints[-1]]))
    return joints[::-1]


def _first_least(costs: FloatArray) -> IntArray:
    """Return the first place along the first axis with the least cost, but for rounding."""
    least = costs.min(axis=0)
    found: IntArray = (costs <= least + EQUAL * np.abs(least)).argmax(axis=0)
    return found
