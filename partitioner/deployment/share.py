"""One rank's share of a plan: its programs, its tensors, its optimizer. No communication happens here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.precision import Precision
from partitioner.batches.step import replanned
from partitioner.deployment.state import holders_of, rank_state
from partitioner.engine.optimizer import make_engine_optimizer
from partitioner.engine.weights import StateKeys, weights_of
from partitioner.models.as_graph import Check, as_graph
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.record.rebuild import plan_code, plan_programs, plan_segments
from passes.graph.graph import OpGraph
from passes.lower.placed_graph import PlacedGraph
from passes.trace.init_state import values_of
from passes.trace.precision import check_precision
from runtime.execute.loaded import Replan
from runtime.mesh.sharding import Block, Sharding
from runtime.program.program import Program, SegmentGraph
from runtime.program.relabel import RankMap
from runtime.segment.code import BatchSpec, SegmentCode
from runtime.state.rank_state import RankState


@dataclass(frozen=True)
class Recipe:
    """The arguments of ``deploy`` that a share is made from."""

    workload: Workload
    batch_dims: Mapping[str, int | None] | None
    dynamic_dims: Mapping[str, list[int]] | None
    optimizer: Callable[..., torch.optim.Optimizer] | None
    optimizer_kwargs: Mapping[str, Any]
    learning_rate: float
    weights: str | Path | None
    state_dict: Mapping[str, Tensor] | None
    init_fn: Callable[[nn.Module], None] | None
    seed: int
    check: Check = "on"


@dataclass(frozen=True)
class RankShare:
    """One rank's share, in the ranks of the launch. ``programs``: all ranks'; ``codes``: those of this rank's segments.

    ``graph``: the model's; ``run``: the graph that ranks run of it; ``batch``: the way in which a rank reads batches, which
    may be in parts (``runtime.segment.code``).
    """

    graph: OpGraph
    run: OpGraph
    batch: BatchSpec
    programs: tuple[Program, ...]
    segments: SegmentGraph
    codes: Mapping[int, SegmentCode]
    state: RankState
    optimizer: torch.optim.Optimizer
    keys: StateKeys
    replan: Replan
    """Programs for batches that are cut into fewer micro-batches."""


def build_share(
    plan: PlanData, recipe: Recipe, ranks: RankMap, rank: int, device: torch.device, graph: OpGraph | None
) -> RankShare:
    """Build the share of ``rank`` on ``device``."""
    if graph is None:
        graph = as_graph(
            recipe.workload,
            batch_dims=recipe.batch_dims,
            dynamic_dims=recipe.dynamic_dims,
            precision=plan.precision,
            loss_reduction=plan.loss_reduction,
            opaque=plan.opaque,
            check=recipe.check if rank == 0 else "off",  # one rank's comparison is enough
        )
    code = plan_code(plan, graph, ranks)
    programs, segments = plan_programs(plan, ranks), plan_segments(plan, ranks)
    mine = frozenset(segment.index for segment in segments.segments if rank in segment.ranks)
    codes = code.lowered(device=str(device), only=mine)
    check_precision(graph, plan.precision, plan.optimizer_memory)
    keys = StateKeys.of(recipe.workload.model, plan.precision)
    state = _own_state(recipe, keys, code, rank, device, plan.precision)
    optimizer = make_engine_optimizer(
        recipe.optimizer, recipe.optimizer_kwargs, plan, graph, state, recipe.learning_rate, device
    )

    def replan(microbatches: int) -> tuple[Program, ...]:
        return plan_programs(replanned(plan, microbatches), ranks)

    return RankShare(
        graph, code.graph, code.batch_of(rank), programs, segments, codes, state, optimizer, keys, replan
    )


def _own_state(
    recipe: Recipe,
    keys: StateKeys,
    code: PlacedGraph,
    rank: int,
    device: torch.device,
    precision: Precision,
) -> RankState:
    graph, model = code.graph, recipe.workload.model
    holders = holders_of(graph, code.segmentation, code.shardings)
    mine = [name for name, ranks in holders.items() if rank in ranks]
    values = values_of(
        mine,
        model=model,
        weights=None if recipe.weights is None else weights_of(recipe.weights, keys, model),
        state_dict=recipe.state_dict,
        init_fn=recipe.init_fn,
        device=device,
        seed=recipe.seed,
        blocks=_blocks(graph, code.shardings, rank),
        # A master of what was saved in its type, as of a checkpoint's masters, is not rounded on the way.
        wider={name: graph.types_of(name, precision).owner for name in graph.parameters},
        parts=graph.parts,
    )
    return rank_state(graph, rank, holders, values, device, precision, code.shardings)


def _blocks(graph: OpGraph, shardings: Mapping[str, Sharding], rank: int) -> dict[str, Block]:
    """List the tensors that ``rank`` stores in part."""
    blocks = {}
    for name, sharding in shardings.items():
        if rank not in sharding.mesh.ranks:
            continue
        shape = (graph.parameters.get(name) or graph.buffers[name]).shape
        block = sharding.leaf_block(shape, rank)
        if block.shape != shape:
            blocks[name] = block
    return blocks
