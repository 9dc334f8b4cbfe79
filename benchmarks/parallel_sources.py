"""The sources of published parallel runs: what each framework does alike in all of its runs, and where that is written.

as_run(row)     the row as a plan, by the function of its source in ``SOURCES``
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from benchmarks.nanotron_host import host_seconds
from benchmarks.parallel_models import Decoder
from benchmarks.parallel_rows import (
    GIB,
    AsRun,
    NotExpressibleError,
    ParallelRow,
    microbatches,
    refuse,
    run_of,
    shape_of,
)
from cost_models.precision import Precision

EFA = {"preset": "InfiniBand-NDR", "per": "device"}
"""AWS p5: 3.2 Tb/s a machine, 400 Gb/s a card."""
FOUR_CARDS = {"preset": "InfiniBand-EDR", "cards": 4}
"""Four cards of 100 Gb/s a machine: RoCE of InternLM's runs, Omni-Path of Jean Zay, with the latency that NCCL has."""


def as_run(row: ParallelRow) -> AsRun:
    """Turn a row into a plan. Raises NotExpressibleError."""
    refuse(row, SOURCES)
    return SOURCES[row["source_id"]](row)


def full_borders(layers: int, stages: int, *, ends: bool) -> list[str]:
    """Cut as many layers a stage as the fullest needs, the last stage has what is left (DeepSpeed's PipelineModule).

    ``ends``: embedding and head count as a layer each.
    """
    most = -(-(layers + 2 * ends) // stages)
    cuts = [stage * most - ends for stage in range(1, stages)]
    if cuts and cuts[-1] >= layers:
        raise NotExpressibleError("a pipeline with an empty stage")
    return [f"blocks.{cut}" for cut in cuts]


def parameters_of(shape: Decoder, layers: int, tables: int, shards: int) -> int:
    """Count the parameters of so many layers and tables of the vocabulary that a shard has, but for norms and biases."""
    attention = (2 + 2 * shape.kv_heads / shape.heads) * shape.width**2
    products = 3 if shape.family == "llama" else 2
    of_layers = layers * (attention + products * shape.width * shape.ffn)
    return int(of_layers + tables * shape.vocabulary * shape.width) // shards


def gradient_buffer_bytes(row: ParallelRow, shape: Decoder, layers: int, tables: int) -> int:
    """Count bytes of the buffer of gradients in float32 that is there all the time, in steps of one micro-batch.

    A plan of ours makes gradients as backward goes on, and has them all from the second micro-batch on.
    """
    return 4 * parameters_of(shape, layers, tables, int(row["tp"])) if microbatches(row) == 1 else 0


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
    Gradients have a buffer from the start (its FP32GradientAccumulator). Its host takes its time
    (``benchmarks.nanotron_host``), and allocates ahead (``scattered_bytes``).
    """
    shape = shape_of(row, "llama")
    stages = int(row["pp"])
    zero = 1 if row["sharding"] == "zero1" else 0
    borders = nanotron_borders(shape, stages) if stages > 1 else []
    if len(borders) != stages - 1:
        raise NotExpressibleError("a pipeline with an empty stage")
    inner = bool(borders) and borders[0].startswith("blocks.")
    first = int(borders[0].removeprefix("blocks.")) if inner else shape.layers
    return run_of(
        row,
        shape,
        zero=zero,
        recompute="gathers",
        borders=borders,
        held_bytes=gradient_buffer_bytes(row, shape, first, 1 if borders else 2)
        + scattered_bytes(row, shape, first),
        optimizer="fused-adamw",
        host_seconds=host_seconds(row),
        place="first",
        counts="reserved",
        network=EFA,
    )


def scattered_bytes(row: ParallelRow, shape: Decoder, layers: int) -> int:
    """Count what two products of each layer made of a micro-batch, before its sum was scattered: freed, and not yet free.

    The host launches a micro-batch ahead of the device, and memory that NCCL's stream uses is handed out again only when
    that stream is through ("record_stream" in PyTorch's notes on CUDA; TORCH_NCCL_AVOID_RECORD_STREAMS, off in those
    years), so that no layer takes what the layer before gave up.
    """
    shards = int(row["tp"])
    whole = int(row["micro_batch"]) * int(row["sequence"]) * shape.width * shape.dtype.itemsize
    return 2 * layers * whole * (shards > 1)


MPT_70B_LAYERS = 80
"""The file has 64. Throughput and share of the peak, published beside each other, are of 67.5 GFLOP a token in all of its
rows: 80 layers (64 would be 54)."""


def _mosaic(row: ParallelRow) -> AsRun:
    """Run llm-foundry's benchmarks of 2023: MPT with FSDP's full shard, the loss in 16 bits, FlashAttention of that year.

    ``mixed_precision: PURE`` sums gradients in bf16, ``DEFAULT`` in 32 bits (Composer's mixed precision of FSDP).
    """
    layers = {"layers": str(MPT_70B_LAYERS)} if row["model"] == "mpt-70b" else {}
    shape = shape_of({**row, **layers}, "gpt", logits=torch.bfloat16, dtype=torch.float32)
    summed = torch.bfloat16 if row["precision"] == "bf16 (pure)" else None
    again = "full" if row["recompute"] == "full" else "gathers"
    return run_of(
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
DEEPSPEED_BUCKET = 500_000_000
"""Elements of the buffer in which ZeRO-1 gathers gradients: the default of its "reduce_bucket_size"."""
SMI_CONTEXT_BYTES = int(1.6 * GIB)
"""What nvidia-smi counts beside tensors on Jean Zay (the row says so of its memory)."""


def _bigscience(row: ParallelRow) -> AsRun:
    """Run the search for BLOOM's shape: Megatron-DeepSpeed of February 2022 (chronicles-prequel.md).

    Every layer recomputed, attention as two products around a fused softmax, dropout, the loss in place (``_golden``), no
    sequence parallelism, fp16 gradients unless the row says bf16 with gradients in float32. Those are summed only when all
    of a stage's have been made in bf16 (DeepSpeed's pipeline engine and its optimizer for bf16): they are held beside the
    sums. A stage keeps its outputs from forward to backward (its "pipe_buffers"), the first of as many
    micro-batches as there are stages; ZeRO in fp16 has a bucket. Memory is nvidia-smi's, over first and last machine.
    ``CUDA_LAUNCH_BLOCKING=1`` ("dealing with JZ hanging on the large model": on 80 GPUs steps took 7% longer with it).
    """
    half = torch.float16 if row["precision"] == "fp16" else torch.bfloat16
    shape = shape_of(row, "gpt", attention="softmax", dtype=half, logits=half, dropout=MEGATRON_DROPOUT)
    fp32 = "fp32" in row["precision"] or "fp32" in row["optimizer"]
    precision = Precision(
        gradients=torch.float32 if fp32 else half,
        master=torch.float32,
        loss_scale="dynamic" if half is torch.float16 else None,
    )
    borders = full_borders(shape.layers, int(row["pp"]), ends="embeddings balanced" in row["notes"])
    first = int(borders[0].removeprefix("blocks.")) if borders else shape.layers
    outputs = int(row["pp"]) * int(row["micro_batch"]) * int(row["sequence"]) * shape.width
    gradients = parameters_of(shape, first, 1, int(row["tp"]))
    return run_of(
        row,
        shape,
        zero=1 if row["sharding"] == "zero1" else 0,
        recompute="full",
        borders=borders,
        held_bytes=half.itemsize * (outputs + (gradients if fp32 else DEEPSPEED_BUCKET)),
        stack="2023",
        launches_block=True,
        optimizer="fused-adamw",
        precision=precision,
        network=FOUR_CARDS,
        counts="driver",
        context_bytes=SMI_CONTEXT_BYTES,
    )


def _internlm(row: ParallelRow) -> AsRun:
    """Run InternLM 7B of 2023 (doc/en/train_performance.md): flash-attn, ZeRO-1, no sequence parallelism.

    No word of ``fix`` splits the optimizer's state among some of the replicas only.
    """
    if row["shard_degree"] != row["dp"]:
        raise NotExpressibleError("optimizer's state split among some of the replicas")
    return run_of(
        row,
        shape_of(row, "llama"),
        zero=1,
        recompute=row["recompute"],
        stack="2023",
        optimizer="fused-adamw",
        network=FOUR_CARDS,
    )


def _nemo_launcher(row: ParallelRow) -> AsRun:
    """Run GPT-3 5B of the NeMo launcher of 2023 (launcher_scripts/conf/training/gpt3/5b.yaml).

    No Transformer Engine: a fused softmax between two products, dropout; masters in 32 bits,
    gradients summed in bf16 by Apex's distributed Adam. The file says that nothing is recomputed; so it would take 119 GiB
    of 80 by prediction, and the configuration is of another day than the release that was measured: attention, as
    Megatron recommends.
    """
    return run_of(
        row,
        shape_of(row, "gpt", attention="softmax", logits=torch.bfloat16, dropout=MEGATRON_DROPOUT),
        zero=1,
        recompute="selective",
        stack="2023",
        optimizer="fused-adamw",
        precision=Precision(gradients=torch.bfloat16, master=torch.float32),
    )


_UNLIKE = re.compile(
    "mla|swiglu|uneven|account_for_embedding|fsdp|fim_dataset|reshard|defer_embedding|distill"
)
"""Golden runs whose model or stages the columns do not tell; of a distillation, the teacher that is in memory too."""


def _golden(row: ParallelRow) -> AsRun:
    """Run Megatron-LM's functional tests: torch's peak of allocated bytes on the last rank.

    Parameters in 16 bits, gradients summed in float32, masters in float32; Transformer Engine's attention keeps no scores
    unless the row says ``unfused``, the local one does. The loss is computed in place: a softmax in float32, then its
    gradient in the same bytes, beside logits of 16 bits. A loss in 16 bits that is not in place has as many bytes.
    Gradients have a buffer from the start (``DistributedDataParallel`` of megatron-core).
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
    shape = shape_of(padded, "gpt", attention=attention, dtype=half, logits=half, dropout=MEGATRON_DROPOUT)
    return run_of(
        row,
        shape,
        zero=1 if row["sharding"] == "zero1" else 0,
        recompute="full" if row["recompute"].startswith("full") else "none",
        place="last",
        held_bytes=gradient_buffer_bytes(row, shape, shape.layers // int(row["pp"]), 1 if shape.tied else 2),
        optimizer="fused-adamw",
        precision=precision,
    )


SOURCES: Mapping[str, Callable[[ParallelRow], AsRun]] = {
    "nanotron-grid": _nanotron,
    "nanotron-tp": _nanotron,
    "mosaic": _mosaic,
    "bigscience": _bigscience,
    "internlm": _internlm,
    "nemo-launcher": _nemo_launcher,
    "mlm-golden": _golden,
}
