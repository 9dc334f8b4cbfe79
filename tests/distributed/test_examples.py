"""The scripts in ``examples/`` that users start from. One is run by torchrun, and killed; the others as Python runs a file,
in processes that have imported torch already.
"""

from __future__ import annotations

import csv
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from safetensors.torch import load_file

from partitioner import Plan
from runtime.ranks.launch import WorkerPool

ROOT = Path(__file__).parents[2]
SECONDS = 180
"""For one run on a busy machine; idle it takes about ten."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Python with this command line. Nothing of it is left afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    process = subprocess.Popen([sys.executable, *command], env=environment, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
        process.wait(timeout=SECONDS)


def run(script: str, *options: str) -> str:
    """Run a script as Python runs it, in this process, and return what it prints."""
    path = ROOT / script
    printed = io.StringIO()
    with (
        redirect_stdout(printed),
        mock.patch.object(sys, "argv", [str(path), *options]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        mock.patch("torch.distributed.destroy_process_group"),  # the pool's
    ):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def run_on_two(pool: WorkerPool, script: str, *options: str) -> str:
    """Run a script on two ranks, and return what rank 0 prints."""
    printed: str = pool.run(run, script, *options, world_size=2, timeout_seconds=SECONDS)[0]
    return printed


def losses(text: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Model and optimizer of the newest checkpoint."""
    newest = directory / (directory / "latest").read_text().strip()
    found = [load_file(file) for file in sorted(newest.glob("rank-*.safetensors"))]
    assert len(found) == 2
    return {name: t for part in found for name, t in part.items() if not name.startswith("random/")}


def kill_a_worker(torchrun: subprocess.Popen[str]) -> None:
    """As if a machine failed: torchrun then ends the other one."""
    workers = psutil.Process(torchrun.pid).children()
    os.kill(next(w.pid for w in workers if "finetune_llama.py" in " ".join(w.cmdline())), signal.SIGKILL)


@pytest.mark.matrix
@pytest.mark.timeout(3 * SECONDS)
def test_fine_tuning_goes_on_after_a_crash_as_if_there_had_been_none(
    pool: WorkerPool, tmp_path: Path
) -> None:
    def command(name: str) -> list[str]:
        options = ["--epochs", "4", "--samples", "94", "--save-every", "5", "--checkpoints"]
        return ["examples/finetune_llama.py", *options, str(tmp_path / name)]

    expected = losses(run_on_two(pool, *command("whole")))
    with started(*TORCHRUN, *command("parts")) as parts:
        assert parts.stdout is not None
        begun = ""
        deadline = time.monotonic() + SECONDS
        while 7 not in losses(begun) and time.monotonic() < deadline and (line := parts.stdout.readline()):
            begun += line
        kill_a_worker(parts)
        rest, error = parts.communicate(timeout=SECONDS)
        assert parts.returncode != 0
        assert max(losses(begun + rest)) < 24, "it was over before it was interrupted"
    resumed = losses(run_on_two(pool, *command("parts")))
    assert sorted(expected) == list(range(1, 25)), error
    assert sorted(resumed) == list(range(min(resumed), 25))
    assert min(resumed) > 5, "it began anew"
    assert {**losses(begun + rest), **resumed} == expected
    assert float(expected[24]) < float(expected[1]) - 1

    left, right = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert any(name.startswith("optimizer/") for name in left)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_metrics_of_a_custom_loss_reach_the_log(pool: WorkerPool, tmp_path: Path) -> None:
    log = tmp_path / "metrics.csv"
    text = run_on_two(pool, "examples/custom_metrics.py", "--epochs", "2", "--csv", str(log))
    rows = list(csv.DictReader(log.open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 33))
    first, last = rows[0], rows[-1]
    assert float(last["metric/accuracy"]) > 0.5 > float(first["metric/accuracy"])
    assert float(last["loss"]) < float(first["loss"])
    assert 0 < float(last["metric/confidence"]) < 1
    assert f"step 32: loss {float(last['loss']):.3f}" in text


def test_a_large_model_is_planned_from_a_cluster_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the eighty layers, short samples, two of eight nodes: all of it takes the time of a whole test file."""
    file, nodes = tmp_path / "plan.json", tmp_path / "two-nodes.yaml"
    text = (ROOT / "docs/clusters/dgx-h100-8-nodes.yaml").read_text()
    nodes.write_text(text.replace("dgx[0-7]", "dgx[0-1]").replace("10.0.0.[1-8]", "10.0.0.[1-2]"))
    monkeypatch.setattr("partitioner.planning.options.AUTO_SECONDS", 0.5)
    options = "--cluster", str(nodes), "--layers", "2", "--tokens", "256", "--save", str(file)
    text = run("examples/plan_llama70b.py", *options)
    plan = Plan.load(file)
    assert (plan.cluster.name, plan.cluster.world_size) == ("two-nodes", 16)
    assert plan.model.dtype == "bfloat16"
    assert str(plan) in text
    peaks = {
        (optimizer, kept): float(peak)
        for optimizer, kept, peak in re.findall(r"^(\w+) +(\w+) \w+ +[\d.]+ s +([\d.]+) GiB$", text, re.M)
    }
    assert len(peaks) == 4
    # The fastest plans fill memory as they like, so a larger state need not be a higher peak; all of them fit.
    capacity = min(device.memory_bytes for device in plan.cluster.devices) / 2**30
    assert all(0 < peak <= capacity for peak in peaks.values())


@pytest.mark.matrix
def test_strategies_are_compared_with_one_trace() -> None:
    header, *rows = run("examples/compare_strategies.py").splitlines()
    assert header.split() == [
        "cluster",
        "schedule",
        "pieces",
        "stages",
        "recomputed",
        "step",
        "bubble",
        "peak",
    ]
    assert len(rows) == 18
    found = {}
    for row in rows:
        schedule, pieces, _, recomputed, milliseconds, _, _, mebibytes, _ = row[18:].split()
        key = row[:18].strip(), schedule, int(pieces), recomputed != "0"
        found[key] = float(milliseconds), float(mebibytes)
    two = {key[1:]: value for key, value in found.items() if key[0] == "2 local workers"}
    step, peak = two["1f1b", 8, False]
    assert two["zb-h1", 8, False][0] < step
    assert two["1f1b", 4, False][0] > step
    assert two["gpipe", 8, False][1] > peak
    assert two["1f1b", 8, True][0] > step
    assert two["1f1b", 8, True][1] < peak
    assert min(seconds for seconds, _ in two.values()) == float(rows[5][18:].split()[4])


def test_what_was_trained_is_loaded_by_from_pretrained(pool: WorkerPool, tmp_path: Path) -> None:
    text = run_on_two(pool, "examples/evaluate_and_export.py", "--folder", str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert float(re.findall(r"held-out loss ([\d.]+)", text)[0]) < 4.5  # ln 256 = 5.5 before
    assert float(re.findall(r"largest difference of the logits: (\S+)", text)[0]) < 1e-5
