"""Blocks that a stage computes again: as few as make it fit.

The surrogate knows two kinds of stages, those that keep all activations and those that compute all blocks again. Of the
latter, blocks keep their activations after all while there is room for them, those that save the most time per byte first.
The estimate is the surrogate's; the simulation of the candidate has the last word.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from cost_models.arrays import FloatArray
from passes.search.blocks import Blocks
from passes.search.layer.search import LayerSearch, SolvedSplit

BlocksOfStages = tuple[tuple[str, ...], ...]


def all_blocks(search: LayerSearch, solved: SolvedSplit) -> BlocksOfStages:
    """Per stage, the blocks with ops in it if it computes them again; () if no stage does."""
    return _named(search.model.blocks, _present(search, solved))


def fewest_blocks(search: LayerSearch, solved: SolvedSplit) -> BlocksOfStages:
    """Per stage, the blocks that it must compute again to fit; all of them where that was asked for."""
    present = _present(search, solved)
    recompute = solved.problem.recompute
    if recompute is not None and not recompute.always:
        room = _room(solved)
        for stage, again in enumerate(solved.split.recomputed):
            if again:
                present[stage] -= _kept(search, solved, stage, present[stage], room)
    return _named(search.model.blocks, present)


def _present(search: LayerSearch, solved: SolvedSplit) -> list[set[int]]:
    """Per stage that computes its blocks again, the blocks with ops in it; nothing for the others."""
    found: list[set[int]] = [set() for _ in solved.ranks]
    for stage, block in zip(solved.stages.tolist(), search.model.blocks.of.tolist(), strict=True):
        if block >= 0 and solved.split.recomputed and solved.split.recomputed[stage]:
            found[stage].add(block)
    return found


def _named(blocks: Blocks, present: list[set[int]]) -> BlocksOfStages:
    if not any(present):
        return ()
    return tuple(tuple(blocks.names[block] for block in sorted(found)) for found in present)


def _room(solved: SolvedSplit) -> FloatArray:
    """[kinds or devices, by rank] bytes left on each rank, by the surrogate's estimate."""
    room = np.zeros(max(solved.ranks) + 1)
    for rank, kind in zip(solved.ranks, solved.split.kinds, strict=True):
        room[rank] = solved.problem.kinds[kind].capacity_bytes
    np.subtract.at(room, list(solved.ranks), solved.split.memory_bytes)
    return room


def _kept(
    search: LayerSearch, solved: SolvedSplit, stage: int, present: set[int], room: FloatArray
) -> set[int]:
    """Blocks of ``present`` whose activations fit the room on the stage's rank, which shrinks by them."""
    size, rank = solved.option.size(search.batch_size), solved.ranks[stage]
    held = max(whole for whole, _ in solved.problem.held_at(len(solved.ranks) - stage))
    bytes_of, seconds_of = _savings(search, solved, stage, present, size)
    kept: set[int] = set()
    for block in sorted(present, key=lambda b: -seconds_of[b] / max(bytes_of[b], 1.0)):
        needed = held * bytes_of[block]
        if needed <= room[rank]:
            room[rank] -= needed
            kept.add(block)
    return kept


def _savings(
    search: LayerSearch, solved: SolvedSplit, stage: int, present: set[int], size: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes per micro-batch that recomputing each block of the stage frees, and seconds that it takes."""
    model, blocks = search.model, search.model.blocks
    again = model.again_seconds(size, search.table.device(solved.ranks[stage]))
    stages = solved.stages
    sizes = model.costs.storage_bytes(size)
    bytes_of: dict[int, float] = {}
    seconds_of: defaultdict[int, float] = defaultdict(float)
    for block in present:
        mine = [op for op in blocks.members[block] if stages[op] == stage]
        inside = set(blocks.inside[block])
        saved = {name for op in mine for name in model.costs.saved[model.rows[op]]} & inside
        bytes_of[block] = float(sum(sizes[name] for name in saved))
        seconds_of[block] = float(again[mine].sum())
    return bytes_of, seconds_of
