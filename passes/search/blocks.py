"""Recompute as searches over whole ops see it: each op's block, and what is held where blocks run again.

a stage that keeps its activations        holds what its ops save
a stage that computes its blocks again    holds what its blocks read from outside, and what ops outside of blocks
                                          save; while a block is in backward, all that the block saves
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray, IntArray
from passes.costs.costs import GraphCosts
from passes.costs.recompute import computed_again
from passes.search.touches import Touch

RECEIVED = ":received"
"""Behind the name of an op: its result where it is received, if that has no storage where it is made."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of the placed ops 0 … n-1."""

    costs: GraphCosts
    names: tuple[str, ...]
    of: IntArray
    """[n] index of the op's block; -1 outside of any."""
    rows: IntArray
    """[n] positions in the tuples of ``costs``."""
    readers: tuple[tuple[int, ...], ...]

    def __bool__(self) -> bool:
        return bool(self.names)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Ops of each block, rising."""
        found: list[list[int]] = [[] for _ in self.names]
        for op, block in enumerate(self.of.tolist()):
            if block >= 0:
                found[block].append(op)
        return tuple(map(tuple, found))

    @cached_property
    def again(self) -> FloatArray:
        """[n] 1 for ops that run a second time where their block is computed again."""
        result = np.zeros(len(self.rows))
        for ops in self.members:
            region = [int(row) for row in self.rows[list(ops)]]
            result[[self._op_of_row[row] for row in computed_again(self.costs, region, deferring=False)]] = (
                1.0
            )
        return result

    @cached_property
    def inside(self) -> tuple[tuple[str, ...], ...]:
        """Per block: the storages that it saves and does not merely read."""
        result = []
        for index, ops in enumerate(self.members):
            saved = {name for op in ops for name in self.costs.saved[self.rows[op]]}
            result.append(
                tuple(sorted(saved.difference(*(self._read_from_outside(op, index) for op in ops))))
            )
        return tuple(result)

    def _read_from_outside(self, op: int, block: int) -> list[str]:
        """Storages that ``op`` reads of ops that are not in ``block``."""
        found = []
        for producer, storage in self.costs.reads[self.rows[op]]:
            made_by = self._op_of_row.get(producer, -1)  # -1: by an op that every stage runs for itself
            if storage is not None and (made_by < 0 or self.of[made_by] != block):
                found.append(storage)
        return found

    @cached_property
    def _op_of_row(self) -> dict[int, int]:
        return {row: op for op, row in enumerate(self.rows.tolist())}

    @cached_property
    def storages(self) -> tuple[tuple[str, Touch], ...]:
        """Storage keys with the ops that make a stage hold them, when it computes all its blocks again."""
        saved = [
            self.costs.saved[row] if block < 0 else self._read_from_outside(op, block)
            for op, (row, block) in enumerate(zip(self.rows.tolist(), self.of.tolist(), strict=True))
        ]
        return touches(self.costs, self.rows.tolist(), self.readers, saved)

    def sizes(self, size: int) -> FloatArray:
        """[storages] bytes per micro-batch of ``size`` samples."""
        return storage_sizes(self.costs, self.storages, size)

    def block_bytes(self, size: int) -> FloatArray:
        """[blocks] bytes that are alive again while the block is in backward."""
        sizes = self.costs.storage_bytes(size)
        return np.array([sum(sizes[key] for key in keys) for keys in self.inside], dtype=np.float64)

    def transient_bytes(self, size: int) -> FloatArray:
        """[n] ``block_bytes`` of each op's block; 0 outside of any."""
        return np.append(self.block_bytes(size), 0.0)[self.of]

    def beside_deferred_bytes(self, size: int, output_bytes: FloatArray) -> FloatArray:
        """[n] as ``transient_bytes``, without what weight halves need of the block: that stays for them.

        ``output_bytes``: [n] of each op's result, and of its gradient.
        """
        sizes = self.costs.storage_bytes(size)
        result = self.block_bytes(size)
        for index, (ops, inside) in enumerate(zip(self.members, self.inside, strict=True)):
            deferring = [op for op in ops if self.costs.weight_half[self.rows[op]]]
            kept = {name for op in deferring for name in self.costs.saved[self.rows[op]]}.intersection(inside)
            result[index] -= sum(sizes[name] for name in kept) + output_bytes[deferring].sum()
        return np.append(np.maximum(result, 0.0), 0.0)[self.of]


def touches(
    costs: GraphCosts,
    rows: Sequence[int],
    readers: Sequence[Sequence[int]],
    saved: Iterable[Iterable[str]],
    *,
    keeps_sent: bool = True,
) -> tuple[tuple[str, Touch], ...]:
    """List what makes a stage hold each storage. ``saved``: the storages that each op has the stage keep.

    A view of a parameter or of the batch has no storage of its own, but is one where it is received.
    """
    savers = ops_by_storage(saved)
    # the ops whose results live in it, its maker first
    holders = ops_by_storage(filter(None, costs.output_storages[row]) for row in rows)
    found = []
    for key in dict.fromkeys([*savers, *holders]):
        family = holders.get(key, [])
        producer = family[0] if family else -1
        read_by = {v for u in family for v in readers[u]} - {producer}
        mine = savers.get(key, ())
        if mine or read_by:
            found.append((key, Touch(tuple(sorted(set(mine))), producer, tuple(sorted(read_by)), keeps_sent)))
    for op, row in enumerate(rows):
        if readers[op] and not any(costs.output_storages[row]):
            view = Touch((), op, tuple(sorted(readers[op])), keeps_sent)
            found.append((costs.ops[row] + RECEIVED, view))
    return tuple(found)


def storage_sizes(costs: GraphCosts, touched: Iterable[tuple[str, Touch]], size: int) -> FloatArray:
    """[storages] bytes per micro-batch of ``size`` samples of what ``touches`` lists."""
    sizes, made = costs.storage_bytes(size), costs.at(size).output_bytes
    row_of = {name + RECEIVED: row for row, name in enumerate(costs.ops)}
    return np.array(
        [sizes[key] if key in sizes else made[row_of[key]] for key, _ in touched], dtype=np.float64
    )


def ops_by_storage(storages: Iterable[Iterable[str]]) -> dict[str, list[int]]:
    """Turn the storages of each op into the ops of each storage, rising."""
    found: dict[str, list[int]] = defaultdict(list)
    for op, names in enumerate(storages):
        for name in names:
            found[name].append(op)
    return found
