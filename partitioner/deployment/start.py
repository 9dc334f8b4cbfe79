"""The way from a rank's share to an engine that runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from partitioner.batches.reader import BatchReader
from partitioner.deployment.share import Recipe, Share
from partitioner.engine.callbacks import Callback
from partitioner.engine.engine import Engine
from partitioner.evaluation.evaluation import Evaluator
from partitioner.evaluation.placed import Deployed
from partitioner.record.data import PlanData
from runtime.execute.execute import Executor
from runtime.program.relabel import RankMap
from runtime.segment.compiled import CompileOptions


def start_executor(
    share: Share, device: torch.device, *, timeout_seconds: float, seed: int, compile: CompileOptions | None
) -> Executor:
    """Start the executor, which runs the program of this rank. Collective."""
    return Executor(
        share.programs[share.state.rank],
        share.codes,
        share.segments,
        share.state.leaves,
        share.batch,
        device=device,
        timeout_seconds=timeout_seconds,
        programs=share.programs,
        replan=share.replan,
        seed=seed,
        compile=compile,
        shardings=share.state.shardings,
    )


def make_engine(
    plan: PlanData,
    recipe: Recipe,
    ranks: RankMap,
    share: Share,
    executor: Executor,
    *,
    check_batches: int,
    callbacks: Iterable[Callback],
) -> Engine:
    """Make the engine that people train with, around the executor."""
    workload = recipe.workload
    has_loss_fn = workload.loss_fn is not None
    reader = BatchReader(plan.model.name, workload.model, workload.example_inputs, has_loss_fn=has_loss_fn)
    deployed = Deployed(
        plan,
        workload.model,
        workload.loss_fn,
        workload.example_inputs,
        recipe.dynamic_dims,
        share.graph,
        share.run,
        ranks,
        executor,
        share.state,
    )
    return Engine(
        plan,
        executor,
        share.state,
        reader,
        share.optimizer,
        share.graph,
        share.keys,
        Evaluator(deployed),
        check_batches=check_batches,
        callbacks=callbacks,
        ranks=ranks,
    )
