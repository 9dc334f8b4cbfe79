"""The boxes of a placement graph for a still picture: modules, equal ones folded, runs of ops, and which are opened.

    layers.0 … layers.39, all alike             ->   one box "layers.0–39 ×40" that shows the inside of one of them
    32 ops of self_attn between q_proj, o_proj  ->   one box "32 ops"
    modules that would make it too much         ->   closed: one box with what is in it

A picture has at most ``MOST_BOXES`` boxes, or, where everything is asked for, every op and no folds.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_models.units import counted
from partitioner.pictures.drawing import Kind

MOST_BOXES = 300
"""The most boxes of a picture, open ones and the legend counted: as many as the report page draws at once."""
LONGEST_LIST = 60
"""The most boxes directly in another, as on the report page; longer lists are cut into parts."""
ENOUGH = 24
"""The boxes below which a picture is opened further than to the modules: an A4 page holds more."""


@dataclass(eq=False)
class Box:
    """A module, a fold of equal modules, a run of ops, or an op."""

    kind: Kind
    label: str
    ops: list[int]
    """All ops in it; of a fold those of all its blocks."""
    children: list[Box] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    """The ops that its picture is made of: of a fold those of its first block."""

    @property
    def has_modules(self) -> bool:
        return any(child.kind in ("module", "fold") for child in self.children)


def choose_boxes(graph: Mapping[str, Any], most: int | None = MOST_BOXES) -> tuple[Box, set[Box]]:
    """Return the boxes of a placement graph, and which of them are open. ``most``: None to open all, folds too."""
    root = _Maker(graph, most is None).box(graph["tree"])
    return root, {box for box in _all(root) if box.children} if most is None else _opened(root, most)


def _all(box: Box) -> Iterator[Box]:
    yield box
    for child in box.children:
        yield from _all(child)


class _Maker:
    """Makes boxes of the tree's nodes."""

    def __init__(self, graph: Mapping[str, Any], whole: bool) -> None:
        self.ops = graph["ops"]
        self.whole = whole

    def box(self, node: Mapping[str, Any]) -> Box:
        if node.get("members"):
            if self.whole:
                children = [self.box(member) for member in node["members"]]
                return Box("module", node["label"], ops_of(node), children, ops_of(node))
            inner = self.box(node["members"][0])
            return Box("fold", node["label"], ops_of(node), inner.children, inner.shown)
        inside = [(child["first"], self.box(child)) for child in node["children"]]
        inside += self._own(node["ops"], sorted(first for first, _ in inside))
        inside.sort(key=lambda item: item[0])
        children = self._parts([box for _, box in inside])
        if len(children) == 1 and children[0].kind == "op":  # the module says all that there is to say
            return Box("module", node["label"], ops_of(node), [], children[0].shown)
        shown = [op for child in children for op in child.shown]
        if len(children) == 1 and children[0].kind == "ops":
            children = children[0].children
        return Box("module", node["label"], ops_of(node), children, shown)

    def _own(self, ops: Sequence[int], firsts: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """Yield boxes of a module's own ops: one per run of neighbours on one stage with no module between them."""

        def run_of(op: int) -> tuple[int, int]:
            return bisect_left(firsts, op), self.ops[op][2]

        for _, found in itertools.groupby(sorted(ops), key=run_of):
            run = list(found)
            single = [Box("op", "", [op], [], [op]) for op in run]
            if len(run) == 1 or self.whole:
                yield from zip(run, single, strict=True)
            else:
                yield run[0], Box("ops", counted(len(run), "op"), run, self._parts(single), run)

    def _parts(self, boxes: list[Box]) -> list[Box]:
        if len(boxes) <= LONGEST_LIST or self.whole:
            return boxes
        size = max(-(-len(boxes) // LONGEST_LIST), LONGEST_LIST // 2)
        parts = []
        for start in range(0, len(boxes), size):
            inside = boxes[start : start + size]
            ops, shown = ([op for box in inside for op in getattr(box, name)] for name in ("ops", "shown"))
            parts.append(Box("ops", counted(len(ops), "op"), ops, inside, shown))
        return self._parts(parts)


def ops_of(node: Mapping[str, Any]) -> list[int]:
    """Return all ops of a node of the tree; of equal nodes in equal order."""
    if node.get("members"):
        return [op for member in node["members"] for op in ops_of(member)]
    return [*node["ops"], *(op for child in node["children"] for op in ops_of(child))]


def _opened(root: Box, most: int) -> set[Box]:
    """Choose the boxes to open: modules of modules, the largest first, and all others while the picture is small."""
    opened, count = {root}, len(root.children)
    while True:
        closed = [box for box in _visible(root, opened) if box not in opened and box.children]
        fitting = [box for box in closed if box.has_modules and count + len(box.children) <= most]
        if fitting:
            largest = max(fitting, key=lambda box: len(box.ops))
            opened.add(largest)
            count += len(largest.children)
            continue
        added = sum(len(box.children) for box in closed)
        if not closed or count >= ENOUGH or count + added > most:
            return opened
        opened.update(closed)
        count += added


def _visible(box: Box, opened: set[Box]) -> Iterator[Box]:
    for child in box.children:
        yield child
        if child in opened:
            yield from _visible(child, opened)
