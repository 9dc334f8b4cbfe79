"""Random models under random placements, on real processes: the loss and every gradient, in float64."""

from __future__ import annotations

import pytest
import torch

from partitioner.compare import StepResult, compare
from partitioner.verify_rank import VerificationTask, run_rank
from passes.cheap import recomputed_ops
from passes.lower import lower
from passes.segment import by_reach
from runtime.check import check
from runtime.launch import WorkerPool
from runtime.microbatch import microbatch_sizes
from runtime.order import build_programs
from runtime.schedules import SCHEDULES
from tests.random_graphs import WIDTH, random_model, random_placement
from tests.unit.passes.test_segment import summary

RANKS, MICROBATCHES, SAMPLES = 3, 3, 7


@pytest.mark.parametrize("seed", range(24))
def test_a_random_placement_computes_the_same(seed: int, pool: WorkerPool) -> None:
    model = random_model(seed, ops=10 + seed)
    graph = model.graph
    recomputed = recomputed_ops(graph)
    segmentation = by_reach(graph, random_placement(graph, recomputed, RANKS, seed), recomputed)
    segments, tied = summary(model, segmentation, RANKS)
    groups = [(group.parameters, group.ranks) for group in tied]
    orders = SCHEDULES["list"].order(segments, MICROBATCHES)
    programs = build_programs(segments, orders, MICROBATCHES, transfer_seconds=lambda *_: 1e-3, tied=groups)
    check(programs, segments, MICROBATCHES, tied=groups)
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    task = VerificationTask(
        programs=programs,
        codes=lower(graph, segmentation),
        segments=segments,
        batch_spec=graph.batch,
        batch={"x": x},
        state=model.state,
        trainable=frozenset(name for name, spec in graph.parameters.items() if spec.requires_grad),
        microbatches=MICROBATCHES,
        weights=tuple(size / SAMPLES for size in microbatch_sizes(SAMPLES, MICROBATCHES)),
        optimizer="sgd",
        learning_rate=0.0,
        timeout_seconds=30.0,
    )
    results = pool.run(run_rank, task, world_size=RANKS, timeout_seconds=60.0)
    loss, gradients = model.loss_and_gradients(list(microbatch_sizes(SAMPLES, MICROBATCHES)), x)
    (actual_loss,) = [result.loss for result in results if result.loss == result.loss]
    held = {name for result in results for name in result.parameters}
    assert set(gradients) <= held
    for result in results:
        mine = {name: g for name, g in gradients.items() if name in result.parameters}
        found = compare(
            StepResult(loss, mine, {}), StepResult(actual_loss, result.gradients, {}), 0.0, whole=gradients
        )
        assert [c for c in found if not c.agrees] == []
