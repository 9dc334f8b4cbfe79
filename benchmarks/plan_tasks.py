"""What workers need to run steps of a plan."""

from __future__ import annotations

from typing import Any

from partitioner.models.workload import Workload
from partitioner.plan import Plan
from partitioner.record.rebuild import plan_code, plan_programs, plan_segments, ranks_in_order
from partitioner.verify.rank import VerificationTask
from partitioner.verify.verify import model_state
from passes.graph.graph import OpGraph
from passes.trace.batch import flatten_batch, forward_names
from passes.trace.loss.reduction import step_batch, step_weights


def plan_task(
    plan: Plan,
    workload: Workload,
    graph: OpGraph,
    *,
    batch: Any = None,
    optimizer: str = "none",
    learning_rate: float = 0.0,
) -> VerificationTask:
    """One step of ``plan`` for ``graph``, the workload's trace; of the workload's own batch if no other is given."""
    batch = workload.example_inputs if batch is None else batch
    ranks = ranks_in_order(plan)
    code = plan_code(plan, graph, ranks)
    leaves = flatten_batch(batch, forward_names(workload.model))
    return VerificationTask(
        programs=plan_programs(plan, ranks),
        codes=code.lowered(),
        segments=plan_segments(plan, ranks),
        batch_specs=tuple(map(code.batch_of, range(plan.world_size))),
        batch=step_batch(graph, leaves, plan.microbatches),
        state=model_state(workload.model, graph),
        trainable=frozenset(name for name, spec in graph.parameters.items() if spec.requires_grad),
        microbatches=plan.microbatches,
        weights=step_weights(graph, leaves, plan.microbatches),
        optimizer=optimizer,
        learning_rate=learning_rate,
        timeout_seconds=120.0,
        shardings=code.shardings,
        parts=code.graph.parts,
    )
