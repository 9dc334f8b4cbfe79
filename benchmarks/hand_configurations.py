"""Hand-tuned configurations of public recipes, each planned with one ``fix`` line: what they take by our own prediction.

    python -m benchmarks.hand_configurations [--only 70b] [--search] [--json rows.json]

With ``--search`` each row is planned with nothing fixed, too, and the table compares both.

A row is a model, a cluster, a batch and a fix; what is short is said where it does not fit. Recipes that used FP8 are
planned in bfloat16: only the structure is compared. A stage computes its blocks again or keeps them, so where the source
computed some ops of each block again ("selective"), or nothing on cards of more memory, ``recompute=auto`` stands for it:
stages that would not fit compute all of their blocks again, which is leaner and slower than the source.

Sources: torchtitan (its benchmark of December 2024, on H100s with 96 GB), The Llama 3 Herd of Models
(arXiv 2407.21783, section 3.3: 126 layers in 128 parts of 16 ranks, nothing computed again), Megatron-LM's published
configurations, Narayanan et al. 2021 (arXiv 2104.04473, table 1).
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from cost_models.room import FILLS
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from passes.graph.graph import OpGraph

VOCABULARY = 51_200
"""Tokens of Megatron's GPT models, padded."""


@dataclass(frozen=True)
class Row:
    """One configuration. ``model``: a bundled name, or (layers, width, heads) of a GPT.

    ``recomputed``: how much of a block the source says it computed again; "" where it does not say.
    """

    model: str | tuple[int, int, int]
    seq: int
    cluster: str
    batch: int
    fix: str
    recomputed: Literal["", "none", "selective", "full"] = ""

    @property
    def name(self) -> str:
        """The model in a word or two."""
        if isinstance(self.model, str):
            return self.model
        layers, width, _ = self.model
        return f"gpt {layers}x{width}"


def _gpt(layers: int, width: int, heads: int, devices: int, batch: int, tensor: int, pipeline: int) -> Row:
    data = devices // (tensor * pipeline)
    fix = f"pipeline={pipeline} tensor={tensor} data={data} microbatch=1 recompute=full"
    return Row((layers, width, heads), 2048, f"dgx-a100:{devices // 8}", batch, fix, "full")


WIDE = "data=8 tensor=8 zero=1 microbatch=1 recompute=full"
META = "tensor=8 data=128 zero=1 microbatch=1 recompute=auto"
ROWS = (
    Row("llama-70b", 8192, "dgx-h100:8", 128, "pipeline=8 interleave=5 tensor=4 microbatch=1"),
    Row("llama-8b", 8192, "dgx-h100:1", 16, "data=8 zero=3 microbatch=2 recompute=auto", "selective"),
    Row("llama-8b", 8192, "dgx-h100:16", 256, "data=128 zero=3 microbatch=2 recompute=auto", "selective"),
    Row("llama-70b", 8192, "dgx-h100:32", 512, "data=32 tensor=8 zero=3 microbatch=16 recompute=full", "full"),
    Row("llama-405b", 8192, "dgx-h100:64", 256, f"pipeline=8 {WIDE}", "full"),
    Row("llama-405b", 8192, "dgx-h100:64", 256, f"pipeline=8 interleave=2 {WIDE}", "full"),
    Row("llama-405b", 8192, "dgx-h100:2048", 2048, f"pipeline=16 interleave=8 {META}", "none"),
    Row((96, 12_288, 96), 2048, "dgx-h100:64", 2048, "pipeline=8 interleave=6 sequence=4 data=16 microbatch=2"),
    _gpt(24, 2304, 24, 32, 512, 1, 1),
    _gpt(30, 3072, 32, 64, 512, 2, 1),
    _gpt(36, 4096, 32, 128, 512, 4, 1),
    _gpt(40, 6144, 48, 256, 1024, 8, 1),
    _gpt(48, 8192, 64, 512, 1536, 8, 2),
    _gpt(60, 10_240, 80, 1024, 1792, 8, 4),
    _gpt(80, 12_288, 96, 1536, 2304, 8, 8),
    _gpt(96, 16_384, 128, 1920, 2160, 8, 16),
    _gpt(105, 20_480, 128, 2520, 2520, 8, 35),
    _gpt(128, 25_600, 160, 3072, 3072, 8, 64),
)  # fmt: skip


def traced(row: Row) -> OpGraph:
    """Trace a row's model in bfloat16, without values."""
    if isinstance(row.model, str):
        return as_graph(load_workload(row.model, settings={}, seq=row.seq, dtype="bfloat16"))
    layers, width, heads = row.model
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": layers, "n_embd": width, "n_head": heads,
        "n_positions": row.seq, "vocab_size": VOCABULARY, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return as_graph(load_workload(f"hf:{path}", settings={}, seq=row.seq, dtype="bfloat16"))


def measured(rows: list[Row], *, search: bool) -> Iterator[dict[str, object]]:
    """Plan the rows, and yield what each came to; ``search``: then with nothing fixed."""
    for row in rows:
        graph = traced(row)
        found: dict[str, object] = {
            "model": row.name,
            "devices": row.cluster,
            "batch": row.batch,
            "fix": row.fix,
            "recomputed": row.recomputed,
            **_planned(graph, row, row.fix),
        }
        if search:
            found["found"] = _planned(graph, row, None)
        yield found


def _planned(graph: OpGraph, row: Row, fix: str | None) -> dict[str, object]:
    started = time.perf_counter()
    found: dict[str, object] = {}
    try:
        cluster = ClusterSpec.parse(row.cluster)
        plan = partition(graph, cluster, strategy="hybrid", fix=fix, batch_size=row.batch, risk=FILLS)
        found |= _figures(plan)
    except PartitionerError as error:
        found["refused"] = [error.what, *error.because]
    found["planning_seconds"] = round(time.perf_counter() - started, 1)
    found["resident_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    return found


def _figures(plan: Plan) -> dict[str, object]:
    p = plan.prediction
    return {
        "world": plan.world_size,
        "step_seconds": p.step_seconds,
        "mfu": p.mfu,
        "peak_gib": max(p.peak_memory_bytes.values()) / 2**30,
        "bubble": p.bubble_fraction,
        "gap": plan.certificate.gap,
        "plan": next(row for row in str(plan).splitlines() if row.startswith("plan "))
        .removeprefix("plan")
        .strip(),
        "file_mb": len(plan.model_dump_json()) / 1e6,
    }


def line(row: dict[str, object]) -> str:
    """Write a row of the table in ``docs/06g-hybrid.md``."""
    head = f"| {row['model']} | {row['devices']} | {row['batch']} | `{row['fix']}` | {row['recomputed']} |"
    if "refused" in row:
        refused = row["refused"]
        assert isinstance(refused, list)
        return f"{head} {'; '.join(refused[:3])} | | | | {row['planning_seconds']} |"
    return (
        f"{head} {row['step_seconds']:.2f} s | {row['mfu']:.1%} | {row['peak_gib']:.1f} GiB | {row['bubble']:.1%} | "
        f"{row['planning_seconds']} |"
    )


def compared(row: dict[str, object]) -> str:
    """Write a row that compares the fixed plan with the found one."""
    found = row["found"]
    assert isinstance(found, dict)
    head = f"| {row['model']} | {row['devices']} | {row['batch']} "
    if "refused" in found:
        return f"{head}| {'; '.join(found['refused'][:3])} | | | | | {found['planning_seconds']} |"
    hand = row.get("step_seconds")
    faster = "" if hand is None else f"{float(str(hand)) / found['step_seconds']:.2f}x"
    fixed = "does not fit" if hand is None else f"{hand:.2f} s"
    return (
        f"{head}| {fixed} | {found['step_seconds']:.2f} s | {faster} | {found['mfu']:.1%} | "
        f"{found['peak_gib']:.1f} GiB | {found['gap']:.1%} | {found['plan']} | {found['planning_seconds']} |"
    )


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose model, devices or fix contain this")
    parser.add_argument("--search", action="store_true", help="plan with nothing fixed, too")
    parser.add_argument("--json", type=Path, help="append a line of JSON per row")
    given = parser.parse_args()
    rows = [row for row in ROWS if given.only in f"{row.name} {row.cluster} {row.fix}"]
    head = "model | devices | batch | fix | again there | step | MFU | fullest device | bubble | planning, s"
    if given.search:
        head = "model | devices | batch | by hand | found | faster | MFU | fullest device | gap | plan | planning, s"
    print(f"| {head} |\n|" + "---|" * (head.count("|") + 1))
    for found in measured(rows, search=given.search):
        print(compared(found) if given.search else line(found), flush=True)
        if given.json is not None:
            with given.json.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
