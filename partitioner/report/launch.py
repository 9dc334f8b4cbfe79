"""The torchrun command lines that run a plan: one per node."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cost_models.devices import Device
    from partitioner.record.data import PlanData


def launch_of(plan: PlanData, run: str) -> str:
    """Write ``torchrun`` of ``run`` for each node that has a used device; the first one's host is the meeting point."""
    per_node: dict[int, list[Device]] = {}
    for index in plan.used_devices:
        device = plan.cluster.devices[index]
        per_node.setdefault(device.node, []).append(device)
    first = next(iter(per_node.values()))[0]
    if len(per_node) == 1:
        return f"{_visible(plan, first.node)}torchrun --standalone --nproc-per-node {plan.world_size} {run}"
    address = first.host or first.node_name
    return "\n".join(
        f"# on {devices[0].node_name}\n"
        f"{_visible(plan, node)}torchrun --nnodes {len(per_node)} --node-rank {position} "
        f"--nproc-per-node {len(devices)} --master-addr {shlex.quote(address)} --master-port 29500 {run}"
        for position, (node, devices) in enumerate(sorted(per_node.items()))
    )


def _visible(plan: PlanData, node: int) -> str:
    """Name the GPUs that the processes of a node may see, if the plan leaves one idle that is not the last."""
    ranks = plan.cluster.ranks_per_node[node]
    used = [place for place, device in enumerate(ranks) if device in plan.used_devices]
    gaps = used != list(range(len(used)))
    is_gpu = plan.cluster.devices[ranks[0]].kind == "cuda"
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, used))} " if gaps and is_gpu else ""
