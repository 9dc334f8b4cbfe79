"""The search against every pipeline of its space, on random small models, unlike devices and tight memory.

bound ≤ the least surrogate of all that fit ≤ what the search finds;    with room for everything both are equal
"""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.hybrid.bounds import GAP
from passes.search.hybrid.search import GroupSearch
from passes.search.hybrid.survey import SIMULATED_FIRST, SLACK, survey
from passes.trace.trace import trace
from tests.support.every_pipeline import EveryPipeline
from tests.support.matrix import thinned

BATCH = 4
WIDTH = 128
"""Wide enough that a part of the model fills a device of a MiB, the least that there is."""


class Block(nn.Module):
    """Products, a norm and a residual; sixteen times ``inner`` neurons between."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16 * inner), nn.Linear(16 * inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self, inner: tuple[int, ...], head: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, inner))
        self.head = nn.Linear(WIDTH, 16 * head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


MODELS = [
    ((16, 16), 8), ((16, 16, 16), 8), ((16, 32, 16), 32), ((16, 16, 16, 16), 8), ((32, 32), 64), ((8, 64, 8), 8),
    ((16,) * 5, 8), ((16, 16, 64, 64), 16),
]  # fmt: skip


@cache
def graph(number: int) -> OpGraph:
    torch.manual_seed(0)
    inner, head = MODELS[number]
    return trace(Blocks(inner, head), {"x": torch.randn(BATCH, 6, WIDTH)}, loss_reduction="mean")


def random_search(seed: int, *, tight: bool) -> GroupSearch:
    """One to five devices on up to three nodes, of unlike speed and memory, behind links from fast to slow."""
    draw = random.Random(seed)
    own = graph(draw.randrange(len(MODELS)))
    counts: list[int] = []
    while sum(counts) < 5 and len(counts) < 3 and (not counts or draw.random() < 0.7):
        counts.append(draw.randint(1, min(3, 5 - sum(counts))))
    whole = 16 * sum(spec.elements for spec in own.parameters.values())
    alike = draw.random() < 0.4
    speed, share = draw.choice([1.0, 2.0]), draw.uniform(0.1, 1.2)
    nodes = []
    for number, count in enumerate(counts):
        if not alike:
            speed, share = draw.choice([1.0, 1.0, 2.0, 3.0]), draw.uniform(0.1, 1.2)
        nodes.append(
            {
                "name": f"n{number}",
                "count": count,
                "device": {
                    "name": f"d{number}",
                    "kind": "cpu",
                    "memory": max(int(whole * share), 1 << 20) if tight else 10**9,
                    "memory_bandwidth": draw.choice(["10TB/s", "1GB/s"]),
                    "flops": {"float32": 1e9 * speed},
                    "launch_overhead": "0us",
                },
                "links": {"default": {"bandwidth": 10.0 ** draw.uniform(6, 10), "latency": "0us"}},
            }
        )
    network = {
        "bandwidth": 10.0 ** draw.uniform(5, 9),
        "latency": draw.choice(["0us", "20us"]),
        "per": "device",
    }
    machine = ClusterSpec.from_dict({"name": "toys", "nodes": nodes, "network": network})
    schedule = draw.choice(["auto", "1f1b", "1f1b", "gpipe"])
    recompute = draw.choice(["auto", "auto", "none", "full"])
    return GroupSearch(
        own, costs_of(own, machine), machine, Job(BATCH), schedule=schedule, recompute=recompute
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seeds", thinned([range(i, i + 5) for i in range(0, 600, 5)], [range(10, 15)]), ids=str
)
def test_the_optimum_is_that_of_every_pipeline_that_fits(seeds: range) -> None:
    feasible = missed = 0
    for seed in seeds:
        own = random_search(seed, tight=True)
        every = EveryPipeline(own, recompute=own.recompute)
        least = {option: every.least(option) for option in own.options()}
        best = min(least.values())
        surveyed = survey(own, math.inf)
        assert surveyed.bound_seconds <= best * (1 + 1e-9), seed
        for option, bound in surveyed.bounds:
            assert bound <= max(least[option], best * SLACK) * (1 + 1e-9), (seed, option)
        feasible += math.isfinite(best)
        found = surveyed.solved[0].seconds if surveyed.solved else math.inf
        assert found >= best * (1 - 1e-9), seed
        missed += found > best * (1 + GAP)
        assert all(own.fits(solved) for solved in surveyed.solved), seed
    assert feasible
    assert missed <= 1


def test_on_a_part_of_the_cluster_all_near_its_best_are_found() -> None:
    """Those that are faster than what is known of more devices: the simulation chooses among them."""
    own = random_search(16, tight=False)
    part = own.on(range(own.world_size - 1))
    least = sorted(map(EveryPipeline(part, recompute=part.recompute).least, part.options()))
    near = [seconds for seconds in least if seconds <= least[0] * SLACK]
    assert len(near) == SIMULATED_FIRST
    for known_seconds, count in ((2 * near[0], 3), (near[1] * (1 + 1e-9), 2), (near[1] * (1 - 1e-9), 1)):
        solved = survey(part, math.inf, known_seconds=known_seconds).solved
        assert [each.seconds for each in solved][:count] == pytest.approx(near[:count], rel=1e-9)


@pytest.mark.parametrize("seeds", thinned([range(i, i + 20) for i in range(0, 60, 20)], []), ids=str)
def test_with_room_for_everything_bound_and_optimum_are_one(seeds: range) -> None:
    for seed in seeds:
        own = random_search(seed, tight=False)
        every = EveryPipeline(own, recompute=own.recompute)
        best = min(every.least(option) for option in own.options())
        surveyed = survey(own, math.inf)
        assert surveyed.solved[0].pipeline.objective_seconds == pytest.approx(best, rel=1e-9), seed
        assert best * (1 - 2 * GAP) <= surveyed.bound_seconds <= best * (1 + 1e-9), seed
