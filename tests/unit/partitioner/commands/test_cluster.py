"""``partitioner cluster``: what is printed, what is written, and what is refused before anything is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cost_models.cluster import ClusterSpec
from partitioner.cli import run_command
from tests.unit.cost_models.from_machines.forms import GPUS, full, matrix

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what two H100 print, the working directory."""
    (tmp_path / "topo.txt").write_text(matrix(full("NV18", 2)))
    (tmp_path / "gpus.csv").write_text(GPUS["units"][0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


FILES = ["--topo", "topo.txt", "--gpus", "gpus.csv"]


def test_what_is_written_is_what_is_printed_and_as_json(saved: Path, capsys: Capture) -> None:
    assert run_command(["cluster", *FILES]) == 0
    printed = capsys.readouterr().out
    assert run_command(["cluster", *FILES, "-o", "c.yaml"]) == 0
    assert capsys.readouterr().out == "2 devices written to c.yaml\n"
    assert Path("c.yaml").read_text() == printed
    assert run_command(["cluster", *FILES, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert ClusterSpec.from_dict({**data["cluster"], "name": "c"}) == ClusterSpec.load("c.yaml")
    assert data["sources"]["nodes[0].count"] == "topo.txt, line 1"
    assert data["missing"] == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--topo", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--topo", "topo.txt"], "cannot tell what the GPUs are"),
        ([*FILES, "--nodes", "2"], "cannot tell how fast the nodes reach each other"),
        ([*FILES, "--nodes", "0"], "cannot read --nodes"),
        ([*FILES, "--network", "InfiniBand-NDR"], "cannot read --network"),
        ([*FILES, "-o", "c.json"], "cannot write c.json"),
        ([*FILES, "-o", "nowhere/c.yaml"], "cannot write nowhere/c.yaml"),
    ],
)
def test_what_is_refused_writes_nothing(
    saved: Path, capsys: Capture, arguments: list[str], error: str
) -> None:
    assert (
        run_command(
            ["cluster", "-o", "c.yaml", *arguments] if "-o" not in arguments else ["cluster", *arguments]
        )
        == 2
    )
    assert error in capsys.readouterr().err
    assert sorted(path.name for path in saved.iterdir()) == ["gpus.csv", "topo.txt"]


SMI = """#!/bin/sh
case "$1" in topo) cat "$DATA/topo.txt";; *) cat "$DATA/gpus.csv";; esac
"""


def test_without_files_it_is_this_machine(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    script = saved / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(SMI)
    script.chmod(0o755)
    monkeypatch.setenv("DATA", str(saved))
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    assert run_command(["cluster"]) == 0
    text = capsys.readouterr().out
    assert "    count: 2  # `nvidia-smi topo -m`, line 1" in text
    assert "    host_memory: " in text
    script.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    assert run_command(["cluster"]) == 2
    assert "cannot run nvidia-smi topo -m\n  because: NVIDIA-SMI has failed" in capsys.readouterr().err
    script.unlink()
    monkeypatch.setenv("PATH", str(saved / "bin"))
    assert run_command(["cluster"]) == 2
    assert "because: nvidia-smi is not here" in capsys.readouterr().err
