"""Our side of the executor benchmark: the public way from a model to a plan, and the executor on the plan's programs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.executor_models import ModelSpec
from benchmarks.plan_tasks import plan_task
from cost_models.cluster import ClusterSpec
from partitioner.api import partition
from partitioner.models.as_graph import as_graph
from partitioner.plan import Plan
from partitioner.verify.rank import VerificationTask, own_state
from passes.graph.graph import OpGraph
from runtime.execute.context import RankProgram
from runtime.execute.execute import Executor

RANKS = 2


def plan_of(spec: ModelSpec, graph: OpGraph, schedule: str, stages: int) -> Plan:
    """Two local workers, equal stages pinned: only the cut is given, the rest is the compiler's own."""
    pins = {f"layers.{layer}": stage for stage in range(stages) for layer in spec.stage_layers(stage, stages)}
    return partition(
        graph,
        ClusterSpec.local(RANKS),
        batch_size=spec.batch_size,
        schedule=schedule,
        microbatches=spec.microbatches,
        pins=pins,
        optimizer_memory="none",
        strategy="layer",
    )


def trace_of(spec: ModelSpec) -> OpGraph:
    """The model's graph, loss included."""
    return as_graph(spec.workload(), name="stack")


def task_of(spec: ModelSpec, graph: OpGraph, plan: Plan) -> VerificationTask:
    """What the workers need to run ``plan``."""
    return plan_task(plan, spec.workload(), graph)


class Ours:
    """One rank's executor with its batch; ``step`` zeroes gradients, runs forwards and backwards."""

    def __init__(self, task: VerificationTask) -> None:
        rank = dist.get_rank()
        mine = {segment.index for segment in task.segments.segments if rank in segment.ranks}
        codes = {index: code for index, code in task.codes.items() if index in mine}
        self._state = own_state(codes, task, rank).leaves
        self._batch, self._microbatches = task.batch, task.microbatches
        self._executor = Executor(
            RankProgram(task.programs, rank, codes, task.segments, self._state, task.batch_specs[rank]),
            timeout_seconds=task.timeout_seconds,
        )

    def step(self) -> Tensor | None:
        """One step; the loss where this rank computes it."""
        return self._executor.train_step(self._batch, self._microbatches)

    def gradients(self) -> dict[str, Tensor]:
        """By the model's parameter names."""
        return {
            name: tensor.grad
            for name, tensor in self._state.items()
            if isinstance(tensor, torch.nn.Parameter) and tensor.grad is not None
        }

    def close(self) -> None:
        """Stop the executor's watcher."""
        self._executor.close()
