"""The profile of one kind of GPU: what was measured, on which machine and software. JSON, safe to read from anyone.

    profile = GpuProfile.load(path)
    profile.records["linear bfloat16 4096x4096x4096"].parts["forward"].seconds
    cluster = calibrated(ClusterSpec.parse("H100-80GB:8"), profile)      # cost_models.gpu.fit

A file is written anew after every few measurements, so one that was interrupted holds what was measured until then.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cost_models import host
from cost_models.cluster_file import key_path
from cost_models.errors import UsageError

FORMAT = 1
MOST_BYTES = 1 << 26
"""The largest file: a whole calibration has some 300 KB."""
_SMI_SECONDS = 10.0

Device = torch.device
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(_Data):
    """One direction of an op: what it computes and moves, as the cost model counts it, and how long it took."""

    flops: Amount
    moved_bytes: Amount
    seconds: Seconds


class Measured(_Data):
    """A record: an op in one or two directions, or other numbers by name with their units. Or why there is none."""

    kind: str
    number: str = ""
    """The type that was computed with."""
    backend: str | None = None
    share: float = Field(default=1.0, gt=0, le=1)
    parts: Mapping[Literal["forward", "backward"], Part] = {}
    values: Mapping[str, Finite] = {}
    unsupported: str | None = None


class GpuMachine(_Data):
    """The machine and software that a profile is valid for. None where it cannot be read."""

    card: str
    count: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)
    compute_capability: str
    processor: str
    driver: str | None
    power_limit_watts: float | None
    torch: str
    cuda: str | None
    cudnn: int | None

    @classmethod
    def this(cls, device: Device) -> GpuMachine:
        """Describe this machine and ``device``."""
        smi = _nvidia_smi(device)
        if device.type != "cuda":
            return cls(
                card=f"{device.type} of {platform.machine()}",
                count=1,
                memory_bytes=host.memory_bytes(),
                compute_capability="",
                processor=platform.processor(),
                driver=None,
                power_limit_watts=None,
                torch=torch.__version__,
                cuda=None,
                cudnn=None,
            )
        properties = torch.cuda.get_device_properties(device)
        return cls(
            card=properties.name,
            count=torch.cuda.device_count(),
            memory_bytes=properties.total_memory,
            compute_capability=f"{properties.major}.{properties.minor}",
            processor=platform.processor(),
            driver=smi[0],
            power_limit_watts=smi[1],
            torch=torch.__version__,
            cuda=torch.version.cuda or torch.version.hip,
            cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        )

    def differences(self, other: GpuMachine) -> list[str]:
        """List what differs: "driver: 550.54 and 560.28"."""
        return [
            f"{name}: {getattr(self, name)} and {getattr(other, name)}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]


class GpuProfile(_Data):
    """All records by name. ``seconds``: the time that they took."""

    format: Literal[1] = 1
    kind: Literal["gpu calibration"] = "gpu calibration"
    machine: GpuMachine
    date: str
    seconds: Amount = 0.0
    records: Mapping[str, Measured] = {}

    @classmethod
    def load(cls, path: Path) -> GpuProfile:
        """Read a file; raises UsageError with every problem."""
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise _wrong(path, [(error.strerror or str(error)).lower()]) from error
        if len(data) > MOST_BYTES:
            raise _wrong(path, [f"it is larger than {MOST_BYTES:,} bytes"])
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _wrong(path, [f"it is not JSON: {error}"]) from error
        if not isinstance(found, dict) or found.get("kind") != "gpu calibration":
            raise _wrong(
                path, ['it does not say kind "gpu calibration"; one of CPU workers cannot stand for it']
            )
        if found.get("format") != FORMAT:
            raise _wrong(path, [f"expected format {FORMAT}, found {found.get('format')!r}"])
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            problems = error.errors(include_url=False)[:10]
            raise _wrong(path, [f"{key_path(p['loc'])}: {p['msg'].lower()}" for p in problems]) from error

    def save(self, path: Path) -> None:
        """Write atomically; a crash leaves the previous file."""
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(self.model_dump_json(indent=1) + "\n")
            Path(temporary).replace(path)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise UsageError(f"cannot write the calibration to {path}", [str(error)]) from error


def merged(profiles: Sequence[GpuProfile]) -> GpuProfile:
    """Put profiles of one machine and software together; where several have a record, the latest one's stays."""
    by_date = sorted(profiles, key=lambda profile: profile.date)
    last = by_date[-1]
    for other in by_date:
        if differences := other.machine.differences(last.machine):
            raise UsageError(
                "cannot merge calibrations of unlike machines",
                differences,
                ["give files that were measured on one kind of card with one software"],
            )
    records: dict[str, Measured] = {}
    for profile in by_date:
        records.update(profile.records)
    return last.model_copy(
        update={"records": records, "seconds": sum(profile.seconds for profile in by_date)}
    )


def _wrong(path: Path, because: list[str]) -> UsageError:
    return UsageError(
        f"cannot read the calibration {path}",
        because,
        ["measure again on the GPU: partitioner calibrate --device cuda -o FILE"],
    )


def _nvidia_smi(device: torch.device) -> tuple[str | None, float | None]:
    """Return the driver's version and the power limit in watts; None where they cannot be read."""
    if device.type != "cuda":
        return None, None
    query = [
        "nvidia-smi",
        f"--id={torch.cuda.current_device() if device.index is None else device.index}",
        "--query-gpu=driver_version,power.limit",
        "--format=csv,noheader,nounits",
    ]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
        driver, _, watts = found.stdout.strip().partition(",")
    except (OSError, subprocess.SubprocessError):
        return None, None
    try:
        return driver.strip() or None, float(watts)
    except ValueError:  # "[N/A]"
        return driver.strip() or None, None
