"""The most memory that a backward holds, found by going through its ops once in reverse.

Before it begins, all that the forwards saved is there. Then, op by op, from the last to the first:

    during an op    + what its backward makes: gradients, and what lies between (``OpTable.backward_peak_bytes``)
    after it        - its output's gradient    - storages that no earlier op saved    its operands' gradients stay

    logits ─► log_softmax ─► loss        saved: log_softmax    in backward: + gradients of log_softmax and of logits

A backward that makes nothing hands its own gradient on (a sum, a view): one storage with several owners. Gradients of
parameters belong to the state, where they are added to what micro-batches before left; in the first backward of a step
nothing is there yet, and they come one by one. Those of a parameter that several ops read are summed first, in a tensor
that is there from the last reader's backward to the first's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph, once_per_graph


@dataclass(frozen=True)
class BackwardPeak:
    """The most bytes that a backward holds beyond what was saved when it began.

    ``later_bytes``: where the gradients of parameters, which are not counted, were there before. ``first_bytes``: in the
    first backward, with the ``gradient_bytes`` that it makes, of parameters that no other segment reads.
    """

    later_bytes: int
    first_bytes: int
    gradient_bytes: int


def backward_peak(
    graph: OpGraph,
    costs: GraphCosts,
    ops: Sequence[int],
    batch_size: int,
    regions: Sequence[Sequence[int]] = (),
    *,
    deferring: bool = False,
) -> BackwardPeak:
    """Return the most that the backward of ``ops`` (rising indices) holds.

    ``regions``: ops that backward computes again, by block; what they save is there from when that begins.
    ``deferring``: weight halves run later, and keep what
    their ops saved and the gradients of their results.
    """
    exact = costs.exact(batch_size)
    walk = _BackwardWalk(graph, exact, ops, batch_size, regions)
    for op in reversed(ops):
        later = deferring and exact.weight_half[op]
        if op in walk.trained:
            walk.step(op, keep=later)
        if not later:
            walk.free(op)
        walk.sum_parameters(op)
    beyond, first = (max(0, int(most - walk.saved_before)) for most in (walk.most, walk.first_most))
    return BackwardPeak(beyond, first, int(walk.grown))


@dataclass(frozen=True, eq=False)
class BackwardWork:
    """The bytes of the whole graph's backward, op by op; arrays are [ops], 0 at ops that have no backward."""

    beside_bytes: FloatArray
    """The most that is alive while it is at the op, beside the saved storages that are left."""
    freed_bytes: FloatArray
    """Saved storages that nobody needs once it has left the op."""

    @cached_property
    def beyond_bytes(self) -> FloatArray:
        """The most while it is at the op, beyond all that was saved when it began; 0 where it is less."""
        freed = np.cumsum(self.freed_bytes[::-1])[::-1] - self.freed_bytes
        return np.maximum(self.beside_bytes - freed, 0.0)


@once_per_graph
def backward_work(graph: OpGraph, costs: GraphCosts, batch_size: int) -> BackwardWork:
    """Return what the backward of the whole graph holds at each op."""
    ops = range(len(costs.ops))
    walk = _BackwardWalk(graph, costs.exact(batch_size), ops, batch_size, ())
    work = BackwardWork(np.zeros(len(ops)), np.zeros(len(ops)))
    left = walk.saved_before
    for op in reversed(ops):
        if op in walk.trained:
            work.beside_bytes[op] = walk.step(op, keep=False) - left
        work.freed_bytes[op] = walk.free(op)
        left -= work.freed_bytes[op]
        walk.sum_parameters(op)
    return work


class _BackwardWalk:
    """The storages that are alive while a backward goes on."""

    def __init__(
        self,
        graph: OpGraph,
        costs: GraphCosts,
        ops: Sequence[int],
        batch_size: int,
        regions: Sequence[Sequence[int]],
    ) -> None:
        self.costs = costs
        self.trained = frozenset(op for op in ops if costs.ops[op] in graph.needs_grad)
        self.summed = _summed_parameters(graph, self.trained)
        self.grows = _gradients_made(graph, self.trained)
        self.grown = 0.0
        """Bytes of the gradients of parameters that were made."""
        self.sizes: Mapping[str, int] = costs.storage_bytes(batch_size)
        table = costs.at(batch_size)
        self.made = table.backward_peak_bytes
        self.output_bytes = table.output_bytes
        self.region_of = {op: number for number, region in enumerate(regions) for op in region}
        self.filled: set[int] = set()
        inner = [costs.inputs_of(set(region)) for region in regions]
        self.saved: dict[int, list[str]] = {}
        """Storages by the first op that saved them: after its backward nobody needs them."""
        self.again: list[float] = [0] * len(regions)
        """Bytes that computing a region again fills."""
        seen: set[str] = set()
        for op in ops:
            region = self.region_of.get(op)
            for name in costs.saved[op]:
                if name in seen:
                    continue
                seen.add(name)
                self.saved.setdefault(op, []).append(name)
                if region is not None and name not in inner[region]:
                    self.again[region] += self.sizes[name]
        self.alive = self.saved_before = float(sum(self.sizes[name] for name in seen)) - sum(self.again)
        self.gradient: dict[int, list[float]] = {}
        """[bytes, owners] of the storage of each op's gradient."""
        self.gradients_alive = 0.0
        self.most = self.first_most = float(self.alive)

    def _reach(self, more: float) -> float:
        """Note and return what is alive with ``more`` on top."""
        most = self.alive + self.gradients_alive + more
        self.most, self.first_most = max(self.most, most), max(self.first_most, most + self.grown)
        return most

    def step(self, op: int, *, keep: bool) -> float:
        """Run the backward of ``op``; return what is alive meanwhile. ``keep``: its result's gradient is needed later."""
        region = self.region_of.get(op)
        if region is not None and region not in self.filled:
            self.filled.add(region)
            self.alive += self.again[region]
        own = self.gradient.pop(op, None)
        made = float(self.made[op])
        most = self._reach(made)
        for producer in dict.fromkeys(producer for producer, _ in self.costs.reads[op]):
            if producer not in self.trained:
                continue
            self._release(self.gradient.pop(producer, None))
            given = own if made == 0.0 and own is not None else [float(self.output_bytes[producer]), 0]
            if given[1] == 0:
                self.gradients_alive += given[0]
            given[1] += 1
            self.gradient[producer] = given
        if not keep:
            self._release(own)
        return most

    def free(self, op: int) -> float:
        """Free what no op before ``op`` saved; return its bytes."""
        freed = float(sum(self.sizes[name] for name in self.saved.get(op, ())))
        self.alive -= freed
        return freed

    def sum_parameters(self, op: int) -> None:
        """Add the gradients of parameters that several ops read: one more, and its sum with those before."""
        begun, added, ended = (each.get(op, 0.0) for each in self.summed)
        self._reach(2 * added)
        self.alive += begun - ended
        self.grown += self.grows.get(op, 0.0)
        self._reach(0.0)

    def _release(self, gradient: list[float] | None) -> None:
        """Give up one owner of a gradient."""
        if gradient is None:
            return
        gradient[1] -= 1
        if gradient[1] == 0:
            self.gradients_alive -= gradient[0]


def _readers(graph: OpGraph, trained: frozenset[int]) -> dict[str, list[int]]:
    """Return the ops among ``trained`` that read each trained parameter, rising; of those that no other op reads."""
    return {name: users for name, users in _all_readers(graph).items() if trained.issuperset(users)}


@once_per_graph
def _all_readers(graph: OpGraph) -> Mapping[str, list[int]]:
    """Return the ops that read each trained parameter, rising."""
    index_of = {node.name: index for index, node in enumerate(graph.ops)}
    found = {}
    for given in graph.inputs:
        if given.kind == "parameter" and given.name in graph.trained:
            users = sorted(index_of.get(user.name, -1) for user in graph.nodes[given.node].users)
            if users:
                found[given.name] = users
    return found


def _gradients_made(graph: OpGraph, trained: frozenset[int]) -> dict[int, float]:
    """Count bytes of the gradients of parameters by the op whose backward ends them: the first of their readers."""
    made: dict[int, float] = {}
    for name, readers in _readers(graph, trained).items():
        size_bytes = graph.parameters[name].elements * graph.types_of(name, graph.precision).gradient.itemsize
        made[readers[0]] = made.get(readers[0], 0.0) + size_bytes
    return made


def _summed_parameters(
    graph: OpGraph, trained: frozenset[int]
) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Count bytes of the gradients of parameters that several ops read, by op: those that its backward begins to sum,
    adds to (which takes a tensor more), and hands over to the state."""
    begun: dict[int, float] = {}
    added: dict[int, float] = {}
    ended: dict[int, float] = {}
    for name, readers in _readers(graph, trained).items():
        if len(readers) < 2:
            continue
        size_bytes = float(
            graph.parameters[name].elements * graph.types_of(name, graph.precision).leaf.itemsize
        )
        begun[readers[-1]] = begun.get(readers[-1], 0.0) + size_bytes
        ended[readers[0]] = ended.get(readers[0], 0.0) + size_bytes
        for reader in readers[:-1]:
            added[reader] = added.get(reader, 0.0) + size_bytes
    return begun, added, ended
