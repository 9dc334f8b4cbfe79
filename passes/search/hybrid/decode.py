"""A pipeline of the search as a candidate: the layouts of each stage's pieces put together.

stage ─► its pieces, the layout at each joint ─► each piece's recipe, renamed to the piece ─► one placement of the stage
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cost_models.layout import Mesh
from passes.graph.blocks import SELECTIVE, attention_of
from passes.graph.graph import OpGraph
from passes.graph.nodes import is_size
from passes.lower.candidate import Candidate
from passes.search.feature.result import SolvedPart, assemble
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.program import Pipeline
from passes.search.hybrid.recipes.joints import Pieces
from passes.search.hybrid.recipes.walk import Step
from passes.shard.words import FeaturePlacement, Placements

V = TypeVar("V")


@dataclass(frozen=True)
class StageRecipe:
    """One stage: pieces ``first`` … ``end`` - 1 on ``ranks``, each as ``steps`` have it."""

    first: int
    end: int
    ranks: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class Decoded:
    """A pipeline as a candidate."""

    candidate: Candidate
    parts: Mapping[int, tuple[SolvedPart, ...]]
    """The pieces of each stage that several devices share, solved."""
    values: Mapping[str, Placements]
    """The layouts at joints inside stages."""
    unlike: frozenset[str]
    """Ops, parameters and leaves of the batch that pieces of a stage would place in unlike ways: the stage has one of them,
    so that it costs something else than its pieces."""


def decoded(
    pieces: Pieces,
    option: GroupOption,
    pipeline: Pipeline,
    stages_steps: Sequence[tuple[Step, ...]],
    *,
    one_queue: bool,
    within: str = "",
) -> Decoded:
    """Return the candidate. ``stages_steps``: the pieces of each stage; ``within``: see ``PieceSearch``."""
    ends = [*pipeline.starts[1:], len(pieces)]
    groups = tuple(option.ranks[place] for place in option.places)
    stages = [StageRecipe(*each) for each in zip(pipeline.starts, ends, groups, stages_steps, strict=True)]
    blocks = tuple(
        tuple(dict.fromkeys(pieces.blocks[s.first + at] for at, step in enumerate(s.steps) if step.again))
        + _within(pieces, s, within)
        for s in stages
    )
    shared = {number: _sharded(pieces, s) for number, s in enumerate(stages) if len(s.ranks) > 1}
    shardings, unlike = _with_batch(pieces, stages, {n: own.placement for n, own in shared.items()})
    candidate = Candidate(
        stage_of={
            op: number for number, s in enumerate(stages) for ops in pieces.ops[s.first : s.end] for op in ops
        },
        groups=groups,
        microbatches=option.microbatches,
        schedule=option.schedule,
        recomputed_blocks=blocks if any(blocks) else (),
        shardings=shardings,
        one_queue=one_queue,
    )
    return Decoded(
        candidate,
        {number: own.parts for number, own in shared.items()},
        _first_of(own.values for own in shared.values()),
        frozenset(unlike.union(*(own.unlike for own in shared.values()))),
    )


@dataclass(frozen=True, eq=False)
class _Sharded:
    """A stage put together from its pieces. ``values``: at all its joints; ``placement`` has those at its ends."""

    placement: FeaturePlacement
    parts: tuple[SolvedPart, ...]
    values: Mapping[str, Placements]
    unlike: set[str]


def _within(pieces: Pieces, stage: StageRecipe, within: str) -> tuple[str, ...]:
    """Return ``within`` where a stage has any of it: gathers of several ranks, attentions that are not one fused op."""
    if within == SELECTIVE:
        attentions = attention_of(pieces.graph)
        there = any(op in attentions for ops in pieces.ops[stage.first : stage.end] for op in ops)
    else:
        there = bool(within) and len(stage.ranks) > 1
    return (within,) if there else ()


def _sharded(pieces: Pieces, stage: StageRecipe) -> _Sharded:
    known: dict[tuple[int, tuple[int, ...]], FeaturePlacement] = {}
    found: list[FeaturePlacement] = []
    parts: list[SolvedPart] = []
    read: list[Mapping[str, Placements]] = []
    for piece, step in enumerate(stage.steps, start=stage.first):
        problem, options = step.recipes.problem, step.options
        key = id(problem), options
        if key not in known:
            known[key] = assemble(problem, options)
        first, part = problem.space.graph, pieces.parts[piece]
        names = {old.name: new.name for old, new in zip(first.graph.nodes, part.graph.nodes, strict=True)}
        parts.append(SolvedPart(problem, options, names))
        own = renamed(known[key], first, part, stage.ranks)
        sizes = {given.name for given in part.inputs if only_its_sizes(part, given.node)}
        read.append({name: layout for name, layout in own.batch.items() if name not in sizes})
        found.append(own)
    whole, crossing = _joined(found, read), _crossing(pieces, stage)
    values = {name: layout for name, layout in whole.values.items() if name in crossing}
    return _Sharded(replace(whole, values=values), tuple(parts), whole.values, _unlike(whole, found, read))


def _with_batch(
    pieces: Pieces, stages: Sequence[StageRecipe], placements: Mapping[int, FeaturePlacement]
) -> tuple[dict[int, FeaturePlacement], set[str]]:
    """Return the placements with each part of the batch in one layout on each group, and the parts that a stage of one
    would read in another.

    Stages that read nothing of it but its size take it as others of their group do, or of any on a mesh of their shape.
    """
    read: dict[tuple[int, ...], dict[str, Placements]] = {}
    alike: dict[tuple[int, ...], dict[str, Placements]] = {}
    own_read: dict[int, dict[str, Placements]] = {}
    for number, own in placements.items():
        stage = stages[number]
        names = {
            given.name
            for part in pieces.parts[stage.first : stage.end]
            for given in part.inputs
            if given.kind == "batch" and not only_its_sizes(part, given.node)
        }
        own_read[number] = {name: own.batch[name] for name in own.batch if name in names}
        read[stage.ranks] = _first_of([read.get(stage.ranks, {}), own_read[number]])
        alike[own.mesh.shape] = _first_of([alike.get(own.mesh.shape, {}), own_read[number]])
    made, unlike = {}, set[str]()
    for number, own in placements.items():
        group = read[stages[number].ranks]
        unlike |= {name for name, layout in own_read[number].items() if group[name] != layout}
        known = {**own.batch, **alike[own.mesh.shape], **group}
        batch = {name: known[name] for name in own.batch}
        made[number] = replace(own, batch=batch)
    return made, unlike


def _joined(parts: Sequence[FeaturePlacement], read: Sequence[Mapping[str, Placements]]) -> FeaturePlacement:
    """Put placements of pieces on one mesh together; of what several have, the first says how.

    ``read``: leaves of the batch of which each reads more than the sizes; others take them as these do.
    """
    mesh: Mesh = parts[0].mesh
    return FeaturePlacement(
        mesh,
        _first_of(p.choices for p in parts),
        _first_of(p.stored for p in parts),
        _first_of([*read, *(p.batch for p in parts)]),
        parts[0].microbatches,
        _first_of(p.sharded_state for p in parts),
        _first_of(p.values for p in parts),
    )


def _first_of(found: Iterable[Mapping[str, V]]) -> dict[str, V]:
    joined: dict[str, V] = {}
    for each in found:
        for name, value in each.items():
            joined.setdefault(name, value)
    return joined


def _unlike(
    whole: FeaturePlacement, parts: Sequence[FeaturePlacement], read: Sequence[Mapping[str, Placements]]
) -> set[str]:
    """Name what a piece would place in another way than its stage has it."""
    found = {name for own in read for name, layout in own.items() if whole.batch[name] != layout}
    for own in parts:
        found |= {name for name, choice in own.choices.items() if whole.choices[name] != choice}
        found |= {name for name, layout in own.stored.items() if whole.stored[name] != layout}
        found |= {name for name, layout in own.sharded_state.items() if whole.sharded_state[name] != layout}
    return found


def _crossing(pieces: Pieces, stage: StageRecipe) -> set[str]:
    """Name the values that other stages make or read."""
    inside = range(stage.first, stage.end)
    found = set()
    for piece in inside:
        part = pieces.parts[piece]
        found |= {x.name for x in part.inputs if x.kind == "value" and pieces.piece_of[x.name] not in inside}
        found |= {
            x.name for x in part.outputs if x.kind == "value" and pieces.last_reader[x.name] not in inside
        }
    return found


def only_its_sizes(part: OpGraph, node: str) -> bool:
    """Tell whether a part reads nothing of a leaf but how large it is: any layout will do."""
    return all(is_size(user.meta.get("val")) for user in part.nodes[node].users)


def renamed(
    placement: FeaturePlacement, source: OpGraph, target: OpGraph, group: tuple[int, ...]
) -> FeaturePlacement:
    """Return the placement of ``source`` as one of ``target``, a part of equal structure, on the ranks of ``group``."""
    mesh = Mesh(group, placement.mesh.shape, placement.mesh.axes)
    pairs = list(zip(source.graph.nodes, target.graph.nodes, strict=True))
    nodes = {old.name: new.name for old, new in pairs}
    given = {
        source.input_of[old.name].name: target.input_of[new.name].name
        for old, new in pairs
        if old.op == "placeholder"
    }
    outputs = zip(source.outputs, target.outputs, strict=True)
    names = {**given, **{old.name: new.name for old, new in outputs}}
    return replace(
        placement,
        mesh=mesh,
        choices={nodes[name]: choice for name, choice in placement.choices.items()},
        stored={names[name]: layout for name, layout in placement.stored.items()},
        batch={names[name]: layout for name, layout in placement.batch.items() if name in names},
        values={names[name]: layout for name, layout in placement.values.items()},
        returned={names[name]: layout for name, layout in placement.returned.items()},
        sharded_state={names[name]: layout for name, layout in placement.sharded_state.items()},
    )
