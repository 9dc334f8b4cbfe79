"""The tables of docs/how-to/what-fits.md: what ``partitioner fit`` and ``plan --objective usd`` find, stored and checked.

    python -m benchmarks.what_fits                  run all commands, minutes each; write benchmarks/data/what_fits.json
    python -m benchmarks.what_fits cnns llama       these alone
    python -m benchmarks.make_docs --files          the page, from what is stored

Each row is checked before it is stored: its peak is within the memory and its chance within the risk by the simulation, and
with the next size nothing was found that fits, or none was looked for.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from cost_models.units import format_bytes, format_seconds
from partitioner.planning.options import RISK

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks/data/what_fits.json"
PAGE = ROOT / "docs/how-to/what-fits.md"
START, END = "<!-- {}: made by python -m benchmarks.what_fits -->", "<!-- end of {} -->"
CNNS = ("vgg16", "googlenet", "resnet50", "resnet101", "resnet152", "inception_resnet_v2")
LIMIT_SECONDS = 3600.0

COMMANDS: Mapping[str, Sequence[str]] = {
    "cnns": (
        "partitioner fit",
        *(f"examples/cnns.py:{name}" for name in CNNS),
        "--cluster TitanX-12GB:1,2,4 --strategy layer --recompute none",
    ),
    "cards": (
        "partitioner fit gpt2 --seq 1024 --precision compute=bf16",
        "--cluster RTX3060-12GB:1 --cluster RTX4090:1 --cluster RTX5090:1",
    ),
    "lora": (
        "partitioner fit examples/lora.py:lora --seq 1024 --dtype bfloat16 --strategy layer",
        "--cluster RTX4090:1,2 --cluster RTX5090:1,2 --cluster H100-80GB:1",
    ),
    "llama": (
        "partitioner fit llama-8b --seq 1024 --dtype bfloat16 --strategy layer",
        "--cluster RTX4090:2,4,8 --cluster RTX5090:4 --cluster H100-80GB:1",
    ),
    "rent": (
        "partitioner plan llama-8b --seq 2048 --dtype bfloat16 --batch-size 64 --objective usd",
        "--cluster aws:p5.48xlarge:1 --cluster aws:p4de.24xlarge:1 --cluster aws:g6e.48xlarge:1",
        "--cluster lambda:gpu_8x_h100_sxm5:1 --cluster lambda:gpu_8x_a100_80gb_sxm4:1",
    ),
}
"""Commands by the name of their table, cut where their lines are."""


def ran(parts: Sequence[str]) -> dict[str, Any]:
    """Run a command, check what it finds, and return that with what it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", *shlex.split(" ".join(parts)), "--json"]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        env={**os.environ, "PARTITIONER_CALIBRATION": "none", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = json.loads(done.stdout)["offers"]
    if wrong := [
        problem for row in rows for problem in problems(row, parts[0].startswith("partitioner fit"))
    ]:
        raise SystemExit("\n".join(wrong))
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"on": date.today().isoformat(), "cpu_seconds": round(seconds), "offers": rows}


def problems(row: Mapping[str, Any], largest: bool) -> Iterator[str]:
    """Say what is wrong with a row: it does not fit, or the next may. ``largest``: the largest was looked for."""
    name = f"{row['model']} on {row['cluster']}"
    if row["fits"] and row["peak_memory_bytes"] > row["memory_bytes"]:
        yield f"{name}: more than the memory"
    if row["fits"] and row["chance_of_not_fitting"] > RISK:
        yield f"{name}: a chance of {row['chance_of_not_fitting']:.1%} of not fitting"
    if (
        largest
        and row["fits"]
        and not row["more_may_fit"]
        and row["nothing_found_at"] != row["batch_size"] + 1
    ):
        yield f"{name}: the next was not tried"


def page() -> str:
    """Return the page with the tables that are stored."""
    text, stored = PAGE.read_text(), json.loads(FILE.read_text())
    for name, found in stored.items():
        start, end = START.format(name), END.format(name)
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{_shown(COMMANDS[name], found)}\n{end}{rest.partition(end)[2]}"
    return text


def _shown(parts: Sequence[str], found: Mapping[str, Any]) -> str:
    command = " \\\n    ".join(parts)
    took = f"processor seconds on {found['on']}: {found['cpu_seconds']:,}"
    rows = found["offers"]
    columns = _columns(rows)
    lines = [columns, ["---"] * len(columns), *([_cell(row, name) for name in columns] for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    marker = f"<!-- not run: its result is stored; {took} -->"
    return f"{marker}\n```sh\n{command}\n```\n\n{table}\n"


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ["model", "parameters"] if len({row["model"] for row in rows}) > 1 else []
    columns += ["cluster", "batch", "plan", "step", "fullest device", "chance"]
    columns += ["USD per hour", "USD per million tokens"] if any(row["usd_per_hour"] for row in rows) else []
    return columns


def _cell(row: Mapping[str, Any], column: str) -> str:
    """Write one figure of a row, as ``--json`` has it."""
    if column in ("model", "cluster"):
        return f"`{row[column]}`"
    if column == "parameters":
        return f"{row['parameters']:,}"
    if column == "USD per hour":
        return f"{row['usd_per_hour']:.2f}"
    if not row["fits"]:
        return f"nothing: {'; '.join(row['why']).replace(':; ', ': ')}" if column == "plan" else "-"
    match column:
        case "batch":
            return f"{row['batch_size']:,}{'+' if row['more_may_fit'] and row['nothing_found_at'] else ''}"
        case "plan":
            return str(row["plan"])
        case "step":
            low, high = row["step_seconds_interval"] or (None, None)
            around = "" if low is None else f" ({format_seconds(low)} to {format_seconds(high)})"
            return f"{format_seconds(row['step_seconds'])}{around}"
        case "fullest device":
            return f"{format_bytes(row['peak_memory_bytes'])} of {format_bytes(row['memory_bytes'])}"
        case "chance":
            return f"{row['chance_of_not_fitting']:.0%}"
    return f"{row['usd_per_million_tokens']:.3f}"


def main(names: Iterable[str]) -> None:
    """Run the commands of these tables and store what they find."""
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names:
        stored[name] = ran(COMMANDS[name])
        print(f"{name}: {stored[name]['cpu_seconds']} processor seconds", flush=True)
        kept = {key: stored[key] for key in COMMANDS if key in stored}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=[*COMMANDS], help=f"of {', '.join(COMMANDS)}; all if none"
    )
    main(parser.parse_args().names)
