"""Degrees as a plan: what ``partitioner plan --strategy hybrid --fix`` makes of them."""

from __future__ import annotations

from dataclasses import replace

from cost_models.cluster import ClusterSpec
from partitioner.api import plan_traced
from partitioner.formats.parallelism import Parallelism
from partitioner.plan import Plan
from partitioner.planning.options import PlanOptions
from passes.graph.graph import OpGraph
from passes.search.hybrid.fix import Fix


def planned(graph: OpGraph, cluster: ClusterSpec, options: PlanOptions, p: Parallelism, fix: Fix) -> Plan:
    """Plan a model with what is fixed of ``p``. Raises UsageError where it cannot be divided so, InfeasibleError."""
    schedule = p.schedule if p.pipeline > 1 else "auto"
    asked = replace(options, strategy="hybrid", fix=str(fix), schedule=schedule)
    asked.check()
    return plan_traced(graph, cluster, asked, None)
