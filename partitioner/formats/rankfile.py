"""The places of a plan's ranks: SLURM's host file, and torchrun's command lines.

SLURM_HOSTFILE=hostfile srun --distribution=arbitrary --ntasks 4 python train.py        one line of the file per rank
"""

from __future__ import annotations

from partitioner.formats.tool import Tool, Written
from partitioner.record.data import PlanData
from partitioner.report.launch import launch_of

TITLE = "SLURM and torchrun"


def write(plan: PlanData) -> Written:
    """Write the host of every rank in order, srun with them, and torchrun for each machine."""
    used = [plan.cluster.devices[rank] for rank in plan.used_devices]
    hosts = [device.host or device.node_name for device in used]
    machines = list(dict.fromkeys(hosts))
    run = f"srun --nodes {len(machines)} --ntasks {len(hosts)} --distribution=arbitrary python train.py"
    notes = ["srun --distribution=arbitrary follows the file line by line: rank n is on its n-th line"]
    again = [
        host
        for index, host in enumerate(hosts)
        if index and host != hosts[index - 1] and host in hosts[:index]
    ]
    if again:
        notes.append(
            f"ranks of {', '.join(dict.fromkeys(again))} are not together: torchrun numbers them machine by machine"
        )
    if any(device.host is None for device in used):
        notes.append(
            "names of machines are the cluster file's: write their host names there, or in the host file"
        )
    return Written(
        {
            "hostfile": "\n".join(hosts) + "\n",
            "srun.sh": f"export SLURM_HOSTFILE=hostfile\n{run}\n",
            "torchrun.sh": launch_of(plan, "train.py") + "\n",
        },
        tuple(notes),
    )


TOOL = Tool(TITLE, write)
