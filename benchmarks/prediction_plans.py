"""The plans that the prediction benchmark runs: models of different kinds, and every way to place them on workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.plan_tasks import plan_task
from benchmarks.prediction_models import graph_of, workload_of
from cost_models.cluster import ClusterSpec
from partitioner.api import partition
from partitioner.plan import Plan
from partitioner.verify.grow_batch import grow_batch
from partitioner.verify.rank import VerificationTask

WORKERS_OF_HYBRID = 4


@dataclass(frozen=True)
class PlanCase:
    """One plan: a model, its batch, and the options of ``partition`` that place it."""

    name: str
    model: str
    batch_size: int
    options: Mapping[str, Any]

    def plan(self, cluster: ClusterSpec) -> Plan:
        graph = graph_of(self.model)
        return partition(
            graph,
            cluster,
            batch_size=self.batch_size,
            optimizer_memory="adamw",
            **{"strategy": "layer", **self.options},
        )

    def task(self, plan: Plan) -> VerificationTask:
        """Return what the workers need, in the model's own data type."""
        workload, graph = workload_of(self.model), graph_of(self.model)
        batch = grow_batch(workload.example_inputs, graph.batch.batch_dims, workload.model, plan.batch_size)
        return plan_task(
            plan, workload, graph, batch=batch, optimizer=plan.optimizer_memory, learning_rate=1e-4
        )


def layered(
    model: str, schedule: str, microbatches: int, batch_size: int, note: str = "", **options: Any
) -> PlanCase:
    """A pipeline of single workers."""
    name = f"{model} {schedule} m={microbatches}{' ' + note if note else ''}"
    return PlanCase(name, model, batch_size, {"schedule": schedule, "microbatches": microbatches, **options})


def fixed(model: str, fix: str, schedule: str, microbatches: int, batch_size: int) -> PlanCase:
    """A pipeline of sharded stages, or one such stage, of degrees that are given."""
    name = f"{model} {fix}" if "pipeline=1" in fix else f"{model} {fix} @ {schedule}"
    options = {"strategy": "hybrid", "fix": fix, "schedule": schedule, "microbatches": microbatches}
    return PlanCase(name, model, batch_size, options)


def found(model: str, strategy: str, batch_size: int, note: str = "", **options: Any) -> PlanCase:
    """The plan that a search of whole-mesh or free placements finds."""
    name = f"{model} {strategy}{' ' + note if note else ''}"
    return PlanCase(name, model, batch_size, {"strategy": strategy, **options})


def plan_cases() -> tuple[PlanCase, ...]:
    """All plans on two workers. Pins put the cut elsewhere than the search would."""
    return (
        layered("gpt2-small", "gpipe", 4, 8),
        layered("gpt2-small", "1f1b", 4, 8),
        layered("gpt2-small", "1f1b", 8, 8),
        layered("gpt2-small", "zb-h1", 8, 8),
        layered(
            "gpt2-small", "1f1b", 4, 8, "cut at 2 of 6", pins={"transformer.h.1": 0, "transformer.h.2": 1}
        ),
        layered("gpt2-small", "1f1b", 4, 8, "recompute", recompute="full"),
        layered("gpt2-small", "zb-h1", 8, 8, "recompute", recompute="full"),
        layered("llama-small", "gpipe", 4, 8, "recompute", recompute="full"),
        layered("llama-small", "gpipe", 2, 8),
        layered("llama-small", "1f1b", 8, 8),
        layered("llama-small", "interleaved", 4, 8),
        layered("llama-small", "zb-v", 4, 8),
        layered("vit-small", "1f1b", 4, 16),
        layered("vit-small", "interleaved", 8, 16),
        layered("unet", "gpipe", 4, 8),
        layered("unet", "1f1b", 2, 8),
        layered("mlp", "1f1b", 4, 512),
        layered("mlp", "gpipe", 8, 512),
        fixed("gpt2-small", "pipeline=1 tensor=2", "1f1b", 2, 8),
        fixed("gpt2-small", "pipeline=1 data=2", "1f1b", 2, 8),
        fixed("gpt2-small", "pipeline=1 data=2 zero=1", "1f1b", 1, 8),
        fixed("llama-small", "pipeline=1 data=2 zero=3", "1f1b", 1, 8),
        fixed("llama-small", "pipeline=1 data=2 zero=3 recompute=full", "1f1b", 2, 8),
        fixed("llama-small", "pipeline=1 tensor=2 recompute=full", "1f1b", 1, 8),
        fixed("unet", "pipeline=1 data=2", "1f1b", 1, 8),
        found("vit-small", "feature", 16, microbatches=1),
        found("mlp", "feature", 512, "column_row", microbatches=2, mesh=(2,), pins={"*": "column_row"}),
        found("mlp", "free", 512, microbatches=1),
        found("unet", "free", 8, microbatches=1),
        found("gpt2-small", "free", 8, microbatches=2),
    )


def hybrid_cases() -> tuple[PlanCase, ...]:
    """All plans on four workers. A micro-batch is divided by two and, where a group is of three, by three."""
    return tuple(
        fixed(model, fix, schedule, 4, batch_size)
        for model, batch_size, fix, schedule in (
            ("gpt2-small", 16, "pipeline=2 tensor=2", "1f1b"),
            ("gpt2-small", 16, "pipeline=2 tensor=2", "zb-h1"),
            ("gpt2-small", 16, "pipeline=2 tensor=2 recompute=full", "1f1b"),
            ("gpt2-small", 16, "pipeline=2 tensor=2 interleave=2", "interleaved"),
            ("gpt2-small", 16, "pipeline=2 data=2", "1f1b"),
            ("gpt2-small", 16, "pipeline=2 data=2 zero=1", "gpipe"),
            ("gpt2-small", 16, "groups=2,1,1", "1f1b"),
            ("llama-small", 16, "pipeline=2 tensor=2", "gpipe"),
            ("llama-small", 16, "pipeline=2 data=2 zero=3", "1f1b"),
            ("llama-small", 16, "pipeline=2 data=2 zero=1 recompute=full", "zb-h1"),
            ("llama-small", 24, "groups=1,3", "1f1b"),
            ("llama-small", 24, "groups=3,1", "gpipe"),
            ("llama-small", 16, "pipeline=2 data=2 interleave=2", "interleaved"),
            ("mlp", 384, "groups=1,3", "1f1b"),
            ("mlp", 384, "groups=3,1 tensor=1 zero=1", "zb-h1"),
            ("mlp", 384, "groups=3,1 tensor=1 zero=3 recompute=full", "gpipe"),
            ("mlp", 384, "pipeline=2 data=2", "1f1b"),
            ("unet", 16, "pipeline=2 data=2 zero=1", "1f1b"),
        )
    )
