"""``make gpu`` on a CPU: parts that fail or hang leave the others' figures, and a model is measured beside predictions."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Part, parts_of, run_parts, table
from benchmarks.gpu_models import MODELS, GpuModel, cluster_of, figures_of, preset_of
from cost_models.cluster import ClusterSpec
from examples.mlp import mlp
from runtime.ranks.launch import WorkerPool


def part(folder: Path, name: str, code: str, seconds: float = 30.0) -> Part:
    figures = folder / f"{name}.json"
    return Part(name, (sys.executable, "-c", code.replace("FILE", repr(str(figures)))), seconds, figures)


INTERRUPTED = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    open(FILE, 'w').write('{"x": 2}')
"""
WRITES = "open(FILE, 'w').write('{\"x\": 1}')"
HANGS = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "open(FILE, 'w').write('{\"child\": %d}' % child.pid); time.sleep(60)"
)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_part_that_fails_or_hangs_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    parts = [
        part(tmp_path, "fails", "import sys; print('why'); sys.exit(3)"),
        part(tmp_path, "hangs", HANGS, 2.0),
        part(tmp_path, "writes then fails", f"{WRITES}; raise SystemExit(1)"),
        part(tmp_path, "writes when interrupted", INTERRUPTED, 3.0),
        part(tmp_path, "writes", WRITES),
    ]
    found = run_parts(parts, path, {"card": "none"})
    assert json.loads(path.read_text()) == found
    states = {name: entry["status"] for name, entry in found["parts"].items()}
    assert states == {
        "fails": "failed with code 3",
        "hangs": "out of time",
        "writes then fails": "failed with code 1",
        "writes when interrupted": "out of time",
        "writes": "ok",
    }
    assert found["parts"]["writes when interrupted"]["figures"] == {"x": 2}
    assert "why" in found["parts"]["fails"]["output"]
    assert "no_figures" in found["parts"]["fails"]
    assert found["parts"]["writes then fails"]["figures"] == {"x": 1}
    child = found["parts"]["hangs"]["figures"]["child"]
    for _ in range(50):
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child), "what a part started ends with it"


def test_the_whole_ends_in_time(tmp_path: Path) -> None:
    started = time.monotonic()
    parts = [part(tmp_path, f"part {number}", "import time; time.sleep(60)") for number in range(3)]
    found = run_parts(parts, tmp_path / "figures.json", {}, limit=2.0)
    assert time.monotonic() - started < 15.0
    states = [entry["status"] for entry in found["parts"].values()]
    assert states == ["out of time", *["not run: no time was left"] * 2]


def test_pytests_report_becomes_counts(tmp_path: Path) -> None:
    test = tmp_path / "test_two.py"
    test.write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    report = tmp_path / "tests.xml"
    command = (sys.executable, "-m", "pytest", str(test), "-q", f"--junitxml={report}", "-c", "/dev/null")
    found = gpu.run_part(Part("tests", command, 60.0, report), 60.0)
    assert found["status"] == "failed with code 1"
    assert found["figures"] == {"tests": 2, "failures": 1, "errors": 0, "skipped": 0, "failed": ["test_b"]}


def test_there_are_eleven_models_and_each_is_a_part(tmp_path: Path) -> None:
    names = [one.name for one in parts_of(tmp_path)]
    assert names == ["tests", "calibration", *(f"model {name}" for name in MODELS)]
    assert len(MODELS) == 11


def test_without_a_gpu_nothing_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "run_parts", lambda *_: pytest.fail("nothing is to be run"))
    assert gpu.main(["--json", str(tmp_path / "x.json")]) == 0
    assert not (tmp_path / "x.json").exists()
    assert "sees no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "expected"), [(WRITES, 0), (f"{WRITES}; raise SystemExit(1)", 1)])
def test_the_command_ends_as_its_parts_do(
    code: str,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = [part(tmp_path, "model one", code), part(tmp_path, "other", "raise SystemExit(9)")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(gpu, "parts_of", lambda _: parts)
    assert gpu.main(["--json", str(tmp_path / "x.json"), "--only", "model *"]) == expected
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["card"] == "a card"
    assert list(found["parts"]) == ["model one"]
    assert found["parts"]["model one"]["figures"] == {"x": 1}
    assert str(tmp_path / "x.json") in capsys.readouterr().out


TINY = GpuModel(lambda: mlp(inputs=16, hidden=32, pairs=1), 8, 2)


def measure(calibrate: Callable[[ClusterSpec], ClusterSpec]) -> list[dict[str, object]]:
    """In a worker: the rows one after the other, as they were when yielded."""
    device = torch.device("cpu")
    rows = []
    with suppress(ZeroDivisionError):
        for row in figures_of(TINY, cluster_of(device), device, calibrate, steps=3):
            rows.append(copy.deepcopy(row))
    return rows


def with_little_memory(_: ClusterSpec) -> ClusterSpec:
    return ClusterSpec.local(1, "1GiB")


def that_fails(_: ClusterSpec) -> ClusterSpec:
    raise ZeroDivisionError


def test_a_model_is_measured_beside_both_predictions(pool: WorkerPool) -> None:
    ((predicted, measured, row),) = pool.run(measure, with_little_memory, world_size=1)
    assert set(predicted["predicted"]) == {"defaults"}
    assert "measured" not in predicted
    assert set(measured["predicted"]) == {"defaults"}
    assert set(row["predicted"]) == {"defaults", "calibrated"}
    assert row["measured"]["step_seconds"] > 0.0
    assert len(row["measured"]["all_step_seconds"]) == 6
    assert row["measured"]["peak_allocated_bytes"] is None, "a CPU does not tell"
    assert row["predicted"]["defaults"]["peak_bytes"] > 0
    text = table({"parts": {"model tiny": {"figures": row}, "model lost": {}, "tests": {"figures": {}}}})
    assert len(text.splitlines()) == 2
    assert "tiny" in text


def test_a_calibration_that_cannot_be_used_loses_no_measurement(pool: WorkerPool) -> None:
    (rows,) = pool.run(measure, that_fails, world_size=1)
    assert rows[-1]["measured"]["step_seconds"] > 0.0
    assert set(rows[-1]["predicted"]) == {"defaults"}


def test_the_calibrations_command_is_one(tmp_path: Path) -> None:
    (calibration,) = (one for one in parts_of(tmp_path, "cuda:99") if one.name == "calibration")
    found = gpu.run_part(calibration, 60.0)
    assert found["status"].startswith("failed")
    assert not any(word in found["output"].lower() for word in ("unknown", "usage:")), found["output"]
    assert "cuda" in found["output"].lower()


@pytest.mark.parametrize(
    ("card", "gigabytes", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, "H100-80GB"),
        ("NVIDIA A100-SXM4-80GB", 85.1, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 42.4, "A100-40GB"),
        ("Tesla V100-SXM2-16GB", 16.9, "V100-16GB"),
        ("NVIDIA H200", 150.1, "H200-141GB"),
        ("NVIDIA A100 MIG 3g.20gb", 20.9, None),
        ("NVIDIA H100 PCIe", 84.9, "H100-PCIE-80GB"),
        ("NVIDIA GeForce RTX 4090", 25.4, "RTX4090"),
        ("NVIDIA GeForce GTX 1080 Ti", 11.7, None),
    ],
)
def test_a_drivers_name_means_a_preset(card: str, gigabytes: float, preset: str | None) -> None:
    assert preset_of(card, int(gigabytes * 1e9)) == preset


def test_a_models_process_writes_its_figures(tmp_path: Path) -> None:
    script = (
        "import benchmarks.gpu_models as g; from examples.mlp import mlp; "
        "g.MODELS = {'tiny': g.GpuModel(lambda: mlp(inputs=16, hidden=32, pairs=1), 8)}; "
        f"g.main(['tiny', '--device', 'cpu', '--json', {str(tmp_path / 'row.json')!r}])"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=gpu.ROOT)
    assert json.loads((tmp_path / "row.json").read_text())["measured"]["step_seconds"] > 0.0
