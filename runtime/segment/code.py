"""The code of one segment as the executor runs it: its graph, and where every input comes from and output goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx

from cost_models.errors import InternalError
from cost_models.layout import Layout, Mesh, Placement, Shard
from runtime.mesh.sharding import Block, block_of
from runtime.ops.products import CONVOLUTIONS, PRODUCTS, is_factor
from runtime.segment.portable import PackedNode, pack, unpack

aten = torch.ops.aten

_WEIGHTED = PRODUCTS | CONVOLUTIONS | {aten.embedding.default}
"""Ops whose weight's gradient is a new tensor; some keep more than that."""

Dim: TypeAlias = int | sympy.Expr
"""A size, or an expression of the batch symbol (and of other dynamic sizes)."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a value for any micro-batch size."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype

    def concrete(self, symbols: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
        """Return the shape, in elements per dimension, once every symbol has a number."""
        numbers = tuple(symbols.items())
        return tuple(d if isinstance(d, int) else _number(d, numbers) for d in self.shape)

    def size_bytes(self, symbols: Mapping[sympy.Symbol, int]) -> int:
        """Return the bytes of such a tensor, once every symbol has a number."""
        return math.prod(self.concrete(symbols)) * self.dtype.itemsize


@lru_cache(maxsize=4096)  # a model has a few expressions, a search a few micro-batch sizes
def _number(dim: sympy.Expr, symbols: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    """Compute a size in elements. Searches ask for the same ones thousands of times. A part of nothing is nothing."""
    try:
        return int(dim.subs(symbols))
    except ZeroDivisionError:
        return 0


InputKind: TypeAlias = Literal["parameter", "buffer", "constant", "batch", "value"]
OutputKind: TypeAlias = Literal["value", "loss", "metric", "output", "buffer"]


@dataclass(frozen=True)
class SegmentInput:
    """One positional argument of the segment's graph.

    ``name`` is the fully qualified name in the model for parameters, buffers and constants, the batch leaf's name
    for batch inputs, and the value's name for values from other segments.
    """

    kind: InputKind
    name: str
    needs_grad: bool = False
    """True for a value if the segment owes its producer a gradient."""


@dataclass(frozen=True)
class SegmentOutput:
    """One element of the tuple that the segment's graph returns.

    ``metric``: a number that the loss function returned beside the loss, without a gradient. ``buffer``: the new
    contents of the buffer called ``name``, which the next micro-batch reads, or which are written ``once`` a step.
    """

    kind: OutputKind
    name: str
    needs_grad: bool = False
    """True for a value if some consumer sends a gradient back."""
    once: bool = False
    """True for a buffer whose contents from before the step every micro-batch reads."""


@dataclass(frozen=True)
class Interface:
    """The layouts of a value where it leaves a segment, or arrives there, and on the other side of that way."""

    own: Layout
    others: tuple[Layout, ...]
    """One per group that makes or uses it."""

    def piece(self, local_shape: Sequence[int], rank: int, peer: int) -> Block:
        """Return what ``rank`` sends to or receives from ``peer``, within its own block, which has ``local_shape``."""
        whole = list(local_shape)
        for placement, size in zip(self.own.placements, self.own.mesh.shape, strict=True):
            if isinstance(placement, Shard):
                whole[placement.dim] *= size
        other = next(layout for layout in self.others if peer in layout.ranks)
        mine = block_of(whole, self.own.placements, self.own.mesh, rank)
        common = mine.shared_with(block_of(whole, other.placements, other.mesh, peer))
        if common is None:
            raise InternalError(
                f"send a value from rank {rank} to rank {peer}", ["they have nothing in common"]
            )
        return common.within(mine.offsets)


@dataclass(frozen=True)
class SegmentCode:
    """One segment, ready to run: ``module(*inputs)`` returns a tuple that matches ``outputs``."""

    index: int
    module: fx.GraphModule
    inputs: tuple[SegmentInput, ...]
    outputs: tuple[SegmentOutput, ...]
    values: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Specs of every value the segment receives or produces."""
    random: bool = False
    """True if it contains an op that draws random numbers (dropout): then it is seeded per micro-batch."""
    mesh: Mesh | None = None
    """Ranks that run it together, each on its shards; None where one rank runs it."""
    recomputed: tuple[tuple[str, ...], ...] = ()
    """Names of the ops of each block whose activations are computed again in backward (``runtime.segment.recompute``)."""
    interfaces: Mapping[str, Interface] = field(default_factory=dict)
    """The layouts on both sides of the values that go in pieces; others go whole."""

    @property
    def held(self) -> dict[str, InputKind]:
        """Kind of every parameter, buffer and constant that a rank needs for this segment, by name.

        A buffer may be written without being read.
        """
        kinds = {i.name: i.kind for i in self.inputs if i.kind in ("parameter", "buffer", "constant")}
        written: dict[str, InputKind] = {o.name: "buffer" for o in self.outputs if o.kind == "buffer"}
        return {**written, **kinds}

    @property
    def fresh(self) -> frozenset[str]:
        """The parameters whose gradients are new tensors that nobody else reads: a sum over ranks may be made in them."""
        found: dict[str, bool] = {}
        placeholders = self.module.graph.find_nodes(op="placeholder")
        for node, given in zip(placeholders, self.inputs, strict=True):
            if given.kind == "parameter":
                alone = all(user.target in _WEIGHTED and is_factor(user, node) for user in node.users)
                found[given.name] = found.get(given.name, True) and alone
        return frozenset(name for name, alone in found.items() if alone)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give plain data that can travel to another process (``runtime.segment.portable``)."""
        rest = (self.inputs, self.outputs, dict(self.values), self.random, self.mesh, self.recomputed)
        return _unpacked, (self.index, pack(self.module), *rest, dict(self.interfaces))


def _unpacked(index: int, nodes: tuple[PackedNode, ...], *rest: Any) -> SegmentCode:
    return SegmentCode(index, unpack(nodes), *rest)


@dataclass(frozen=True)
class BatchSpec:
    """The rules by which a batch is cut into micro-batches.

    ``batch_dims[name]`` is the batch dimension of the leaf, or None if it is handed whole to every micro-batch.
    ``symbols[symbol]`` is the (leaf, dimension) where the symbol's number is read.
    """

    batch_dims: Mapping[str, int | None]
    batch_symbol: sympy.Symbol
    symbols: Mapping[sympy.Symbol, tuple[str, int]]
    leaves: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Shapes and types that the leaves were traced with; a batch is checked against those that are given."""
    multiple: int = 1
    """Samples that every micro-batch has a multiple of; the batch symbol of local graphs counts in these."""
    mesh: Mesh | None = None
    """Ranks of a sharded model."""
    placements: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    """Placements, on ``mesh``, of the leaves that not every rank reads as a whole."""
