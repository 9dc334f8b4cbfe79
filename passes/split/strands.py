"""Strands: which dimensions of which values are cut together when one of them is, followed through the graph.

    q = linear(x) [b, s, 32] ─ view [b, s, 4, 8] ─┐
    k = linear(x) [b, s, 16] ─ view [b, s, 2, 8] ─┴─ attention [b, 4, s, 8] ─ reshape [b, s, 32] ─ linear: sums over them

One strand; what is cut has 32, 4, 16 and 2 elements there, so that there are gcd(32, 4, 16, 2) = 2 units (of grouped
key-value heads). A chunk along a strand begins strands of its own (the gates of an LSTM), which become one where they meet.

A value that something reads whole (a norm), or that is summed over, is not cut together with what is added to it later:
the residual stream would tie all layers into one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import fx

from cost_models.layout import Shard
from passes.graph.graph import OpGraph
from passes.graph.nodes import argument, tensors_of
from passes.shard.rules import makes_tensors
from passes.shard.rules.shapes import shape
from passes.shard.words import operands
from passes.split.push import computed_from_state, mere_forms
from passes.split.rules import CONVOLUTIONS, SplitWay, reads_any_part, ways_to_read
from passes.split.shapes import PARTING, read_by_result
from passes.split.values import ranges_of
from runtime.ops.bags import EMBEDDING_BAG

aten = torch.ops.aten

Share = tuple[Fraction, Fraction]
"""A range, as parts of the whole dimension."""


@dataclass(eq=False)
class Strand:
    """Dimensions cut together. ``lengths``: numbers of elements (or groups) that they have; all must be cut alike."""

    lengths: set[int] = field(default_factory=set)
    ops: list[fx.Node] = field(default_factory=list)
    ends: list[fx.Node] = field(default_factory=list)
    """Ops that sum over the strand."""
    children: dict[Share, Strand] = field(default_factory=dict)
    same: Strand | None = None

    @property
    def root(self) -> Strand:
        """The strand that this one has become."""
        found = self
        while found.same is not None:
            found = found.same
        return found

    def join(self, other: Strand) -> None:
        """Unite with another strand."""
        mine, theirs = self.root, other.root
        if mine is theirs:
            return
        theirs.same = mine
        mine.lengths |= theirs.lengths
        mine.ops += theirs.ops
        mine.ends += theirs.ends
        for share, child in theirs.children.items():
            if share in mine.children:
                mine.children[share].join(child)
            else:
                mine.children[share] = child

    def leaves(self, share: Share = (Fraction(0), Fraction(1))) -> Iterator[tuple[Share, Strand]]:
        """Yield the strands that it is parted into, in order, with their parts of the dimension."""
        root, (begin, end) = self.root, share
        if not root.children:
            yield share, root
        for low, high in sorted(root.children):
            inner = (begin + (end - begin) * low, begin + (end - begin) * high)
            yield from root.children[low, high].leaves(inner)

    def is_tiled(self) -> bool:
        """Tell whether the strands that it is parted into leave nothing out and do not overlap."""
        shares = [share for share, _ in self.leaves()]
        ends = [Fraction(0), *(end for _, end in shares)]
        return [begin for begin, _ in shares] == ends[:-1] and ends[-1] == 1


@dataclass(frozen=True)
class Seed:
    """An op that makes neurons: the beginning of a strand."""

    node: fx.Node
    dim: int
    kind: str
    strand: Strand


class Strands:
    """``seeds`` in the order of the graph; ``of``: the strand of a value, and its dimension there."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.of_state = computed_from_state(graph)
        self.light = self._light()
        self.of: dict[fx.Node, tuple[int, Strand]] = {}
        self.parted: dict[fx.Node, list[Strand]] = {}
        self.read_whole: set[fx.Node] = set()
        self.seeds: list[Seed] = []
        for node in graph.ops:
            if not self._goes_on(node):
                self._begin(node)

    def _light(self) -> frozenset[str]:
        """Name what needs no parameter: masks, positions, zeros."""
        found = {i.node for i in self.graph.inputs if i.kind in ("batch", "constant")}
        for node in self.graph.ops:
            sources = node.all_input_nodes if node.target is operator.getitem else operands(node)
            if all(s.name in found or reads_any_part(node, i) for i, s in enumerate(sources)):
                found.add(node.name)
        return frozenset(found)

    # ------------------------------------------------------------------------------------------------------
    # Beginnings

    def _begin(self, node: fx.Node) -> None:
        found = neurons(node, self.of_state)
        if found is None:
            return
        dim, kind = found
        size = tensors_of(node)[0].shape[dim]
        if isinstance(size, int) and size > 1:
            strand = Strand({size}, [node])
            if (groups := argument(node, "groups", 1)) != 1:
                strand.lengths.add(groups)
            self.of[node] = (dim, strand)
            self.seeds.append(Seed(node, dim, kind, strand))

    # ------------------------------------------------------------------------------------------------------
    # On through the graph

    def _goes_on(self, node: fx.Node) -> bool:
        """Tell whether the op's result belongs to strands of its operands."""
        if node.target is operator.getitem:
            return self._piece(node)
        if not makes_tensors(node):
            return False
        if self._parts(node):
            return True
        found = [
            (i, s, *self.of[s])
            for i, s in enumerate(operands(node))
            if s in self.of and not reads_any_part(node, i)
        ]
        if not found:
            return False
        for position, source, dim, strand in found:
            for way in ways_to_read(node, position, dim):
                if way.summed:
                    strand.root.ends.append(node)
                    break
                if self._joins(way):
                    return True
            self._mark(source)
        return False

    def _joins(self, way: SplitWay) -> bool:
        """Give the result to the strand of all operands that the way cuts, if they may become one."""
        node = way.node
        if len(way.dims()) != 1 or isinstance(node.meta["val"], list | tuple):
            return False
        taken = [
            (source, self.of[source])
            for source, need in zip(operands(node), way.choice.inputs, strict=True)
            if source in self.of and need.placement == Shard(self.of[source][0])
        ]
        roots = list(dict.fromkeys(strand.root for _, (_, strand) in taken))
        if not way.allows([0]) or self._beside_whole(way):
            return False
        if len(roots) > 1 and any(source in self.read_whole for source, _ in taken):
            return False
        first = taken[0][1][1].root
        for strand in roots:
            first.join(strand)
        dim = way.dims()[0]
        first.root.ops.append(node)
        first.root.lengths |= {int(tensors_of(node)[0].shape[dim]), *way.choice.divides}
        self.of[node] = (dim, first)
        return True

    def _beside_whole(self, way: SplitWay) -> bool:
        """Tell whether a whole value, as large as the others, is computed beside: slicing it is no gain."""
        target = way.node.target
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
            return False
        large = math.prod(shape(tensors_of(way.node)[0]))
        return any(
            source not in self.of
            and source.name not in self.of_state | self.light
            and math.prod(shape(source.meta["val"])) >= large
            for source in operands(way.node)
        )

    def _parts(self, node: fx.Node) -> bool:
        """Part a strand if the op cuts chunks along it; tell whether it does."""
        source = node.args[0] if node.args else None
        if node.target not in PARTING or not isinstance(source, fx.Node) or source not in self.of:
            return False
        dim, strand = self.of[source]
        if argument(node, "dim", 0) % tensors_of(source)[0].dim() != dim or not read_by_result(node):
            return False
        sizes = tuple(int(tensor.shape[dim]) for tensor in tensors_of(node))
        total = sum(sizes)
        self.parted[node] = [
            strand.root.children.setdefault((Fraction(begin, total), Fraction(end, total)), Strand())
            for begin, end in ranges_of(sizes)
        ]
        return True

    def _piece(self, node: fx.Node) -> bool:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        if source not in self.parted:
            return False
        given: fx.Node = source.args[0]  # type: ignore[assignment]
        dim = self.of[given][0]
        strand = self.parted[source][index]
        strand.root.lengths.add(int(node.meta["val"].shape[dim]))
        strand.root.ops.append(node)
        self.of[node] = (dim, strand)
        return True

    def _mark(self, node: fx.Node) -> None:
        """Mark a value as read whole or summed over, and its sources through casts and powers too."""
        self.read_whole.update(form for form in mere_forms(node, self.of_state) if form in self.of)


_LINEAR = frozenset(
    {aten.linear.default, aten.addmm.default, aten.mm.default, aten.embedding.default, EMBEDDING_BAG}
)
_PRODUCTS = frozenset({aten.bmm.default, aten.baddbmm.default, aten.matmul.default})


def neurons(node: fx.Node, of_state: frozenset[str]) -> tuple[int, str] | None:
    """Return the output dimension that an op's weights make, and its kind; None for ops without weights.

    "neurons" of a linear layer, "channels" of a convolution, "experts" of stacked weights, "locations" where each of
    several dimensions has weights of its own.
    """
    weights = [source for source in operands(node) if source.name in of_state]
    if not weights or not makes_tensors(node):
        return None
    rank: int = tensors_of(node)[0].dim()
    if node.target in _LINEAR:
        return rank - 1, "neurons"
    if node.target in CONVOLUTIONS:
        return rank - int(weights[0].meta["val"].dim() - 2) - 1, "channels"
    if node.target is aten.einsum.default:
        return _einsum(node, of_state)
    if node.target not in _PRODUCTS or operands(node)[-1].name not in of_state:
        return None
    stacked = operands(node)[-1].meta["val"].dim()
    return (rank - stacked, "experts") if stacked > 2 else (rank - 1, "neurons") if stacked == 2 else None


def _einsum(node: fx.Node, of_state: frozenset[str]) -> tuple[int, str] | None:
    """Tell by letters: those that weights share with inputs count experts or locations, those of weights alone neurons."""
    equation = str(argument(node, "equation")).replace(" ", "")
    left, _, made = equation.partition("->")
    if not made or "." in equation:
        return None
    terms = list(zip(left.split(","), operands(node), strict=True))
    of_weights = {x for text, source in terms if source.name in of_state for x in text if x in made}
    of_inputs = {x for text, source in terms if source.name not in of_state for x in text}
    shared = [dim for dim, x in enumerate(made) if x in of_weights & of_inputs]
    own = [dim for dim, x in enumerate(made) if x in of_weights - of_inputs]
    if shared:
        return shared[-1], "experts" if len(shared) == 1 else "locations"
    return (own[-1], "neurons") if own else None
