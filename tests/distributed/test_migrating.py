"""The blocks of docs/migrating.md, as they stand there: ours on two processes, theirs where they can be installed.

Each block runs after the page's common one, in an empty folder, and leaves ``losses``: one per step, ours and theirs equal.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partitioner import Plan
from runtime.ranks.launch import WorkerPool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text()
BLOCKS = dict(re.findall(r'(?s)```python title="([\w-]+)"\n(.*?)```', PAGE))
SECONDS = 180
STEPS = 6


def script(folder: Path, name: str) -> Path:
    path = folder / f"block_{name.replace('-', '_')}.py"  # a file accelerate.py would hide the package
    path.write_text(f"{BLOCKS['common']}\n{BLOCKS[name]}")
    return path


def run_here(path: str) -> dict[str, Any]:
    """On one worker: the plain numbers that a block leaves."""
    before = os.getcwd()
    os.chdir(Path(path).parent)
    try:
        left = runpy.run_path(path)
    finally:
        os.chdir(before)
    return {name: left[name] for name in ("losses", "evaluated") if name in left}


def on_two(pool: WorkerPool, folder: Path, name: str) -> list[dict[str, Any]]:
    path = str(script(folder, name))
    return pool.run(run_here, path, world_size=2, timeout_seconds=SECONDS)


def alone(folder: Path, name: str) -> dict[str, Any]:
    """In a process of its own: these tools keep global state."""
    path = script(folder, name)
    wanted = "{n: globals()[n] for n in ('losses', 'evaluated') if n in globals()}"
    path.write_text(f"{path.read_text()}\nimport json\nprint('\\n' + json.dumps({wanted}))\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(path)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def same(losses: list[float], others: list[float]) -> bool:
    """In float32, over six steps."""
    assert len(others) == STEPS
    return losses == pytest.approx(others, rel=2e-5)


@pytest.mark.matrix
def test_trainer(pool: WorkerPool, tmp_path: Path) -> None:
    theirs = alone(tmp_path, "trainer")
    ours = on_two(pool, tmp_path, "trainer-ours")
    assert same(ours[0]["losses"], theirs["losses"])
    assert ours[1] == ours[0]
    assert ours[0]["evaluated"] == pytest.approx(theirs["evaluated"], rel=2e-5)
    for folder in ("trained", "trained-ours"):
        assert (tmp_path / folder / "model.safetensors").is_file()


@pytest.mark.matrix
def test_accelerate(pool: WorkerPool, tmp_path: Path) -> None:
    theirs = alone(tmp_path, "accelerate")["losses"]
    assert same(on_two(pool, tmp_path, "accelerate-ours")[0]["losses"], theirs)

    line = re.compile(r"like_theirs = \{.*?\}")
    assert line.search(BLOCKS["accelerate-ours"])
    default = tmp_path / "default.py"
    default.write_text(line.sub("like_theirs = {}", script(tmp_path, "accelerate-ours").read_text()))
    exact = pool.run(run_here, str(default), world_size=2, timeout_seconds=SECONDS)[0]["losses"]
    assert not same(exact, theirs)


def test_plain_torch(pool: WorkerPool, tmp_path: Path) -> None:
    ours = on_two(pool, tmp_path, "torch-ours")
    assert ours[0] == ours[1]
    for name in ("ddp", "fsdp2"):
        for theirs in on_two(pool, tmp_path, name):
            assert same(ours[0]["losses"], theirs["losses"]), name
    theirs = on_two(pool, tmp_path, "pipelining")[1]
    by_hand = on_two(pool, tmp_path, "pipelining-ours")
    assert by_hand[0] == by_hand[1]
    assert same(by_hand[0]["losses"], theirs["losses"])
    assert same(by_hand[0]["losses"], ours[0]["losses"])


def test_those_whose_counterpart_cannot_be_installed(pool: WorkerPool, tmp_path: Path) -> None:
    run_here(str(script(tmp_path, "torchtitan-ours")))
    assert Plan.load(tmp_path / "plan.json").recompute == "full"

    ours = on_two(pool, tmp_path, "deepspeed-ours")
    assert ours[0] == ours[1]
    assert len(ours[0]["losses"]) == STEPS
    assert (tmp_path / "checkpoints-ds" / "latest").is_file()


def test_every_block_of_the_page_is_run() -> None:
    assert len(re.findall(r"```python", PAGE)) == len(BLOCKS)
    strings = {
        node.value
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.Constant)
    }
    assert [name for name in BLOCKS if name not in strings] == []
