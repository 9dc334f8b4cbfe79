"""The most memory that a backward holds, found by going through its ops once in reverse.

Before it begins, all that the forwards saved is there. Then, op by op, from the last to the first:

    during an op    + what its backward makes: gradients, and what lies between them (``OpTable.backward_peak_bytes``)
    after it        - its output's gradient    - storages that no earlier op saved    the gradients of its operands stay

    logits ─► log_softmax ─► loss        saved: log_softmax    during its backward: + gradients of the loss's input and of logits

A backward that makes nothing hands its own gradient on (a sum, a view): one storage with several owners. Gradients of
parameters belong to the state, where they are added to what micro-batches before left; but those of a parameter that several
ops read are summed first, in a tensor that is there from the last reader's backward to the first's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph


def backward_peak_bytes(
    graph: OpGraph,
    costs: GraphCosts,
    ops: Sequence[int],
    batch_size: int,
    regions: Sequence[Sequence[int]] = (),
    *,
    deferring: bool = False,
) -> int:
    """Return the most bytes that the backward of ``ops`` (rising indices) holds beyond what was saved when it began.

    ``regions``: ops that backward computes again, by block; what they save is there from when that begins. ``deferring``: weight halves run later, and keep what
    their ops saved and the gradients of their results.
    """
    exact = costs.exact(batch_size)
    walk = _Walk(graph, exact, [int(op) for op in ops], batch_size, regions)
    for op in reversed(ops):
        later = deferring and exact.weight_half[op]
        if op in walk.trained:
            walk.step(op, keep=later)
        if not later:
            walk.free(op)
        walk.sum_parameters(op)
    return max(0, int(walk.most - walk.saved_before))


class _Walk:
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
        self.sizes: Mapping[str, int] = costs.storage_bytes(batch_size)
        table = costs.at(batch_size)
        self.made = table.backward_peak_bytes
        self.output_bytes = table.output_bytes
        self.region_of = {op: number for number, region in enumerate(regions) for op in region}
        self.filled: set[int] = set()
        inner = [costs.inputs_of(set(region)) for region in regions]
        self.saved: dict[int, list[str]] = {}
        """Storages by the first op that saved them: after its backward nobody needs them."""
        self.again: list[int] = [0] * len(regions)
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
        self.alive = self.saved_before = sum(self.sizes[name] for name in seen) - sum(self.again)
        self.gradient: dict[int, list[float]] = {}
        """[bytes, owners] of the storage of each op's gradient."""
        self.gradients_alive = 0.0
        self.most = float(self.alive)

    def step(self, op: int, *, keep: bool) -> None:
        """Run the backward of ``op``; ``keep``: its result's gradient is needed later."""
        region = self.region_of.get(op)
        if region is not None and region not in self.filled:
            self.filled.add(region)
            self.alive += self.again[region]
        own = self.gradient.pop(op, None)
        made = float(self.made[op])
        self.most = max(self.most, self.alive + self.gradients_alive + made)
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

    def free(self, op: int) -> None:
        """Free what no op before ``op`` saved."""
        self.alive -= sum(self.sizes[name] for name in self.saved.get(op, ()))

    def sum_parameters(self, op: int) -> None:
        """Add the gradients of parameters that several ops read: one more, and its sum with those before."""
        begun, added, ended = (each.get(op, 0.0) for each in self.summed)
        self.most = max(self.most, self.alive + self.gradients_alive + 2 * added)
        self.alive += begun - ended

    def _release(self, gradient: list[float] | None) -> None:
        """Give up one owner of a gradient."""
        if gradient is None:
            return
        gradient[1] -= 1
        if gradient[1] == 0:
            self.gradients_alive -= gradient[0]


def _summed_parameters(
    graph: OpGraph, trained: frozenset[int]
) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Count bytes of the gradients of parameters that several ops read, by op: those that its backward begins to sum,
    adds to (which takes a tensor more), and hands over to the state."""
    index_of = {node.name: index for index, node in enumerate(graph.ops)}
    begun: dict[int, float] = {}
    added: dict[int, float] = {}
    ended: dict[int, float] = {}
    for given in graph.inputs:
        if given.kind != "parameter" or given.name not in graph.trained:
            continue
        readers = sorted(
            index
            for user in graph.nodes[given.node].users
            if (index := index_of.get(user.name, -1)) in trained
        )
        if len(readers) < 2:
            continue
        types = graph.types_of(given.name, graph.precision)
        size_bytes = float(graph.parameters[given.name].elements * types.leaf.itemsize)
        begun[readers[-1]] = begun.get(readers[-1], 0.0) + size_bytes
        ended[readers[0]] = ended.get(readers[0], 0.0) + size_bytes
        for reader in readers[:-1]:
            added[reader] = added.get(reader, 0.0) + size_bytes
    return begun, added, ended
