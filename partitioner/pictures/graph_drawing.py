"""The placement graph as a drawing: each box with its words, arrows for values, bridges on them with their bytes.

What passes between two boxes, of all blocks of a fold, is one arrow. Bridges inside of a box are said in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_models.units import format_bytes
from partitioner.pictures.boxes import MOST_BOXES, Box, choose_boxes, ops_of
from partitioner.pictures.drawing import WIDEST, Bridge, Drawing, Edge, Node, Way, short_text, together

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
    root, opened = choose_boxes(graph, None if whole else MOST_BOXES - len(legend))
    drawer = _Drawer(graph, opened, [name for name, _ in stages], whole)
    drawer.number(root)
    drawer.connect()
    nodes = tuple(drawer.node(child, "") for child in root.children)
    return Drawing(short_text(title, 80), nodes, tuple(drawer.edges()), tuple(legend))


@dataclass
class _Arrow:
    values: set[int] = field(default_factory=set)
    bridges: list[Bridge] = field(default_factory=list)


class _Drawer:
    """Turns boxes into nodes, and values and bridges into arrows between those that are not open."""

    def __init__(
        self, graph: Mapping[str, Any], opened: set[Box], stages: Sequence[str], whole: bool
    ) -> None:
        self.graph, self.opened, self.stages = graph, opened, stages
        self.stand_in = {} if whole else dict(_stand_ins(graph["tree"]))
        self.id_of: dict[Box, str] = {}
        self.owner: dict[int, str] = {}
        self.inside: defaultdict[str, list[Bridge]] = defaultdict(list)
        self.arrows: defaultdict[tuple[str, str, bool], _Arrow] = defaultdict(_Arrow)

    def number(self, box: Box) -> None:
        """Give the shown boxes numbers, and each op the closed box that it is in."""
        for child in box.children:
            self.id_of[child] = f"n{len(self.id_of)}"
            if child in self.opened:
                self.number(child)
            else:
                self.owner |= dict.fromkeys(child.shown, self.id_of[child])

    def connect(self) -> None:
        """Put each value that an op reads, and each bridge, on the arrow between two boxes, or inside of one."""
        for op, row in enumerate(self.graph["ops"]):
            for read in row[4]:
                key = self._ends(read, op)
                if key[0] != key[1]:
                    self.arrows[key].values.add(read)
        for row in self.graph["bridges"]:
            back = bool(row["gradient"])
            key = self._ends(row["to"], row["from"]) if back else self._ends(row["from"], row["to"])
            cost, unit = row.get("cost", 0.0), row.get("unit", "")
            way: Way = "back" if back else "there"
            bridge = Bridge(row["kind"], row["size_bytes"], way, cost=cost, unit=unit)
            if key[0] == key[1]:
                self.inside[key[0]].append(bridge)
            else:
                self.arrows[key].bridges.append(bridge)

    def _ends(self, source: int, target: int) -> tuple[str, str, bool]:
        """Return the boxes of two ops, and whether the second is in a later block of a fold than the first."""
        first, second = self._shown(source), self._shown(target)
        return self.owner[first], self.owner[second], first >= second and source < target

    def _shown(self, op: int) -> int:
        while op in self.stand_in:
            op = self.stand_in[op]
        return op

    def edges(self) -> Iterator[Edge]:
        for (source, target, again), arrow in self.arrows.items():
            yield Edge(source, target, max(1, len(arrow.values)), together(arrow.bridges), again)

    def node(self, box: Box, around: str) -> Node:
        """Draw a box. ``around``: the stages of the box that holds it, which it need not say again."""
        number, is_open = self.id_of[box], box in self.opened
        stages = self._stages(box)
        stage_text = self._stage_text(stages)
        lines = list(self._lines(box, is_open))
        if not is_open:
            lines += [bridge.text for bridge in together(self.inside[number])]
        return Node(
            id=number,
            kind=box.kind,
            lines=tuple(map(short_text, lines)),
            stages=stages,
            stage_text=short_text(stage_text) if not is_open or stage_text != around else "",
            children=tuple(self.node(child, stage_text) for child in box.children) if is_open else (),
            ops=() if is_open else tuple(self.graph["ops"][op][0] for op in sorted(box.ops)),
        )

    def _stages(self, box: Box) -> tuple[int, ...]:
        return tuple(sorted({self.graph["ops"][op][2] for op in box.ops} - {-1})) if self.stages else ()

    def _stage_text(self, stages: Sequence[int]) -> str:
        if not self.stages:
            return ""
        names = [self.stages[stage] for stage in stages[:MOST_NAMED]]
        more = [f"{len(stages) - MOST_NAMED} more"] if len(stages) > MOST_NAMED else []
        return ", ".join([*names, *more]) or "on every stage"

    def _lines(self, box: Box, is_open: bool) -> Iterator[str]:
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

    def _content(self, box: Box) -> str:
        """Name the kinds of a closed box's ops: those with the most arithmetic first, then the most frequent."""
        kinds = self.graph["kinds"]
        flops: Counter[str] = Counter()
        for op in box.shown:
            flops[self._kind(op)] += kinds[self.graph["ops"][op][1]]["forward_flops"]
        counts = Counter(map(self._kind, box.shown))
        names = sorted(counts, key=lambda kind: (-flops[kind], -counts[kind]))
        if len(box.shown) == 1:
            return names[0]
        lead = "" if box.kind == "ops" else f"{len(box.shown):,} ops: "
        shown = names[:1]
        for name in names[1:MOST_NAMED]:  # as many as fit: a name cut in the middle says little
            if len(f"{lead}{', '.join([*shown, name])} …") <= WIDEST:
                shown.append(name)
        return f"{lead}{', '.join(shown)}{' …' if len(shown) < len(names) else ''}"

    def _parameters(self, box: Box) -> Iterator[str]:
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


def _stand_ins(node: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield each op of a fold's later blocks with the op of the first block that is drawn for it."""
    members = node.get("members") or ()
    if members:
        first = ops_of(members[0])
        for member in members[1:]:
            yield from zip(ops_of(member), first, strict=True)
        yield from _stand_ins(members[0])
        return
    for child in node["children"]:
        yield from _stand_ins(child)
