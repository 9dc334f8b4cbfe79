"""The torchrun command lines that run a plan: one per machine."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cost_models.devices import Device
    from partitioner.record.data import PlanData


def launch_of(plan: PlanData, run: str) -> str:
    """Write ``torchrun`` of ``run`` for each machine that has a used device; the first one is where all ranks connect.

    Nodes of one ``host`` are one machine, whose processes play its devices in file order (``deployment.facts``).
    """
    machines: dict[str | int, list[Device]] = {}
    for device in plan.cluster.devices:
        machines.setdefault(device.node if device.host is None else device.host.lower(), []).append(device)
    used = set(plan.used_devices)
    machines = {key: own for key, own in machines.items() if not used.isdisjoint(d.rank for d in own)}
    first = next(device for own in machines.values() for device in own if device.rank in used)
    if len(machines) == 1:
        (alone,) = machines.values()
        return f"{_visible(alone, used)}torchrun --standalone --nproc-per-node {plan.world_size} {run}"
    address = first.host or first.node_name
    return "\n".join(
        f"# on {' and '.join(dict.fromkeys(device.node_name for device in own if device.rank in used))}\n"
        f"{_visible(own, used)}torchrun --nnodes {len(machines)} --node-rank {position} "
        f"--nproc-per-node {sum(device.rank in used for device in own)} "
        f"--master-addr {shlex.quote(address)} --master-port 29500 {run}"
        for position, own in enumerate(machines.values())
    )


def _visible(machine: Sequence[Device], used: Collection[int]) -> str:
    """Name the GPUs that the processes of a machine may see, if the plan leaves one idle that is not the last."""
    places = [place for place, device in enumerate(machine) if device.rank in used]
    gaps = places != list(range(len(places)))
    is_gpu = machine[0].kind == "cuda"
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, places))} " if gaps and is_gpu else ""
