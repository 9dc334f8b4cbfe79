"""Published parallel runs as plans: a row's model, cluster, batch and one ``fix`` line, as its source ran it.

    nt-8B-16-dp2tp8pp1z1mb4  ─►  llama 32 x 4,096   dgx-h100:2   256 samples
                                 pipeline=1 data=2 sequence=8 zero=1 microbatch=4 recompute=gathers

What a framework does alike in all of its runs stands in ``benchmarks.parallel_sources``. Rows that no ``fix`` line says are
refused with the reason. ``PARALLEL.md`` beside the file says what each row is worth.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from benchmarks.parallel_models import Decoder
from benchmarks.residuals import Counts
from cost_models.cluster import ClusterSpec
from cost_models.precision import Precision
from cost_models.spec.presets import MACHINE_NETWORKS
from cost_models.spec.rates import MeasuredRates

ROOM = "100TB"
"""Memory of each device here: what a run that ran would need is asked, not whether it fits."""
PER_MACHINE = 8
GIB = 2**30

ParallelRow: TypeAlias = Mapping[str, str]


class NotExpressibleError(Exception):
    """A row that cannot be planned as it was run. Its text is the reason, the same for all rows that it holds for."""


@dataclass(frozen=True)
class AsRun:
    """A row as a plan. ``place``: the stage whose memory was published; ``fullest``: any, the fullest counts."""

    shape: Decoder
    device: str
    machine: str
    devices: int
    per_machine: int
    batch: int
    fix: str
    precision: Precision
    network: Mapping[str, Any] = field(default_factory=dict)
    stack: str | None = None
    efficiency: Mapping[str, float] = field(default_factory=dict)
    """Efficiencies in place of the stack's."""
    host_seconds: float = 0.0
    """Seconds that its framework's host takes for a step, whatever the devices do meanwhile."""
    launches_block: bool = False
    """``CUDA_LAUNCH_BLOCKING=1``: the host launches a kernel when the one before has ended, so the device waits for it."""
    optimizer: str = "adamw"
    schedule: str = "auto"
    place: Literal["first", "last", "fullest"] = "fullest"
    held_bytes: int = 0
    """Tensors that its framework holds on that device beside those of a plan of ours."""
    counts: Counts = "allocated"
    """What the published memory is of: tensors; what the allocator reserves for them; or that and what is beside torch."""
    context_bytes: int = 0
    """CUDA's context, where it is the driver's count."""

    def cluster(self) -> ClusterSpec:
        """Return its devices, with room for whatever the plan needs."""
        card = {"preset": self.device, "memory": ROOM} | ({"stack": self.stack} if self.stack else {})
        per_machine = min(self.per_machine, self.devices)
        node = (
            {"preset": self.machine, "count": per_machine, "device": card}
            if self.devices > 1
            else {"device": card}
        )
        machines = -(-self.devices // per_machine)
        found: dict[str, Any] = {"nodes": [{**node, "name": f"machine{i}"} for i in range(machines)]}
        if machines > 1:
            found["network"] = dict(self.network)
        cluster = ClusterSpec.model_validate(found)
        rates = MeasuredRates()
        if self.efficiency:
            rates = replace(rates, efficiency=dict(self.efficiency))
        if self.launches_block:
            first = cluster.devices[0]
            waits = first.kernel_overhead_seconds + first.launch_overhead_seconds
            rates = replace(rates, kernel_overhead_seconds=waits)
        return (
            cluster.with_device_rates(rates, provenance="as its source ran it")
            if rates != MeasuredRates()
            else cluster
        )


def read_rows(path: Path) -> list[ParallelRow]:
    """Read a file of rows."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def kinds_of(row: ParallelRow) -> list[str]:
    """Return the kinds of plan that a row counts under."""
    words = set(row["kind"].split("+"))
    pair = {"TP", "PP"} <= words
    found = ["TPxPP"] if pair else [word for word in ("TP", "PP") if word in words]
    found += [
        name
        for name, word in (("interleaved", "VPP"), ("recompute", "AC"), ("ZeRO", "ZERO1"))
        if word in words
    ]
    if "FSDP" in words and "ZeRO" not in found:
        found.append("ZeRO")
    return found or ["data parallel"]


_WORDS = {
    "EP": "experts",
    "MOE": "experts",
    "CP": "context parallelism",
    "FP8": "8-bit arithmetic",
    "LORA": "adapters, and samples of unlike lengths",
    "OFFLOAD": "offloading",
    "OOM": "out of memory: nothing was measured",
    "FIT": "the longest sequence that fits: nothing was measured",
    "LAYER": "one layer, not a step",
}
_NEEDED = (
    "layers",
    "hidden",
    "heads",
    "ffn",
    "vocab",
    "gpu",
    "gpus",
    "sequence",
    "global_batch",
    "micro_batch",
)


def refuse(row: ParallelRow, sources: Collection[str]) -> None:
    """Raise NotExpressibleError for a row that no ``fix`` line says, or whose source nobody has read."""
    for word in row["kind"].split("+"):
        if word in _WORDS:
            raise NotExpressibleError(_WORDS[word])
    if row["source_id"] not in sources:
        raise NotExpressibleError(f"nobody has read how {row['source_id']} ran its models")
    if row["gpu"] not in CARDS:
        raise NotExpressibleError(f"no preset of {row['gpu'] or 'an unnamed card'}")
    if missing := [name for name in _NEEDED if not row[name]]:
        raise NotExpressibleError(f"not published: {', '.join(missing)}")


CARDS = {
    "v100_32gb": ("V100-32GB", "dgx-v100"),
    "a100_40gb": ("A100-40GB", "dgx-a100"),
    "a100_80gb": ("A100-80GB", "dgx-a100"),
    "h100_80gb": ("H100-80GB", "dgx-h100"),
    "gb200": ("GB200", "gb200-tray"),
}
"""The device's and the machine's preset of each card."""


def shape_of(row: ParallelRow, family: Literal["llama", "gpt"], **more: Any) -> Decoder:
    """Return a row's model. With several stages a tied head is a parameter of its own, as each stage keeps a copy of it."""
    heads = int(row["heads"])
    if int(row["hidden"]) % heads:
        raise NotExpressibleError("heads that do not divide the width")
    found = re.match(r"(\d+)(?: padded to (\d+)\*tp)?$", row["vocab"])
    if found is None:
        raise NotExpressibleError("not published: vocab")
    vocabulary, multiple = int(found[1]), int(found[2] or 1) * int(row["tp"] or 1)
    return Decoder(
        family=family,
        layers=int(row["layers"]),
        width=int(row["hidden"]),
        heads=heads,
        kv_heads=int(row["kv_heads"] or heads),
        ffn=int(row["ffn"]),
        vocabulary=-(-vocabulary // multiple) * multiple if found[2] else vocabulary,
        tokens=int(row["sequence"]),
        tied=row["tied"] == "1" and int(row["pp"] or 1) == 1,
        **more,
    )


def run_of(
    row: ParallelRow,
    shape: Decoder,
    *,
    zero: int,
    recompute: str,
    borders: list[str] | None = None,
    **more: Any,
) -> AsRun:
    """Return what all sources have in common. ``more``: fields of the run that a source has otherwise."""
    device, machine = CARDS[row["gpu"]]
    pipeline, chunks, shards = (int(row[name] or 1) for name in ("pp", "vpp", "tp"))
    devices = int(row["gpus"])
    words = {"pipeline": pipeline, "data": devices // (pipeline * shards), "zero": zero}
    if chunks > 1:
        words["interleave"] = chunks
    if shards > 1:
        words["sequence" if row["sp"] == "1" else "tensor"] = shards
    fix = " ".join(f"{name}={value}" for name, value in words.items())
    fix += f" microbatch={row['micro_batch']} recompute={recompute}"
    if borders is None and pipeline > 1:
        borders = even_borders(shape.layers, pipeline * chunks)
    if borders:
        fix += f" borders={','.join(borders)}"
    made = AsRun(
        shape, device, machine, devices, int(row["gpus_per_node"] or PER_MACHINE), int(row["global_batch"]), fix,
        Precision(master=torch.float32), network=MACHINE_NETWORKS[machine],
    )  # fmt: skip
    return replace(made, **more)


def microbatches(row: ParallelRow) -> int:
    """Return the micro-batches of a replica's step."""
    replicas = int(row["gpus"]) // (int(row["tp"]) * int(row["pp"]))
    return int(row["global_batch"]) // (int(row["micro_batch"]) * replicas)


def even_borders(layers: int, stages: int) -> list[str]:
    """Cut equally many layers, the embedding before the first stage's, the head behind the last one's (Megatron-LM)."""
    if layers % stages:
        raise NotExpressibleError("stages of unequal numbers of layers, which are not published")
    return [f"blocks.{stage * layers // stages}" for stage in range(1, stages)]
