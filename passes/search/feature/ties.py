"""Ties: of equally cheap ways that with the least data on each rank, so that batches arrive in parts.

    input_ids R ─slice─► embedding S0               input_ids S0 ───────────────────────────────► embedding S0
    labels    R ─► pad R ─► view R ─slice─► loss S0     labels S0 ─► pad S0 ─► view S0 ─────────► loss S0

Slicing is free, and on a GPU a small op takes its launch however little it computes: the search's objective does not say
which of the two. But a rank loads only its part of a batch that arrives in parts.

Batch leaves are looked at, and what is computed from them without gradients, from the last op back to the leaves.
A unit changes to another of its ways if the step takes no longer, no more bytes are held, and each rank's tensors of the
unit are smaller: so it ends.

And sums that a choice is charged without need, of gradients of which no reader leaves parts (``without_needless_sums``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from passes.search.feature.bridges import BridgeTable
from passes.search.feature.codes import DEFERRED, WHOLE, combine, digits, left_in_parts, needs_of
from passes.search.feature.graph import Unit
from passes.search.feature.options import Options, UnitNumbers, bytes_of
from passes.search.feature.problem import FeatureProblem
from passes.search.feature.tuning import TUNING


def with_split_batch(problem: FeatureProblem, options: Sequence[int]) -> tuple[int, ...]:
    """``options`` (per unit an index into its ``detail``) with ties broken; O(units · options · wires at each)."""
    ties = _Ties(problem, options)
    moved = True
    while moved:
        moved = sum(ties.move(unit) for unit in reversed(ties.units)) > 0
    chosen = without_needless_sums(problem, ties.chosen)
    return tuple(int(u.index[k]) for u, k in zip(problem.units, chosen, strict=True))


class _Ties:
    """A choice that is changed one unit at a time."""

    def __init__(self, problem: FeatureProblem, options: Sequence[int]) -> None:
        self.problem = problem
        self.chosen: list[int] = [
            n.index.tolist().index(k) for n, k in zip(problem.units, options, strict=True)
        ]
        self.units = _from_the_batch(problem)
        self.wires: dict[int, list[int]] = {unit.index: [] for unit in self.units}
        for w, wire in enumerate(problem.space.wires):
            for index in {wire.producer, *(reader for reader, _ in wire.readers)}:
                if index in self.wires:
                    self.wires[index].append(w)
        self._bridges: dict[tuple[int, int, int], BridgeTable] = {}

    def move(self, unit: Unit) -> bool:
        """Move to the way with the least data among those that cost no more; tell whether there was a better one."""
        index = unit.index
        before = best = self.chosen[index]
        data = _data(self.problem, unit)
        cost = self._cost(index)
        for k in np.flatnonzero(data < data[before] * (1 - TUNING.equal)).tolist():
            self.chosen[index] = k
            if data[k] < data[best] and all(
                new <= old * (1 + TUNING.equal) for new, old in zip(self._cost(index), cost, strict=True)
            ):
                best = k
        self.chosen[index] = best
        return best != before

    def _cost(self, index: int) -> tuple[float, float, float]:
        """(seconds, bytes, largest buffer with what its backward works in) of a unit and its bridges."""
        numbers, k = self.problem.units[index], self.chosen[index]
        seconds, held, buffer = float(numbers.seconds[k]), float(numbers.bytes[k]), 0.0
        for w in self.wires[index]:
            wire = self.problem.space.wires[w]
            source = self._code(wire.producer, wire.output, made=True)
            needs = {self._code(unit, operand, made=False) for unit, operand in wire.readers}
            found = [self._bridge(w, source, need) for need in needs]
            seconds += sum(float(bridge.seconds[0, 0]) for bridge in found)
            seconds += sum(np.inf for bridge in found if not bridge.allowed[0, 0])
            held += sum(float(bridge.copies[0, 0]) for bridge in found)
            buffer = max(buffer, sum(float(bridge.buffers[0, 0]) for bridge in found))
        return seconds, held, buffer + float(numbers.working_bytes[k])

    def _code(self, unit: int, tensor: int, *, made: bool) -> int:
        numbers = self.problem.units[unit]
        return int((numbers.outputs if made else numbers.inputs)[tensor][self.chosen[unit]])

    def _bridge(self, wire: int, source: int, need: int) -> BridgeTable:
        key = wire, source, need
        if key not in self._bridges:
            self._bridges[key] = self.problem.table(wire, [source], [need])
        return self._bridges[key]


def _from_the_batch(problem: FeatureProblem) -> list[Unit]:
    """Batch leaves, and ops without gradients that read what comes from them; in the graph's order."""
    space = problem.space
    needs_grad = space.graph.needs_grad
    readers: dict[int, set[int]] = {}
    for wire in space.wires:
        readers.setdefault(wire.producer, set()).update(unit for unit, _ in wire.readers)
    found = {unit.index for unit in space.units if unit.kind == "batch"}
    waiting = list(found)
    while waiting:
        for index in readers.get(waiting.pop(), set()) - found:
            unit = space.units[index]
            if unit.kind == "op" and not any(name in needs_grad for name in unit.members):
                found.add(index)
                waiting.append(index)
    leaves = [unit for unit in space.units if unit.kind == "batch"]
    return leaves + [unit for unit in space.units if unit.index in found and unit.kind == "op"]


def _data(problem: FeatureProblem, unit: Unit) -> FloatArray:
    """Bytes of the tensors that a rank reads and makes, per option. Shape [options]."""
    numbers = problem.units[unit.index]
    assert isinstance(numbers.detail, Options)
    read = np.array([bytes_of(spec, problem.symbols) for spec in unit.operands])
    made = np.array([bytes_of(spec, problem.symbols) for spec in unit.outputs])
    found: FloatArray = numbers.detail.operand_share @ read + numbers.detail.output_share @ made
    return found[numbers.index]


def axes_of_parts(problem: FeatureProblem, chosen: Sequence[int]) -> dict[int, frozenset[int]]:
    """Mesh axes along which readers leave parts of the gradient of a parameter, or of a value of another part of the model,
    by its unit; O(wires)."""
    axes = len(problem.mesh.shape)
    found: dict[int, frozenset[int]] = {}
    for wire in problem.space.wires:
        if problem.space.units[wire.producer].kind not in ("parameter", "value"):
            continue
        needs = [needs_of(int(problem.units[u].inputs[i][chosen[u]]), axes) for u, i in wire.readers]
        parts = {axis for need in needs for axis in range(axes) if need[axis].partial_gradient}
        found[wire.producer] = found.get(wire.producer, frozenset()) | parts
    return found


def without_needless_sums(problem: FeatureProblem, chosen: Sequence[int]) -> list[int]:
    """``chosen``, where parameters are charged a sum at the step's end along those axes only that have parts to be summed;
    and values of other parts of the model send no parts of sums back along others.

    That a gradient is deferred is a parameter's way, that a reader leaves parts of it is the reader's: where several read,
    no pair of them says that no reader does (``FeatureProblem.table`` forbids what one reader alone says). Ranks sum what
    is in parts (``passes.shard.syncs``), so such a choice does not cost what it says: most often less, but a sum over the
    ranks of two axes may be priced below one over those of one axis, whose groups share a node's links.
    """
    return [
        int(k) for k in each_without_needless_sums(problem, np.array(chosen, dtype=np.intp)[:, None])[:, 0]
    ]


def each_without_needless_sums(problem: FeatureProblem, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
    """[units, choices] many choices, each as ``without_needless_sums`` has it."""
    axes = len(problem.mesh.shape)
    parts: dict[int, NDArray[np.intp]] = {}
    for wire in problem.space.wires:
        if problem.space.units[wire.producer].kind in ("parameter", "value"):
            for reader, operand in wire.readers:
                needs = problem.units[reader].inputs[operand].tolist()
                left = np.array([left_in_parts(code, axes) for code in needs], dtype=np.intp)[chosen[reader]]
                parts[wire.producer] = parts.get(wire.producer, np.zeros_like(left)) | left
    found = chosen.copy()
    for unit, numbers in zip(problem.space.units, problem.units, strict=True):
        if unit.kind in ("parameter", "value"):
            left = parts.get(unit.index, np.zeros_like(chosen[unit.index]))
            pairs, which = np.unique(left * len(numbers.seconds) + chosen[unit.index], return_inverse=True)
            whole = WHOLE if unit.kind == "parameter" else 0
            mended = [_mended(numbers, whole, axes, *divmod(p, len(numbers.seconds))) for p in pairs.tolist()]
            found[unit.index] = np.array(mended, dtype=np.intp)[which.reshape(-1)]
    return found


def _mended(numbers: UnitNumbers, whole: int, axes: int, summed: int, k: int) -> int:
    """Return the option that defers what option ``k`` does, along axes of ``summed`` (bits) alone."""
    codes = numbers.outputs[0]
    read = digits(int(codes[k]), axes)
    wanted = combine([whole if d == DEFERRED and not summed >> a & 1 else d for a, d in enumerate(read)])
    same = np.flatnonzero((codes == wanted) & (numbers.bytes <= numbers.bytes[k]))
    return int(same[np.argmin(numbers.seconds[same])]) if wanted != codes[k] and len(same) else k
