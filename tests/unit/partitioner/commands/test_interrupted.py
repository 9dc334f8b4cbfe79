"""Ctrl-C sent to ``partitioner plan`` at random moments: a whole plan, or a clear word that there is none; nothing else."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partitioner import Plan
from partitioner.cli import run_command
from passes.search.fastest import _ProviderRuns
from passes.search.layer.search import LayerSearch
from tests.support.matrix import thinned
from tests.unit.passes.test_interrupts import pressed_in

ROOT = Path(__file__).parents[4]
PLAN = ["plan", "gpt2", "--set", "size=tiny", "--cluster", "local:4", "--batch-size", "8", "--check", "off"]
SECONDS = 5.0
"""About as long as the command takes, torch imported."""


def run(folder: Path, moments: list[list[float]], strategy: str) -> list[dict[str, Any]]:
    """Run the command once per group of moments, plans in numbered folders."""
    for number in range(len(moments)):
        (folder / str(number)).mkdir()
    text = ";".join(",".join(map(str, group)) for group in moments)
    output = ["--strategy", strategy, "-o", str(folder / "NUMBER" / "plan.json")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interrupted", text, *PLAN, *output],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def check(folder: Path, row: dict[str, Any]) -> None:
    """A plan that holds and its code, or no file and the word and code for that."""
    files = [file.name for file in folder.iterdir()]
    assert "Traceback" not in row["stderr"], row
    if files:
        assert files == ["plan.json"], row
        assert row["code"] in (0, 5), row
        assert ("error[time-limit]: the search was interrupted" in row["stderr"]) == (row["code"] == 5)
        plan = Plan.load(folder / "plan.json")
        assert plan.simulate().step_seconds == pytest.approx(plan.prediction.step_seconds)
    else:
        assert row["code"] == 130, row
        assert "interrupted" in row["stderr"], row  # before the search: the bare word


@pytest.mark.parametrize(
    ("strategy", "times"), thinned([("hybrid", 3), ("hybrid", 8), ("auto", 5)], [("hybrid", 3)])
)
def test_there_is_a_whole_plan_or_a_clear_word(strategy: str, times: int, tmp_path: Path) -> None:
    """In one process for all; the last is pressed twice, of which the second ends it at once."""
    draws = random.Random(7)
    moments = [[0.05], *([round(draws.uniform(0.3, SECONDS), 3)] for _ in range(times)), [2.5, 2.6]]
    rows = run(tmp_path, moments, strategy)
    for number, row in enumerate(rows):
        check(tmp_path / str(number), row)
    assert rows[0]["code"] == rows[-1]["code"] == 130
    assert not list((tmp_path / "0").iterdir())


@pytest.mark.parametrize(("owner", "name"), [(LayerSearch, "solve"), (_ProviderRuns, "run")])
def test_in_a_search_the_best_plan_so_far_is_written_and_claims_no_more_than_was_looked_at(
    owner: type, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the second family of pipelines; and before the first, beside the rows that everything is compared with."""
    file = tmp_path / "plan.json"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pressed_in(owner, name, 0):
            code = run_command([*PLAN, "--strategy", "hybrid", "-o", str(file)])
    finally:
        signal.signal(signal.SIGINT, before)
    check(tmp_path, {"code": code, "stderr": capsys.readouterr().err})
    assert code == 5
    certificate = Plan.load(file).certificate
    assert certificate.solver_status == "interrupted"
    assert "; or " not in certificate.space, "of one family at most"
    assert (certificate.bound_seconds == 0.0) == (owner is _ProviderRuns)
