"""Plans written by hand: every number fixed, so that texts made of them change only when the report does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.precision import Precision
from partitioner.plan import (
    Alternative,
    CertificateRecord,
    ModelInfo,
    Plan,
    Prediction,
    ProofRecord,
    Stage,
    StageValue,
    Transfer,
)

MIB = 1 << 20
GIB = 1 << 30


def made_plan(
    cluster: ClusterSpec,
    stage_ranks: tuple[int, ...] = (0, 1),
    *,
    blocks_per_stage: int = 2,
    peak_bytes: int = 3 * GIB,
    **changes: Any,
) -> Plan:
    """A chain of stages; stage ``s`` holds blocks ``model.layers.[s * n, (s + 1) * n)``."""
    count = len(stage_ranks)
    fields: dict[str, Any] = {
        "partitioner_version": "0.1.0",
        "model": ModelInfo(
            name="chain",
            fingerprint="f" * 64,
            parameters=1_234_567_890,
            parameter_bytes=2_469_135_780,
            dtype="bfloat16",
            trainable_parameters=1_234_567_890,
            ops=count,
        ),
        "cluster": cluster,
        "strategy": "layer",
        "batch_size": 33,
        "microbatches": 8,
        "schedule": "1f1b",
        "optimizer_memory": "adamw",
        "recompute": "auto",
        "precision": Precision(),
        "loss_reduction": "mean",
        "stages": tuple(_stage(s, rank, count, blocks_per_stage) for s, rank in enumerate(stage_ranks)),
        "placements": {f"op{s}": (rank,) for s, rank in enumerate(stage_ranks)},
        "recomputed": ("arange",),
        "tied": (),
        "values": tuple(
            StageValue(name=f"op{s}", producer=s, consumers=(s + 1,), size_bytes=16 * MIB, needs_grad=True)
            for s in range(count - 1)
        ),
        "transfers": tuple(
            Transfer(value=f"op{s}", kind="send", source=a, target=b, size_bytes=16 * MIB, gradient=True)
            for s, (a, b) in enumerate(pairwise(stage_ranks))
            if a != b
        ),
        "state_bytes": {str(rank): GIB for rank in range(cluster.world_size)},
        "optimizer_seconds": {str(rank): 0.001 for rank in range(cluster.world_size)},
        "attention_backend": "flash",
        "prediction": Prediction(
            step_seconds=0.25,
            samples_per_second=132.0,
            tokens_per_second=270_336.0,
            mfu=0.4321,
            bubble_fraction=0.111,
            peak_memory_bytes={str(rank): peak_bytes + rank * MIB for rank in range(cluster.world_size)},
            communication_bytes=256 * MIB,
            messages=2 * 8 * (count - 1),
            confidence="defaults",
        ),
        "certificate": CertificateRecord(
            objective="surrogate",
            objective_seconds=0.24,
            bound_seconds=0.24,
            gap=0.0,
            simulated_lower_bound_seconds=0.2,
            space="contiguous splits at 40 cuts; 1f1b, 8 micro-batches",
            method="dynamic program",
            solver_status="optimal",
            search_seconds=0.05,
        ),
        "alternatives": (
            Alternative(
                strategy="one device",
                feasible=False,
                reason="does not fit: 12.3 GiB short on each device",
                step_seconds=0.5,
                peak_memory_bytes=93 * GIB,
            ),
            Alternative(
                strategy="2 stages, gpipe, 8 micro-batches",
                feasible=True,
                reason="12.0% slower",
                step_seconds=0.28,
                peak_memory_bytes=4 * GIB,
            ),
        ),
        "not_considered": ("data parallelism", "tensor parallelism"),
        "proof": ProofRecord(instructions=40, messages=16, rules=("every send has its one receive",)),
        "notes": ("dropout is reproducible from the seed",),
    }
    return Plan(**{**fields, **changes})


def _stage(index: int, rank: int, count: int, blocks: int) -> Stage:
    first, last = index * blocks, (index + 1) * blocks - 1
    run = f"model.layers.{first}-{last}" if blocks > 1 else f"model.layers.{first}"
    modules = [run]
    if index == 0:
        modules.insert(0, "model.embed_tokens")
    if index == count - 1:
        modules += ["model.norm", "lm_head"]
    return Stage(
        devices=(rank,),
        ops=(f"op{index}",),
        modules=tuple(modules),
        parameter_bytes=600 * MIB + index * MIB,
        forward_seconds=0.004,
        backward_seconds=0.008,
        backward_input_seconds=0.004,
        backward_weight_seconds=0.004,
        saved_bytes=200 * MIB,
        weight_saved_bytes=20 * MIB,
        recomputed_blocks=(),
        transient_bytes=0,
        has_backward=True,
        in_flight=min(8, count - index),
    )
