"""Hand-tuned configurations of public recipes, each planned with one ``fix`` line, beside the step that was published.

    python -m benchmarks.hand_configurations [--only 70b] [--search] [--json rows.json]

With ``--search`` each row is planned with nothing fixed, too, and the table compares both.

A row is a model, a cluster, a batch and a fix; what is short is said where it does not fit. Recipes that used FP8 are
planned in bfloat16: only the structure is compared. A stage computes its blocks again or keeps them, so where the source
computed some ops of each block again ("selective"), or nothing on cards of more memory, ``recompute=auto`` stands for it:
stages that would not fit compute all of their blocks again, which is leaner and slower than the source.

Sources: torchtitan (its benchmark of December 2024, on H100s with 96 GB), The Llama 3 Herd of Models
(arXiv 2407.21783, section 3.3 and table 4: 126 layers in 128 parts of 16 ranks, nothing computed again), Megatron-LM's
published configurations, Narayanan et al. 2021 (arXiv 2104.04473, table 1).

What they published is a rate; the step is what it makes of the batch:

    torchtitan    tokens per second and GPU, compiled: batch · tokens / (rate · GPUs)
    Llama 3       FLOP/s per GPU: 6 · parameters · tokens / (rate · GPUs), attention left out, which is at most 8% more
    Megatron-LM   FLOP/s per GPU: equation 3, 96·B·s·l·h² (1 + s/6h + V/16lh) / (rate · GPUs), forward counted twice
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.parallel_models import Decoder, decoder
from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from cost_models.room import FILLS
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from passes.graph.graph import OpGraph

VOCABULARY = 51_200
"""Tokens of Megatron's GPT models, padded."""
DROPOUT = 0.1
"""Megatron-LM's default, of attention and hidden states. Its kernels are fused as those of ``Decoder`` stand for."""


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
    published_seconds: float | None = None
    """A step as its source has it; None where it published none in 16 bits."""

    @property
    def name(self) -> str:
        """The model in a word or two."""
        if isinstance(self.model, str):
            return self.model
        layers, width, _ = self.model
        return f"gpt {layers}x{width}, fused"


def _gpt(
    layers: int, width: int, heads: int, devices: int, batch: int, tensor: int, pipeline: int, teraflops: int
) -> Row:
    """Return a row of Megatron-LM's table. ``teraflops``: published, per second and GPU."""
    data, seq = devices // (tensor * pipeline), 2048
    fix = f"pipeline={pipeline} tensor={tensor} data={data} microbatch=1 recompute=full"
    rest = 1 + seq / (6 * width) + VOCABULARY / (16 * layers * width)
    flops = 96 * batch * seq * layers * width**2 * rest
    published = flops / (devices * teraflops * 1e12)
    return Row((layers, width, heads), seq, f"dgx-a100:{devices // 8}", batch, fix, "full", published)


def _of_llama(parameters: float, batch: int, teraflops: int) -> float:
    """Return the seconds of Llama 3's step of 8,192 tokens on 16,384 devices."""
    return 6 * parameters * batch * 8192 / (16_384 * teraflops * 1e12)


def _tokens(batch: int, seq: int, devices: int, rate: float) -> float:
    """Return the seconds of a step at so many tokens per second and device."""
    return batch * seq / (rate * devices)


WIDE = "data=8 tensor=8 zero=1 microbatch=1 recompute=full"
META = "pipeline=16 interleave=8 tensor=8 data=128 zero=1 microbatch=1 recompute=auto"
FSDP = "zero=3 microbatch=2 recompute=auto"
ROWS = (
    Row("llama-70b", 8192, "dgx-h100:8", 128, "pipeline=8 interleave=5 tensor=4 microbatch=1"),
    Row("llama-8b", 8192, "dgx-h100:1", 16, f"data=8 {FSDP}", "selective", _tokens(16, 8192, 8, 6667)),
    Row("llama-8b", 8192, "dgx-h100:16", 256, f"data=128 {FSDP}", "selective", _tokens(256, 8192, 128, 6514)),
    Row("llama-70b", 8192, "dgx-h100:32", 512, "data=32 tensor=8 zero=3 microbatch=16 recompute=full", "full"),
    Row("llama-405b", 8192, "dgx-h100:64", 256, f"pipeline=8 {WIDE}", "full"),
    Row("llama-405b", 8192, "dgx-h100:64", 256, f"pipeline=8 interleave=2 {WIDE}", "full"),
    Row("llama-405b", 8192, "dgx-h100:2048", 2048, META, "none", _of_llama(405.9e9, 2048, 400)),
    Row((96, 12_288, 96), 2048, "dgx-h100:64", 2048, "pipeline=8 interleave=6 sequence=4 data=16 microbatch=2"),
    _gpt(24, 2304, 24, 32, 512, 1, 1, 137),
    _gpt(30, 3072, 32, 64, 512, 2, 1, 138),
    _gpt(36, 4096, 32, 128, 512, 4, 1, 142),
    _gpt(40, 6144, 48, 256, 1024, 8, 1, 135),
    _gpt(48, 8192, 64, 512, 1536, 8, 2, 138),
    _gpt(60, 10_240, 80, 1024, 1792, 8, 4, 140),
    _gpt(80, 12_288, 96, 1536, 2304, 8, 8, 148),
    _gpt(96, 16_384, 128, 1920, 2160, 8, 16, 155),
    _gpt(105, 20_480, 128, 2520, 2520, 8, 35, 163),
    _gpt(128, 25_600, 160, 3072, 3072, 8, 64, 163),
)  # fmt: skip


def traced(row: Row) -> OpGraph:
    """Trace a row's model in bfloat16, without values."""
    if isinstance(row.model, str):
        return as_graph(load_workload(row.model, settings={}, seq=row.seq, dtype="bfloat16"))
    layers, width, heads = row.model
    shape = Decoder("gpt", layers, width, heads, heads, 4 * width, VOCABULARY, row.seq, tied=True)
    return as_graph(decoder(replace(shape, attention="softmax", dropout=DROPOUT)))


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
            "published_seconds": row.published_seconds,
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
        return f"{head} {'; '.join(refused[:3])} | | | | | | {row['planning_seconds']} |"
    seconds, published = row["step_seconds"], row["published_seconds"]
    assert isinstance(seconds, float)
    beside = f"{published:.2f} s | {seconds / published - 1:+.0%}" if isinstance(published, float) else " | "
    return (
        f"{head} {seconds:.2f} s | {beside} | {row['mfu']:.1%} | {row['peak_gib']:.1f} GiB | {row['bubble']:.1%} | "
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
    head = "model | devices | batch | fix | again there | step | published | off | MFU"
    head += " | fullest device | bubble | planning, s"
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
