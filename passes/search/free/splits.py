"""Ops that are split into blocks of neurons, and the blocks' sizes.

given       {"mlp": (60, 40)}                    as the user says, in the family's own units
automatic   devices of speeds 3 and 1            75 and 25 of 100 neurons: unlike devices end together
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.shard.words import operands
from passes.split.families import Family, families
from passes.split.split import Split, split_neurons

MOST_BLOCK_DEVICES = 16
"""Devices up to which models are split by themselves."""
LARGE_FAMILY = 0.3
"""Share of a device's fair part of all work above which a family is large, hard to balance."""
MOST_SPLIT_OPS, OPS_PER_BLOCK = 8000, 12
"""Ops that a graph with blocks may have; ops that a block of a family brings, about."""


def given_splits(graph: OpGraph, wanted: Mapping[str, Sequence[int]]) -> tuple[Split, ...]:
    """Return the splits that the user asks for.

    ``wanted``: sizes of blocks by glob over families' names, or by an op's name (``conv2d:2`` for its dimension 2).

    Raises UsageError with every problem.
    """
    known = families(graph)
    found: list[Split] = []
    problems: list[str] = []
    for glob, sizes in wanted.items():
        matched = [family for family in known if fnmatchcase(family.name, glob)]
        for family in matched:
            if sum(sizes) != family.units or min(sizes) < 1:
                problems.append(
                    f"{family.name} has {family.units} {family.kind}; {'+'.join(map(str, sizes))} is {sum(sizes)}"
                )
            else:
                found += family.splits(sizes)
        named = None if matched else _named_op(graph, known, glob)
        if named is not None:
            found.append(Split(*named, tuple(sizes)))
        elif not matched:
            problems.append(f"{glob!r} is no op, and matches nothing that can be split{_close(glob, known)}")
    if problems:
        names = ", ".join(f"{family.name} ({family.units} {family.kind})" for family in known[:6])
        raise UsageError(
            "cannot split as asked",
            problems,
            [f"one of: {names}{', …' if len(known) > 6 else ''}" if known else "a model with linear layers"],
        )
    split = tuple(each for each in found if len(each.sizes) > 1)
    _refuse_what_stays_whole(graph, split)
    return split


def _refuse_what_stays_whole(graph: OpGraph, splits: Sequence[Split]) -> None:
    """Raise UsageError for ops that cannot run in blocks along the dimension that was named."""
    in_blocks = {whole for whole, _ in split_neurons(graph, splits).blocks.values()}
    whole = [split for split in splits if split.op not in in_blocks]
    if whole:
        raise UsageError(
            "cannot split as asked",
            [f"{split.op} cannot run in blocks of its dimension {split.dim}" for split in whole],
            [
                "another dimension (OP:DIM), or the layer before it: blocks are pushed on through what can take them"
            ],
        )


def _named_op(graph: OpGraph, known: Sequence[Family], name: str) -> tuple[str, int] | None:
    """Find the op that ``linear`` or ``conv2d:2`` means, and its dimension: that of its neurons where none is named."""
    op, _, dim = name.rpartition(":") if ":" in name else (name, "", "")
    node = graph.nodes.get(op)
    if node is None or node.op != "call_function" or not re.fullmatch(r"-?\d+|", dim):
        return None
    if dim:
        return op, int(dim)
    dims = [
        cut[0] for family in known for seed, cut in zip(family.ops, family.cuts, strict=True) if seed == op
    ]
    return op, dims[0] if dims else (1 if "conv" in str(node.target) else -1)


def _close(glob: str, known: Sequence[Family]) -> str:
    close = get_close_matches(glob, [family.name for family in known], n=2, cutoff=0.4)
    return f" (close: {', '.join(close)})" if close else ""


def automatic_families(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec) -> tuple[Family, ...]:
    """Choose the families that are too large for a device's fair share, or whose weights and gradients no device can hold.

    The latter are tables, which compute next to nothing. Empty where the graph would have too many ops, or there are too
    many devices.
    """
    count = cluster.world_size
    if not 1 < count <= MOST_BLOCK_DEVICES or len(graph) > MOST_SPLIT_OPS:
        return ()
    known = [family for family in families(graph) if family.units > 1]
    table = costs.at(graph.example_batch_size)  # as families' FLOPs are counted
    work = max(sum(family.flops for family in known), float(np.sum(table.forward_flops)))
    room, large = max(device.room_bytes for device in cluster.devices), LARGE_FAMILY * work / count
    chosen = tuple(f for f in known if f.flops > large or 2 * _weight_bytes(graph, f) > room)
    more = sum(len(family.ops) for family in chosen) * count * OPS_PER_BLOCK
    return chosen if len(graph) + more <= MOST_SPLIT_OPS else ()


def _weight_bytes(graph: OpGraph, family: Family) -> int:
    """Sum the bytes of the parameters that a family's seeds read."""
    read = {source.name for op in family.ops for source in operands(graph.nodes[op])}
    specs = (graph.parameters[i.name] for i in graph.inputs if i.kind == "parameter" and i.node in read)
    return sum(spec.elements * spec.dtype.itemsize for spec in specs)


def proportional(units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divide ``units`` into parts as close to ``shares`` as whole numbers can be (largest remainders), none empty.

    The largest shares get one each where there are fewer units than shares.
    """
    if units < len(shares):
        return (1,) * units
    exact = [units * share / sum(shares) for share in shares]
    sizes = [max(1, int(part)) for part in exact]
    while sum(sizes) < units:
        sizes[max(range(len(sizes)), key=lambda i: exact[i] - sizes[i])] += 1
    while sum(sizes) > units:
        sizes[max((i for i in range(len(sizes)) if sizes[i] > 1), key=lambda i: sizes[i] - exact[i])] -= 1
    return tuple(sizes)
