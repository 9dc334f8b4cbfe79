"""Plans written by hand: every number fixed, so that texts made of them change only when the report does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.precision import Precision
from partitioner.plan import Plan
from partitioner.record.records import (
    ModelInfo,
    Prediction,
    ProofRecord,
    Stage,
    StageValue,
)
from partitioner.record.sharding import LayoutRow, StageSharding
from passes.lower.crossing import Bridge
from passes.search.certificate import Alternative, Certificate
from passes.shard.sent import GradientSum, StageCollective, UpdateGather

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
        "recomputed": ("arange",),
        "tied": (),
        "values": tuple(
            StageValue(name=f"op{s}", producer=s, consumers=(s + 1,), size_bytes=16 * MIB, needs_grad=True)
            for s in range(count - 1)
        ),
        "transfers": tuple(
            Bridge(value=f"op{s}", kind="send", source=a, target=b, size_bytes=16 * MIB, gradient=True)
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
            confidence=cluster.origin().text,
        ),
        "certificate": Certificate(
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


def made_sharded_plan(cluster: ClusterSpec, axes: dict[str, int], *, layers: int = 4, **changes: Any) -> Plan:
    """A feature-wise plan of ``layers`` equal blocks: tensor parallel along the last axis, ZeRO-1 along the first."""
    plan = made_plan(cluster, (0,))
    ranks, ops = tuple(range(math.prod(axes.values()))), _ops(range(layers))
    stage = plan.stages[0].model_copy(
        update={
            "devices": ranks,
            "ops": ops,
            "modules": ("embed", "h", "head"),
            "sharding": made_sharding(axes, range(layers)),
        }
    )
    fields: dict[str, Any] = {
        "strategy": "feature",
        "batch_size": 64,
        "microbatches": 2,
        "recompute": "none",
        "stages": (stage,),
        "recomputed": (),
        "transfers": (),
        "prediction": plan.prediction.model_copy(update={"messages": 0, "collectives": 321}),
        "proof": plan.proof.model_copy(update={"messages": 0}),
        "not_considered": ("pipeline stages",),
    }
    return plan.model_copy(update={**fields, **changes})


def made_hybrid_plan(
    cluster: ClusterSpec, meshes: Sequence[dict[str, int]], *, layers: int = 2, crossing: bool = False
) -> Plan:
    """Stages of ``layers`` equal blocks, each sharded on devices of its own; {}: on one device.

    Nothing goes from stage to stage, unless ``crossing``: then the last op's value of each goes to the next.
    """
    plan = made_plan(cluster, tuple(range(len(meshes))), blocks_per_stage=layers)
    stages, first = [], 0
    for index, (stage, axes) in enumerate(zip(plan.stages, meshes, strict=True)):
        blocks, count = range(index * layers, (index + 1) * layers), math.prod(axes.values())
        sharding = made_sharding(axes, blocks) if axes else None
        devices = tuple(range(first, first + count))
        stages.append(
            stage.model_copy(update={"devices": devices, "ops": _ops(blocks), "sharding": sharding})
        )
        first += count
    values = tuple(
        v.model_copy(update={"name": stages[v.producer].ops[-1], "shape": (16, 8), "element_bytes": 4})
        for v in plan.values
    )
    fields: dict[str, Any] = {
        "strategy": "hybrid",
        "batch_size": 64,
        "microbatches": 4,
        "stages": tuple(stages),
        "values": values if crossing else (),
        "transfers": (),
    }
    return plan.model_copy(update=fields)


def _ops(blocks: range) -> tuple[str, ...]:
    return tuple(f"op{2 * block + half}" for block in blocks for half in (0, 1))


def made_sharding(axes: dict[str, int], blocks: range) -> StageSharding:
    """Equal blocks on a mesh of one or two axes: tensor parallel along the last, ZeRO-1 along the first of two."""
    layers = len(blocks)
    outer, inner = next(iter(axes)), list(axes)[-1]
    two = len(axes) == 2

    def of(along_outer: str, along_inner: str) -> str:
        return f"{along_outer} {along_inner}" if two else along_inner

    def row(name: str, stored: str, taken: str, op: str, takes: str, makes: str, **other: Any) -> LayoutRow:
        fields: dict[str, Any] = {"count": layers, "size_bytes": layers * 8 * MIB, "state": "", **other}
        return LayoutRow(
            name=name,
            stored=stored,
            taken=taken,
            op=op,
            takes=(takes,) if takes else (),
            makes=makes,
            **fields,
        )

    names = [f"h.{i}.{kind}.weight" for i in blocks for kind in ("up", "down")]
    ops = _ops(blocks)
    return StageSharding(
        axes=axes,
        choices={op: ("S0 R~ -> S0", "R~ S0 -> S2")[-len(axes) :] for op in ops},
        stored={name: of("R", "S0" if "up" in name else "S1") for name in names},
        state={name: "S1 S0" for name in names if "up" in name} if two else {},
        batch={"ids": of("S0", "R"), "labels": of("S0", "R")},
        samples_multiple=axes[outer] if two else 1,
        collectives=tuple(
            StageCollective(
                value=f"{op}__all_reduce_{inner}",
                kind="all_reduce",
                axis=inner,
                size_bytes=32 * MIB,
                sent_bytes=2 * (axes[inner] - 1) / axes[inner] * 32 * MIB,
                backward=back,
            )
            for op in ops[:layers]
            for back in (False, True)
        ),
        sums=(
            GradientSum(
                parameters=tuple(names),
                axes=(outer,),
                scattered=True,
                size_bytes=(8 * MIB,) * len(names),
                seconds=0.003,
            ),
        )
        if two
        else (),
        gathers=(
            UpdateGather(axis=outer, parameters=tuple(names), size_bytes=64 * MIB, seconds=0.002),
        )
        if two
        else (),
        layouts=(
            row("embed.weight", of("R", "S0"), of("R", "S0"), "embedding", of("S0", "R"), of("S0", "P"), count=1),
            row(
                "h.*.up.weight", of("R", "S0"), of("R", "S0"), "linear", of("S0", "R"), of("S0", "S2"),
                state="S1 S0" if two else "",
            ),
            row("h.*.attn", "", "", "scaled_dot_product_attention", of("S0", "S1"), of("S0", "S1"), size_bytes=0),
            row("h.*.down.weight", of("R", "S1"), of("R", "S1"), "linear", of("S0", "S2"), of("S0", "P")),
            row("h.*.norm.weight", of("R", "R"), of("R", "R"), "layer_norm", of("S0", "S1"), of("S0", "S1"),
                size_bytes=64),
            row("h.*.norm.bias", of("R", "R"), of("R", "R"), "layer_norm", of("S0", "S1"), of("S0", "S1"),
                size_bytes=64),
            row("head.weight", of("S0", "R"), of("R", "R"), "linear", of("S0", "S1"), of("S0", "S1"), count=1),
        ),
        discovered_ops=2,
        replicated_ops=("wkv", "wkv_1"),
        replicated_seconds=0.004,
        replicated_matmul_share=0.031,
    )  # fmt: skip
