"""The plans of the prediction benchmark on four workers: pipelines of sharded stages."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.prediction_plans import PlanCase, graph_of
from cost_models.cluster import ClusterSpec
from partitioner.api import partition
from partitioner.plan import Plan

RANKS = 4
MICROBATCHES = 4


@dataclass(frozen=True)
class HybridCase(PlanCase):
    """One plan: a model, its batch and its schedule, and the degrees that are fixed."""

    fix: str = ""

    @property
    def name(self) -> str:
        return f"{self.model} {self.fix} @ {self.schedule}"

    def plan(self, cluster: ClusterSpec) -> Plan:
        return partition(
            graph_of(self.model),
            cluster,
            strategy="hybrid",
            fix=self.fix,
            batch_size=self.batch_size,
            schedule=self.schedule,
            microbatches=self.microbatches,
            optimizer_memory="adamw",
        )


def hybrid_cases() -> tuple[HybridCase, ...]:
    """All plans, on four workers. A micro-batch is divided by two and, where a group is of three, by three."""
    return tuple(
        HybridCase(model, schedule, MICROBATCHES, batch_size, fix=fix)
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
