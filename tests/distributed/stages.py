"""Pipelines of stages on device groups, given by hand: each stage's ops run in a pattern on its ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_models.layout import Mesh, Placement
from passes.graph.graph import OpGraph
from passes.graph.part import part_of
from passes.graph.recomputed import recomputed_ops
from passes.lower.candidate import Candidate
from passes.shard.words import FeaturePlacement
from tests.distributed.sharded_models import Forced, R, place


@dataclass(frozen=True)
class Group:
    """A stage: the number of its ranks, how they run its ops, and the placement in which values arrive and leave."""

    ranks: int
    pattern: Forced
    exchanged: Placement = R


def staged(
    graph: OpGraph, borders: Sequence[str], groups: Sequence[Group], schedule: str, microbatches: int
) -> Candidate:
    """Cut ``graph`` before the first op of each module in ``borders``; stage k runs on the ``groups[k % len(groups)]``."""
    copied = recomputed_ops(graph)
    stage, stage_of = 0, {}
    for node in graph.ops:
        path = node.meta["module_path"]
        if stage < len(borders) and (path == borders[stage] or path.startswith(f"{borders[stage]}.")):
            stage += 1
        if node.name not in copied:
            stage_of[node.name] = stage
    ends = list(itertools.accumulate(group.ranks for group in groups))
    ranks = [tuple(range(end - group.ranks, end)) for end, group in zip(ends, groups, strict=True)]
    of_stage = [k % len(groups) for k in range(len(borders) + 1)]
    shardings: dict[int, FeaturePlacement] = {}
    for number, k in enumerate(of_stage):
        if groups[k].ranks == 1:
            continue
        part = part_of(graph, [name for name, own in stage_of.items() if own == number], copied)
        placed = place(part, Mesh(ranks[k], (groups[k].ranks,), ("all",)), (groups[k].pattern,), microbatches)
        crossing = [entry.name for entry in (*part.inputs, *part.outputs) if entry.kind == "value"]
        shardings[number] = replace(placed, values=dict.fromkeys(crossing, (groups[k].exchanged,)))
    return Candidate(stage_of, tuple(ranks[k] for k in of_stage), microbatches, schedule, shardings=shardings)
