"""What every bad input gets: the exit code and the text, as one table. Runs the command line in this process.

Each row: the command (NET is a small model that is right, PLAN a plan made for it, words with a suffix are files of
``files()``), the exit code, and texts that stderr must hold; the first is the line after ``error[kind]:``.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError, UsageError
from partitioner import Workload, partition
from partitioner.cli import run_command
from tests.support import bad_workloads
from tests.support.bad_workloads import Net, NoLoss, batch, net

WORKLOADS = Path(bad_workloads.__file__)
GOOD = "--cluster local:2 --batch-size 8"

Case = tuple[str, int, tuple[str, ...]]

FLAGS: list[Case] = [
    ("frobnicate", 2, ("error[usage]: cannot read the command line", 'Unknown command "frobnicate"')),
    ("plan", 2, ("error[usage]: cannot read the command line", "MODEL requires", "partitioner plan --help")),
    ("plan NET --batch-size 8", 2, ("cannot read the command line", "--cluster requires an argument")),
    ("plan NET --cluster local:2", 2, ("cannot read the command line", "--batch-size requires an argument")),
    (f"plan NET {GOOD} --bath-size 4", 2, ("Unknown option: --bath-size. Did you mean --batch-size?",)),
    (f"plan NET {GOOD} surplus", 2, ("more arguments than it takes: surplus", "try: partitioner plan MODEL")),
    ("graph NET -o g.svg", 2, ("Unknown option: -o", "[OPTIONS] > FILE")),
    ("plan NET --cluster local:2 --batch-size 0", 2, ("the batch size is 0, expected 1 to",)),
    ("plan NET --cluster local:2 --batch-size -8", 2, ("the batch size is -8, expected 1 to",)),
    ("plan NET --cluster local:2 --batch-size 2.5", 2, ("--batch-size: '2.5' is not a whole number",)),
    ("plan NET --cluster local:2 --batch-size eight", 2, ("--batch-size: 'eight' is not a whole number",)),
    ("plan NET --cluster local:2 --batch-size 9999999999999", 2, ("expected 1 to 1,073,741,824 samples",)),
    (
        f"plan NET {GOOD} --microbatches 9",
        2,
        ("error[usage]: cannot cut a batch of 8 into 9 micro-batches", "try: use at most 8 micro-batches"),
    ),
    (f"plan NET {GOOD} --microbatches 0", 2, ("'0' is neither auto nor a number from 1 up",)),
    (f"plan NET {GOOD} --microbatches many", 2, ("'many' is neither auto nor a number from 1 up",)),
    (
        f"plan NET {GOOD} --schedule 2f2b --strategy magic --optimizer-memory lion --min-stages 0 --max-stages 0 "
        "--time-limit 0",
        2,
        (
            "error[usage]: cannot plan with these options",
            "because: strategy 'magic' is not one of: layer",
            "because: schedule '2f2b' is not one of: auto, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, list",
            "because: optimizer memory 'lion' is not one of: none, sgd, momentum, adam, adamw",
            "because: min_stages is 0, expected 1 or more",
            "because: max_stages is 0, expected 1 or more",
            "because: the time limit is 0.0, expected more than 0 seconds",
        ),
    ),
    (f"plan NET {GOOD} --min-stages 2 --max-stages 1", 2, ("min_stages is 2, more than max_stages, 1",)),
    (
        f"plan NET {GOOD} --min-stages 3",
        4,
        (
            "error[infeasible]: no layer-wise plan uses 3 devices",
            "the cluster has 2",
            "min_stages=2 uses all",
        ),
    ),
    (f"plan NET {GOOD} --time-limit -1", 2, ("the time limit is -1.0, expected more than 0 seconds",)),
    (f"plan NET {GOOD} --time-limit nan", 2, ("the time limit is nan, expected more than 0 seconds",)),
    (f"plan NET {GOOD} --risk abc", 2, ("cannot read --risk", "'abc' is no chance such as 5% or 0.05")),
    (f"plan NET {GOOD} --risk 0", 2, ("the risk is 0.0, expected a chance of more than 0 and at most 1",)),
    (f"plan NET {GOOD} --risk 120%", 2, ("the risk is 1.2, expected a chance of more than 0 and at most 1",)),
    (f"plan NET {GOOD} --seq 128", 2, ("the settings do not fit the model", "seq is no parameter")),
    (f"plan NET {GOOD} --set width", 2, ("error[usage]: cannot read --set", "'width' is not key=value")),
    (f"plan NET {GOOD} --set width=wide", 2, ("width=wide: expected int", "with: width (int)")),
    (f"plan NET {GOOD} --set widht=4", 2, ("widht is no parameter", "with: width (int)")),
    (f"plan NET {GOOD} --set width=4 --set width=5", 2, ("cannot read --set", "width is given twice")),
    (f"plan NET {GOOD} --precision bf16", 2, ("cannot read --precision", "'bf16' is not key=value")),
    (
        f"plan NET {GOOD} --precision compute=int8,mast=fp32",
        2,
        ("compute='int8' is not", "'mast' is not one"),
    ),
    (f"plan NET {GOOD} --precision compute=fp16", 2, ("in float16 without a loss scale", "loss_scale=")),
    (f"plan NET {GOOD} --pin first", 2, ("cannot read --pin", "'first' is not GLOB=LAYOUT")),
    (f"plan NET {GOOD} --pin first=one", 2, ("'one' is not R, P, or S and a dimension",)),
    (
        f"plan NET {GOOD} --strategy layer --pin first=one",
        2,
        ("'first=one': the stage 'one' is not a number from 0 up",),
    ),
    (f"plan NET {GOOD} --pin first=0 --pin first=1", 2, ("'first' is pinned to stage 0 and to stage 1",)),
    (f"plan NET {GOOD} --pin third=0", 2, ("'third' matches no module path and no op", "for 'third': first")),
    (f"plan NET {GOOD} --pin first=1 --pin second=0", 2, ("reads from linear ('first', stage 1)",)),
    (
        f"plan NET {GOOD} --pin second=9",
        4,
        ("error[infeasible]:", "no split obeys the pins", "try: other pins"),
    ),
    (
        f"plan NET {GOOD} -o nowhere/plan.json",
        2,
        ("cannot write nowhere/plan.json", "there is no folder nowhere"),
    ),
    (f"plan NET {GOOD} -o .", 2, ("error[usage]: cannot write .", "because: . is a folder")),
]

CLUSTERS: list[Case] = [
    ("local:0", 2, ("error[cluster]: cannot make a cluster of 0 workers", "expected 1 to 65536")),
    ("local", 2, ('error[cluster]: cannot read the cluster "local"', 'as in "local:2"')),
    ("dgx-h1000:2", 2, ('there is no cluster "dgx-h1000:2" (did you mean "dgx-h100"?)', "dgx-h100:2")),
    ("missing.yaml", 2, ("error[cluster]: cannot read missing.yaml", "No such file or directory")),
    (".", 2, ("error[cluster]: cannot read .", "Is a directory")),
    ("empty.yaml", 2, ("empty.yaml has 1 problem", "expected a mapping with nodes, got nothing")),
    ("torn.yaml", 2, ("error[cluster]: torn.yaml is not valid YAML", "line 1, column 2")),
    ("binary.yaml", 2, ("cannot read binary.yaml", "it is not UTF-8 text (byte 0)")),
    (
        "wrong.yaml",
        2,
        (
            "error[cluster]: wrong.yaml has 3 problems",
            'nodes[0].count: expected a whole number, got "two" (line 3)',
            'nodes[0].device.memory: expected a size such as "80GiB", got "big" (line 3)',
            "colour: unknown key; expected one of version, name, nodes",
        ),
    ),
    ("huge.yaml", 2, ("nodes[0].count: expected a number of at most 65536, got 1000000000",)),
    (
        "small.yaml",
        4,
        (
            "error[infeasible]: Net fits small by no strategy",
            "has 1.00 MiB",
            "try: devices with more memory",
        ),
    ),
]

SHARD = f"plan NET {GOOD} --strategy feature"

SHARDINGS: list[Case] = [
    (f"{SHARD} --pin nothing=S0", 2, ("cannot use these pins", "'nothing' matches no parameter, batch leaf")),
    (f"{SHARD} --pin frist.weight=S0", 2, ("(there is first.weight",)),
    (
        f"{SHARD} --pin second.weight=S0",
        2,
        (
            "error[usage]: no mesh allows these pins",
            "on a mesh of 2: second.weight cannot be S0",
            "sizes are (3, 8)",
        ),
    ),
    (f"{SHARD} --pin first.weight=S5", 2, ("first.weight cannot be S5", "its sizes are (8, 4)")),
    (f"{SHARD} --pin first.weight=P", 2, ("whole or split, never a part of a sum",)),
    (f"{SHARD} --pin first.weight=Q", 2, ("cannot read the layout 'Q'", '"S0" on a mesh of one axis')),
    (f"{SHARD} --pin first.weight=", 2, ("cannot read the layout ''", "because: it is empty")),
    (f"{SHARD} --pin first.weight=S0,R", 2, ("cannot be S0 R", "the mesh has 1 axis", "mesh=")),
    (
        f"{SHARD} --pin first.weight=S0,R --mesh 2",
        2,
        (
            "pin 'first.weight': 'S0 R' names 2 placements, the mesh has 1 axis",
            "try: one placement per mesh axis",
        ),
    ),
    (f"{SHARD} --pin first=S0 --pin first=S1", 2, ("'first' is pinned to layout S0 and to layout S1",)),
    (
        f"{SHARD} --pin first.weight=S0 --pin first.*=S1",
        2,
        ("first.weight", "'first.weight' (S0) and 'first.*' (S1)"),
    ),
    (f"{SHARD} --pin first", 2, ("cannot read --pin", "'first' is not GLOB=LAYOUT")),
    (f"{SHARD} --mesh 3", 2, ("cannot use the mesh 3", "it has 3 devices, the cluster 2", "try: 2")),
    (
        "plan NET --cluster dgx-h100:8 --batch-size 8 --strategy feature --mesh 8x4",
        2,
        ("cannot use the mesh 8×4", "it has 32 devices, the cluster 64", "try: 64, 8x8, 4x16"),
    ),
    (f"{SHARD} --mesh 1x1x1x2", 2, ("it has 4 axes, expected 1 to 3",)),
    (f"{SHARD} --mesh two", 2, ("cannot read --mesh", "'two' is not sizes such as 8x4")),
    (
        f"{SHARD} --microbatches 3",
        2,
        (
            "cannot train Net feature-wise on 8 samples in 3 micro-batches",
            "because: its micro-batches have equally many samples, and 3 does not divide 8",
            "try: 1 or 2 or 4 micro-batches",
        ),
    ),
    (
        "plan NET --cluster local:2 --batch-size 8 --strategy hybrid --fix 'pipelin=2 zero=2'",
        2,
        (
            "error[usage]: cannot read what is fixed",
            "'pipelin' cannot be fixed (did you mean pipeline?)",
            "zero=1 splits what is summed",
        ),
    ),
    (
        "plan NET --cluster local:2 --batch-size 8 --strategy hybrid --fix groups=1,5",
        2,
        ("error[usage]: cannot arrange 2 devices so", "1 + 5 = 6 devices, there are 2"),
    ),
    (
        f"{SHARD} --schedule gpipe --min-stages 2 --max-stages 2",
        2,
        (
            "error[usage]: cannot plan with these options",
            "because: schedule='gpipe' is about stages",
            "because: min_stages=2 is about stages",
            "because: max_stages=2 is about stages",
        ),
    ),
    (
        f"plan NET {GOOD} --strategy layer --mesh 2",
        2,
        ('mesh= arranges the devices of strategy "feature"',),
    ),
    (f"plan NET {GOOD} --strategy layer --pin first=S0", 2, ("the stage 'S0' is not a number",)),
    (f"plan NET {GOOD} --pin first=0 --pin second.weight=S0", 2, ("cannot read the layout '0'",)),
    (
        f"plan NET {GOOD} --mesh 2 --min-stages 2 --pin first=0",
        2,
        (
            "mesh=(2,) is for strategy feature; no strategy knows all that is given",
            "min_stages=2 is for strategy layer;",
            "pin 'first': 0 is for strategy layer or free;",
        ),
    ),
    (
        "plan NET --cluster small.yaml --batch-size 8 --strategy feature",
        4,
        (
            "error[infeasible]: Net does not fit feature-wise on small",
            "because: rank 0 (H100-80GB) has 1.00 MiB, and every sharding needs",
            "because: parameters, gradients and adamw state are",
            "or more devices of this size, or an optimizer with less state",
            'try: strategy "layer"',
        ),
    ),
    (
        "plan NET --cluster small.yaml --batch-size 8 --strategy auto",
        4,
        (
            "error[infeasible]: Net fits small by no strategy",
            "because: hybrid: ",
            "because: free: ",
        ),
    ),
    (
        "explain PLAN nosuch",
        2,
        ("there is no op, parameter or module 'nosuch' to explain", "the plan is for Net with 6 ops"),
    ),
    (
        "explain PLAN frist --model NET",
        2,
        ("there is no op, parameter or module 'frist'", "did you mean first"),
    ),
    ("explain missing.json linear", 2, ("error[plan]: cannot read the plan missing.json",)),
    ("explain PLAN", 2, ("cannot read the command line", "NAME requires an argument")),
    ("explain sharded.json linear", 2, ("cannot explain linear without the model", "`--model`")),
    (
        "explain sharded.json lienar --model NET",
        2,
        ("there is no op, parameter or input 'lienar'", "did you mean linear"),
    ),
    (
        "explain sharded.json first --model NET",
        2,
        ("'first' is a module of 3 ops and parameters", "explain linear"),
    ),
    ("explain sharded.json linear --model NET --set width=10", 2, ("the plan for Net does not fit Net",)),
    ("explain wrongway.json linear --model NET", 2, ("runs 1 ops in ways that would give other numbers",)),
    ("verify wrongway.json NET", 2, ("runs 1 ops in ways that would give other numbers",)),
    ("graph NET --rank 0", 2, ("cannot draw what rank 0 runs", "no plan was given", "--plan PLAN")),
    (
        "graph NET --plan sharded.json --rank 2",
        2,
        ("there is no graph of rank 2", "the plan uses 2 devices: 0-1"),
    ),
    ("graph NET --format text", 2, ("cannot draw this as text", "--rank N")),
    ("graph PLAN --rank 0", 2, ("cannot draw the plan plan.json with --rank",)),
]

MODELS: list[Case] = [
    ("gpt5", 2, ("error[usage]: there is no model 'gpt5'", "try: gpt2?", "bundled models: gpt2 llama-1b")),
    ("WORKLOADS", 2, ("there is no model", "bad_workloads.py:FACTORY, naming a function in that file")),
    ("missing.py:net", 2, ("error[usage]: there is no file missing.py",)),
    ("WORKLOADS:nett", 2, ("has no function 'nett'", "bad_workloads.py:net")),
    ("WORKLOADS:not_callable", 2, ("has no function 'not_callable'",)),
    ("no.such.module:net", 2, ("cannot load 'no.such.module:net'", "No module named 'no'")),
    ("hf:missing/config.json", 2, ("error[usage]: cannot read missing/config.json",)),
    ("hf:list.json", 2, ("list.json is no Hugging Face config", "it has no model_type")),
    ("imports.py:net", 3, ("error[model]: imports.py cannot be imported", "No module named 'nosuchpackage'")),
    ("syntax.py:net", 3, ("error[model]: syntax.py cannot be imported", "SyntaxError")),
    ("script.py:net", 3, ("error[model]: script.py cannot be imported", "SystemExit: usage: me")),
    ("WORKLOADS:raises", 3, ("raises failed", "RuntimeError: no such data set")),
    ("WORKLOADS:exits", 3, ("exits failed", "SystemExit: usage: train.py DATA")),
    ("WORKLOADS:wrong_type", 3, ("returned Net, not a Workload", "return Workload(model, example_inputs")),
    ("WORKLOADS:required", 2, ("width has no default and was not given", "--set key=value")),
    ("WORKLOADS:not_a_module", 2, ("a torch.nn.Module, a Workload or the result of partitioner.trace()",)),
    ("WORKLOADS:no_loss", 3, ("error[model]: the model returns no loss", "try: pass loss_fn(output, batch)")),
    ("WORKLOADS:vector_loss", 3, ("loss_fn does not return a loss", "try: return loss.mean()")),
    ("WORKLOADS:integer_loss", 3, ("a loss is one floating-point number", "torch.int64")),
    ("WORKLOADS:loss_raises", 3, ("error[model]: cannot trace NoLoss", "bad_workloads.py:", "IndexError")),
    ("WORKLOADS:branch", 3, ("cannot trace Branch", "if x.sum() > 0", "try: choose with torch.where")),
    ("WORKLOADS:fixed_batch", 3, ("no batch dimension found", "fixes x at 4")),
    ("WORKLOADS:missing_input", 3, ("Net.forward needs y, which the batch does not have",)),
    ("WORKLOADS:wrong_shape", 3, ("cannot trace Net", "in module 'first' (Linear)")),
    ("WORKLOADS:no_tensors", 3, ("cannot trace Net", "example_inputs holds no tensor")),
    ("WORKLOADS:no_batch", 3, ("no tensor of the batch has a batch dimension", "x has shape ()")),
]

PLANS: list[Case] = [
    ("show missing.json", 2, ("error[plan]: cannot read the plan missing.json", "no such file", "try: give")),
    ("show .", 2, ("error[plan]: cannot read the plan .", "is a directory")),
    ("show empty.yaml", 2, ("error[plan]: cannot read the plan empty.yaml", "it is empty")),
    ("show binary.yaml", 2, ("error[plan]: cannot read the plan binary.yaml", "byte 0 is not UTF-8 text")),
    ("show wrong.yaml", 2, ("error[plan]: wrong.yaml is not JSON", "line 1, column 1")),
    ("show half.json", 2, ("error[plan]: half.json is not JSON", "the file ends there: it was cut off")),
    ("show cluster.json", 2, ("error[plan]: cluster.json is not a plan", "it has no schema_version")),
    ("show future.json", 2, ("future.json is a plan of another version", "try: update partitioner")),
    ("show edited.json", 2, ("edited.json is not a valid plan", "batch_size: input should be", "got 0")),
    ("diff PLAN", 2, ("cannot read the command line", "SECOND requires an argument")),
    ("simulate PLAN --width 0", 2, ("cannot draw a timeline 0 columns wide", "expected 10 to 10,000")),
    ("simulate PLAN --trace nowhere/t.json", 2, ("cannot write nowhere/t.json",)),
    ("simulate PLAN --ranks 0", 2, ("--ranks is for the trace", "add --trace FILE")),
    (
        "simulate PLAN --trace t.json --ranks 0,9,3-1,x",
        2,
        ("there is no rank 9", "'3-1' is no rank", "'x' is no rank"),
    ),
    ("graph PLAN --plan PLAN", 2, ("cannot draw the plan", "these are for drawing a model")),
    ("graph NET --format pdf", 2, ("cannot read the command line", '"dot", "svg", "json"')),
    ("graph NET --plan missing.json", 2, ("error[plan]: cannot read the plan missing.json",)),
    (
        "verify PLAN NET --set width=9",
        2,
        (
            "error[plan]: the plan for Net does not fit Net",
            "because: fingerprint",
            "because: the model has 75 parameters, the plan's 67",
            "try: plan this model anew",
        ),
    ),
    ("graph NET --plan PLAN --set width=9", 2, ("the plan for Net does not fit Net",)),
    ("verify PLAN WORKLOADS:no_loss", 3, ("error[model]: the model returns no loss",)),
    ("verify PLAN NET --timeout 0", 2, ("--timeout is 0, expected more than 0 seconds",)),
    ("run PLAN NET --steps 0", 2, ("error[usage]: cannot run with these options", "--steps is 0")),
    (
        "run PLAN NET --steps 1 --timeout -1 --learning-rate nan",
        2,
        ("--learning-rate is nan, expected 0 or more", "--timeout is -1, expected more than 0 seconds"),
    ),
    ("run PLAN NET --steps 2", 2, ("cannot run the plan outside torchrun", "try: torchrun --standalone")),
]

CASES = [
    *FLAGS,
    *((f"plan NET --cluster {name} --batch-size 8", code, texts) for name, code, texts in CLUSTERS),
    *((f"plan {name} {GOOD}", code, texts) for name, code, texts in MODELS),
    *PLANS,
    *SHARDINGS,
]


def files(folder: Path) -> None:
    """The bad files of the table."""
    (folder / "empty.yaml").write_text("")
    (folder / "torn.yaml").write_text("{]")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    node = "name: n, count: {}, device: {{preset: H100-80GB, memory: {}, memory_process: 0B}}, links: {{default: NVLink4}}"
    (folder / "wrong.yaml").write_text(f"version: 1\ncolour: red\nnodes: [{{{node.format('two', 'big')}}}]\n")
    (folder / "huge.yaml").write_text(f"version: 1\nnodes: [{{{node.format(10**9, '80GB')}}}]\n")
    (folder / "small.yaml").write_text(f"version: 1\nnodes: [{{{node.format(2, '1MiB')}}}]\n")
    (folder / "list.json").write_text("[1]")
    (folder / "imports.py").write_text("import nosuchpackage")
    (folder / "syntax.py").write_text("def net(:")
    (folder / "script.py").write_text("import sys; sys.exit('usage: me')")
    plan = partition(net(), ClusterSpec.local(2), batch_size=8, strategy="layer").to_dict()
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "half.json").write_text(json.dumps(plan)[:1500])
    sharded = partition(net(), ClusterSpec.local(2), batch_size=8, strategy="feature").to_dict()
    (folder / "sharded.json").write_text(json.dumps(sharded))
    sharded["stages"][0]["sharding"]["choices"]["linear"] = ["S0 S0 R -> S0"]
    (folder / "wrongway.json").write_text(json.dumps(sharded))
    (folder / "cluster.json").write_text(json.dumps(plan["cluster"]))
    (folder / "future.json").write_text(json.dumps({**plan, "schema_version": 3}))
    (folder / "edited.json").write_text(json.dumps({**plan, "batch_size": 0}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    files(made)
    return made


def arguments(command: str) -> list[str]:
    """The row's command with its words in capitals filled in."""
    text = (
        command.replace("NET", "WORKLOADS:net")
        .replace("WORKLOADS", str(WORKLOADS))
        .replace("PLAN", "plan.json")
    )
    return shlex.split(text)


@pytest.mark.parametrize(("command", "code", "texts"), CASES, ids=[case[0] for case in CASES])
def test_a_bad_input_gets_its_error(
    command: str,
    code: int,
    texts: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RANK", raising=False)
    before = [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"]
    given = arguments(command)
    if command.startswith("plan") and "small.yaml" in command:
        given += ["--set", "width=50000"]
    assert run_command(given) == code
    out, err = capsys.readouterr()
    assert out == ""
    for text in texts:
        assert text in err
    assert "Traceback" not in err
    assert "error[internal]" not in err
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 40
    assert len({case[0] for case in CASES}) == len(CASES)


def test_with_json_an_error_is_one_json_object(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for command in (
        f"plan NET {GOOD} --schedule x",
        "show missing.json",
        "show",
        f"plan WORKLOADS:raises {GOOD}",
    ):
        code = run_command([*arguments(command), "--json"])
        out, err = capsys.readouterr()
        found = json.loads(out)
        assert found["exit_code"] == code
        assert found["error"]["kind"] in ("usage", "plan", "model")
        assert found["error"]["because"]
        assert f"error[{found['error']['kind']}]" in err


def test_tracebacks_only_with_debug(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert run_command([*arguments(f"plan WORKLOADS:raises {GOOD}"), "--debug"]) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert 'raise RuntimeError("no such data set")' in err


# --------------------------------------------------------------------------------------------------
# The same from Python

TWO = ClusterSpec.local(2)
X = {"x": torch.zeros(4, 4)}
MISUSES: list[tuple[dict[str, Any], str]] = [
    ({"model": "gpt2"}, "cannot partition a str"),
    ({"model": Net}, "cannot partition a type"),
    ({"model": Net()}, "no example inputs were given"),
    ({"model": NoLoss(), "example_inputs": X}, "returns no loss"),
    ({"cluster": "local:2"}, "cannot plan for a cluster of type str"),
    ({"batch_size": 0}, "the batch size is 0"),
    ({"batch_size": True}, "the batch size is True"),
    ({"batch_size": 8.0}, "the batch size is 8.0"),
    ({"microbatches": "8"}, "the number of micro-batches is '8'"),
    ({"batch_size": 4, "microbatches": 5}, "cannot cut a batch of 4 into 5 micro-batches"),
    ({"microbatches": 5}, "cannot cut a batch of 4 into 5 micro-batches"),
    ({"pins": {"first": "0"}}, "cannot read the layout '0'"),
    ({"pins": {"first": "0"}, "strategy": "layer"}, "pin 'first': the stage '0' is not a number"),
    ({"pins": {"first": 1.5}}, "pin 'first': 1.5 is neither a number nor a layout"),
    ({"pins": {"first": -1}}, "stages start at 0"),
    ({"pins": [1]}, "pins is [1], expected places by name"),
    ({"pins": {1: 0}}, "pin 1: expected a text"),
    ({"time_limit_seconds": float("inf")}, "the time limit is inf"),
    ({"strategy": "auto", "schedule": "none"}, "schedule 'none' is not one of"),
    ({"strategy": "hybrid", "min_stages": 2}, "strategy 'hybrid' has its own way"),
    ({"strategy": "hybrid", "mesh": (2,)}, "strategy 'hybrid' has none"),
    (
        {"mesh": (2,), "objective": "latency"},
        "objective='latency' is for strategy free; no strategy knows all",
    ),
    ({"batch_dims": {"z": 0}}, "z"),
]


@pytest.mark.parametrize(("options", "text"), MISUSES, ids=[text for _, text in MISUSES])
def test_misuse_from_python_is_refused(options: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"model": Workload(Net(), batch()), "cluster": TWO, **options}
    model, cluster = given.pop("model"), given.pop("cluster")
    with pytest.raises(PartitionerError) as caught:
        partition(model, cluster, **given)
    assert text in str(caught.value)


def test_a_trace_cannot_be_deployed() -> None:
    from partitioner import trace

    workload = net()
    plan = partition(workload, TWO, batch_size=8, strategy="layer")
    with pytest.raises(UsageError, match="weights are needed"):
        plan.deploy(trace(workload.model, workload.example_inputs))
