"""The tensors that a segment allocates and releases, op by op: what the allocator's memory follows from.

    forward     an op's results, what autograd keeps for it; released after the last op that reads it, unless saved
    backward    in reverse: gradients of an op's operands, what lies between, gradients of parameters; then the op's own
                gradient is released, and what no earlier op saved. A block that is computed again is first

Tensors have slots, numbers that begin at 0 in each list's order; sizes are those of ``passes.costs.backward_peak``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from passes.costs.costs import GraphCosts
from passes.costs.recompute import computed_again
from passes.graph.graph import OpGraph

TensorChange: TypeAlias = tuple[int, int]
"""(slot, bytes): bytes are allocated; RELEASED: what the slot holds is released; a slot below 0 is the gradient of the
parameter -1 - slot, made in so many bytes."""
RELEASED = -1


@dataclass(frozen=True, eq=False)
class Allocations:
    """The changes of one micro-batch. What is left after backward is released at its end."""

    forward: tuple[TensorChange, ...]
    backward: tuple[TensorChange, ...]
    parameters: tuple[str, ...]
    """Names of the parameters whose gradients backward makes, by number."""


def allocations(
    graph: OpGraph,
    costs: GraphCosts,
    ops: Sequence[int],
    batch_size: int,
    outputs: Collection[str] = (),
    regions: Sequence[Sequence[int]] = (),
) -> Allocations:
    """List the changes of the segment that runs ``ops`` (rising indices).

    ``outputs``: ops whose results it sends or returns, which stay; ``regions``: ops that backward computes again, by block.
    """
    return _AllocationWalk(graph, costs.exact(batch_size), ops, batch_size, outputs, regions).run()


@dataclass(eq=False)
class _Gradient:
    """The storage of a gradient, and how many ops' gradients it is."""

    slot: int | None
    owners: int = 0


@dataclass(eq=False)
class _AllocationWalk:
    graph: OpGraph
    costs: GraphCosts
    ops: Sequence[int]
    batch_size: int
    outputs: Collection[str]
    regions: Sequence[Sequence[int]]
    slots: int = 0
    changes: list[TensorChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        costs, inside = self.costs, set(self.ops)
        table = costs.at(self.batch_size)
        self.sizes: Mapping[str, int] = costs.storage_bytes(self.batch_size)
        self.made = table.backward_peak_bytes
        self.output_bytes = table.output_bytes
        self.trained = {op for op in self.ops if costs.ops[op] in self.graph.needs_grad}
        self.makes: defaultdict[int, list[str]] = defaultdict(list)
        """Storages by the op that makes them."""
        for name, op in costs.maker.items():
            if op in inside and self.sizes[name]:
                self.makes[op].append(name)
        self.region_of = {op: number for number, region in enumerate(self.regions) for op in region}
        self.savers: defaultdict[int, list[str]] = defaultdict(list)
        """Storages by the first op that saved them."""
        self.saved: set[str] = set()
        self.again: list[set[str]] = [set() for _ in self.regions]
        """Storages that computing a region again makes."""
        inner = [costs.inputs_of(set(region)) for region in self.regions]
        outside = {name for op in self.ops if op not in self.region_of for name in costs.saved[op]}
        for op in self.ops:
            region = self.region_of.get(op)
            for name in costs.saved[op]:
                if name not in self.saved:
                    self.savers[op].append(name)
                    self.saved.add(name)
                    if region is not None and name not in inner[region] and name not in outside:
                        self.again[region].add(name)
        sent = {
            name for op in self.ops if costs.ops[op] in self.outputs for name in costs.output_storages[op]
        }
        kept = self.saved.difference(*self.again) | {name for names in inner for name in names} | sent
        self.kept = {name for name in kept if name is not None}
        self.parameter: dict[str, int] = {}
        self.gradients_of = self._gradients_of()
        self.at: dict[str, int] = {}
        """The slot of each storage that is there."""

    def _gradients_of(self) -> Mapping[int, list[tuple[int, int]]]:
        """Return the (number, bytes) of the gradients of parameters that each op's backward makes."""
        index_of = {self.costs.ops[op]: op for op in self.trained}
        found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for given in self.graph.inputs:
            if given.kind != "parameter" or given.name not in self.graph.trained:
                continue
            types = self.graph.types_of(given.name, self.graph.precision)
            size = self.graph.parameters[given.name].elements * types.leaf.itemsize
            for user in self.graph.nodes[given.node].users:
                if user.name in index_of:
                    number = self.parameter.setdefault(given.name, len(self.parameter))
                    found[index_of[user.name]].append((number, size))
        return found

    def run(self) -> Allocations:
        self._forward(self.ops, self.kept)
        forward, self.changes = tuple(self.changes), []
        self._backward()
        return Allocations(forward, tuple(self.changes), tuple(self.parameter))

    def _take(self, size_bytes: float) -> int | None:
        if size_bytes <= 0:
            return None
        self.changes.append((self.slots, int(size_bytes)))
        self.slots += 1
        return self.slots - 1

    def _leave(self, slot: int | None) -> None:
        if slot is not None:
            self.changes.append((slot, RELEASED))

    def _forward(self, ops: Sequence[int], kept: Collection[str]) -> None:
        """Run ``ops`` forward; what they make stays if it is ``kept``."""
        last: dict[str, int] = {}
        for op in ops:
            last |= dict.fromkeys(self.makes.get(op, ()), op)
            last |= {name: op for _, name in self.costs.reads[op] if name in last}
        ends: defaultdict[int, list[str]] = defaultdict(list)
        for name, op in last.items():
            if name not in kept:
                ends[op].append(name)
        for op in ops:
            for name in self.makes.get(op, ()):
                if name not in self.at and (slot := self._take(self.sizes[name])) is not None:
                    self.at[name] = slot
            for name in ends.get(op, ()):
                self._leave(self.at.pop(name, None))

    def _backward(self) -> None:
        gradients: dict[int, _Gradient] = {}
        begun: set[int] = set()
        for op in reversed(self.ops):
            region = self.region_of.get(op)
            if region is not None and region not in begun and op in self.trained:
                begun.add(region)
                self._forward(computed_again(self.costs, self.regions[region], False), self.again[region])
            if op in self.trained:
                self._step(op, gradients)
            for name in self.savers.get(op, ()):
                self._leave(self.at.pop(name, None))

    def _step(self, op: int, gradients: dict[int, _Gradient]) -> None:
        """Run the backward of ``op``."""
        own = gradients.pop(op, None) or _Gradient(self._take(self.output_bytes[op]), 1)
        made, named = float(self.made[op]), 0.0
        given: list[tuple[int, _Gradient]] = []
        for producer in dict.fromkeys(producer for producer, _ in self.costs.reads[op]):
            if producer not in self.trained:
                continue
            gradient = own
            if made:
                gradient = _Gradient(self._take(self.output_bytes[producer]))
                named += float(self.output_bytes[producer])
            gradient.owners += 1
            given.append((producer, gradient))
        for number, size in self.gradients_of.get(op, ()):
            self.changes.append((-1 - number, size))
            named += size
        self._leave(self._take(made - named))
        for producer, gradient in given:
            before = gradients.get(producer)
            if before is None:
                gradients[producer] = gradient
            elif before.owners == 1:  # autograd adds to what nobody else has
                self._drop(gradient)
            else:
                gradients[producer] = _Gradient(self._take(self.output_bytes[producer]), 1)
                self._drop(before)
                self._drop(gradient)
        self._drop(own)

    def _drop(self, gradient: _Gradient) -> None:
        gradient.owners -= 1
        if gradient.owners == 0:
            self._leave(gradient.slot)
