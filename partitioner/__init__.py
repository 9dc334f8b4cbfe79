"""An auto-partitioning compiler for model parallelism on PyTorch.

    from partitioner import ClusterSpec, partition
    plan = partition(model, ClusterSpec.load("cluster.yaml"), example_inputs=batch, batch_size=512)
    print(plan)                              # where everything runs, what it costs, how sure that is
    plan.verify(model)                       # the actual plan, in float64, on local processes
    print(plan.explain("head.weight"))       # what else it could have been, and what that would cost
    engine = plan.deploy(model, optimizer=torch.optim.AdamW)    # under torchrun

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
        CheckpointError,
        ClusterError,
        InfeasibleError,
        ModelError,
        PartitionerError,
        PlanError,
        RankFailureError,
        TimeLimitError,
        UsageError,
        VerificationError,
    )
    from cost_models.precision import Precision
    from partitioner.api import partition
    from partitioner.deploy_together import deploy
    from partitioner.engine.callbacks import Callback
    from partitioner.engine.loggers import CsvLogger, LineLogger, TensorBoardLogger, WandbLogger
    from partitioner.largest_fit import fit
    from partitioner.models.as_graph import trace
    from partitioner.models.workload import Workload
    from partitioner.plan import Plan
    from partitioner.verify.report import VerifyReport
    from passes.graph.graph import OpGraph
    from passes.trace.opaque.mark import opaque
    from runtime.checkpoint.directory import is_checkpoint

__all__ = [
    "Callback",
    "CheckpointError",
    "ClusterError",
    "ClusterSpec",
    "CsvLogger",
    "InfeasibleError",
    "LineLogger",
    "ModelError",
    "OpGraph",
    "PartitionerError",
    "Plan",
    "PlanError",
    "Precision",
    "RankFailureError",
    "TensorBoardLogger",
    "TimeLimitError",
    "UsageError",
    "VerificationError",
    "VerifyReport",
    "WandbLogger",
    "Workload",
    "deploy",
    "fit",
    "is_checkpoint",
    "opaque",
    "partition",
    "trace",
]

_MODULES = {
    "Callback": "partitioner.engine.callbacks",
    "ClusterSpec": "cost_models.cluster",
    "CsvLogger": "partitioner.engine.loggers",
    "LineLogger": "partitioner.engine.loggers",
    "OpGraph": "passes.graph.graph",
    "Plan": "partitioner.plan",
    "Precision": "cost_models.precision",
    "TensorBoardLogger": "partitioner.engine.loggers",
    "VerifyReport": "partitioner.verify.report",
    "WandbLogger": "partitioner.engine.loggers",
    "Workload": "partitioner.models.workload",
    "deploy": "partitioner.deploy_together",
    "fit": "partitioner.largest_fit",
    "is_checkpoint": "runtime.checkpoint.directory",
    "opaque": "passes.trace.opaque.mark",
    "partition": "partitioner.api",
    "trace": "partitioner.models.as_graph",
}
"""The modules of all but the errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'partitioner' has no attribute {name!r}")
    from partitioner.unforeseen import versions_named
    from runtime.collector import collector_paused

    # The collector would walk all of torch's objects again and again.
    with versions_named(), collector_paused():
        return getattr(import_module(_MODULES.get(name, "cost_models.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
