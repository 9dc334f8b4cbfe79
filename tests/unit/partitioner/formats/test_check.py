"""The check of another tool's configuration: legal, fitting, better ones; and the commands around it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import jsonschema
import pytest

from benchmarks.rooms import ROOT
from cost_models.cluster import ClusterSpec
from partitioner.cli import run_command
from partitioner.commands.formats import check, export
from partitioner.formats import megatron
from partitioner.formats.check import Checked, check_configuration, neighbours
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.tools import TOOLS, readers
from partitioner.planning.options import PlanOptions
from tests.support.formatted_plans import plan_of, small_gpt2

FIX = "pipeline=2 tensor=2 data=2 zero=1 microbatch=1 recompute=none"
SIZES = {"attention heads": 4}
SCHEMA = json.loads((ROOT / "docs/check.schema.json").read_text())


def checked(text: str, cluster: str = "H100-80GB:8", *, best: bool = False) -> Checked:
    machines = ClusterSpec.parse(cluster)
    understood = megatron.read(text, machines.world_size)
    return check_configuration(
        "run.sh",
        "Megatron-LM",
        understood,
        small_gpt2(),
        machines,
        PlanOptions(),
        SIZES,
        lambda what: nullcontext(),
        best=best,
    )


def test_what_a_plan_wrote_is_planned_as_the_same() -> None:
    plan = plan_of(FIX, "1f1b")
    found = checked(str(megatron.write(plan)))
    assert found.exit_code == 0
    assert found.plan is not None
    assert parallelism_of(found.plan) == parallelism_of(plan)
    assert found.plan.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)
    assert found.to_dict()["fits"] is True


@pytest.mark.parametrize(
    ("text", "cluster", "problem"),
    [
        ("--tensor-model-parallel-size 8 --global-batch-size 8", "H100-80GB:8", "does not divide the model's 4 att"),
        ("--micro-batch-size 1 --num-layers 12", "H100-80GB:8", "it says 12 layers, the model has 6"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*2|tL", "H100-80GB:8", "have 3 layers"),
        ("--tensor-model-parallel-size 4 --global-batch-size 8", "A100-40GB:2", "no multiple of tensor 4"),
    ],
)  # fmt: skip
def test_rules_that_are_broken_make_it_illegal(text: str, cluster: str, problem: str) -> None:
    found = checked(text, cluster)
    assert found.exit_code == 2
    assert any(problem in told for told in found.problems)
    assert found.plan is None
    assert "not legal" in str(found)
    jsonschema.validate(found.to_dict(), SCHEMA)


def test_what_would_be_better_is_planned_and_said() -> None:
    found = checked("--tensor-model-parallel-size 4 --global-batch-size 32", best=True)
    assert found.plan is not None
    assert found.best is not None
    assert found.best.prediction.step_seconds <= found.plan.prediction.step_seconds
    assert found.changes
    jsonschema.validate(found.to_dict(), SCHEMA)
    assert all(change.step_seconds < found.plan.prediction.step_seconds for change in found.changes)
    assert "best found" in str(found)


def test_neighbours_keep_devices_and_batch() -> None:
    p = Parallelism(pipeline=2, tensor=4, data=2, microbatch=2, microbatches=8)
    for words, changed in neighbours(p):
        assert (changed.world_size, changed.batch_size) == (p.world_size, p.batch_size), words


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, folder = tmp_path / "plan.json", tmp_path / "out"
    plan_of(FIX, "1f1b").save(plan)
    assert run_command(["export", str(plan), "--to", "megatron", "-o", str(folder)]) == 0
    written = folder / "megatron.args"
    assert "--tensor-model-parallel-size 2" in written.read_text()
    assert run_command(["export", str(plan), "--to", "megatron"]) == 0
    assert written.read_text() in capsys.readouterr().out
    model = ["--model", "gpt2", "--set", "size=tiny", "--set", "layers=6", "--cluster", "H100-80GB:8"]
    assert run_command(["check", str(written), *model, "--alone", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, SCHEMA)
    assert told["tool"] == "Megatron-LM"
    assert told["parallelism"]["pipeline"] == 2
    assert told["plan"]["step_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["export", "{plan}", "--to", "megatorn"], 'did you mean "megatron"?'),
        (["export", "{plan}.no", "--to", "megatron"], "no such file"),
        (["check", "{plan}", "--model", "gpt2", "--cluster", "H100-80GB:8"], "cannot tell which tool"),
        (["check", "{plan}.no", "--model", "gpt2", "--cluster", "H100-80GB:8"], "No such file"),
        (
            ["check", "{plan}", "--model", "gpt2", "--cluster", "H100-80GB:8", "--from", "x"],
            "there is no tool 'x'",
        ),
    ],
)
def test_bad_command_lines(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan_of(FIX, "1f1b").save(plan)
    assert run_command([argument.format(plan=plan) for argument in arguments]) == 2
    assert reason in capsys.readouterr().err


def test_the_help_names_every_tool() -> None:
    for words, names in ((export.__doc__, TOOLS), (check.__doc__, readers())):
        assert words is not None
        assert [name for name in names if name not in words] == []


def test_a_batch_is_given_where_the_file_says_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "distributed.json"
    file.write_text('{"tp_size": 2, "fsdp_size": 4}')
    model = ["--model", "gpt2", "--set", "size=tiny", "--set", "layers=6", "--cluster", "H100-80GB:8"]
    asked = ["check", str(file), "--from", "transformers", *model, "--alone", "--json"]
    assert run_command([*asked, "--batch-size", "32", "--microbatch", "2"]) == 0
    told = json.loads(capsys.readouterr().out)["parallelism"]
    assert (told["data"], told["microbatch"], told["microbatches"]) == (4, 2, 4)
    assert run_command([*asked, "--batch-size", "30"]) == 2
    assert "no multiple" in capsys.readouterr().err
