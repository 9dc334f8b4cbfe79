"""Self-calibration of local CPU workers: measured once in seconds, kept as JSON, used by ``ClusterSpec.local``.

    calibration = calibrate(workers=2, count=passes.costs.cases.count_case)
    calibration.save(cache_path())
    ClusterSpec.local(2).provenance   # "calibration of 2026-01-31T… with 2 workers (/home/…/calibration.json)"

The file holds data only. A file of another machine, another torch, another format, or one that cannot be read is left
aside with a warning; planning then rests on defaults and says so.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cost_models import host
from cost_models.calibration_fit import CaseWork, fit_op_times
from cost_models.calibration_run import Curve, MeasureCollectives, WorkerTimes, measure_workers
from cost_models.cluster_schema import CollectiveSpec, HostSpec
from cost_models.errors import UsageError
from cost_models.measure_links import fit_latency
from cost_models.measure_ops import CaseSeconds
from cost_models.op_cases import OpCase, op_cases
from cost_models.op_profile import PHASES, CostLine, OpTimes
from cost_models.rates import MeasuredRates

logger = logging.getLogger("partitioner")

FORMAT_VERSION = 3
VARIABLE = "PARTITIONER_CALIBRATION"
"""Environment variable: the calibration file to use; ``none`` for no calibration."""


@dataclass(frozen=True)
class Machine:
    """The machine and software that a calibration is valid for."""

    processor: str
    cores: int
    architecture: str
    torch: str

    @classmethod
    def this(cls) -> Machine:
        return cls(_processor(), host.core_count(), platform.machine(), torch.__version__)


@dataclass(frozen=True)
class Calibration:
    """Measured rates of one machine's CPU workers. SI base units."""

    machine: Machine
    date: str
    workers: int
    """The number of workers that measured at the same time: rates are those with that many busy."""
    flops_per_second: Mapping[str, float]
    memory_bandwidth_bytes_per_second: float
    busy_slowdown: float
    """Seconds of a matrix product with all workers busy over seconds alone."""
    op_times: OpTimes
    link_latency_seconds: float
    link_bandwidth_bytes_per_second: float
    contention: float
    compute_overhead_seconds: float
    send_overhead_seconds: float
    receive_overhead_seconds: float
    collectives: Mapping[str, Curve]
    """Seconds of collectives of two workers by kind: (bytes of the whole tensor, seconds)."""
    seconds: float
    """The time that the calibration took."""

    def rates(self, workers: int) -> MeasuredRates:
        """Return the rates of ``workers`` workers; with more workers than cores each has a part of a core."""
        slowdown = max(1.0, workers / self.machine.cores)
        return MeasuredRates(
            flops_per_second={dtype: rate / slowdown for dtype, rate in self.flops_per_second.items()},
            memory_bandwidth_bytes_per_second=self.memory_bandwidth_bytes_per_second / slowdown,
            op_times=self.op_times.slower(slowdown) if slowdown > 1.0 else self.op_times,
            link_bandwidth_bytes_per_second=self.link_bandwidth_bytes_per_second,
            link_latency_seconds=self.link_latency_seconds,
            host_costs=HostSpec(
                contention=self.contention,
                compute_overhead=self.compute_overhead_seconds * slowdown,
                send_overhead=self.send_overhead_seconds * slowdown,
                receive_overhead=self.receive_overhead_seconds * slowdown,
                collectives=tuple(
                    CollectiveSpec.model_validate(
                        {"kind": kind, "measured": tuple((size, s * slowdown) for size, s in curve)}
                    )
                    for kind, curve in sorted(self.collectives.items())
                ),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the calibration as plain JSON data."""
        data = {
            key: value
            for key, value in vars(self).items()
            if key not in ("machine", "op_times", "collectives")
        }
        return {
            "format": FORMAT_VERSION,
            **data,
            "flops_per_second": dict(self.flops_per_second),
            "machine": asdict(self.machine),
            "op_times": self.op_times.to_dict(),
            "collectives": {kind: [list(point) for point in c] for kind, c in self.collectives.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """Read what ``to_dict`` wrote; raises ``ValueError`` that says what is wrong."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT_VERSION:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"expected a calibration of format {FORMAT_VERSION}, found {found}")
        fields = {key: value for key, value in data.items() if key != "format"}
        names = set(cls.__dataclass_fields__)
        if set(fields) != names:
            raise ValueError(f"expected exactly the keys {', '.join(sorted(names))}")
        machine = fields["machine"]
        if not isinstance(machine, Mapping) or set(machine) != set(Machine.__dataclass_fields__):
            raise ValueError("machine: expected processor, cores, architecture and torch")
        if not isinstance(fields["flops_per_second"], Mapping) or not isinstance(fields["op_times"], Mapping):
            raise ValueError("flops_per_second and op_times: expected mappings")
        numbers = {
            **{key: fields[key] for key in names if key.endswith("second") and key != "flops_per_second"},
            **{key: fields[key] for key in names if key.endswith("seconds")},
            **{f"flops_per_second.{key}": rate for key, rate in fields["flops_per_second"].items()},
            **{key: fields[key] for key in ("busy_slowdown", "contention", "workers")},
        }
        wrong = [key for key, n in numbers.items() if not _positive(n, zero=key.endswith("overhead_seconds"))]
        if wrong:
            raise ValueError(f"expected positive numbers for {', '.join(sorted(wrong))}")
        if not _are_curves(fields["collectives"]):
            raise ValueError("collectives: expected (bytes, seconds) by kind, by rising bytes")
        if not isinstance(fields["date"], str):
            raise ValueError("date: expected text")
        return cls(
            **{
                **fields,
                "machine": Machine(**machine),
                "op_times": OpTimes.from_dict(fields["op_times"]),
                "collectives": {kind: tuple(map(tuple, c)) for kind, c in fields["collectives"].items()},
            }
        )

    def save(self, path: Path) -> None:
        """Write atomically; a crash leaves the previous file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False, encoding="utf-8"
            ) as file:
                json.dump(self.to_dict(), file, indent=1)
                file.write("\n")
            Path(file.name).replace(path)
        except OSError as error:
            raise UsageError(f"cannot write the calibration to {path}", [str(error)]) from error
        _read.cache_clear()

    def __str__(self) -> str:
        rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {name}" for name, rate in self.flops_per_second.items())
        kinds = len({kind for (kind, _), _ in self.op_times.costs})
        return "\n".join(
            (
                f"{self.machine.processor}, {self.machine.cores} cores, torch {self.machine.torch}: "
                f"{self.workers} workers measured at once in {self.seconds:.1f} s",
                f"  products   {rates}; {self.busy_slowdown:.2f}x the time of a worker alone",
                f"  memory     {self.memory_bandwidth_bytes_per_second / 1e9:.1f} GB/s; {kinds} kinds of ops",
                f"  link       {self.link_latency_seconds * 1e6:.0f} us + bytes at "
                f"{self.link_bandwidth_bytes_per_second / 1e9:.2f} GB/s; "
                f"computing beside it takes {self.contention:.2f}x",
                f"  host       {self.compute_overhead_seconds * 1e6:.0f} us per compute, "
                f"{self.send_overhead_seconds * 1e6:.0f} us per send, "
                f"{self.receive_overhead_seconds * 1e6:.0f} us per receive",
            )
        )


def calibrate(
    workers: int, count: Callable[[OpCase], CaseWork], collectives: MeasureCollectives | None = None
) -> Calibration:
    """Measure this machine with ``workers`` processes at once; takes seconds.

    ``count`` counts a case's FLOPs and bytes as the cost model of whole models does (``passes.costs.cases``).
    ``collectives`` measures those of the executor (``runtime.measure.collectives``); without it they go by the link.
    """
    if not 1 <= workers <= 64:
        raise UsageError(f"cannot calibrate with {workers} workers", ["expected 1 to 64"])
    started = datetime.datetime.now(datetime.UTC)
    cases = op_cases()
    works = [count(case) for case in cases]
    times = measure_workers(workers, collectives)
    seconds = [_mean_case([t.cases[index] for t in times]) for index in range(len(cases))]
    fitted = fit_op_times(cases, works, seconds)
    optimizers = {
        f"optimizer {name}": _mean_line([t.optimizers[name] for t in times]) for name in times[0].optimizers
    }
    lines = tuple(((name, PHASES[0]), line) for name, line in optimizers.items())
    op_times = OpTimes(tuple(sorted((*fitted.costs, *lines), key=lambda item: item[0])))
    link = times[0].link
    latency, bandwidth = fit_latency(link.one_way) if link is not None else (70e-6, 2e9)
    return Calibration(
        machine=Machine.this(),
        date=started.isoformat(timespec="seconds"),
        workers=workers,
        flops_per_second={
            name: statistics.mean(t.flops_per_second[name] for t in times)
            for name in times[0].flops_per_second
        },
        memory_bandwidth_bytes_per_second=statistics.mean(t.copy_bytes_per_second for t in times),
        busy_slowdown=times[0].busy_slowdown,
        op_times=op_times,
        link_latency_seconds=latency,
        link_bandwidth_bytes_per_second=bandwidth,
        contention=link.contention if link is not None else 1.0,
        compute_overhead_seconds=statistics.mean(t.compute_overhead_seconds for t in times),
        send_overhead_seconds=link.send_seconds if link is not None else 0.0,
        receive_overhead_seconds=link.receive_seconds if link is not None else 0.0,
        collectives=times[0].collectives,
        seconds=(datetime.datetime.now(datetime.UTC) - started).total_seconds(),
    )


def cache_path() -> Path:
    """Return the file of the calibration: ``$PARTITIONER_CALIBRATION``, or a file in the user's cache folder."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen and chosen != "none":
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "partitioner" / "calibration.json"


def stored_calibration() -> tuple[Calibration, Path] | None:
    """Load this machine's calibration, if there is a valid one; a file that is not is left aside with a warning."""
    if os.environ.get(VARIABLE) == "none":
        return None
    path = cache_path()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return None
    found = _read(path, stamp)
    return None if found is None else (found, path)


@lru_cache(maxsize=8)
def _read(path: Path, _: int) -> Calibration | None:
    try:
        found = Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        logger.warning("ignoring the calibration %s: %s; run `partitioner calibrate` again", path, error)
        return None
    here = Machine.this()
    if found.machine != here:
        logger.warning("ignoring the calibration %s: it is of %s, this is %s", path, found.machine, here)
        return None
    return found


def _positive(value: object, *, zero: bool) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (0 if zero else 1e-300) <= value < 1e300  # type: ignore[operator]


def _are_curves(data: object) -> bool:
    try:
        HostSpec.model_validate(
            {"collectives": [{"kind": kind, "measured": curve} for kind, curve in data.items()]}  # type: ignore[attr-defined]
        )
    except (ValueError, AttributeError):
        return False
    return True


def _mean_case(measured: Sequence[CaseSeconds]) -> CaseSeconds:
    return CaseSeconds(
        statistics.mean(m.forward for m in measured),
        statistics.mean(m.backward for m in measured),
        statistics.mean(m.backward_weight for m in measured),
    )


def _mean_line(measured: Sequence[tuple[float, float]]) -> CostLine:
    per_tensor, per_byte = (statistics.mean(column) for column in zip(*measured, strict=True))
    return CostLine(per_tensor, 0.0, per_byte)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


__all__ = ["Calibration", "Machine", "WorkerTimes", "cache_path", "calibrate", "stored_calibration"]
