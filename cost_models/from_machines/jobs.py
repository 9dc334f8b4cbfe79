"""The nodes of a job from its environment: SLURM's variables, or torchrun's.

SLURM_JOB_NODELIST=node[01-04,07]      the nodes, in this order
SLURM_GPUS_PER_NODE=8                  GPUs of each; else SLURM_GPUS_ON_NODE, which is of this node alone
SLURM_TASKS_PER_NODE=8(x4),4           processes of each, so GPUs; not where each has one, which starts others

PET_NNODES=4   PET_NPROC_PER_NODE=8    what torchrun was given
WORLD_SIZE=32  LOCAL_WORLD_SIZE=8      what torchrun gives its workers
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.from_machines.host_lists import read_counts, read_hosts
from cost_models.from_machines.seen import ToolText

MAKE = "inside the job: env > job.env"
_LINE = re.compile(r"(?:export |declare -x )?([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_READ = re.compile(r"SLURM_\w+|PET_\w+|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE")
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a job. ``hosts``: empty where only their number is known; ``counts``: GPUs of each, None if not said."""

    nodes: int
    hosts: tuple[str, ...]
    counts: tuple[int, ...] | None
    source: str
    counts_source: str = ""


def read_job(text: ToolText) -> JobNodes:
    """Read the variables; ``ClusterError`` names the line of what is none."""
    found = _variables(text)
    for name in _LISTS:
        if name in found:
            return _slurm(text, found, name)
    if "SLURM_HET_SIZE" in found:
        raise text.wrong(
            found["SLURM_HET_SIZE"][0],
            "a job of several groups has a list for each, none for all",
            "write SLURM_JOB_NODELIST with all of their nodes into the file",
        )
    return _torchrun(text, found)


def _variables(text: ToolText) -> dict[str, tuple[int, str]]:
    """Return the line and value of each variable that counts."""
    found: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(text.lines, start=1):
        match = _LINE.fullmatch(line.strip())
        if match and _READ.fullmatch(match[1]):
            value = match[2].strip()
            quoted = value[:1] in ("'", '"') and value[-1:] == value[:1] and len(value) > 1
            found[match[1]] = number, value[1:-1] if quoted else value
    return found


def _slurm(text: ToolText, found: Mapping[str, tuple[int, str]], name: str) -> JobNodes:
    line, value = found[name]
    try:
        hosts = read_hosts(value)
    except ValueError as error:
        raise text.wrong(line, f"{name}: expected {error}, got {value[:80]!r}", MAKE) from error
    for variable in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_TASKS_PER_NODE"):
        if variable not in found:
            continue
        counts = _counts(text, found, variable, len(hosts))
        if variable != "SLURM_TASKS_PER_NODE" or set(counts) != {1}:
            return JobNodes(
                len(hosts),
                hosts,
                counts,
                f"{text.at(line)}, {name}",
                f"{text.at(found[variable][0])}, {variable}",
            )
    return JobNodes(len(hosts), hosts, None, f"{text.at(line)}, {name}")


def _counts(text: ToolText, found: Mapping[str, tuple[int, str]], name: str, nodes: int) -> tuple[int, ...]:
    """Read the GPUs of each node; a number alone is of all."""
    line, value = found[name]
    try:
        counts = read_counts(value.rpartition(":")[2])  # a type may stand before it: "h100:8"
    except ValueError as error:
        raise text.wrong(line, f"{name}: expected {error}, got {value[:80]!r}", MAKE) from error
    if len(counts) == 1 and name != "SLURM_TASKS_PER_NODE":
        counts *= nodes
    if len(counts) != nodes:
        raise text.wrong(line, f"{name} is of {len(counts)} nodes, the job has {nodes}", MAKE)
    return counts


def _torchrun(text: ToolText, found: Mapping[str, tuple[int, str]]) -> JobNodes:
    local = _first_number(text, found, "LOCAL_WORLD_SIZE", "PET_NPROC_PER_NODE")
    nodes = _first_number(text, found, "GROUP_WORLD_SIZE", "PET_NNODES")
    if (
        nodes is None
        and local is not None
        and (world := _first_number(text, found, "WORLD_SIZE")) is not None
    ):
        if world[0] % local[0]:
            cause = f"WORLD_SIZE is {world[0]}, no multiple of {local[0]} processes of a node"
            raise text.wrong(
                found["WORLD_SIZE"][0], cause, "name nodes of unlike sizes with SLURM_JOB_NODELIST"
            )
        nodes = world[0] // local[0], world[1]
    if nodes is None:
        raise text.wrong(
            None,
            "it has neither SLURM_JOB_NODELIST nor torchrun's variables (PET_NNODES, WORLD_SIZE with LOCAL_WORLD_SIZE)",
            MAKE,
        )
    counts = None if local is None else (local[0],) * nodes[0]
    return JobNodes(nodes[0], (), counts, nodes[1], local[1] if local is not None else "")


def _first_number(
    text: ToolText, found: Mapping[str, tuple[int, str]], *names: str
) -> tuple[int, str] | None:
    """Return the number of the first variable that is there, with its source; words such as "gpu" say none."""
    for name in names:
        line, value = found.get(name, (0, "gpu"))
        if value in ("gpu", "auto", "cpu"):
            continue
        if re.fullmatch(r"[1-9]\d{0,4}:[1-9]\d{0,4}", value):
            cause = f"{name} is {value}, but a plan is for one number of nodes"
            raise text.wrong(line, cause, f"write the one into it: {name}={value.partition(':')[2]}")
        if re.fullmatch(r"[1-9]\d{0,4}", value) is None:
            raise text.wrong(line, f"{name}: expected a number from 1, got {value[:80]!r}", MAKE)
        return int(value), f"{text.at(line)}, {name}"
    return None
