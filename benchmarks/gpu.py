"""Everything that wants one CUDA device, in at most eight minutes: tests, a calibration, predicted beside measured.

    make gpu                = python -m benchmarks.gpu [--json gpu-figures.json] [--only GLOB]
    python -m benchmarks.gpu --again benchmarks/data/h100-80gb.json     its models predicted anew, on any machine
                             [--residuals]                              and their peaks put into benchmarks/residuals.csv

tests          tests/gpu, by pytest
calibration    partitioner calibrate --device cuda --short
eleven models  step time and peak memory, measured, and predicted with the default costs and with the calibrated ones

Each part is a process with a time of its own. One that takes too long is interrupted, so that it can write what it has,
then killed with all that it started. The file is written after every part: the figures of the others stay. Without a GPU
nothing runs, and nothing is claimed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.gpu_models import MODELS, predicted_again, preset_of
from benchmarks.residuals import Residual, replace_residuals
from cost_models.measure.calibration import Calibration

LIMIT_SECONDS = 460.0
"""Eight minutes, less the grace of a last part and the start of this process."""
TEST_SECONDS, CALIBRATION_SECONDS, MODEL_SECONDS = 140.0, 90.0, 45.0
"""The most of each part. Tests and calibration leave half of the whole, a model may take twice its share of the rest."""
GRACE_SECONDS = 10.0
"""The time that a part gets to write what it has: a calibration by itself, others after an interrupt."""
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """One process, the most seconds that it may take, and the file in which it leaves its figures."""

    name: str
    command: tuple[str, ...]
    seconds: float
    figures: Path


def parts_of(folder: Path, device: str = "cuda") -> list[Part]:
    """List all parts, which write into ``folder``."""
    python, calibration = sys.executable, folder / "calibration.json"
    tests = folder / "tests.xml"
    calibrate = (
        *(python, "-m", "partitioner", "calibrate", "--device", device, "--short", "--quiet"),
        *("--seconds", str(CALIBRATION_SECONDS - GRACE_SECONDS), "-o", str(calibration)),
    )
    parts = [
        Part(
            "tests",
            (python, "-m", "pytest", "tests/gpu", "-vv", f"--junitxml={tests}", "-p", "no:cacheprovider"),
            TEST_SECONDS,
            tests,
        ),
        Part("calibration", calibrate, CALIBRATION_SECONDS, calibration),
    ]
    for name in MODELS:
        row = folder / f"{name}.json"
        command = (
            *(python, "-m", "benchmarks.gpu_models", name, "--device", device),
            *("--calibration", str(calibration), "--json", str(row)),
        )
        parts.append(Part(f"model {name}", command, MODEL_SECONDS, row))
    return parts


def run_parts(
    parts: Sequence[Part], path: Path, head: dict[str, Any], limit: float = LIMIT_SECONDS
) -> dict[str, Any]:
    """Run the parts one after the other, within ``limit`` seconds; write what is known to ``path`` after each."""
    deadline = time.monotonic() + limit
    found: dict[str, Any] = {**head, "parts": {}}
    for part in parts:
        left = min(part.seconds, deadline - time.monotonic())
        result = (
            run_part(part, left) if left > 1.0 else {"status": "not run: no time was left", "seconds": 0.0}
        )
        found["parts"][part.name] = result
        path.write_text(json.dumps(found, indent=1))
        print(f"{part.name:<20} {result['status']}, {result['seconds']:.1f} s", flush=True)
    return found


def run_part(part: Part, seconds: float) -> dict[str, Any]:
    """Run one part in a session of its own; after ``seconds`` it is interrupted, then killed with all that it started."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        try:
            code = process.wait(seconds)
            status = "ok" if code == 0 else f"failed with code {code}"
        except subprocess.TimeoutExpired:
            status = "out of time"
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # where nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
        tail = log.read().decode(errors="replace")
    result: dict[str, Any] = {"status": status, "seconds": time.monotonic() - started}
    try:
        result["figures"] = _figures(part.figures)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        result["no_figures"] = str(error)
    return result if status == "ok" else {**result, "output": tail}


def _heed_interrupts() -> None:
    """Let a part be interrupted where this process is not: shells start what runs in their background so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _figures(path: Path) -> Any:
    """Read what a part left: JSON, or the counts and failures of pytest's report."""
    if path.suffix != ".xml":
        return json.loads(path.read_text())
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    failed = []
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, 0))
        failed += [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    return {**counts, "failed": failed}


def table(found: dict[str, Any]) -> str:
    """Write predicted beside measured, a line per model that has figures."""
    lines = [
        f"{'model':<12} {'measured':>10} {'defaults':>10} {'calibrated':>10}   peak GiB: allocated, reserved; predicted"
    ]
    for name, part in found["parts"].items():
        row = part.get("figures", {})
        if not name.startswith("model ") or "measured" not in row:
            continue
        own = row["measured"]
        times = [own["step_seconds"]]
        times += [row["predicted"].get(kind, {}).get("step_seconds") for kind in ("defaults", "calibrated")]
        sizes = [
            own["peak_allocated_bytes"],
            own["peak_reserved_bytes"],
            row["predicted"]["defaults"]["peak_bytes"],
            row["predicted"]["defaults"].get("reserved_bytes"),
        ]
        cells = [f"{'-' if s is None else f'{s * 1e3:.1f} ms':>10}" for s in times]
        gib = ", ".join("-" if size is None else f"{size / 2**30:.2f}" for size in sizes)
        lines.append(f"{name.removeprefix('model '):<12} {' '.join(cells)}   {gib}")
    return "\n".join(lines)


def again(found: dict[str, Any]) -> dict[str, Any]:
    """Predict the measured models of earlier figures anew, at default costs and at those of their calibration."""
    calibration = Calibration.from_dict(found["parts"]["calibration"]["figures"])
    parts = {}
    for name, part in found["parts"].items():
        row = part.get("figures", {})
        if name.startswith("model ") and "measured" in row:
            predicted = predicted_again(MODELS[name.removeprefix("model ")], calibration)
            part = {**part, "figures": {**row, "predicted": predicted}}
        parts[name] = part
    return {**found, "parts": parts}


OWN = "our own, H100 and H200"
"""The source of residuals, one for all cards: the same models allocate the same bytes on each."""


def residuals(found: dict[str, Any]) -> list[Residual]:
    """Return the residuals of allocated peaks. Steps are none: rates were fitted on these cards."""
    card = preset_of(found["card"], found["parts"]["calibration"]["figures"]["machine"]["memory_bytes"])
    return [
        Residual(
            f"gpu {card}",
            OWN,
            f"{name.removeprefix('model ')} on {card}",
            "one device",
            "presets",
            "cuda",
            None,
            part["figures"]["measured"]["peak_allocated_bytes"]
            / part["figures"]["predicted"]["defaults"]["peak_bytes"],
            "allocated",
        )
        for name, part in found["parts"].items()
        if "measured" in part.get("figures", {}) and name.startswith("model ")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts on this machine's GPU; without one, say so and claim nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-figures.json"), help="the file of all figures")
    parser.add_argument("--only", default="*", help="glob over the names of parts")
    parser.add_argument(
        "--again", type=Path, help="predict the models of this file of figures anew; needs no GPU"
    )
    parser.add_argument(
        "--residuals", action="store_true", help="with --again: put the peaks into residuals.csv"
    )
    options = parser.parse_args(arguments)
    if options.again is not None:
        found = again(json.loads(options.again.read_text()))
        print(table(found))
        if options.residuals:
            rows = residuals(found)
            replace_residuals(rows[0].benchmark, rows)
        return 0
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device: nothing was run, and nothing is claimed")
        return 0
    head = {"card": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}
    with tempfile.TemporaryDirectory() as folder:
        parts = [part for part in parts_of(Path(folder)) if fnmatch.fnmatch(part.name, options.only)]
        found = run_parts(parts, options.json, head)
    print(table(found))
    print(f"all figures: {options.json}")
    return int(any(part["status"] != "ok" for part in found["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
