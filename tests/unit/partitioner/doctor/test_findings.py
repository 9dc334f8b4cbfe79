"""The conclusions that are drawn from the facts about a machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import version

import pytest

from partitioner.cli import run_command
from partitioner.doctor import findings as looks
from partitioner.doctor.findings import NEEDED, OPTIONAL, MachineFacts, diagnose, gather

VERSIONS = dict.fromkeys(("python", "partitioner", *NEEDED, *OPTIONAL), "1.2.3")
GOOD = MachineFacts(
    versions=VERSIONS,
    untried=(),
    system="Linux x86_64",
    cores=16,
    memory_bytes=128 << 30,
    shared_memory_bytes=64 << 30,
    gpus=("NVIDIA H100", "NVIDIA H100"),
    gpu_build="13.0",
    planned_only=None,
    backends=("gloo", "nccl"),
    cxx="/usr/bin/g++",
    calibration="/root/.cache/partitioner/calibration.json",
    stale_calibration=None,
    loopback_problem="",
    port_problem="",
    torch_problem="",
    planning_problem="",
    planning_seconds=0.5,
)


def test_where_all_is_well_nothing_is_found() -> None:
    found = diagnose(GOOD)
    assert found.findings == ()
    assert found.can_plan
    text = str(found)
    assert "2 x NVIDIA H100; torch for CUDA or ROCm 13.0" in text
    assert "will not work" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gpus": (), "gpu_build": None},
            ("training on GPUs", "torch was built for CPUs only", "train where"),
        ),
        ({"planned_only": "rocm"}, ("plans on the rocm devices", "CUDA GPUs and CPUs alone", "run --local")),
        ({"gpus": ()}, ("training on GPUs", "nvidia-smi", "run --local")),
        (
            {"untried": ("torch 2.16.0 was not tried; known good: 2.11 to 2.14",)},
            ("something, perhaps", "torch 2.16.0 was not tried", "where something fails"),
        ),
        ({"backends": ("gloo",)}, ("training on several GPUs", "no NCCL", "CUDA")),
        ({"backends": ("nccl",)}, ("verify, and run --local", "no Gloo", "pypi.org")),
        ({"calibration": None}, ("local:N", "was not measured", "partitioner calibrate")),
        (
            {"calibration": None, "stale_calibration": "c.json"},
            ("local:N", "c.json is of another", "calibrate"),
        ),
        ({"cores": 1}, ("side by side", "one core", "measure elsewhere")),
        ({"shared_memory_bytes": 64 << 20}, ("NCCL", "64.0 MiB", "--shm-size")),
        ({"cxx": None}, ("compile=True", "no C++ compiler", "$CXX")),
        ({"loopback_problem": "refused"}, ("run --local", "127.0.0.1", "firewall")),
        ({"port_problem": "Address already in use"}, ("launch command", "29500", "--master-port")),
        ({"versions": {**VERSIONS, "transformers": None}}, ("hf:", "not installed", "partitioner[hf]")),
    ],
    ids=lambda value: ",".join(value),
)
def test_what_will_not_work_is_said_with_a_way_out(
    changes: dict[str, object], words: tuple[str, ...]
) -> None:
    found = diagnose(replace(GOOD, **changes))  # type: ignore[arg-type]
    (finding,) = found.findings
    for part, word in zip((finding.what, finding.because, finding.suggestion), words, strict=True):
        assert word in part
    assert found.can_plan
    told = str(found)
    assert max(map(len, told.splitlines())) <= 80
    assert f"- {finding.what}" in told


def test_without_torch_one_thing_is_said() -> None:
    versions = {**VERSIONS, "torch": None}
    found = diagnose(
        replace(
            GOOD,
            versions=versions,
            torch_problem="ImportError: x",
            planning_problem="ImportError: x",
            gpus=(),
        )
    )
    assert not found.can_plan
    assert [finding.because for finding in found.findings] == [
        "torch missing",
        "torch cannot be imported: ImportError: x",
    ]


def test_the_facts_of_this_machine() -> None:
    found = diagnose(gather())
    assert found.can_plan, found.facts.planning_problem
    assert found.facts.versions["torch"] == version("torch")
    assert "gloo" in found.facts.backends
    assert found.facts.loopback_problem == ""
    assert json.loads(json.dumps(found.to_dict()))["facts"]["cores"] == found.facts.cores


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("ModelError: no", 1)])
def test_the_exit_code_says_whether_planning_works(
    problem: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = replace(GOOD, planning_problem=problem)
    monkeypatch.setattr("partitioner.commands.doctor.gather", lambda: facts)
    assert run_command(["doctor", "--json"]) == code
    data = json.loads(capsys.readouterr().out)
    assert data["can_plan"] == (code == 0)
    assert data["facts"] == json.loads(json.dumps(asdict(facts)))


def test_a_port_in_use_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert looks._port_problem(server.getsockname()[1]) != ""


def test_versions_are_told_without_importing_torch() -> None:
    code = "import partitioner.cli as cli, sys; cli.run_command(['--version']); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith(
        f"partitioner {version('partitioner')}, torch {version('torch')}, Python 3."
    )
