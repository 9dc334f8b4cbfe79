"""A layered layout: boxes in rows, so that arrows go down; long arrows lead around the boxes between their ends.

    1. rows      each box below all that it reads from (longest path), sources just above their first reader
    2. points    an arrow over several rows gets a point in each of them, which takes a place like a narrow box
    3. order     each row by the mean place of its neighbours, a few times down and up
    4. places    as near to the mean of the neighbours as the order and the gaps allow (least squares: pool adjacent
                 violators)

This is the method of K. Sugiyama, S. Tagawa and M. Toda, "Methods for Visual Understanding of Hierarchical System
Structures", 1981, as Graphviz and dagre use it. networkx gives rows, but no places for boxes of unequal sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

GAP_ACROSS, GAP_DOWN = 22.0, 34.0
"""Pixels between boxes of a row, and between rows: an arrow's head is seen."""
POINT_WIDTH = 8.0
"""Pixels that a passing arrow takes in a row."""
SHORT, LONG, PASSING = 50.0, 1.0, 8.0
"""The weights with which links are straightened: to the next row, at the end of a long arrow, within one.
Were all alike, a chain of boxes with arrows to far below would become a staircase. Chosen by looking at pictures."""
SWEEPS = 8
"""Rounds of ordering, and of placing; more change nothing that is seen."""
LONGEST = 100
"""The most rows of an arrow that is led around boxes; a longer one goes straight: its points would take too long."""
GRID_ROW = 6
"""Boxes without arrows in one row."""

XY = tuple[float, float]


@dataclass(frozen=True)
class RowLayout:
    """The middle of each box across and its upper edge, the points of each arrow, and the size of it all."""

    places: tuple[XY, ...]
    paths: tuple[tuple[XY, ...], ...]
    width: float
    height: float


def layered(
    sizes: Sequence[XY], edges: Sequence[tuple[int, int]], order: Sequence[float] | None = None
) -> RowLayout:
    """Lay out boxes of ``sizes``. ``order``: an arrow from a box to one before it in this order goes up."""
    order = range(len(sizes)) if order is None else order
    rank = {box: (order[box], box) for box in range(len(sizes))}
    down = [(a, b) if rank[a] < rank[b] else (b, a) for a, b in edges]
    rows = _rows(sizes, down, rank)
    nodes = list(sizes)
    row_of = {box: number for number, row in enumerate(rows) for box in row}
    chains = [_chain(a, b, row_of, rows, nodes) for a, b in down]
    links = sorted({(a, b) for chain in chains for a, b in pairwise(chain)})
    _order(rows, links)
    xs = _places(rows, links, nodes)
    tops, height = _tops(rows, nodes)
    left = min((xs[box] - nodes[box][0] / 2 for box in range(len(sizes))), default=0.0)
    shift = -min(left, min(xs.values(), default=0.0))
    places = tuple((xs[box] + shift, tops[row_of[box]][0]) for box in range(len(sizes)))
    paths = []
    for (a, b), chain in zip(edges, chains, strict=True):
        first, *between, last = chain
        points = [(xs[first] + shift, tops[row_of[first]][0] + nodes[first][1])]
        for point in between:
            top, bottom = tops[row_of[point]]
            points += [(xs[point] + shift, top), (xs[point] + shift, bottom)]
        points.append((xs[last] + shift, tops[row_of[last]][0]))
        paths.append(tuple(points if (a, b) == (first, last) else reversed(points)))
    width = max((xs[box] + shift + nodes[box][0] / 2 for box in xs), default=0.0)
    return RowLayout(places, tuple(paths), width, height)


def _rows(
    sizes: Sequence[XY], down: Sequence[tuple[int, int]], rank: dict[int, tuple[float, int]]
) -> list[list[int]]:
    dag: nx.DiGraph[int] = nx.DiGraph()
    dag.add_edges_from((a, b) for a, b in down if a != b)
    rows = [sorted(row, key=rank.__getitem__) for row in nx.topological_generations(dag)]
    row_of = {box: number for number, row in enumerate(rows) for box in row}
    for box in [box for box in dag if not dag.in_degree(box)]:
        row_of[box] = min(row_of[reader] for reader in dag.successors(box)) - 1
    rows = [[] for _ in rows]
    for box in sorted(row_of, key=rank.__getitem__):
        rows[row_of[box]].append(box)
    alone = sorted((box for box in range(len(sizes)) if box not in dag), key=rank.__getitem__)
    grid = [alone[start : start + GRID_ROW] for start in range(0, len(alone), GRID_ROW)]
    return [*grid, *rows]


def _chain(a: int, b: int, row_of: dict[int, int], rows: list[list[int]], nodes: list[XY]) -> list[int]:
    """Return an arrow's ends with a new point in each row between them."""
    chain = [a]
    between = range(row_of[a] + 1, row_of[b])
    for row in between if len(between) <= LONGEST else ():
        point = len(nodes)
        nodes.append((POINT_WIDTH, 0.0))
        row_of[point] = row
        rows[row].append(point)
        chain.append(point)
    return [*chain, b]


def _neighbours(links: Sequence[tuple[int, int]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    above: defaultdict[int, list[int]] = defaultdict(list)
    below: defaultdict[int, list[int]] = defaultdict(list)
    for a, b in links:
        below[a].append(b)
        above[b].append(a)
    return above, below


def _order(rows: list[list[int]], links: Sequence[tuple[int, int]]) -> None:
    """Sort each row by the mean place of its neighbours in the rows above, then below."""
    place = {box: float(number) for row in rows for number, box in enumerate(row)}
    above, below = _neighbours(links)
    for sweep in range(SWEEPS):
        near = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            mean = {
                box: sum(place[other] for other in near[box]) / len(near[box]) if box in near else place[box]
                for box in row
            }
            row.sort(key=mean.__getitem__)
            place.update((box, float(number)) for number, box in enumerate(row))


def _places(
    rows: Sequence[Sequence[int]], links: Sequence[tuple[int, int]], nodes: Sequence[XY]
) -> dict[int, float]:
    xs: dict[int, float] = {}
    for row in rows:  # at first side by side around 0
        offsets = _offsets(row, nodes)
        middle = (offsets[0] + offsets[-1]) / 2 if offsets else 0.0
        xs |= {box: offset - middle for box, offset in zip(row, offsets, strict=True)}
    above, below = _neighbours(links)

    def weight(a: int, b: int) -> float:
        points = (nodes[a][1] == 0.0) + (nodes[b][1] == 0.0)
        return (SHORT, LONG, PASSING)[points]

    for sweep in range(SWEEPS):
        near = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            weights = [sum(weight(box, other) for other in near.get(box, ())) or LONG for box in row]
            wanted = [
                sum(weight(box, other) * xs[other] for other in near[box]) / heavy if box in near else xs[box]
                for box, heavy in zip(row, weights, strict=True)
            ]
            offsets = _offsets(row, nodes)
            apart = [want - offset for want, offset in zip(wanted, offsets, strict=True)]
            free = _ascending(apart, weights)
            xs |= {box: base + offset for box, base, offset in zip(row, free, offsets, strict=True)}
    return xs


def _offsets(row: Sequence[int], nodes: Sequence[XY]) -> list[float]:
    """Return the middles of a row's boxes where they stand as near as they may."""
    found, right = [], 0.0
    for box in row:
        width = nodes[box][0]
        found.append(right + width / 2)
        right += width + GAP_ACROSS
    return found


def _ascending(wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the ascending numbers that are nearest to ``wanted`` by weighted least squares."""
    pools: list[
        tuple[float, float, int]
    ] = []  # the mean, the weight and the number of neighbours that must be equal
    for want, weight in zip(wanted, weights, strict=True):
        mean, heavy, count = want, weight, 1
        while pools and pools[-1][0] > mean:
            other, more, members = pools.pop()
            mean = (mean * heavy + other * more) / (heavy + more)
            heavy, count = heavy + more, count + members
        pools.append((mean, heavy, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _tops(rows: Sequence[Sequence[int]], nodes: Sequence[XY]) -> tuple[list[tuple[float, float]], float]:
    """Return the upper and lower edge of each row, and the height of all."""
    found, top = [], 0.0
    for row in rows:
        bottom = top + max((nodes[box][1] for box in row), default=0.0)
        found.append((top, bottom))
        top = bottom + GAP_DOWN
    return found, max(0.0, top - GAP_DOWN)
