"""Published parallel runs as plans: a row's model, cluster, batch and one ``fix`` line, as its source ran it.

    nt-8B-16-dp2tp8pp1z1mb4  ─►  llama 32 x 4,096   dgx-h100:2   256 samples
                                 pipeline=1 data=2 sequence=8 zero=1 microbatch=4 recompute=gathers

What a framework does alike in all of its runs stands in the function of its source, with where that is written. Rows that
no ``fix`` line says are refused with the reason. ``PARALLEL.md`` beside the file says what each row is worth.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from benchmarks.parallel_models import Decoder
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
    optimizer: str = "adamw"
    schedule: str = "auto"
    place: Literal["first", "last", "fullest"] = "fullest"
    context_bytes: int = 0
    """CUDA's context where the published number is the driver's count, which has NCCL's communicators too."""

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
        if not self.efficiency:
            return cluster
        rates = MeasuredRates(efficiency=dict(self.efficiency))
        return cluster.with_device_rates(rates, provenance="without its source's runs")


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


def as_run(row: ParallelRow) -> AsRun:
    """Turn a row into a plan. Raises NotExpressibleError."""
    _refuse(row)
    return SOURCES[row["source_id"]](row)


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


def _refuse(row: ParallelRow) -> None:
    for word in row["kind"].split("+"):
        if word in _WORDS:
            raise NotExpressibleError(_WORDS[word])
    if row["source_id"] not in SOURCES:
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
EFA = {"preset": "InfiniBand-NDR", "per": "device"}
"""AWS p5: 3.2 Tb/s a machine, 400 Gb/s a card."""
FOUR_CARDS = {"preset": "InfiniBand-EDR", "cards": 4}
"""Four cards of 100 Gb/s a machine: RoCE of InternLM's runs, Omni-Path of Jean Zay, with the latency that NCCL has."""


def _shape(row: ParallelRow, family: Literal["llama", "gpt"], **more: Any) -> Decoder:
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


def _plan(
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


def even_borders(layers: int, stages: int) -> list[str]:
    """Cut equally many layers, the embedding before the first stage's, the head behind the last one's (Megatron-LM)."""
    if layers % stages:
        raise NotExpressibleError("stages of unequal numbers of layers, which are not published")
    return [f"blocks.{stage * layers // stages}" for stage in range(1, stages)]


def full_borders(layers: int, stages: int, *, ends: bool) -> list[str]:
    """Cut as many layers a stage as the fullest needs, the last stage has what is left (DeepSpeed's PipelineModule).

    ``ends``: embedding and head count as a layer each.
    """
    most = -(-(layers + 2 * ends) // stages)
    cuts = [stage * most - ends for stage in range(1, stages)]
    if cuts and cuts[-1] >= layers:
        raise NotExpressibleError("a pipeline with an empty stage")
    return [f"blocks.{cut}" for cut in cuts]


# --------------------------------------------------------------------------------------------------
# Sources


def nanotron_borders(shape: Decoder, stages: int) -> list[str]:
    """Cut as nanotron does: by multiplications of layers and head; a stage ends with the block that passes its share.

    The source: nanotron at 67c5ebb6, where it builds a model and where its Llama counts the costs of a block.
    """
    layer = 4 * shape.width**2 + 3 * shape.ffn * shape.width
    names = ["tokens", *(f"blocks.{i}" for i in range(shape.layers)), "norm", "head"]
    costs = [0, *([layer] * shape.layers), 0, shape.vocabulary * shape.width]
    thresholds = [sum(costs) * ((stage + 1) / stages) for stage in range(stages)]
    borders, stage, passed, begun = [], 0, 0, False
    for name, cost in zip(names, costs, strict=True):
        if begun:
            borders.append(name)
        passed += cost
        begun = passed > thresholds[stage]
        stage += begun
    return borders


def _nanotron(row: ParallelRow) -> AsRun:
    """The grid of the Ultra-Scale Playbook: nanotron at 67c5ebb6, as its scaling benchmarks configure it.

    bf16 parameters, float32 copies, gradients summed in float32, fused AdamW; sequence parallelism whose gathers run
    again in backward; logits cast to float32; 1F1B. Its log has peaks of allocated and of reserved memory. The former are
    reset before the optimizer steps, so what the grid shows, which grows with activations, is what was reserved.
    """
    shape = _shape(row, "llama")
    stages = int(row["pp"])
    zero = 1 if row["sharding"] == "zero1" else 0
    borders = nanotron_borders(shape, stages) if stages > 1 else []
    if len(borders) != stages - 1:
        raise NotExpressibleError("a pipeline with an empty stage")
    return _plan(
        row,
        shape,
        zero=zero,
        recompute="gathers",
        borders=borders,
        optimizer="fused-adamw",
        place="first",
        network=EFA,
    )


MPT_70B_LAYERS = 80
"""The file has 64. Throughput and share of the peak, published beside each other, are of 67.5 GFLOP a token in all of its
rows: 80 layers (64 would be 54)."""


def _mosaic(row: ParallelRow) -> AsRun:
    """Run llm-foundry's benchmarks of 2023: MPT with FSDP's full shard, the loss in 16 bits, FlashAttention of that year.

    ``mixed_precision: PURE`` sums gradients in bf16, ``DEFAULT`` in 32 bits (Composer's mixed precision of FSDP).
    """
    layers = {"layers": str(MPT_70B_LAYERS)} if row["model"] == "mpt-70b" else {}
    shape = _shape({**row, **layers}, "gpt", logits=torch.bfloat16, dtype=torch.float32)
    summed = torch.bfloat16 if row["precision"] == "bf16 (pure)" else None
    again = "full" if row["recompute"] == "full" else "gathers"
    return _plan(
        row,
        shape,
        zero=3,
        recompute=again,
        stack="2023",
        precision=Precision(compute=torch.bfloat16, gradients=summed),
    )


MEGATRON_DROPOUT = 0.1
"""The default of ``--hidden-dropout`` and ``--attention-dropout``."""
MEGATRON_MULTIPLE = 128
"""The default of ``--make-vocab-size-divisible-by``, of each shard's part of the vocabulary."""
SMI_CONTEXT_BYTES = int(1.6 * GIB)
"""What nvidia-smi counts beside tensors on Jean Zay (the row says so of its memory)."""


def _bigscience(row: ParallelRow) -> AsRun:
    """Run the search for BLOOM's shape: Megatron-DeepSpeed of February 2022 (chronicles-prequel.md).

    Every layer recomputed, attention as two products around a fused softmax, dropout, the loss in place (``_golden``), no
    sequence parallelism, fp16 gradients unless the row says bf16 with gradients in float32. Memory is nvidia-smi's, over
    first and last machine.
    """
    half = torch.float16 if row["precision"] == "fp16" else torch.bfloat16
    shape = _shape(row, "gpt", attention="softmax", dtype=half, logits=half, dropout=MEGATRON_DROPOUT)
    fp32 = "fp32" in row["precision"] or "fp32" in row["optimizer"]
    precision = Precision(
        gradients=torch.float32 if fp32 else half,
        master=torch.float32,
        loss_scale="dynamic" if half is torch.float16 else None,
    )
    return _plan(
        row,
        shape,
        zero=1 if row["sharding"] == "zero1" else 0,
        recompute="full",
        borders=full_borders(shape.layers, int(row["pp"]), ends="embeddings balanced" in row["notes"]),
        stack="2023",
        optimizer="fused-adamw",
        precision=precision,
        network=FOUR_CARDS,
        context_bytes=SMI_CONTEXT_BYTES,
    )


def _internlm(row: ParallelRow) -> AsRun:
    """Run InternLM 7B of 2023 (doc/en/train_performance.md): flash-attn, ZeRO-1, no sequence parallelism.

    No word of ``fix`` splits the optimizer's state among some of the replicas only.
    """
    if row["shard_degree"] != row["dp"]:
        raise NotExpressibleError("optimizer's state split among some of the replicas")
    return _plan(
        row,
        _shape(row, "llama"),
        zero=1,
        recompute=row["recompute"],
        stack="2023",
        optimizer="fused-adamw",
        network=FOUR_CARDS,
    )


_UNLIKE = re.compile("mla|swiglu|uneven|account_for_embedding|fsdp|fim_dataset|reshard|defer_embedding")
"""Golden runs whose model or stages the columns do not tell."""


def _golden(row: ParallelRow) -> AsRun:
    """Run Megatron-LM's functional tests: torch's peak of allocated bytes on the last rank.

    Parameters in 16 bits, gradients summed in float32, masters in float32; Transformer Engine's attention keeps no scores
    unless the row says ``unfused``, the local one does. The loss is computed in place: a softmax in float32, then its
    gradient in the same bytes, beside logits of 16 bits. A loss in 16 bits that is not in place has as many bytes.
    """
    if _UNLIKE.search(row["id"]):
        raise NotExpressibleError("a test whose model or stages the columns do not tell")
    unfused = row["attention"] == "unfused" or row["fused"] == "local"
    half = torch.float16 if row["precision"] == "fp16" else torch.bfloat16
    precision = Precision(
        gradients=torch.float32,
        master=torch.float32,
        loss_scale="dynamic" if half is torch.float16 else None,
    )
    words = row["vocab"].split()
    padded = {**row, "vocab": f"{words[0]} padded to {MEGATRON_MULTIPLE}*tp"}
    attention: Literal["flash", "softmax"] = "softmax" if unfused else "flash"
    return _plan(
        row,
        _shape(padded, "gpt", attention=attention, dtype=half, logits=half, dropout=MEGATRON_DROPOUT),
        zero=1 if row["sharding"] == "zero1" else 0,
        recompute="full" if row["recompute"].startswith("full") else "none",
        place="last",
        optimizer="fused-adamw",
        precision=precision,
    )


SOURCES: Mapping[str, Callable[[ParallelRow], AsRun]] = {
    "nanotron-grid": _nanotron,
    "nanotron-tp": _nanotron,
    "mosaic": _mosaic,
    "bigscience": _bigscience,
    "internlm": _internlm,
    "mlm-golden": _golden,
}
