"""The command line: what goes to stdout, what to stderr, and which code it ends with."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partitioner import Plan, Precision
from partitioner.cli import COMMANDS, run_command
from partitioner.commands import options
from partitioner.commands.options import progress
from partitioner.commands.plan_files import step_picture
from tests.support import bad_workloads

NET = f"{Path(bad_workloads.__file__)}:net"
TALKS = NET.replace(":net", ":talks")
GOOD = ["--cluster", "local:2", "--batch-size", "8"]
ROOT = Path(__file__).parents[4]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("cli") / "plan.json"
    assert run_command(["plan", NET, *GOOD, "--pin", "first=0", "--pin", "second=1", "-o", str(file)]) == 0
    return file


def out(capsys: Capture, *arguments: str | Path) -> str:
    """stdout of a command that succeeds and says nothing on stderr but progress."""
    assert run_command([str(argument) for argument in arguments]) == 0
    captured = capsys.readouterr()
    assert "error" not in captured.err
    return captured.out


def test_plan_prints_the_plan_and_writes_nothing_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    text = out(capsys, "plan", NET, *GOOD)
    assert text.startswith("model       Net, 67 parameters in float32\n")
    assert not list(tmp_path.iterdir())


def test_what_is_printed_as_json_is_what_is_saved(plan_file: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "plan.json"
    printed = json.loads(out(capsys, "plan", NET, *GOOD, "--json", "--output", file))
    assert printed == json.loads(file.read_text())
    assert json.loads(out(capsys, "show", plan_file, "--json")) == json.loads(plan_file.read_text())


def test_a_plan_is_shown_with_its_step(
    plan_file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.load(plan_file)
    assert out(capsys, "show", plan_file) == f"{plan}\n\n{step_picture(plan.simulate())}\n"
    monkeypatch.setenv("COLUMNS", "60")
    narrow = out(capsys, "show", plan_file)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "\x1b" not in narrow


def test_the_precision_is_a_list_of_words(plan_file: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mixed.json"
    text = out(capsys, "plan", NET, *GOOD, "--precision", "compute=bf16,master=fp32", "-o", file)
    assert (
        "precision   bfloat16 compute, float32 gradients, float32 updates (the model is\n            in float32)"
        in text
    )
    assert Plan.load(file).precision == Precision(compute=torch.bfloat16, master=torch.float32)
    assert "precision: the model's own -> compute=bfloat16, master=float32" in out(
        capsys, "diff", plan_file, file
    )


def test_options_stand_before_after_and_joined(capsys: Capture) -> None:
    for arguments in (
        ["--set", "width=4", NET, *GOOD],
        [NET, *GOOD, "--set", "width=4"],
        ["--cluster=local:2", NET, "--set=width=4", "--batch-size=8"],
    ):
        assert "Net, 35 parameters" in out(capsys, "plan", *arguments)


def test_diff_says_what_changed(plan_file: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other.json"
    out(capsys, "plan", NET, *GOOD, "--max-stages", "1", "-o", other)
    assert "stages: 2 -> 1" in out(capsys, "diff", plan_file, other)
    assert out(capsys, "diff", other, other) == "no difference\n"
    assert json.loads(out(capsys, "diff", other, other, "--json")) == {"equal": True, "differences": []}


def test_simulate_draws_and_traces(plan_file: Path, tmp_path: Path, capsys: Capture) -> None:
    text = out(capsys, "simulate", plan_file, "--width", "40", "--trace", tmp_path / "trace.json")
    assert text.count("rank ") == 2
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    packed = tmp_path / "trace.json.gz"
    out(capsys, "simulate", plan_file, "--trace", packed, "--ranks", "1", "--quiet")
    events = json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    data = json.loads(out(capsys, "simulate", plan_file, "--json"))
    assert data["step_seconds"] == pytest.approx(Plan.load(plan_file).prediction.step_seconds)


def test_graph_draws_models_and_plans(plan_file: Path, capsys: Capture) -> None:
    placed = out(capsys, "graph", plan_file)
    assert placed.startswith('digraph "Net on local:2" {')
    assert "send/recv" in placed
    assert out(capsys, "graph", NET, "--plan", plan_file) == placed
    assert 'stage0 -> stage1 [label=" send/recv' in out(capsys, "graph", plan_file, "--stages")
    assert out(capsys, "graph", plan_file, "--format", "svg").startswith("<svg ")
    data = json.loads(out(capsys, "graph", NET, "--format", "json"))
    assert data == json.loads(out(capsys, "graph", NET, "--json"))
    assert {"id", "kind", "label", "parent", "stages", "bridge", "ops"} == set(data["nodes"][0])


def test_a_plan_that_does_not_remember_its_model_is_drawn_with_it(
    plan_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    data = json.loads(plan_file.read_text()) | {"outline": None}
    old = tmp_path / "old.json"
    old.write_text(json.dumps(data))
    assert run_command(["graph", str(old)]) == 2
    assert "does not remember its model" in capsys.readouterr().err
    drawn = [out(capsys, "graph", NET, "--plan", file) for file in (old, plan_file)]
    assert drawn[0] == drawn[1]


def test_a_sharded_plan_is_explained_and_its_ranks_drawn(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "sharded.json"
    out(capsys, "plan", NET, *GOOD, "--strategy", "feature", "--pin", "first.weight=S0", "-o", file)
    assert "mesh 2 on 2 devices" in out(capsys, "show", file)
    assert "\n*  R R R -> R" in out(capsys, "explain", file, "linear", "--model", NET)
    data = json.loads(out(capsys, "explain", file, "first.weight", "--model", NET, "--json"))
    assert [way["layout"] for way in data["ways"] if way["chosen"]] == ["stored S0"]
    text = out(capsys, "graph", NET, "--plan", file, "--rank", "1")
    assert text.startswith("rank 1 of 2 · Net · mesh 2")
    marked = [line for line in text.splitlines() if line.startswith("> ")]
    assert marked
    drawn = out(capsys, "graph", NET, "--plan", file, "--rank", "1", "--format", "dot")
    assert drawn.count("fillcolor=orange") == len(marked)
    nodes = json.loads(out(capsys, "graph", NET, "--plan", file, "--rank", "1", "--json"))["nodes"]
    assert sum(node["bridge"] for node in nodes) == len(marked)
    assert "ranks 0-1" in out(capsys, "graph", file)


def test_what_a_factory_prints_is_not_data(capfd: Capture) -> None:
    assert run_command(["plan", TALKS, *GOOD, "--json"]) == 0
    captured = capfd.readouterr()
    json.loads(captured.out)
    assert "chatter of a data loader" in captured.err


def test_a_plan_out_of_time_is_still_written(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import partitioner.commands.plan_model as command

    plans: list[Plan] = []  # searched for once

    def stopped(*arguments: Any, **keywords: Any) -> Plan:
        if not plans:
            plans.append(plan_traced(*arguments, **keywords))
        late = replace(plans[0].certificate, solver_status="time limit", gap=0.25)
        return plans[0].model_copy(update={"certificate": late})

    plan_traced = command.plan_traced
    monkeypatch.setattr(command, "plan_traced", stopped)
    monkeypatch.setenv("PARTITIONER_CACHE", str(tmp_path / "plans"))
    file = tmp_path / "plan.json"
    tiny = ["gpt2", "--set", "size=tiny", "--set", "layers=1"]
    assert run_command(["plan", *tiny, *GOOD, "--time-limit", "1", "--json", "-o", str(file)]) == 5
    assert not (tmp_path / "plans").exists()  # the next search may find a better one
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(file.read_text())
    assert "error[time-limit]: the search stopped after 1 s with a plan that fits" in captured.err
    assert "it is within 25.0% of the best" in captured.err
    assert run_command(["plan", *tiny, *GOOD, "--quiet"]) == 0, "auto answers in a time of its own"
    assert "error" not in capsys.readouterr().err
    assert (tmp_path / "plans").exists()  # it is the answer to this call


def test_every_command_explains_itself(capsys: Capture) -> None:
    assert "plan" in out(capsys, "--help")
    for name in COMMANDS:
        assert f"Usage: partitioner {name} " in out(capsys, name, "--help")
    assert out(capsys, "--version").startswith("partitioner 0.")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_their_options(
    shell: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    out(capsys, "--install-completion", "--shell", shell)
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    for word in ("verify", "doctor", "batch-size", "json"):
        assert word in written


def test_every_long_command_can_be_quiet(capsys: Capture) -> None:
    for name in {*COMMANDS} - {"diff", "graph"}:
        assert "--quiet" in out(capsys, name, "--help")


def test_progress_speaks_after_a_while_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with progress("quick work"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(options, "SECONDS_BEFORE_PROGRESS", 0.0)
    monkeypatch.setattr(options.threading.Timer, "cancel", lambda timer: timer.join())
    with progress("slow work"):
        print("from a library")  # noqa: T201
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "slow work … " in captured.err
    assert captured.err.endswith(" s\n")


def run_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    text = command.replace("partitioner", f"{sys.executable} -m partitioner", 1)
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_reader_that_goes_away_is_no_error(plan_file: Path) -> None:
    done = run_shell(f"partitioner show {plan_file.name} --json | head -1", plan_file.parent)
    assert (done.returncode, done.stdout) == (0, "{\n")
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (
            "> /dev/full",
            2,
            "error[usage]: cannot write the result to stdout\n  because: No space left on device\n",
        ),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
    ],
    ids=["full", "stdout closed", "stderr closed"],
)
def test_streams_that_take_nothing(plan_file: Path, redirection: str, code: int, message: str) -> None:
    done = run_shell(f"partitioner show {plan_file.name} --json {redirection}", plan_file.parent)
    assert done.returncode == code
    assert message in done.stderr
    assert "internal" not in done.stderr
    assert redirection != "2>&-" or json.loads(done.stdout)["schema_version"] == 2


def test_a_process_of_its_own_ends_with_the_code(plan_file: Path) -> None:
    done = run_shell("partitioner show missing.json", plan_file.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(
        "error[plan]: cannot read the plan missing.json\n"
        "  because: no such file or directory\n"
        "  try: give the file that `partitioner plan … -o plan.json` wrote\n"
    )
