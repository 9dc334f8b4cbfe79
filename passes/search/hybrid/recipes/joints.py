"""Joints: where a pipeline of sharded stages may be cut, the pieces between them, and which pieces are equal.

    embedding │ layer 0 │ layer 1 │ … │ layer 79 │ norm, head, loss        │ joint
    A           B         B             B          C                      classes of pieces

A piece is a block (``passes.graph.blocks``), or a run of ops between blocks. Equal pieces are decided about once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

from torch import fx

from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph, once_per_graph, tensor_specs
from passes.graph.part import part_of
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import colocated


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a model, in the program's order. ``parts``: each as a graph of its own."""

    graph: OpGraph
    ops: tuple[tuple[str, ...], ...]
    parts: tuple[OpGraph, ...]
    blocks: tuple[str, ...]
    """The block that each piece is, "" where it is none."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Words that tell nodes of equal pieces apart."""
    parted: bool = False
    """Blocks may be several pieces: a stage computes all of those that it has again, or none."""

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
            marks = dict(self.marks)
            for node in (self.streams[number], self.streams[number + 1]):
                if node is not None:
                    marks[node] = f"stream {marks.get(node, '')}"
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


def pieces_of(
    graph: OpGraph,
    fewest: int = 1,
    stage_of: Mapping[str, int] | None = None,
    marks: Mapping[str, str] | None = None,
) -> Pieces:
    """Cut ``graph`` at its joints. Ops that must share a stage share a piece.

    ``fewest``: pieces at least, where there may be so many: blocks are cut between modules for that, or between all ops.
    Where it is several, ops outside of blocks are parted wherever one value crosses: a slow group may run a loss alone.
    ``stage_of``: of each op, where stages begin at fixed ops; ``marks``: what tells nodes of equal pieces apart.
    """
    blocks, copied = block_of(graph), recomputed_ops(graph)
    ops = [node for node in graph.ops if node.name not in copied]
    stages = stage_of or {}
    by_block: list[tuple[object, ...]] = [(stages.get(op.name, 0), blocks.get(op.name, "")) for op in ops]
    if fewest > 1:
        narrow = _narrow_joints(ops)
        by_block = [key if key[1] else (*key, at) for key, at in zip(by_block, narrow, strict=True)]
    by_module = [(*key, str(op.meta.get("module_path", ""))) for key, op in zip(by_block, ops, strict=True)]
    for keys in (by_block, by_module, range(len(ops))):
        runs = [list(run) for _, run in groupby(range(len(ops)), key=keys.__getitem__)]
        names = [blocks.get(ops[run[0]].name, "") for run in runs]
        made, names = _joined(graph, [[ops[at].name for at in run] for run in runs], names)
        if len(made) >= fewest:
            break
    pieces, parted = tuple(map(tuple, made)), keys is not by_block
    parts = tuple(_part(graph, piece, copied) for piece in pieces)
    return Pieces(graph, pieces, parts, tuple(names), marks or {}, parted)


@once_per_graph  # searches with unlike things fixed share what they ask of a part
def _part(graph: OpGraph, piece: tuple[str, ...], copied: frozenset[str]) -> OpGraph:
    return part_of(graph, piece, copied)


def _narrow_joints(ops: Sequence[fx.Node]) -> list[int]:
    """[ops] how many joints that a single value crosses lie before each."""
    position = {op.name: at for at, op in enumerate(ops)}
    last = {
        source.name: at
        for at, op in enumerate(ops)
        for source in op.all_input_nodes
        if source.name in position
    }
    change = [0] * (len(ops) + 1)
    for name, reader in last.items():
        change[position[name] + 1] += 1
        change[reader + 1] -= 1
    return list(accumulate(crossing == 1 for crossing in accumulate(change[:-1])))


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


def structure_of(part: OpGraph, marks: Mapping[str, str]) -> object:
    """Return everything about a part that its sharding follows from, names aside: equal parts have equal structures."""
    number = {node.name: i for i, node in enumerate(part.graph.nodes)}

    def plain(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return ("node", number[argument.name])
        if isinstance(argument, list | tuple):
            return tuple(map(plain, argument))
        if isinstance(argument, dict):
            return tuple((name, plain(value)) for name, value in sorted(argument.items()))
        return str(argument)

    def of(node: fx.Node) -> object:
        role = str(node.target) if node.op == "call_function" else ""
        return (
            part.input_of[node.name].kind if node.op == "placeholder" else role,
            plain(node.args),
            plain(dict(node.kwargs)),
            tuple((spec.shape, spec.dtype) for spec in tensor_specs(node)) if node.op != "output" else (),
            node.name in part.needs_grad,
            marks.get(node.name, ""),
        )

    return tuple(map(of, part.graph.nodes))
