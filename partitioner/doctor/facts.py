"""The facts about this machine that decide what works on it: versions, devices, backends, network, a plan made on trial."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from cost_models import host
from cost_models.errors import PartitionerError
from cost_models.tried import untried_versions

NEEDED = ("torch", "numpy", "networkx", "pulp", "highspy", "pydantic", "pyyaml", "cyclopts", "rich", "jinja2")
"""The packages that ``pyproject.toml`` asks for."""
OPTIONAL = ("transformers", "safetensors", "tensorboard", "wandb")
"""The packages that some features use."""
TORCHRUN_PORT = 29500
"""The port at which the launch commands of a plan let ranks meet; torchrun's own choice."""
NETWORK_SECONDS = 5.0
"""A connection to this machine itself that takes longer does not work."""


@dataclass(frozen=True)
class Facts:
    """The facts. A problem is a text, "" where there is none."""

    versions: Mapping[str, str | None]
    """The versions of partitioner, python, and the packages; None where one is not installed."""
    untried: tuple[str, ...]
    """A line for each of them that was not tried."""
    system: str
    cores: int
    memory_bytes: int
    shared_memory_bytes: int | None
    """The size of /dev/shm; None where there is none."""
    gpus: tuple[str, ...]
    gpu_build: str | None
    """The CUDA (or ROCm) version that torch was built for; None for a CPU build."""
    backends: tuple[str, ...]
    """The backends of torch.distributed."""
    cxx: str | None
    """The C++ compiler that ``torch.compile`` finds for CPUs."""
    calibration: str | None
    """The file of a valid calibration of this machine."""
    stale_calibration: str | None
    """A file of one that is not used: it is of another machine or version, or damaged."""
    loopback_problem: str
    port_problem: str
    """The reason why ``TORCHRUN_PORT`` is not free."""
    torch_problem: str
    planning_problem: str
    planning_seconds: float


def gather() -> Facts:
    """Look at this machine. Takes as long as importing torch and planning a tiny model."""
    torch_problem, devices = _torch()
    calibration, stale = (None, None) if torch_problem else _calibration()
    planning_problem, seconds = (torch_problem, 0.0) if torch_problem else _plan_on_trial()
    packages = {name: _version(name) for name in ("partitioner", *NEEDED, *OPTIONAL)}
    return Facts(
        versions={"python": platform.python_version(), **packages},
        untried=tuple(untried_versions()),
        system=f"{platform.system()} {platform.machine()}",
        cores=host.core_count(),
        memory_bytes=host.memory_bytes(),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        gpus=devices[0],
        gpu_build=devices[1],
        backends=devices[2],
        cxx=shutil.which(os.environ.get("CXX", "g++")),
        calibration=calibration,
        stale_calibration=stale,
        loopback_problem=_loopback_problem(),
        port_problem=_port_problem(TORCHRUN_PORT),
        torch_problem=torch_problem,
        planning_problem=planning_problem,
        planning_seconds=seconds,
    )


def version_text() -> str:
    """Write the versions of partitioner, torch and Python in one line, without importing torch."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"partitioner {_version('partitioner')}, torch {_version('torch')}, Python {python}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _reason(error: BaseException) -> str:
    if isinstance(error, PartitionerError):
        return "; ".join((error.what, *error.because))
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _torch() -> tuple[str, tuple[tuple[str, ...], str | None, tuple[str, ...]]]:
    """Return why torch cannot be imported, and its GPUs, what it was built for, and its backends."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything
        return _reason(error), ((), None, ())
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    found = [
        name
        for name, there in (("gloo", "is_gloo_available"), ("nccl", "is_nccl_available"))
        if dist.is_available() and getattr(dist, there)()
    ]
    return "", (gpus, torch.version.cuda or torch.version.hip, tuple(found))


def _calibration() -> tuple[str | None, str | None]:
    """Return the file of the calibration that plans use, or of one that they do not."""
    from cost_models.measure.stored import VARIABLE, cache_path, stored_calibration

    found = stored_calibration()
    if found is not None:
        return str(found[1]), None
    unused = os.environ.get(VARIABLE) != "none" and cache_path().exists()
    return None, str(cache_path()) if unused else None


def _plan_on_trial() -> tuple[str, float]:
    """Plan two layers on two local workers; return what went wrong, and the seconds."""
    began = time.monotonic()
    try:
        import torch

        from cost_models.cluster import ClusterSpec
        from partitioner.api import partition

        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        partition(
            model,
            ClusterSpec.local(2),
            example_inputs=torch.zeros(4, 8),
            loss_fn=lambda output, _: output.square().mean(),
            batch_size=4,
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the user wants to know
        return _reason(error), 0.0
    return "", time.monotonic() - began


def _loopback_problem() -> str:
    """Connect to a free port of this machine, as local workers do."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=NETWORK_SECONDS),
        ):
            return ""
    except OSError as error:
        return _reason(error)


def _port_problem(port: int) -> str:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return ""
    except OSError as error:
        return str(error.strerror)
