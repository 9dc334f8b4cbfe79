"""The facts that a rank tells of itself before anything is built: its plan, its versions, its device."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cost_models import host
from cost_models.precision import Precision
from partitioner.deployment.ranks import HostPlace, own_place
from partitioner.record.base import package_version
from partitioner.record.data import PlanData

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


def choose_device(
    plan: PlanData, wanted: str | torch.device | None
) -> tuple[torch.device | None, str | None]:
    """Choose ``wanted``, or this process's device, GPU number LOCAL_RANK or the CPU; or say why there is none."""
    if wanted is not None:
        device = torch.device(wanted)
        return _own_gpu() if device == torch.device("cuda") else (device, None)
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
