"""Plans of a small GPT-2 by fixed degrees, for the formats of other tools; each made once."""

from __future__ import annotations

from functools import cache

from cost_models.cluster import ClusterSpec
from partitioner import partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.plan import Plan
from passes.graph.graph import OpGraph

LAYERS = 6


@cache
def small_gpt2() -> OpGraph:
    """Return the trace of a GPT-2 of six layers."""
    return as_graph(load_workload("gpt2", settings={"size": "tiny", "layers": str(LAYERS)}))


@cache
def plan_of(fix: str, schedule: str = "auto", devices: int = 8, batch: int = 32) -> Plan:
    """Return the plan of these degrees on H100 of one machine."""
    return partition(
        small_gpt2(),
        ClusterSpec.parse(f"H100-80GB:{devices}"),
        batch_size=batch,
        strategy="hybrid",
        fix=fix,
        schedule=schedule,
    )


@cache
def small_llama() -> OpGraph:
    """Return the trace of a Llama of four layers: separate projections, weights as [out, in]."""
    return as_graph(load_workload("llama-8b", settings={"size": "tiny"}))


@cache
def llama_plan_of(fix: str, schedule: str = "auto", devices: int = 4, batch: int = 16) -> Plan:
    """Return the plan of these degrees for the small Llama."""
    cluster = ClusterSpec.parse(f"H100-80GB:{devices}")
    return partition(small_llama(), cluster, batch_size=batch, strategy="hybrid", fix=fix, schedule=schedule)
