"""Schedules of our plans as CSV files: torch.distributed.pipelining loads them, and trains with them as we do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from partitioner import Plan
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.schedule_csv import read_csv, schedule_of
from partitioner.formats.torchtitan import FILE, write
from partitioner.formats.torchtitan_fields import settings_of
from runtime.ranks.launch import WorkerPool
from tests.support.decoder import decoder_batch, decoder_model, decoder_plan, decoder_workload, token_loss

SECONDS = 120.0


def parallelism(schedule: str, pipeline: int, layers: tuple[int, ...], microbatches: int = 4) -> Parallelism:
    chunks = len(layers) // pipeline
    return Parallelism(
        pipeline=pipeline,
        chunks=chunks,
        microbatch=2,
        microbatches=microbatches,
        schedule=schedule,
        layers=layers,
    )


PLANS = {
    "1f1b on 2": parallelism("1f1b", 2, (3, 5)),
    "interleaved on 2": parallelism("interleaved", 2, (2, 2, 2, 2)),
    "zb-h1 on 2": parallelism("zb-h1", 2, (4, 4)),
    "1f1b on 4, fewer micro-batches than torch's own takes": parallelism("1f1b", 4, (1, 3, 2, 2), 3),
    "interleaved on 4, in uneven groups": parallelism("interleaved", 4, (1,) * 8, 9),
    "zb-v on 4": parallelism("zb-v", 4, (1,) * 8, 6),
    "zb-h2 on 4": parallelism("zb-h2", 4, (2,) * 4, 6),
}


def steps(plan_json: str, table: str) -> tuple[float, float | None, dict[str, Tensor]]:
    """In a worker: the loss of our step; that of torch's with the schedule in ``table``, and this rank's gradients."""
    plan = Plan.from_json(plan_json)
    batch = decoder_batch(plan.batch_size)
    with plan.deploy(decoder_workload(), timeout_seconds=30.0, check_memory=False) as engine:
        ours = engine.train_step(batch).item()
    parts = settings_of(write(plan).files[FILE]).parallelism["module_fqns_per_model_part"].value
    own = [
        stage
        for stage, rank in read_csv(Path(table).read_text()).stage_ranks().items()
        if rank == dist.get_rank()
    ]
    modules = {stage: decoder_model().keep(parts[stage]) for stage in sorted(own)}
    stages = [
        PipelineStage(module, stage, len(parts), torch.device("cpu")) for stage, module in modules.items()
    ]
    schedule = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        stages, plan.microbatches, lambda logits, targets: token_loss(logits, {"targets": targets})
    )
    schedule._load_csv(table)
    losses: list[Tensor] = []
    inputs = (batch["tokens"],) if 0 in own else ()
    last = len(parts) - 1 in own
    schedule.step(*inputs, target=batch["targets"] if last else None, losses=losses if last else None)
    grads = {
        name: p.grad
        for module in modules.values()
        for name, p in module.named_parameters()
        if p.grad is not None
    }
    return ours, torch.stack(losses).mean().item() if last else None, grads


@pytest.mark.parametrize("name", PLANS)
def test_torch_trains_with_a_plans_schedule(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    wanted = PLANS[name]
    plan = decoder_plan(wanted)
    assert parallelism_of(plan) == wanted
    table = tmp_path / "schedule.csv"
    table.write_text(str(schedule_of(plan)))
    schedule = read_csv(table.read_text())
    assert schedule == schedule_of(plan)
    assert schedule.problems() == ()

    whole = decoder_workload()
    batch = decoder_batch(wanted.batch_size)
    loss = token_loss(whole.model(batch["tokens"]), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    found = pool.run(steps, plan.to_json(), str(table), world_size=wanted.pipeline, timeout_seconds=SECONDS)
    for ours, theirs, _ in found:
        assert ours == pytest.approx(loss.item(), rel=1e-9)
        assert theirs is None or theirs == pytest.approx(loss.item(), rel=1e-9)
    assert sum(theirs is not None for _, theirs, _ in found) == 1
    gradients = {name: grad for _, _, own in found for name, grad in own.items()}
    assert gradients.keys() == dict(whole.model.named_parameters()).keys()
    for parameter, expected in whole.model.named_parameters():
        torch.testing.assert_close(gradients[parameter], expected.grad, rtol=1e-9, atol=1e-12, msg=parameter)
