"""``partitioner fit``, and ``plan`` on several clusters: what fits, what it costs, in which order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from partitioner import Plan, Workload
from partitioner.cli import run_command
from partitioner.largest_fit import OF_PLAN, OF_TRACE
from partitioner.planning.option_table import OPTIONS

NET = f"{Path(__file__)}:net"
MLP = f"{Path(__file__).parents[4]}/examples/mlp.py:mlp"
Capture = pytest.CaptureFixture[str]


class Net(nn.Module):
    """A recurrence without state: each token's activations are kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.second(torch.sin(self.first(x)))).square().mean()


def net(width: int = 16, seq: int = 128) -> Workload:
    """Build a model that no test file but this one plans."""
    return Workload(Net(width), torch.randn(2, seq, width), name="net")


def test_plan_and_fit_take_the_same_options(capsys: Capture) -> None:
    """In Python too; in their words, but for the defaults of the batch and of its micro-batches."""
    shown: list[dict[str, str]] = []
    for command in ("plan", "fit"):
        assert run_command([command, "--help"]) == 0
        text = re.sub(r"[│\n] *", " ", capsys.readouterr().out)
        rows = re.findall(r"--([a-z-]+) (.*?)(?= --[a-z]| ╰)", re.sub(" +", " ", text))
        shown.append(
            {name: re.sub(r" \[(default: (1|auto)|required)\]", "", says).strip() for name, says in rows}
        )
    names = {(option.flag or option.name).replace("_", "-") for option in OPTIONS}
    plan, fit = ({name: rows.get(name) for name in names} for rows in shown)
    assert None not in plan.values()
    assert plan == fit
    assert {option.name for option in OPTIONS} <= {*OF_PLAN, *OF_TRACE}


def cluster(folder: Path, name: str, usd: float | None, flops: float = 1e9, memory: str = "4MiB") -> str:
    """Write a file of one device and return its path. ``usd``: per hour."""
    device = {"kind": "cpu", "memory": memory, "memory_bandwidth": flops, "flops": {"float32": flops}}
    node = {"name": name, "device": device, **({} if usd is None else {"usd_per_hour": usd})}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"name": name, "nodes": [node]}))
    return str(file)


def printed(capsys: Capture, *arguments: str, code: int = 0) -> str:
    assert run_command([*arguments, "--quiet"]) == code
    return capsys.readouterr().out


def offers(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(printed(capsys, *arguments, "--json"))["offers"]
    return found


def test_models_and_numbers_of_devices_are_a_row_each(tmp_path: Path, capsys: Capture) -> None:
    machines = "--cluster", cluster(tmp_path, "small", None, memory="1MiB"), "--cluster", "local:1,2"
    rows = offers(capsys, "fit", NET, MLP, *machines, "--most", "64")
    assert [row["model"] for row in rows] == ["net"] * 3 + ["mlp"] * 3
    assert [row["devices"] for row in rows] == [1, 1, 2] * 2
    assert [row["more_may_fit"] for row in rows[1:3]] == [True, True]
    assert (rows[0]["batch_size"] + 1, None) == (rows[0]["nothing_found_at"], rows[1]["nothing_found_at"])
    assert rows[0]["batch_size"] < 64
    assert rows[0]["peak_memory_bytes"] <= rows[0]["memory_bytes"]


def test_the_table_says_what_does_not_fit(tmp_path: Path, capsys: Capture) -> None:
    tiny, small = cluster(tmp_path, "tiny", None, memory="1MiB"), cluster(tmp_path, "small", None)
    call = ["fit", NET, "--set", "width=200", "--cluster"]
    text = printed(capsys, *call, tiny, "--cluster", small)
    assert text.startswith("net: 80,400 parameters, 314 KiB\n")
    assert "tiny does not fit: " in text
    assert "short" in text
    assert "    try: " in text
    assert "does not fit" in printed(capsys, *call, tiny, code=4)


def test_sequences_are_as_long_as_batches_are_large(tmp_path: Path, capsys: Capture) -> None:
    """Of a model that treats tokens alike: one sample of n · 128 tokens is as large as n samples of 128."""
    machine = "--cluster", cluster(tmp_path, "small", None)
    (batch,) = offers(capsys, "fit", NET, *machine)
    (sequence,) = offers(capsys, "fit", NET, *machine, "--largest", "sequence")
    assert sequence["batch_size"] == 1
    assert sequence["sequence"] == 128 * batch["batch_size"]
    assert "nothing was found that fits" in printed(capsys, "fit", NET, *machine)
    most = printed(capsys, "fit", NET, *machine, "--largest", "sequence", "--most", "1024")
    assert ("sequence" in most, "nothing was found" in most) == (True, False)


def test_what_to_rent(tmp_path: Path, capsys: Capture) -> None:
    """The second is twice as fast for three times the price; the third has no price."""
    files = [
        cluster(tmp_path, "cheap", 1.0),
        cluster(tmp_path, "fast", 3.0, flops=2e9),
        cluster(tmp_path, "ours", None, flops=0.5e9),
    ]
    call = ["plan", NET, "--batch-size", "8", *(word for file in files for word in ("--cluster", file))]
    assert [row["cluster"] for row in offers(capsys, *call)] == ["fast", "cheap", "ours"]
    rows = offers(capsys, *call, "--objective", "usd")
    assert [row["cluster"] for row in rows] == ["cheap", "fast", "ours"]
    dollars = 1.0 / 3600 * rows[0]["step_seconds"] / 8 * 1e6
    assert rows[0]["usd_per_million_samples"] == pytest.approx(dollars)
    assert rows[2]["usd_per_million_samples"] is None
    best = tmp_path / "best.json"
    assert "$/M samples" in printed(capsys, *call, "--objective", "usd", "-o", str(best))
    assert Plan.load(best).cluster.name == "cheap"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit", "--cluster", "local:1"], "no MODEL is given"),
        (["fit", NET, "--cluster", "local:1", "--largest", "model"], "neither batch nor sequence"),
        (["fit", NET, "--cluster", "local:1", "--most", "0"], "most is 0, expected 1 or more"),
        (["fit", NET, "--cluster", "local:1", "--largest", "sequence", "--seq", "8"], "--seq 8 gives it"),
        (["fit", NET, "--cluster", "local:1", "--most", "8", "--step", "16"], "the smallest size is 16"),
        (["fit", NET, "--cluster", "RTX4090:0,1"], "as in NAME:2"),
        (["fit", NET, "--cluster", "local:1", "--objective", "usd"], "none of local:1 has a price"),
        (["plan", NET, "--batch-size", "8", "--cluster", "local:1,2", "--timings"], "of one plan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_said(arguments: list[str], said: str, capsys: Capture) -> None:
    assert run_command(arguments) == 2
    assert said in capsys.readouterr().err
