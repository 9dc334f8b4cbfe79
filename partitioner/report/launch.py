"""The torchrun command lines that run a plan: one per node."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partitioner.plan import Plan


def launch_command(plan: Plan, model: str, plan_file: str, steps: int) -> str:
    """``torchrun`` for each node that has a rank in the plan; node 0's host is the meeting point."""
    per_node: dict[int, int] = {}
    for device in plan.cluster.devices[: plan.world_size]:
        per_node[device.node] = per_node.get(device.node, 0) + 1
    run = f"-m partitioner run {shlex.quote(plan_file)} {shlex.quote(model)} --steps {steps}"
    if len(per_node) == 1:
        return f"torchrun --standalone --nproc-per-node {plan.world_size} {run}"
    first = plan.cluster.devices[0]
    address = first.host or first.node_name
    return "\n".join(
        f"# on {plan.cluster.devices[_first_rank(plan, node)].node_name}\n"
        f"torchrun --nnodes {len(per_node)} --node-rank {position} --nproc-per-node {count} "
        f"--master-addr {shlex.quote(address)} --master-port 29500 {run}"
        for position, (node, count) in enumerate(sorted(per_node.items()))
    )


def _first_rank(plan: Plan, node: int) -> int:
    return next(device.rank for device in plan.cluster.devices if device.node == node)
