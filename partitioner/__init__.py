"""partitioner: an auto-partitioning compiler for model parallelism on PyTorch.

    from partitioner import ClusterSpec, partition
    plan = partition(model, ClusterSpec.load("cluster.yaml"), example_inputs=batch, batch_size=512)
    print(plan)

This is the only place users import from. Exports are lazy: importing it costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from partitioner.shadowing import refuse_shadowed_packages

refuse_shadowed_packages()

if TYPE_CHECKING:
    from cost_models.cluster import ClusterSpec
    from cost_models.errors import (
        ClusterError,
        InfeasibleError,
        ModelError,
        PartitionerError,
        PlanError,
        RankFailureError,
        UsageError,
        VerificationError,
    )
    from cost_models.precision import Precision
    from partitioner.api import partition
    from partitioner.deployment.together import deploy
    from partitioner.plan import Plan
    from partitioner.verify import VerifyReport
    from partitioner.workloads import Workload
    from passes.graph import OpGraph
    from passes.trace import trace

_EXPORTS = {
    "ClusterError": "cost_models.errors",
    "ClusterSpec": "cost_models.cluster",
    "InfeasibleError": "cost_models.errors",
    "ModelError": "cost_models.errors",
    "OpGraph": "passes.graph",
    "PartitionerError": "cost_models.errors",
    "Plan": "partitioner.plan",
    "PlanError": "cost_models.errors",
    "Precision": "cost_models.precision",
    "RankFailureError": "cost_models.errors",
    "UsageError": "cost_models.errors",
    "VerificationError": "cost_models.errors",
    "VerifyReport": "partitioner.verify",
    "Workload": "partitioner.workloads",
    "deploy": "partitioner.deployment.together",
    "partition": "partitioner.api",
    "trace": "passes.trace",
}

__all__ = [
    "ClusterError",
    "ClusterSpec",
    "InfeasibleError",
    "ModelError",
    "OpGraph",
    "PartitionerError",
    "Plan",
    "PlanError",
    "Precision",
    "RankFailureError",
    "UsageError",
    "VerificationError",
    "VerifyReport",
    "Workload",
    "deploy",
    "partition",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'partitioner' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
