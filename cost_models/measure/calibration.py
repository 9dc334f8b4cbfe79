"""A calibration: what was measured of CPU workers or of one kind of GPU, on which machine and software. JSON, safe to read.

    calibration = Calibration.load(path)
    calibration.records["linear bfloat16 4096x4096x4096"].parts["forward"].seconds
    cluster = calibrated(ClusterSpec.parse("H100-80GB:8"), calibration)      # cost_models.variants

A GPU's file is written anew after every few measurements, so one that was interrupted holds what was measured until then.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cost_models import host
from cost_models.devices import DeviceKind
from cost_models.errors import UsageError
from cost_models.files import replace_file
from cost_models.op_profile import Phase
from cost_models.spec.document import key_path

FORMAT = 4
GPU_FORMAT = 1
"""The format of the files that said kind "gpu calibration": the same but for their head. They are read."""
MOST_BYTES = 1 << 26
"""The largest file: a whole calibration has some 300 KB."""
_SMI_SECONDS = 10.0

TorchDevice = torch.device  # ``torch`` is a field below
Nonnegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class CalibrationData(BaseModel):
    """A part of the file: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PhaseTiming(CalibrationData):
    """One direction of an op: what it computes and moves, as the cost model counts it, and how long it took."""

    flops: Nonnegative
    moved_bytes: Nonnegative
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Measurement(CalibrationData):
    """A record: an op in its directions, or other numbers by name with their units. Or why there is none."""

    kind: str
    number: str = ""
    """The type that was computed with."""
    backend: str | None = None
    share: float = Field(default=1.0, gt=0, le=1)
    parts: Mapping[Literal["backward"] | Phase, PhaseTiming] = {}
    """Timings by direction; of a GPU, ``backward`` is the whole of it."""
    values: Mapping[str, Finite] = {}
    unsupported: str | None = None


class Machine(CalibrationData):
    """The machine and software that a calibration is valid for. None where it cannot be read."""

    kind: DeviceKind = "cuda"
    card: str
    """The name of the GPU, or of the processor."""
    count: int = Field(ge=1)
    """GPUs, or cores."""
    memory_bytes: int = Field(ge=0)
    """Memory of the GPU; 0 of processors."""
    compute_capability: str
    processor: str
    """The processor's architecture."""
    driver: str | None
    power_limit_watts: float | None
    torch: str
    cuda: str | None
    cudnn: int | None

    @classmethod
    def this(cls, device: TorchDevice) -> Machine:
        """Describe this machine and ``device``."""
        if device.type != "cuda":
            return cls(
                kind="cpu",
                card=host.processor_name(),
                count=host.core_count(),
                memory_bytes=0,
                compute_capability="",
                processor=platform.machine(),
                driver=None,
                power_limit_watts=None,
                torch=torch.__version__,
                cuda=None,
                cudnn=None,
            )
        properties = torch.cuda.get_device_properties(device)
        driver, watts = _nvidia_smi(device)
        return cls(
            card=properties.name,
            count=torch.cuda.device_count(),
            memory_bytes=properties.total_memory,
            compute_capability=f"{properties.major}.{properties.minor}",
            processor=platform.processor(),
            driver=driver,
            power_limit_watts=watts,
            torch=torch.__version__,
            cuda=torch.version.cuda or torch.version.hip,
            cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        )

    def differences(self, other: Machine) -> list[str]:
        """List what differs: "driver: 550.54 and 560.28"."""
        return [
            f"{name}: {getattr(self, name)} and {getattr(other, name)}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]


class Calibration(CalibrationData):
    """All records by name. ``seconds``: the time that they took."""

    format: Literal[4] = 4
    kind: Literal["calibration"] = "calibration"
    machine: Machine
    date: str
    workers: int | None = Field(default=None, ge=1)
    """The number of CPU workers that measured at the same time: rates are those with that many busy. None of a GPU."""
    seconds: Nonnegative = 0.0
    records: Mapping[str, Measurement] = {}

    @classmethod
    def load(cls, path: Path, kind: DeviceKind | None = None) -> Calibration:
        """Read a file, of a GPU or of CPU workers if ``kind`` says so; raises UsageError with every problem."""
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise _wrong(path, [(error.strerror or str(error)).lower()]) from error
        if len(data) > MOST_BYTES:
            raise _wrong(path, [f"it is larger than {MOST_BYTES:,} bytes"])
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _wrong(path, [f"it is not JSON: {error}"]) from error
        try:
            calibration = cls.from_dict(document)
        except ValidationError as error:
            raise _wrong(path, field_problems(error)) from error
        except ValueError as error:
            raise _wrong(path, [str(error)]) from error
        if kind not in (None, calibration.machine.kind):
            measured, other = ("a GPU", "CPU workers") if kind == "cpu" else ("CPU workers", "a GPU")
            raise _wrong(path, [f"it is one of {measured}, which cannot stand for {other}"])
        return calibration

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """Read plain JSON data, of this format or of a GPU's first; raises ``ValueError`` that says what is wrong."""
        head = (
            (data.get("kind"), data.get("format")) if isinstance(data, dict) else (type(data).__name__, None)
        )
        if head == ("gpu calibration", GPU_FORMAT):
            data = {**data, "kind": "calibration", "format": FORMAT}
        elif head != ("calibration", FORMAT):
            raise ValueError(
                f"expected a calibration of format {FORMAT}, got {head[0]!r} of format {head[1]}"
            )
        return cls.model_validate(data)

    def save(self, path: Path) -> None:
        """Write atomically; a crash leaves the previous file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, self.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write the calibration to {path}", [str(error)]) from error


def merged(calibrations: Sequence[Calibration]) -> Calibration:
    """Put calibrations of one machine and software together; where several have a record, the latest one's stays."""
    by_date = sorted(calibrations, key=lambda calibration: calibration.date)
    last = by_date[-1]
    records: dict[str, Measurement] = {}
    for calibration in by_date:
        if differences := calibration.machine.differences(last.machine):
            raise UsageError(
                "cannot merge calibrations of unlike machines",
                differences,
                ["give files that were measured on one kind of card with one software"],
            )
        records.update(calibration.records)
    return last.model_copy(
        update={"records": records, "seconds": sum(calibration.seconds for calibration in by_date)}
    )


def field_problems(error: ValidationError) -> list[str]:
    """Say what is wrong with which key, of the first problems."""
    problems = error.errors(include_url=False)[:10]
    return [f"{key_path(problem['loc'])}: {problem['msg'].lower()}" for problem in problems]


def _wrong(path: Path, because: list[str]) -> UsageError:
    return UsageError(
        f"cannot read the calibration {path}",
        because,
        ["measure again: partitioner calibrate, or on the GPU: partitioner calibrate --device cuda -o FILE"],
    )


def _nvidia_smi(device: torch.device) -> tuple[str | None, float | None]:
    """Return the driver's version and the power limit in watts; None where they cannot be read."""
    query = [
        "nvidia-smi",
        f"--id={torch.cuda.current_device() if device.index is None else device.index}",
        "--query-gpu=driver_version,power.limit",
        "--format=csv,noheader,nounits",
    ]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
        driver, _, watts = printed.stdout.strip().partition(",")
    except (OSError, subprocess.SubprocessError):
        return None, None
    try:
        return driver.strip() or None, float(watts)
    except ValueError:  # "[N/A]"
        return driver.strip() or None, None
