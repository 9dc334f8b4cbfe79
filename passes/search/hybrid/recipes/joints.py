"""Joints: where a pipeline of sharded stages may be cut, the pieces between them, and which pieces are equal.

    embedding │ layer 0 │ layer 1 │ … │ layer 79 │ norm, head, loss        │ joint
    A           B         B             B          C                      classes of pieces

A piece is a block (``passes.graph.blocks``), or a run of ops between blocks. Equal pieces are decided about once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph, tensor_specs
from passes.graph.part import part_of
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import colocated
from passes.search.hybrid.stages import structure_of


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a model, in the program's order. ``parts``: each as a graph of its own."""

    graph: OpGraph
    ops: tuple[tuple[str, ...], ...]
    parts: tuple[OpGraph, ...]
    blocks: tuple[str, ...]
    """The block that each piece is, "" where it is none."""

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def piece_of(self) -> Mapping[str, int]:
        """The piece of each op, by its name."""
        return {name: number for number, names in enumerate(self.ops) for name in names}

    @cached_property
    def streams(self) -> tuple[str | None, ...]:
        """Per joint, the value that the piece before makes for the piece behind alone: the largest; None without any.

        Joint i lies before piece i; joint 0, and the one behind the last piece, have none.
        """
        found: list[str | None] = [None] * (len(self) + 1)
        largest = [0] * (len(self) + 1)
        for number, part in enumerate(self.parts):
            for output in part.outputs:
                if output.kind != "value" or self.last_reader[output.name] != number + 1:
                    continue
                size = value_bytes(self.graph, output.name)
                if size > largest[number + 1]:
                    largest[number + 1], found[number + 1] = size, output.name
        return tuple(found)

    @cached_property
    def kind(self) -> tuple[int, ...]:
        """The class of each piece: equal pieces take and make their streams in equal places."""
        known: dict[object, int] = {}
        found = []
        for number, part in enumerate(self.parts):
            marks = {
                node: "stream"
                for node in (self.streams[number], self.streams[number + 1])
                if node is not None
            }
            leaving = tuple(output.name == self.streams[number + 1] for output in part.outputs)
            key = structure_of(part, marks), leaving
            found.append(known.setdefault(key, len(known)))
        return tuple(found)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The first piece of each class."""
        return tuple(self.kind.index(number) for number in range(max(self.kind) + 1))

    @cached_property
    def last_reader(self) -> Mapping[str, int]:
        """The last piece that reads each value between pieces."""
        found: dict[str, int] = {}
        for number, part in enumerate(self.parts):
            for given in part.inputs:
                if given.kind == "value":
                    found[given.name] = number
        return found


def pieces_of(graph: OpGraph) -> Pieces:
    """Cut ``graph`` at its joints. Ops that must share a stage share a piece."""
    blocks, copied = block_of(graph), recomputed_ops(graph)
    runs: list[list[str]] = []
    names: list[str] = []
    for node in graph.ops:
        if node.name in copied:
            continue
        own = blocks.get(node.name, "")
        if not runs or own != names[-1]:
            runs.append([])
            names.append(own)
        runs[-1].append(node.name)
    runs, names = _joined(graph, runs, names)
    parts = [part_of(graph, run, copied) for run in runs]
    return Pieces(graph, tuple(map(tuple, runs)), tuple(parts), tuple(names))


def value_bytes(graph: OpGraph, name: str, samples: int | None = None) -> int:
    """Return the bytes of the tensors that an op makes, of a micro-batch of ``samples``; of the example's if not given."""
    symbols = dict(graph.example_sizes)
    if samples is not None:
        symbols[graph.batch.batch_symbol] = samples
    return sum(spec.size_bytes(symbols) for spec in tensor_specs(graph.nodes[name]))


def _joined(graph: OpGraph, runs: list[list[str]], names: list[str]) -> tuple[list[list[str]], list[str]]:
    """Join the pieces between two ops that must share a stage."""
    place = {name: number for number, run in enumerate(runs) for name in run}
    into = list(range(len(runs)))
    for together in colocated(graph):
        at = sorted({place[op] for op in together if op in place})
        for number in range(at[0] + 1, at[-1] + 1) if at else ():
            into[number] = min(into[number], number - 1)
    found: list[list[str]] = []
    kept: list[str] = []
    for number, run in enumerate(runs):
        if into[number] < number:
            found[-1] += run
            kept[-1] = ""
        else:
            found.append(list(run))
            kept.append(names[number])
    return found, kept
