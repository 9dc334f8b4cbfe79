"""Variables of jobs and topologies of SLURM, after the manual pages of sbatch, topology.conf and torchrun."""

from __future__ import annotations

JOBS: dict[str, tuple[str, int, list[str], tuple[int, ...] | None]] = {
    "tasks": (
        "SLURM_JOB_NODELIST=node[01-04,07]\nSLURM_TASKS_PER_NODE=8(x4),4\n",
        5,
        ["node[01-04,07]"],
        (8, 8, 8, 8, 4),
    ),
    "gpus per node": (
        "SLURM_JOB_NODELIST=a[1-2]\nSLURM_GPUS_PER_NODE=8\nSLURM_TASKS_PER_NODE=1(x2)\n",
        2,
        ["a[1-2]"],
        (8, 8),
    ),
    "with a type": ("SLURM_JOB_NODELIST=a1\nSLURM_GPUS_PER_NODE=h100:4\n", 1, ["a1"], (4,)),
    "gpus on this node": (
        "SLURM_GPUS_ON_NODE=4\nSLURM_JOB_NODELIST=cn[002-003]\n",
        2,
        ["cn[002-003]"],
        (4, 4),
    ),
    "one launcher on each node": (
        "SLURM_JOB_NODELIST=a[1-2]\nSLURM_TASKS_PER_NODE=1(x2)\n",
        2,
        ["a[1-2]"],
        None,
    ),
    "an old name": ("SLURM_NODELIST=tux[0-3]\nSLURM_TASKS_PER_NODE=4(x4)\n", 4, ["tux[0-3]"], (4,) * 4),
    "one host": ("SLURM_JOB_NODELIST=dgx-a100-01\nSLURM_TASKS_PER_NODE=8\n", 1, ["dgx-a100-01"], (8,)),
    "exported": (
        'export SLURM_JOB_NODELIST="gpu[1,3]"\nexport SLURM_GPUS_PER_NODE="2"\n',
        2,
        ["gpu[1,3]"],
        (2, 2),
    ),
    "declared": ("declare -x SLURM_JOB_NODELIST='r1n1,r2n1'\n", 2, ["r1n1", "r2n1"], None),
    "two racks": (
        "SLURM_JOB_NODELIST=r[1-2]n[1-2]\nSLURM_GPUS_PER_NODE=8\n",
        4,
        ["r1n[1-2]", "r2n[1-2]"],
        (8,) * 4,
    ),
    "its own order": ("SLURM_JOB_NODELIST=n[3,1-2]\nPATH=/bin\n", 3, ["n[3,1-2]"], None),
    "torchrun's options": ("PET_NNODES=4\nPET_NPROC_PER_NODE=8\n", 4, [], (8,) * 4),
    "as many as there are": ("PET_NNODES=2\nPET_NPROC_PER_NODE=gpu\n", 2, [], None),
    "a worker of torchrun": ("WORLD_SIZE=32\nLOCAL_WORLD_SIZE=8\nRANK=3\n", 4, [], (8,) * 4),
    "a group of workers": ("GROUP_WORLD_SIZE=3\nLOCAL_WORLD_SIZE=2\nWORLD_SIZE=6\n", 3, [], (2,) * 3),
    "not of a job": ("HOME=/root\n\nnot a variable\nPET_NNODES=1\n", 1, [], None),
}
"""By name: the variables, the number of nodes, their names, their GPUs."""

TOPOLOGIES: dict[str, tuple[str, list[str]]] = {
    "man page": (
        "##########\n# Slurm's network topology configuration file for use with the\n##########\n"
        "SwitchName=s0 Nodes=dev[0-5]\nSwitchName=s1 Nodes=dev[6-11]\n"
        "SwitchName=s2 Nodes=dev[12-17]\nSwitchName=s3 Switches=s[0-2]\n",
        ["s0", "s1", "s2", "s3"],
    ),
    "two levels": (
        "SwitchName=s0 Nodes=tux[0-1]\nSwitchName=s1 Nodes=tux[2-3]\nSwitchName=s2 Nodes=tux[4-5]\n"
        "SwitchName=s3 Nodes=tux[6-7]\n"
        "SwitchName=s4 Switches=s[0-1]\nSwitchName=s5 Switches=s[2-3]\nSwitchName=s6 Switches=s[4-5]\n",
        ["s0", "s1", "s2", "s3", "s4", "s5", "s6"],
    ),
    "speeds": (
        "SwitchName=s0 Nodes=tux[0-3]   LinkSpeed=900\nSwitchName=s1 Nodes=tux[4-7]   LinkSpeed=900\n",
        ["s0", "s1"],
    ),
    "two tops": ("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\n", ["a", "b"]),
    "lower case": ("switchname=s0 nodes=c[0-5]\nSWITCHNAME=s1 SWITCHES=s0\n", ["s0", "s1"]),
    "comments": ("SwitchName=s0 Nodes=n1 # the first\n# SwitchName=s1 Nodes=n2\n", ["s0"]),
    "a long line": ("SwitchName=s0 \\\n  Nodes=n[1-4]\n\nSwitchName=s1 Nodes=n5\n", ["s0", "s1"]),
    "keys turned": ("Nodes=n[1-4] SwitchName=leaf-1\n", ["leaf-1"]),
    "scontrol": (
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=c[0-5]\nSwitchName=s2 Level=1 LinkSpeed=1 Nodes=c[0-10] Switches=s0\n",
        ["s0", "s2"],
    ),
    "lists": ("SwitchName=ib1 Nodes=gpu1,gpu3,node[07-09]\n", ["ib1"]),
    "tabs": ("SwitchName=s0\tNodes=n[1-2]\r\nSwitchName=s1\tNodes=n3\r\n", ["s0", "s1"]),
    "guid": (
        "# GUID: 0x1 - switch 0\nSwitchName=ibsw0 Switches=ibsw1 LinkSpeed=100Mb/s\nSwitchName=ibsw1 Nodes=a1\n",
        ["ibsw0", "ibsw1"],
    ),
}
"""By name: topology.conf, and its switches."""
