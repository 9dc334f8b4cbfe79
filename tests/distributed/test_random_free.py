"""A hundred random models under random placements, on four real processes: the loss and every gradient, in float64.

Every other model has random ops split into blocks of random sizes. Ten models run side by side, so that their ranks wait
for one another at the same time; each is compared with its own, unpartitioned run.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from partitioner.verify.rank import VerificationTask
from passes.fidelity.agree import StepResult
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.verify import verify_graph
from passes.split.split import Split, split_neurons
from runtime.ranks.launch import WorkerPool
from runtime.segment.microbatch import microbatch_sizes
from tests.distributed.free_tasks import differences, free_task, run_tasks
from tests.support.matrix import thinned
from tests.support.random_graphs import WIDTH, RandomModel, forest, random_model, random_placement

MODELS, BATCH, TOGETHER, RANKS, SAMPLES = 100, 20, 10, 4, 7
SIZES = [(1, 3), (3, 1), (2, 2), (1, 1, 2), (1, 2, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("first", thinned(range(0, MODELS, BATCH), [40]))
def test_random_placements_compute_the_same(first: int, pool: WorkerPool) -> None:
    models = [random_model(seed, ops=6 + seed % 13) for seed in range(first, first + BATCH)]
    forests = [models[start : start + TOGETHER] for start in range(0, BATCH, TOGETHER)]
    numbers = range(first // TOGETHER, (first + BATCH) // TOGETHER)
    tasks = [_task(number, forest(trees)) for number, trees in zip(numbers, forests, strict=True)]
    assert sum(len(task.parts) for task in tasks) > BATCH / 5, "many parameters are held in parts"
    results = pool.run(run_tasks, tasks, world_size=RANKS, timeout_seconds=120.0)
    for number, task, trees in zip(numbers, tasks, forests, strict=True):
        loss, gradients = _unpartitioned(number, trees)
        found = [result[number - numbers[0]] for result in results]
        assert differences(task, loss, gradients, found) == []


def test_wrong_results_are_seen(pool: WorkerPool) -> None:
    trees = [random_model(5, ops=8), random_model(5, ops=8)]
    task = _task(1, forest(trees))
    results = [ranks[0] for ranks in pool.run(run_tasks, [task], world_size=RANKS, timeout_seconds=60.0)]
    loss, gradients = _unpartitioned(1, trees)
    assert differences(task, loss, gradients, results) == []
    assert differences(task, loss * (1 + 1e-8), gradients, results) != []
    found = {name for result in results for name in result.gradients}
    parts = sorted(found & set(task.parts))
    assert parts
    for name in (parts[0], sorted(found - set(parts))[0]):
        assert differences(task, loss, gradients, [_nudged(result, name) for result in results]) != []
    missing = [_without(result, parts[0]) for result in results]
    assert differences(task, loss, gradients, missing) != []


def _task(number: int, model: RandomModel) -> VerificationTask:
    graph = _randomly_split(model.graph, number)
    groups = random_placement(graph, recomputed_ops(graph), RANKS, number)
    rank_of = {name: rank for name, (rank,) in groups.items()}
    batch = {"x": _samples(number)}
    return free_task(
        graph,
        rank_of,
        model.state,
        batch,
        ranks=RANKS,
        microbatches=_microbatches(number),
        schedule=("list", "list-split")[number // 2 % 2],
    )


def _randomly_split(graph: OpGraph, seed: int) -> OpGraph:
    """Some ops of every other tree in blocks of their columns."""
    draw = random.Random(seed)
    splits = [
        Split(node.name, -1, draw.choice(SIZES))
        for node in graph.ops
        if node.meta["val"].dim() == 2 and int(node.name[1]) % 2 and draw.random() < 0.2
    ]
    split = split_neurons(graph, splits)
    verify_graph(split, after="split")
    return split


def _unpartitioned(number: int, trees: list[RandomModel]) -> tuple[float, dict[str, Tensor]]:
    """The sum of the losses, and all gradients."""
    sizes = list(microbatch_sizes(SAMPLES, _microbatches(number)))
    total, gradients = 0.0, dict[str, Tensor]()
    for tree, model in enumerate(trees):
        loss, found = model.loss_and_gradients(sizes, _samples(number))
        total += loss
        gradients |= {f"m{tree}_{name}": gradient for name, gradient in found.items()}
    return total, gradients


def _microbatches(number: int) -> int:
    return 1 + number % 2


def _samples(seed: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _without(result: StepResult, name: str) -> StepResult:
    return replace(result, gradients={n: g for n, g in result.gradients.items() if n != name})


def _nudged(result: StepResult, name: str) -> StepResult:
    return replace(
        result, gradients={n: g * (1 + 1e-8) if n == name else g for n, g in result.gradients.items()}
    )
