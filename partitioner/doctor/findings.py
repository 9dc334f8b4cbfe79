"""Conclusions from the facts about a machine: each names what fails there, because of which fact, and the remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cost_models.shown import ShownInNotebooks
from cost_models.units import counted, format_bytes, format_seconds
from partitioner.doctor.facts import NEEDED, TORCHRUN_PORT, Facts
from partitioner.report.text import labelled

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

    facts: Facts
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


def diagnose(facts: Facts) -> Diagnosis:
    """Draw the conclusions."""
    return Diagnosis(facts, tuple(_findings(facts)))


def _findings(f: Facts) -> list[Finding]:
    found: list[Finding] = []

    def add(what: str, because: str, suggestion: str) -> None:
        found.append(Finding(what, because, suggestion))

    missing = [name for name in NEEDED if f.versions.get(name) is None]
    if missing:
        add("anything", f"{', '.join(missing)} missing", "install it again: pip install partitioner")
    for line in f.untried:
        add("something, perhaps", line, "install a version that is known good where something fails")
    if f.torch_problem:
        add(
            "anything",
            f"torch cannot be imported: {f.torch_problem}",
            "install torch again: pip install torch",
        )
    elif f.planning_problem:
        add(
            "planning",
            f.planning_problem,
            "read the whole error: partitioner doctor --debug, or plan a model",
        )
    if not f.torch_problem:
        found += _of_training(f)
    if f.loopback_problem:
        add(
            "verify, and run --local",
            f"local workers meet on 127.0.0.1, which is not reached: {f.loopback_problem}",
            "allow connections of this machine to itself (sandbox, firewall)",
        )
    if f.port_problem:
        add(
            "the launch command of a plan, as it is",
            f"port {TORCHRUN_PORT}: {f.port_problem}",
            "give torchrun another --master-port",
        )
    if f.versions.get("transformers") is None:
        add("models named hf:…", "transformers is not installed", "pip install 'partitioner[hf]'")
    return found


def _of_training(f: Facts) -> list[Finding]:
    found: list[Finding] = []

    def add(what: str, because: str, suggestion: str) -> None:
        found.append(Finding(what, because, suggestion))

    if not f.gpus:
        add(
            "training on GPUs",
            "torch was built for CPUs only" if f.gpu_build is None else "torch finds no GPU (see nvidia-smi)",
            "plan and verify here, train where the GPUs are; or run --local on CPU workers",
        )
    elif "nccl" not in f.backends:
        add(
            "training on several GPUs",
            "this torch has no NCCL",
            "install a build of torch for Linux with CUDA",
        )
    if "gloo" not in f.backends:
        add("verify, and run --local", "this torch has no Gloo", "install a build of torch from pypi.org")
    if f.calibration is None:
        stale = f"{f.stale_calibration} is of another machine or version, or damaged"
        add(
            "predicted seconds of local:N",
            stale if f.stale_calibration else "this machine was not measured",
            "partitioner calibrate, while nothing else runs",
        )
    if f.cores < 2:
        add(
            "local workers side by side",
            "there is one core: they take turns, and no measured step means anything",
            "verify as usual, measure elsewhere",
        )
    if f.gpus and f.shared_memory_bytes is not None and f.shared_memory_bytes < SMALL_SHARED_MEMORY_BYTES:
        add(
            "NCCL on several GPUs, and DataLoader workers",
            f"/dev/shm has {format_bytes(f.shared_memory_bytes)}",
            "start the container with --shm-size=8g or --ipc=host",
        )
    if f.cxx is None:
        add(
            "deploy(compile=True) on CPUs",
            "there is no C++ compiler",
            "install g++, or name another in $CXX",
        )
    return found
