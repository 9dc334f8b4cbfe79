"""Which ops are split into blocks of neurons, and into how large ones.

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
from passes.costs import GraphCosts
from passes.graph import OpGraph
from passes.split_families import Family, families
from passes.split_neurons import Split

MOST_DEVICES = 16
"""A model is split by itself into at most so many blocks."""
LARGE = 0.3
"""Of one device's fair share of all work: a family that is larger makes devices hard to balance."""
WORTH = 0.005
"""Of all work: a family that is smaller is left whole."""
MOST_OPS = 8000
"""A graph that would have more ops than this is not split everywhere."""
OPS_PER_BLOCK = 12
"""About how many ops a block of a family brings."""


def given_splits(graph: OpGraph, wanted: Mapping[str, Sequence[int]]) -> tuple[Split, ...]:
    """``wanted``: glob over families' names, or an op's name (``conv2d:2`` for its dimension 2) -> sizes of blocks.

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
        op, _, dim = glob.rpartition(":") if ":" in glob else (glob, "", "-1")
        is_op = (
            op in graph.nodes and graph.nodes[op].op == "call_function" and bool(re.fullmatch(r"-?\d+", dim))
        )
        if not matched and is_op:
            found.append(Split(op, int(dim), tuple(sizes)))
        elif not matched:
            problems.append(f"{glob!r} is no op, and matches nothing that can be split{_close(glob, known)}")
    if problems:
        names = ", ".join(f"{family.name} ({family.units} {family.kind})" for family in known[:6])
        raise UsageError(
            "cannot split as asked",
            problems,
            [f"one of: {names}{', …' if len(known) > 6 else ''}" if known else "a model with linear layers"],
        )
    return tuple(found)


def _close(glob: str, known: Sequence[Family]) -> str:
    close = get_close_matches(glob, [family.name for family in known], n=2, cutoff=0.4)
    return f" (close: {', '.join(close)})" if close else ""


def automatic_families(
    graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec
) -> tuple[tuple[Family, ...], ...]:
    """What is too large for a device's fair share; and everything worth it, if that is more.

    None where the graph would have too many ops, or there are too many devices.
    """
    count = cluster.world_size
    if not 1 < count <= MOST_DEVICES or len(graph) > MOST_OPS:
        return ()
    known = [family for family in families(graph) if family.units > 1]
    table = costs.at(graph.example_batch_size)  # as families' FLOPs are counted
    work = max(sum(family.flops for family in known), float(np.sum(table.forward_flops)))
    large = tuple(family for family in known if family.flops > LARGE * work / count)
    worth = tuple(family for family in known if family.flops > WORTH * work)
    return tuple(
        chosen
        for chosen in dict.fromkeys((large, worth))
        if chosen
        and len(graph) + sum(len(family.ops) for family in chosen) * count * OPS_PER_BLOCK <= MOST_OPS
    )


def proportional(units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """``units`` in parts as near to ``shares`` as whole numbers can be (largest remainders), none of them empty.

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
