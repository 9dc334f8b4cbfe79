"""The facts that a rank tells of itself before anything is built: its plan, its versions, its device, and where it runs.

Where it runs decides which device of the plan it plays.

    nodes of the cluster file            where torchrun started processes          ranks
    a  host: gpu-a  devices 0 1 (2)      gpu-b.site: global ranks 0 1              0 -> 3, 1 -> 4
    b  host: gpu-b  devices 3 4          gpu-a.site: global ranks 2 3              2 -> 0, 3 -> 1

If nodes name their ``host``, the processes on that host play its devices in the order of LOCAL_RANK, whatever their
global ranks. Everywhere else rank r plays the r-th device that the plan uses. Idle devices (2 above) get no rank.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cost_models import host
from cost_models.devices import RUN_KINDS
from cost_models.precision import Precision
from cost_models.units import counted, listed
from partitioner.record.data import PlanData
from partitioner.record.file import package_version
from runtime.program.relabel import RankMap

_HERE = ("localhost", "::1")


@dataclass(frozen=True)
class HostPlace:
    """The place where a process runs. ``names``: those that its machine answers to, first the one it calls itself."""

    names: tuple[str, ...]
    local_rank: int


def own_place(plan: PlanData) -> HostPlace:
    """Find this process's place. Looking names up can take seconds, so it is done only if the plan compares them."""
    named, _ = _devices_by_host(plan)
    names = host_names() if named else (socket.gethostname(),)
    return HostPlace(names, int(os.environ.get("LOCAL_RANK", "0")))


def host_names() -> tuple[str, ...]:
    """List this machine's name, its full name, and its addresses: the one behind the name, and the one to the launch."""
    name = socket.gethostname()
    names = [name, socket.getfqdn()]
    with suppress(OSError):  # a machine that cannot look itself up has no address to compare
        names += [str(entry[4][0]) for entry in socket.getaddrinfo(name, None)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        way_out.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        names.append(str(way_out.getsockname()[0]))
    return tuple(dict.fromkeys(names))


def ranks_by_host(plan: PlanData, places: Sequence[HostPlace]) -> tuple[RankMap | None, list[str]]:
    """Return the map, or every difference between the hosts that were planned and those where the processes run."""
    named, anywhere = _devices_by_host(plan)
    playing: dict[str, list[int]] = {host: [] for host in named}
    machines: dict[str, set[str]] = {host: set() for host in named}
    strangers: list[int] = []
    for rank, place in enumerate(places):
        host = next((host for host in named if any(same_host(host, name) for name in place.names)), None)
        if host is None:
            strangers.append(rank)
        else:
            playing[host].append(rank)
            machines[host].add(place.names[0])
    problems = []
    for host, devices in named.items():
        ranks = playing[host]
        where = f"host {host}: the plan has {counted(len(devices), 'rank')} there"
        if len(machines[host]) > 1:
            problems.append(f"{where}, and {' and '.join(sorted(machines[host]))} both go by that name")
        elif len(ranks) != len(devices):
            problems.append(f"{where}, {_running(ranks)}")
    if anywhere and len(strangers) != len(anywhere):
        elsewhere = f"nodes without a host: the plan has {counted(len(anywhere), 'rank')} there"
        problems.append(f"{elsewhere}, {_running(strangers)}{_hosts(places, strangers)}")
    elif strangers and not anywhere:
        problems.append(f"no host of the plan: {_running(strangers)}{_hosts(places, strangers)}")
    if problems:
        return None, problems
    device_of = dict(zip(strangers, anywhere, strict=True))
    for host, devices in named.items():
        ranks = sorted(playing[host], key=lambda rank: (places[rank].local_rank, rank))
        device_of.update(zip(ranks, devices, strict=True))
    return RankMap(tuple(device_of[rank] for rank in range(len(places)))), []


def same_host(a: str, b: str) -> bool:
    """Tell whether two names can mean one machine: equal, or one of them short and equal to the other's first part."""
    a, b = (name.lower().rstrip(".") for name in (a, b))
    if a == b:
        return True
    if _is_address(a) or _is_address(b):
        return False
    return ("." not in a or "." not in b) and a.partition(".")[0] == b.partition(".")[0]


def _devices_by_host(plan: PlanData) -> tuple[Mapping[str, list[int]], list[int]]:
    """Return the used devices of each host that the cluster names, and those that may be anywhere."""
    named: dict[str, list[int]] = {}
    anywhere: list[int] = []
    for index in plan.used_devices:
        host = plan.cluster.devices[index].host
        if host is None or host.lower() in _HERE or host.startswith("127."):
            anywhere.append(index)
        else:
            named.setdefault(host, []).append(index)
    return named, anywhere


def _running(ranks: Sequence[int]) -> str:
    if not ranks:
        return "none is running"
    return f"{len(ranks)} {'is' if len(ranks) == 1 else 'are'} running (global rank {listed(ranks, 8)})"


def _hosts(places: Sequence[HostPlace], ranks: Sequence[int]) -> str:
    hosts = sorted({places[rank].names[0] for rank in ranks})
    return f" on {listed(hosts, 4)}" if hosts else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_OPINIONS = {
    "certificate", "alternatives", "not_considered", "notes", "prediction", "proof", "partitioner_version"
}  # fmt: skip
"""Fields of a plan that nothing is built from, such as how long the search took: they may differ between ranks."""

_CGROUP_USAGE = (
    Path("/sys/fs/cgroup/memory.current"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),  # version 1
)


@dataclass(frozen=True)
class DeviceFacts:
    """The device that a rank runs on."""

    kind: str
    """The type of ``torch.device``: cuda, cpu."""
    name: str
    """The driver's name for it."""
    memory: str
    """The name of its memory, a GPU's id or the machine's name: ranks with the same one share it."""
    free_bytes: int | None
    """The free memory; None if the system does not say."""
    missing_dtypes: tuple[str, ...]
    """Data types of the model that it does not compute with."""


@dataclass(frozen=True)
class RankFacts:
    """Everything that ranks compare. Travels as JSON."""

    place: HostPlace
    plan: str
    """A digest of what programs and code are made from."""
    versions: Mapping[str, str]
    device: DeviceFacts | None
    backend: str | None
    """The backend of the process group that exists already, if any."""
    problem: str | None = None
    """The reason that there is no device."""
    chosen: bool = False
    """True if the user named the device: then it need not be of the planned kind."""


def own_facts(
    plan: PlanData, model: nn.Module, device: torch.device | None, problem: str | None, *, chosen: bool
) -> RankFacts:
    """Collect this rank's facts. ``device``: None if there is none, for the reason ``problem``."""
    place = own_place(plan)
    return RankFacts(
        place=place,
        plan=plan_digest(plan),
        versions={"torch": str(torch.__version__), "partitioner": package_version()},
        device=None if device is None else device_facts(device, place, _dtypes(model, plan.precision)),
        backend=str(dist.get_backend()) if dist.is_initialized() else None,
        problem=problem,
        chosen=chosen,
    )


def plan_digest(plan: PlanData) -> str:
    """Hash a plan; equal for plans that run alike. Ranks that each plan for themselves may find unlike ones."""
    return hashlib.sha256(plan.model_dump_json(exclude=_OPINIONS).encode()).hexdigest()


UNRUN_SUGGESTIONS = (
    'run it on CPU workers: partitioner run --local, or deploy(..., device="cpu")',
    "plan for CUDA devices, such as H100-80GB:8",
)
"""Remedies where the plan has devices on which no plan was ever run."""


def unrun_problem(plan: PlanData) -> str | None:
    """Say why the plan is not run on its devices; None where it is."""
    kinds = plan.unrun_kinds
    if not kinds:
        return None
    models = sorted(
        {d.model for rank in plan.used_devices if (d := plan.cluster.devices[rank]).kind in kinds}
    )
    return (
        f"the plan has {listed(kinds)} devices ({listed(models)}), which can be planned for only: "
        f"plans run on {listed(sorted(RUN_KINDS))} devices"
    )


def choose_device(
    plan: PlanData, wanted: str | torch.device | None
) -> tuple[torch.device | None, str | None]:
    """Choose ``wanted``, or this process's device, GPU number LOCAL_RANK or the CPU; or say why there is none."""
    if wanted is not None:
        device = torch.device(wanted)
        return _own_gpu() if device == torch.device("cuda") else (device, None)
    if (unrun := unrun_problem(plan)) is not None:
        return None, unrun
    kinds = {plan.cluster.devices[index].kind for index in plan.used_devices}
    return _own_gpu() if "cuda" in kinds else (torch.device("cpu"), None)


def _own_gpu() -> tuple[torch.device | None, str | None]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if count == 0:
        return None, "the plan has GPUs and this process sees none"
    if local < count:
        return torch.device("cuda", local), None
    if count == 1:  # a scheduler that shows each process its own GPU only
        return torch.device("cuda", 0), None
    return None, f"it is process {local} of its machine, which shows it {count} GPUs"


def device_facts(device: torch.device, place: HostPlace, dtypes: Iterable[torch.dtype]) -> DeviceFacts:
    """Collect what this process can see of ``device``."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # Memory that torch has taken from the driver and not used is free for us.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return DeviceFacts(
            kind="cuda",
            name=properties.name,
            memory=str(getattr(properties, "uuid", f"{place.names[0]}/{device}")),
            free_bytes=torch.cuda.mem_get_info(device)[0] + cached,
            missing_dtypes=tuple(
                str(d).removeprefix("torch.") for d in dtypes if not _computes(properties, d)
            ),
        )
    return DeviceFacts(device.type, device.type.upper(), place.names[0], free_memory_bytes(), ())


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Read the main memory that new programs can have without swapping; less if the container's limit is nearer."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None  # not Linux
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    used = [int(path.read_text()) for path in _CGROUP_USAGE if path.is_file()]
    left = [max(0, host.memory_bytes() - size) for size in used[:1]]
    return min([*found, *left], default=None)


def _computes(properties: Any, dtype: torch.dtype) -> bool:
    """Tell whether a GPU computes with ``dtype`` in hardware (bfloat16 from Ampere on, float8 from Ada on)."""
    capability = (properties.major, properties.minor)
    needed = {torch.bfloat16: (8, 0)}.get(dtype, (8, 9) if "float8" in str(dtype) else (0, 0))
    return capability >= needed


def _dtypes(model: nn.Module, precision: Precision) -> list[torch.dtype]:
    """List the data types that the model's floating-point parameters compute in."""
    return sorted({precision.of(p.dtype).leaf for p in model.parameters() if p.is_floating_point()}, key=str)
