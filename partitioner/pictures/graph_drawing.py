"""The placement graph as a drawing: which boxes, each with its words, arrows for values, bridges on them with their bytes.

    layers.0 … layers.39, all alike             ->   one box "layers.0–39 ×40" that shows the inside of one of them
    32 ops of self_attn between q_proj, o_proj  ->   one box "32 ops"
    modules that would make it too much         ->   closed: one box with what is in it

A drawing has at most ``MOST_BOXES`` boxes, or, where everything is asked for, every op and no folds. What passes between
two boxes, of all blocks of a fold, is one arrow. Bridges inside of a box are said in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from cost_models.units import counted, format_bytes
from partitioner.pictures.drawing import (
    WIDEST,
    BoxKind,
    BridgeLabel,
    BridgeWay,
    Drawing,
    Edge,
    Node,
    short_text,
    together,
)

MOST_BOXES = 300
"""The most boxes of a picture, open ones and the legend counted: as many as the report page draws at once."""
LONGEST_LIST = 60
"""The most boxes directly in another, as on the report page; longer lists are cut into parts."""
ENOUGH = 24
"""The boxes below which a picture is opened further than to the modules: an A4 page holds more."""
MOST_STAGES = 40
"""The most stages of a legend."""
MOST_NAMED = 3
"""The most kinds of ops, or stages, that a box names."""


def graph_drawing(
    graph: Mapping[str, Any], title: str, stages: Sequence[tuple[str, str]] = (), *, whole: bool = False
) -> Drawing:
    """Make the picture of a placement graph, as ``op_graph_data`` gives it.

    ``stages``: each one's name, and what else to say of it. ``whole``: every op, however many; else at most 300 boxes.
    """
    legend = [
        (number, short_text(f"{name} · {text}" if text else name, 80))
        for number, (name, text) in enumerate(stages[:MOST_STAGES])
    ]
    if len(stages) > MOST_STAGES:
        legend.append((-1, f"{len(stages) - MOST_STAGES} more"))
    root = _BoxMaker(graph, whole).box(graph["tree"])
    opened = {box for box in root.all() if box.children} if whole else _opened(root, MOST_BOXES - len(legend))
    drawer = _Drawer(graph, opened, [name for name, _ in stages], whole)
    drawer.number(root)
    drawer.connect()
    nodes = tuple(drawer.node(child, "") for child in root.children)
    return Drawing(short_text(title, 80), nodes, tuple(drawer.edges()), tuple(legend))


# --------------------------------------------------------------------------------------------------
# Boxes, and which of them are open


@dataclass(frozen=True, eq=False)
class _Box:
    """A module, a fold of equal modules with the inside of the first of them, a run of ops, or an op."""

    kind: BoxKind
    label: str
    ops: Sequence[int]
    """All ops in it; of a fold those of all its blocks."""
    children: Sequence[_Box] = ()

    @property
    def has_modules(self) -> bool:
        return any(child.kind in ("module", "fold") for child in self.children)

    def all(self) -> Iterator[_Box]:
        """Yield the box and all in it."""
        yield self
        for child in self.children:
            yield from child.all()


class _BoxMaker:
    """Makes boxes of the tree's nodes. ``whole``: no folds, and no ops drawn as one."""

    def __init__(self, graph: Mapping[str, Any], whole: bool) -> None:
        self.ops = graph["ops"]
        self.whole = whole

    def box(self, node: Mapping[str, Any]) -> _Box:
        members = node.get("members") or ()
        if members and not self.whole:
            return _Box("fold", node["label"], _ops_of(node), self.box(members[0]).children)
        if members:
            return _Box("module", node["label"], _ops_of(node), [self.box(member) for member in members])
        inside = [(child["first"], self.box(child)) for child in node["children"]]
        inside += self._between(node["ops"], sorted(first for first, _ in inside))
        inside.sort(key=lambda item: item[0])
        children = self._parts([box for _, box in inside])
        if len(children) == 1 and children[0].kind in (
            "op",
            "ops",
        ):  # the module says all that there is to say
            children = children[0].children
        return _Box("module", node["label"], _ops_of(node), children)

    def _between(self, ops: Sequence[int], firsts: Sequence[int]) -> Iterator[tuple[int, _Box]]:
        """Yield boxes of a module's own ops: one per run of neighbours on one stage with no module between them."""

        def run_of(op: int) -> tuple[int, int]:
            return bisect_left(firsts, op), self.ops[op][2]

        for _, neighbours in groupby(sorted(ops), key=run_of):
            run = list(neighbours)
            single = [_Box("op", "", [op]) for op in run]
            if len(run) == 1 or self.whole:
                yield from zip(run, single, strict=True)
            else:
                yield run[0], _ops_box(self._parts(single))

    def _parts(self, boxes: Sequence[_Box]) -> Sequence[_Box]:
        if len(boxes) <= LONGEST_LIST or self.whole:
            return boxes
        size = max(-(-len(boxes) // LONGEST_LIST), LONGEST_LIST // 2)
        return self._parts([_ops_box(boxes[start : start + size]) for start in range(0, len(boxes), size)])


def _ops_box(boxes: Sequence[_Box]) -> _Box:
    ops = [op for box in boxes for op in box.ops]
    return _Box("ops", counted(len(ops), "op"), ops, boxes)


def _ops_of(node: Mapping[str, Any]) -> list[int]:
    """Return all ops of a node of the tree; of equal nodes in equal order."""
    if node.get("members"):
        return [op for member in node["members"] for op in _ops_of(member)]
    return [*node["ops"], *(op for child in node["children"] for op in _ops_of(child))]


def _stand_ins(node: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield each op of a fold's later blocks with the op of the first block that is drawn for it."""
    members: Sequence[Mapping[str, Any]] = node.get("members") or []
    for member in members[1:]:
        yield from zip(_ops_of(member), _ops_of(members[0]), strict=True)
    for child in members[:1] or node["children"]:
        yield from _stand_ins(child)


def _opened(root: _Box, most: int) -> set[_Box]:
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


def _visible(box: _Box, opened: set[_Box]) -> Iterator[_Box]:
    for child in box.children:
        yield child
        if child in opened:
            yield from _visible(child, opened)


# --------------------------------------------------------------------------------------------------
# Boxes as nodes, and what passes between them


class _Drawer:
    """Turns boxes into nodes, and values and bridges into arrows between those that are not open."""

    def __init__(
        self, graph: Mapping[str, Any], opened: set[_Box], stages: Sequence[str], whole: bool
    ) -> None:
        self.graph, self.opened, self.stages = graph, opened, stages
        self.stand_in = {} if whole else dict(_stand_ins(graph["tree"]))
        self.id_of: dict[_Box, str] = {}
        self.owner: dict[int, str] = {}
        """The closed box of each op that is drawn."""
        self.inside: defaultdict[str, list[BridgeLabel]] = defaultdict(list)
        self.arrows: defaultdict[tuple[str, str, bool], tuple[set[int], list[BridgeLabel]]]
        self.arrows = defaultdict(lambda: (set(), []))
        """Values and bridges between two closed boxes; True: from a block of a fold to the next one."""

    def number(self, box: _Box) -> None:
        """Give the shown boxes numbers, and each op the closed box that it is in."""
        for child in box.children:
            self.id_of[child] = f"n{len(self.id_of)}"
            if child in self.opened:
                self.number(child)
            else:
                self.owner |= dict.fromkeys(self._drawn(child), self.id_of[child])

    def _drawn(self, box: _Box) -> list[int]:
        """Return the ops that a box's picture is made of: of folds those of the first block."""
        return [op for op in box.ops if op not in self.stand_in]

    def connect(self) -> None:
        """Put each value that an op reads, and each bridge, on the arrow between two boxes, or inside of one."""
        for op, row in enumerate(self.graph["ops"]):
            for read in row[4]:
                ends = self._ends(read, op)
                if ends[0] != ends[1]:
                    self.arrows[ends][0].add(read)
        for row in self.graph["bridges"]:
            back = bool(row["gradient"])
            ends = self._ends(row["to"], row["from"]) if back else self._ends(row["from"], row["to"])
            way: BridgeWay = "back" if back else "there"
            bridge = BridgeLabel(
                row["kind"], row["size_bytes"], way, cost=row.get("cost", 0.0), unit=row.get("unit", "")
            )
            (self.inside[ends[0]] if ends[0] == ends[1] else self.arrows[ends][1]).append(bridge)

    def _ends(self, source: int, target: int) -> tuple[str, str, bool]:
        """Return the boxes of two ops, and whether the second is in a later block of a fold than the first."""
        first, second = self._shown(source), self._shown(target)
        return self.owner[first], self.owner[second], first >= second and source < target

    def _shown(self, op: int) -> int:
        while op in self.stand_in:
            op = self.stand_in[op]
        return op

    def edges(self) -> Iterator[Edge]:
        for (source, target, again), (values, bridges) in self.arrows.items():
            yield Edge(source, target, max(1, len(values)), together(bridges), again)

    def node(self, box: _Box, around: str) -> Node:
        """Draw a box. ``around``: the stages of the box that holds it, which it need not say again."""
        is_open = box in self.opened
        stages = self._stages(box)
        stage_text = self._stage_text(stages)
        lines = list(self._lines(box, is_open))
        if not is_open:
            lines += [bridge.text for bridge in together(self.inside[self.id_of[box]])]
        return Node(
            id=self.id_of[box],
            kind=box.kind,
            lines=tuple(map(short_text, lines)),
            stages=stages,
            stage_text=short_text(stage_text) if not is_open or stage_text != around else "",
            children=tuple(self.node(child, stage_text) for child in box.children) if is_open else (),
            ops=() if is_open else tuple(self.graph["ops"][op][0] for op in sorted(box.ops)),
        )

    def _stages(self, box: _Box) -> tuple[int, ...]:
        return tuple(sorted({self.graph["ops"][op][2] for op in box.ops} - {-1})) if self.stages else ()

    def _stage_text(self, stages: Sequence[int]) -> str:
        if not self.stages:
            return ""
        names = [self.stages[stage] for stage in stages[:MOST_NAMED]]
        more = [f"{len(stages) - MOST_NAMED} more"] if len(stages) > MOST_NAMED else []
        return ", ".join([*names, *more]) or "on every stage"

    def _lines(self, box: _Box, is_open: bool) -> Iterator[str]:
        ops = self.graph["ops"]
        if box.kind == "op":
            name, kind = ops[box.ops[0]][0], self._kind(box.ops[0])
            yield kind or name
            if kind:
                yield name
            layout = ops[box.ops[0]][6]
            few_words = "cost_unit" in self.graph  # a traced model's ways to run an op take many
            if layout >= 0 and few_words:
                yield self.graph["layouts"][layout]
        else:
            yield box.label
            if not is_open:
                yield self._content(box)
        if not is_open:
            yield from self._parameters(box)

    def _kind(self, op: int) -> str:
        """Name an op's kind without the types of its operands, add.Tensor -> add; of a cost graph the front of it."""
        kind = str(self.graph["kinds"][self.graph["ops"][op][1]]["op"])
        if "cost_unit" not in self.graph:
            return kind.partition(".")[0]
        return kind if len(kind) <= WIDEST else f"{kind[: WIDEST - 1]}…"

    def _content(self, box: _Box) -> str:
        """Name the kinds of a closed box's ops: those with the most arithmetic first, then the most frequent."""
        kinds, drawn = self.graph["kinds"], self._drawn(box)
        flops: Counter[str] = Counter()
        for op in drawn:
            flops[self._kind(op)] += kinds[self.graph["ops"][op][1]]["forward_flops"]
        counts = Counter(map(self._kind, drawn))
        names = sorted(counts, key=lambda kind: (-flops[kind], -counts[kind]))
        if len(drawn) == 1:
            return names[0]
        lead = "" if box.kind == "ops" else f"{len(drawn):,} ops: "
        shown = names[:1]
        for name in names[1:MOST_NAMED]:  # as many as fit: a name cut in the middle says little
            if len(f"{lead}{', '.join([*shown, name])} …") <= WIDEST:
                shown.append(name)
        return f"{lead}{', '.join(shown)}{' …' if len(shown) < len(names) else ''}"

    def _parameters(self, box: _Box) -> Iterator[str]:
        numbers = dict.fromkeys(number for op in box.ops for number in self.graph["ops"][op][5])
        read = [self.graph["parameters"][number] for number in numbers]
        if read:
            yield f"parameters {format_bytes(sum(one['size_bytes'] for one in read))}"
        layouts = {_split_words(one["layout"]) for one in read}
        if len(layouts) == 1 and (layout := layouts.pop()):
            yield layout


def _split_words(layout: str) -> str:
    """Keep of a parameter's layout the axes that split it, without what gradients and state do."""
    parts = layout.partition(";")[0].split(", ")
    return ", ".join(part for part in parts if not part.startswith("whole"))
