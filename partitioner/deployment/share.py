"""One rank's share of a plan: its programs, its tensors, its optimizer.

No communication happens here but for the comparison of tensors that several ranks hold: they must start alike on all of
them. Their gradients are summed and every rank updates its own copy, so copies that differ at first differ for ever: a tied
embedding would silently be two. Models that each rank seeds for itself (``torch.manual_seed(rank)``) are the usual reason.
The copies of one block of a sharded tensor are compared: if ranks 0 1 2 3 hold blocks A B A B, 0 with 2 and 1 with 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.errors import UsageError
from cost_models.precision import Precision
from partitioner.batches.batch_check import digest
from partitioner.engine.optimizer import make_engine_optimizer
from partitioner.engine.weights import StateKeys, weights_of
from partitioner.models.as_graph import Check, as_graph
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.record.rebuild import plan_code, plan_programs, plan_segments
from passes.graph.graph import OpGraph
from passes.lower.placed_graph import PlacedGraph
from passes.lower.segment import Segmentation
from passes.lower.summarize import state_names_of_segments
from passes.trace.init_state import values_of
from passes.trace.precision import check_precision
from runtime.execute.context import RankProgram
from runtime.mesh.sharding import Block, Sharding
from runtime.program.relabel import RankMap
from runtime.ranks.meeting import Meeting
from runtime.state.precision import leaf_and_owner
from runtime.state.rank_state import RankState
from runtime.state.sharded_owners import sharded_leaf_and_owner


def holders_of(
    graph: OpGraph, segmentation: Segmentation, shardings: Mapping[str, Sharding]
) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold each parameter and buffer of the model, or blocks of it.

    A tensor that no segment reads stays with the first group; one with a sharding is on every rank of its mesh.
    """
    ranks_of: dict[str, set[int]] = {name: set() for name in (*graph.parameters, *graph.buffers)}
    for segment, names in enumerate(state_names_of_segments(graph, segmentation)):
        for name in names:
            ranks_of[name].update(segmentation.ranks[segment])
    for name, sharding in shardings.items():
        ranks_of[name].update(sharding.mesh.ranks)
    first = tuple(sorted(min(segmentation.ranks, key=min)))
    return {name: tuple(sorted(ranks)) or first for name, ranks in ranks_of.items()}


def rank_state(
    graph: OpGraph,
    rank: int,
    holders: Mapping[str, tuple[int, ...]],
    values: Iterable[tuple[str, Tensor]],
    device: torch.device,
    precision: Precision,
    shardings: Mapping[str, Sharding],
) -> RankState:
    """Make this rank's tensors. ``values``: copies of its own for every name that it holds; of blocks where it shards.

    They are taken one by one, because all values together, whole and in their stored types, may need more memory.
    """
    leaves: dict[str, Tensor] = {name: constant.to(device) for name, constant in graph.constants.items()}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    for name, value in values:
        spec, sharding = graph.parameters.get(name), shardings.get(name)
        if spec is None:
            buffers[name] = value
            continue
        types = graph.types_of(name, precision)
        if sharding is None:
            leaves[name], parameters[name] = leaf_and_owner(value, types, spec.requires_grad)
        else:
            leaves[name], parameters[name] = sharded_leaf_and_owner(
                value, types, spec.requires_grad, sharding, rank
            )
        del value  # the next one is made first
    held = {**parameters, **buffers}
    own = {name: sharding for name, sharding in shardings.items() if name in held}
    elsewhere = {name: sharding for name, sharding in shardings.items() if name not in held}
    return RankState(rank, {**leaves, **buffers}, parameters, buffers, holders, own, graph.parts, elsewhere)


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
    """One rank's share, in the ranks of the launch."""

    graph: OpGraph
    """The model's graph."""
    run: OpGraph
    """The graph that ranks run of it."""
    own: RankProgram
    """This rank's program, with the way in which it reads batches, which may be in parts (``runtime.segment.code``)."""
    state: RankState
    optimizer: torch.optim.Optimizer
    keys: StateKeys


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
    check_precision(graph, plan.precision, plan.optimizer_memory)
    keys = StateKeys.of(recipe.workload.model, plan.precision)
    state = _own_state(recipe, keys, code, rank, device, plan.precision)
    optimizer = make_engine_optimizer(
        recipe.optimizer, recipe.optimizer_kwargs, plan, graph, state, recipe.learning_rate, device
    )

    own = RankProgram(
        programs,
        rank,
        code.lowered(device=str(device), only=mine),
        segments,
        state.leaves,
        code.batch_of(rank),
        replan=lambda count: plan_programs(plan.model_copy(update={"microbatches": count}), ranks),
        shardings=state.shardings,
    )
    return RankShare(graph, code.graph, own, state, optimizer, keys)


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


_MOST = 10
"""The most tensors that are named."""


def refuse_unlike_copies(meeting: Meeting, state: RankState, seed: int) -> None:
    """Raise UsageError, on every rank, where copies differ (in what ``digest`` looks at). Collective.

    ``seed``: dropout's. Ranks that run one segment on shards must drop the same of what they all compute.
    """
    if not any(len(ranks) > 1 for ranks in state.holders.values()):
        return
    own = dict(_digests(state))
    if state.shardings:
        own["deploy(seed=)"] = seed
    differences = meeting.decide("copies", own, unlike_copies)
    if differences:
        raise UsageError(
            "ranks hold different values of the same tensors",
            [
                *differences[:_MOST],
                *([f"and {len(differences) - _MOST} more"] if differences[_MOST:] else []),
            ],
            [
                "seed all ranks alike before the model is made: torch.manual_seed(0); and give one seed= to deploy",
                "weights= or state_dict= gives every rank the same values",
            ],
        )


def _digests(state: RankState) -> Iterator[tuple[str, int]]:
    """Yield digests of what this rank has of tensors that others have as well; each name says which part it is."""
    for name, own in {**state.parameters, **state.buffers}.items():
        sharding = state.shardings.get(name)
        if len(state.holders[name]) > 1:
            yield _part(name, () if sharding is None else sharding.owner_part(state.rank)), digest(own)
        if sharding is not None and sharding.cuts:  # the first forward reads more than what the rank trains
            yield _part(f"{name}, stored", sharding.leaf_part(state.rank)), digest(state.leaves[name])


def _part(name: str, places: tuple[int, ...]) -> str:
    return f"{name} (part {' '.join(map(str, places))})" if places else name


def unlike_copies(digests: list[Any]) -> list[str]:
    """Name the tensors that are unlike. ``digests``: for each rank, by the names of the shared tensors that it holds."""
    found = []
    for name in dict.fromkeys(name for of_rank in digests for name in of_rank):
        values = {rank: of_rank[name] for rank, of_rank in enumerate(digests) if name in of_rank}
        first, *others = values
        different = [str(rank) for rank in others if values[rank] != values[first]]
        if different:
            found.append(f"{name}: rank {first} has other values than rank {', '.join(different)}")
    return found
