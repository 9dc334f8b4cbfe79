"""Random numbers that ranks draw by themselves: shards draw apart, copies draw alike, every micro-batch anew.

Verification switches dropout off and replays other draws, so nothing that it compares depends on the ranks' own random
numbers. At the beginning of each segment that draws, ranks therefore draw a few numbers more, in the way of its ops:

    the segment has     run_local("random", "aten.dropout.default", {"shards": "data"}, …)
    ranks draw          run_local("random", "aten.rand.default",    {"shards": "data"}, [8])

    same place on "data", same micro-batch      the same numbers
    another place, or another micro-batch       other numbers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from cost_models.layout import Mesh
from partitioner.verify.compare import Comparison
from runtime.measure.record import Note, note
from runtime.mesh.ranks_along import JOINT
from runtime.mesh.sharding import coordinates
from runtime.ops.local import run_local
from runtime.segment.code import SegmentCode

DRAWN = "random draws"
"""Kind of these comparisons."""
WRONGLY_DRAWN = "{}: shards or micro-batches draw the same random numbers, or copies draw others"
"""The words for an op with such a difference."""
_RAND, _COUNT = torch.ops.aten.rand.default, 8
_RANDOM = "random"
"""The local form of ops that draw on shards (``runtime.ops.local``)."""


@dataclass(frozen=True)
class OwnDraw:
    """Numbers that ranks draw in one segment as its op ``op`` does. ``axes``: those along which ranks have shards."""

    op: str
    segment: int
    axes: str
    mesh: Mesh | None

    @property
    def note(self) -> str:
        """The name under which each rank notes them."""
        return f"{self.op} in segment {self.segment}"


def own_draws(code: SegmentCode, drawing: frozenset[str]) -> tuple[OwnDraw, ...]:
    """Return a draw for each way in which ops of ``code`` draw. ``drawing``: ops that draw while training."""
    found: dict[str, OwnDraw] = {}
    for node in code.module.graph.nodes:
        on_shards = node.target is run_local and node.args[0] == _RANDOM
        if on_shards or node.name in drawing:
            axes = node.args[2]["shards"] if on_shards else ""
            found.setdefault(axes, OwnDraw(node.name, code.index, axes, code.mesh))
    return tuple(found.values())


def with_own_draws(code: SegmentCode, draws: Sequence[OwnDraw]) -> SegmentCode:
    """Return ``code`` with those of these draws that are its own before its first op, each with a note."""
    draws = [draw for draw in draws if draw.segment == code.index]
    if not draws:
        return code
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    drawn = False
    for node in code.module.graph.nodes:
        if node.op != "placeholder" and not drawn:
            drawn = True
            for draw in draws:
                name = f"own_{draw.op}"
                if draw.axes:
                    args = (_RANDOM, "aten.rand.default", {"shards": draw.axes}, [_COUNT])
                    numbers = graph.create_node("call_function", run_local, args, name=name)
                else:
                    numbers = graph.create_node("call_function", _RAND, ([_COUNT],), name=name)
                graph.call_function(note, (draw.note, numbers))
        made[node] = graph.node_copy(node, made.__getitem__)
    return replace(code, module=fx.GraphModule(code.module, graph), random=True)


def compare_draws(
    draws: Sequence[OwnDraw], noted: Sequence[Mapping[str, Sequence[Note]]]
) -> Iterator[Comparison]:
    """Compare each draw over ranks and micro-batches. Its error: the number of pairs that are alike wrongly, or unlike."""
    for draw in draws:
        numbers = [
            (number, _place(draw, rank), microbatch)
            for rank, notes in enumerate(noted)
            for microbatch, number in enumerate(notes.get(draw.note, ()))
        ]
        wrong = sum(
            (number == other) != ((place, microbatch) == (other_place, other_microbatch))
            for at, (number, place, microbatch) in enumerate(numbers)
            for other, other_place, other_microbatch in numbers[:at]
        )
        yield Comparison(DRAWN, draw.op, float(wrong), 0.0)


def _place(draw: OwnDraw, rank: int) -> tuple[int, ...]:
    """Return the place of ``rank`` among the shards that the op draws for."""
    if draw.mesh is None or not draw.axes:
        return ()
    place = coordinates(draw.mesh, rank)
    return tuple(place[draw.mesh.axes.index(axis)] for axis in draw.axes.split(JOINT))
