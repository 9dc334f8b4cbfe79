"""A check of this machine: the facts that decide what works on it, and what follows from them.

Facts are versions, devices, backends, network, a plan made on trial. A finding names what fails here, because of which
fact, and the remedy.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cost_models import host
from cost_models.errors import PartitionerError
from cost_models.shown import ShownInNotebooks
from cost_models.tried import untried_versions
from cost_models.units import counted, format_bytes, format_seconds
from partitioner.report.text import labelled

NEEDED = ("torch", "numpy", "networkx", "pulp", "highspy", "pydantic", "pyyaml", "cyclopts", "rich", "jinja2")
"""The packages that ``pyproject.toml`` asks for."""
OPTIONAL = ("transformers", "safetensors", "tensorboard", "wandb")
"""The packages that some features use."""
TORCHRUN_PORT = 29500
"""The port at which the launch commands of a plan let ranks meet; torchrun's own choice."""
NETWORK_SECONDS = 5.0
"""A connection to this machine itself that takes longer does not work."""


@dataclass(frozen=True)
class MachineFacts:
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
    planned_only: str | None
    """The kind of this machine's accelerators if plans can be made for it and are not run on it: ``rocm``, ``mps``, …"""
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


def gather() -> MachineFacts:
    """Look at this machine. Takes as long as importing torch and planning a tiny model."""
    torch_problem, devices = _torch()
    calibration, stale = (None, None) if torch_problem else _calibration()
    planning_problem, seconds = (torch_problem, 0.0) if torch_problem else _plan_on_trial()
    packages = {name: _version(name) for name in ("partitioner", *NEEDED, *OPTIONAL)}
    return MachineFacts(
        versions={"python": platform.python_version(), **packages},
        untried=tuple(untried_versions()),
        system=f"{platform.system()} {platform.machine()}",
        cores=host.core_count(),
        memory_bytes=host.memory_bytes(),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        gpus=devices[0],
        gpu_build=devices[1],
        planned_only=devices[2],
        backends=devices[3],
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


def _torch() -> tuple[str, tuple[tuple[str, ...], str | None, str | None, tuple[str, ...]]]:
    """Return why torch cannot be imported, and its GPUs, what it was built for, kinds not run on, and its backends."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything
        return _reason(error), ((), None, None, ())
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    found = [
        name
        for name, there in (("gloo", "is_gloo_available"), ("nccl", "is_nccl_available"))
        if dist.is_available() and getattr(dist, there)()
    ]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = None if accelerator is None else "rocm" if torch.version.hip else accelerator.type
    return "", (
        gpus,
        torch.version.cuda or torch.version.hip,
        None if kind == "cuda" else kind,
        tuple(found),
    )


def _calibration() -> tuple[str | None, str | None]:
    """Return the file of the calibration that plans use, or of one that they do not."""
    from cost_models.files import CALIBRATION, calibration_path
    from cost_models.measure.stored import stored_calibration

    found = stored_calibration()
    if found is not None:
        return str(found[1]), None
    unused = os.environ.get(CALIBRATION) != "none" and calibration_path().exists()
    return None, str(calibration_path()) if unused else None


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


SMALL_SHARED_MEMORY_BYTES = 1 << 30
"""Containers get 64 MiB unless asked for more, on which NCCL and the workers of a DataLoader fail."""


@dataclass(frozen=True)
class Finding:
    """Something that will not work, or not well. ``suggestion``: what to do."""

    what: str
    because: str
    suggestion: str


@dataclass(frozen=True)
class Diagnosis(ShownInNotebooks):
    """The facts and what follows from them; ``str()`` is what the command prints."""

    facts: MachineFacts
    findings: tuple[Finding, ...]

    @property
    def can_plan(self) -> bool:
        """True if a plan can be made on this machine."""
        return not self.facts.planning_problem

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        findings = [asdict(finding) for finding in self.findings]
        return {"can_plan": self.can_plan, "facts": asdict(self.facts), "findings": findings}

    def __str__(self) -> str:
        f = self.facts
        present = [f"{name} {version}" for name, version in f.versions.items() if version is not None]
        shared = "" if f.shared_memory_bytes is None else f", {format_bytes(f.shared_memory_bytes)} shared"
        gpus = ", ".join(f"{f.gpus.count(name)} x {name}" for name in dict.fromkeys(f.gpus)) or "no GPU"
        build = f"torch for CUDA or ROCm {f.gpu_build}" if f.gpu_build else "torch for CPUs"
        network = f.loopback_problem or "this machine reaches itself, ports are free"
        planned = f"works (a small model took {format_seconds(f.planning_seconds)})"
        lines = [
            labelled("versions", ", ".join(present)),
            labelled(
                "machine", f"{f.system}, {counted(f.cores, 'core')}, {format_bytes(f.memory_bytes)}{shared}"
            ),
            labelled("GPUs", f"{gpus}; {build}"),
            labelled("backends", ", ".join(f.backends) or "none"),
            labelled("calibrated", f.calibration or "no"),
            labelled("network", network),
            labelled("planning", f.planning_problem or planned),
        ]
        told = ["\n".join(lines)]
        if self.findings:
            told.append("will not work here:" if not self.can_plan else "will not work here, or not well:")
            told += [
                "\n".join(
                    (
                        labelled("-", finding.what, 2),
                        labelled("  because:", finding.because, 11),
                        labelled("  try:", finding.suggestion, 11),
                    )
                )
                for finding in self.findings
            ]
        return "\n\n".join(told[:2]) + "".join(f"\n{text}" for text in told[2:])


def diagnose(facts: MachineFacts) -> Diagnosis:
    """Draw the conclusions."""
    return Diagnosis(facts, tuple(_findings(facts)))


def _findings(f: MachineFacts) -> Iterator[Finding]:
    missing = [name for name in NEEDED if f.versions.get(name) is None]
    if missing:
        yield Finding(
            "anything", f"{', '.join(missing)} missing", "install it again: pip install partitioner"
        )
    for line in f.untried:
        yield Finding(
            "something, perhaps", line, "install a version that is known good where something fails"
        )
    if f.torch_problem:
        yield Finding(
            "anything",
            f"torch cannot be imported: {f.torch_problem}",
            "install torch again: pip install torch",
        )
    else:
        if f.planning_problem:
            yield Finding(
                "planning",
                f.planning_problem,
                "read the whole error: partitioner doctor --debug, or plan a model",
            )
        yield from _of_training(f)
    if f.loopback_problem:
        yield Finding(
            "verify, and run --local",
            f"local workers meet on 127.0.0.1, which is not reached: {f.loopback_problem}",
            "allow connections of this machine to itself (sandbox, firewall)",
        )
    if f.port_problem:
        yield Finding(
            "the launch command of a plan, as it is",
            f"port {TORCHRUN_PORT}: {f.port_problem}",
            "give torchrun another --master-port",
        )
    if f.versions.get("transformers") is None:
        yield Finding("models named hf:…", "transformers is not installed", "pip install 'partitioner[hf]'")


def _of_training(f: MachineFacts) -> Iterator[Finding]:
    if not f.gpus:
        yield Finding(
            "training on GPUs",
            "torch was built for CPUs only" if f.gpu_build is None else "torch finds no GPU (see nvidia-smi)",
            "plan and verify here, train where the GPUs are; or run --local on CPU workers",
        )
    elif "nccl" not in f.backends:
        yield Finding(
            "training on several GPUs",
            "this torch has no NCCL",
            "install a build of torch for Linux with CUDA",
        )
    if f.planned_only is not None:
        yield Finding(
            f"plans on the {f.planned_only} devices of this machine",
            "plans can be made for them, but were run on CUDA GPUs and CPUs alone",
            "plan and verify here; run --local on CPU workers",
        )
    if "gloo" not in f.backends:
        yield Finding(
            "verify, and run --local", "this torch has no Gloo", "install a build of torch from pypi.org"
        )
    if f.calibration is None:
        stale = f"{f.stale_calibration} is of another machine or version, or damaged"
        yield Finding(
            "predicted seconds of local:N",
            stale if f.stale_calibration else "this machine was not measured",
            "partitioner calibrate, while nothing else runs",
        )
    if f.cores < 2:
        yield Finding(
            "local workers side by side",
            "there is one core: they take turns, and no measured step means anything",
            "verify as usual, measure elsewhere",
        )
    if f.gpus and f.shared_memory_bytes is not None and f.shared_memory_bytes < SMALL_SHARED_MEMORY_BYTES:
        yield Finding(
            "NCCL on several GPUs, and DataLoader workers",
            f"/dev/shm has {format_bytes(f.shared_memory_bytes)}",
            "start the container with --shm-size=8g or --ipc=host",
        )
    if f.cxx is None:
        yield Finding(
            "deploy(compile=True) on CPUs",
            "there is no C++ compiler",
            "install g++, or name another in $CXX",
        )
