"""Options of a unit on a mesh: products of its one-axis choices that divide, as arrays over options.

Columns of shares say which part of each tensor, and of the arithmetic, one rank has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from weakref import WeakKeyDictionary

import numpy as np
import sympy
from numpy.typing import NDArray

from cost_models.arrays import FloatArray, IntArray
from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.graph.graph import OpGraph
from passes.graph.signatures import concrete
from passes.search.feature.codes import BITS, DEFERRED, WHOLE, need_code, source_code
from passes.search.feature.graph import Unit
from passes.search.feature.seconds import ByteShares, splits_samples, traffic_of_parts
from passes.shard.sizes import splits_into
from passes.shard.sizes import ways as ways_of
from passes.shard.words import QUERIES, TOKENS_OF_KEYS, Choice, are_nested, short
from runtime.segment.code import Dim, TensorSpec

MOST_PARTS = 8
"""Parts of a sum that a rank may be sent, each by another one: more are summed before they leave."""


@dataclass(frozen=True, eq=False)
class Options:
    """``axes[k, a]``: option k's choice on axis a, an index into ``choices``. ``inputs[i][k]``, ``outputs[o][k]``: codes.

    ``operand_share``, ``output_share``: [options, tensors]; ``work_share``: [options].
    """

    choices: tuple[Choice, ...]
    axes: IntArray
    inputs: tuple[IntArray, ...]
    outputs: tuple[IntArray, ...]
    operand_share: FloatArray
    output_share: FloatArray
    work_share: FloatArray
    _split: dict[tuple[int, ...], tuple[IntArray, ByteShares]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.axes)

    def split(
        self, unit: Unit, graph: OpGraph, shape: Sequence[int], symbols: Mapping[sympy.Symbol, int]
    ) -> tuple[IntArray, ByteShares]:
        """Return the parts that samples are split in, and the shares of the memory traffic of ``unit``, an op, that a rank
        has of its part. ``shape``: of the mesh."""
        sizes = tuple(symbols.values())
        if sizes not in self._split:
            specs, batch = (*unit.operands, *unit.outputs), graph.batch.batch_symbol
            splits = np.array([splits_samples(specs, placements_of(c), batch) for c in self.choices])
            parts = np.where(splits[self.axes], np.array(shape, dtype=np.int64), 1).prod(axis=1)
            parts = np.gcd(parts, symbols[batch])
            both = unit.operands, unit.outputs
            shares = self.operand_share, self.output_share
            traffic = traffic_of_parts(graph, graph.nodes[unit.name], both, symbols, shares, parts)
            self._split[sizes] = parts, traffic
        return self._split[sizes]

    def keep(self, chosen: NDArray[np.bool_]) -> Options:
        """Return those options alone."""
        return Options(
            self.choices,
            self.axes[chosen],
            tuple(codes[chosen] for codes in self.inputs),
            tuple(codes[chosen] for codes in self.outputs),
            self.operand_share[chosen],
            self.output_share[chosen],
            self.work_share[chosen],
        )

    @cached_property
    def unlike(self) -> bool:
        """True if no two options have the same codes."""
        codes = [c.tolist() for c in (*self.inputs, *self.outputs)]
        return self.count < 2 or (bool(codes) and len(set(zip(*codes, strict=True))) == self.count)

    def per_axis(self, option: int) -> tuple[Choice, ...]:
        return tuple(self.choices[i] for i in self.axes[option])


def sizes_of(spec: TensorSpec, symbols: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    """The tensor's shape for one micro-batch size."""
    if all(isinstance(dim, int) for dim in spec.shape):
        return tuple(int(dim) for dim in spec.shape)
    return _sizes(spec.shape, tuple(symbols.items()))


@cache
def _sizes(shape: tuple[Dim, ...], symbols: tuple[tuple[sympy.Symbol, int], ...]) -> tuple[int, ...]:
    known = dict(symbols)
    return tuple(concrete(dim, known) for dim in shape)


def bytes_of(spec: TensorSpec, symbols: Mapping[sympy.Symbol, int]) -> int:
    return math.prod(sizes_of(spec, symbols)) * spec.dtype.itemsize


def options_of(
    unit: Unit,
    choices: Sequence[Choice],
    shape: Sequence[int],
    symbols: Mapping[sympy.Symbol, int],
    batch: sympy.Symbol,
) -> Options:
    """Every combination of ``choices`` over the axes of a mesh of ``shape`` that divides every dimension it splits.

    ``batch``: the symbol of samples, of which a size may be more than a multiple (``passes.shard.sizes``).

    Numbers of samples that the same combinations divide have the same options, and one object.
    """
    known, key = _products.setdefault(unit, {}), tuple(shape)
    if key not in known or known[key].every.choices != tuple(choices):
        known[key] = _ChoiceProducts.of(unit, tuple(choices), key)
    return known[key].options(unit, symbols, batch)


@dataclass(frozen=True, eq=False)
class _ChoiceProducts:
    """Every combination of a unit's choices over the axes of a mesh, whatever the sizes are."""

    every: Options
    split: IntArray
    """[combinations, dimensions of the tensors read and made] the parts that each is split into."""
    counted: NDArray[np.bool_]
    """The combinations that divide the counts that choices name, and nest."""
    by_sizes: dict[tuple[int, ...], Options] = field(default_factory=dict)
    by_combinations: dict[bytes, Options] = field(default_factory=dict)

    @classmethod
    def of(cls, unit: Unit, choices: tuple[Choice, ...], shape: tuple[int, ...]) -> _ChoiceProducts:
        """Combine the choices."""
        specs = (*unit.operands, *unit.outputs)
        dims = [(t, d) for t, spec in enumerate(specs) for d in range(len(spec.shape))]
        column = {at: i for i, at in enumerate(dims)}
        ways = len(choices)
        axes = np.array(list(itertools.product(range(ways), repeat=len(shape))), dtype=np.int64)
        split = np.ones((len(axes), len(dims)), dtype=np.int64)
        work = np.ones(len(axes))
        for axis, size in enumerate(shape):
            factor = np.ones((ways, len(dims)), dtype=np.int64)
            busy = np.ones(ways)
            for k, choice in enumerate(choices):
                for t, placement in enumerate(placements_of(choice)):
                    if isinstance(placement, Shard):
                        factor[k, column[t, placement.dim]] = size
                        busy[k] = 1 / size
            split *= factor[axes[:, axis]]
            work *= busy[axes[:, axis]]
        share = np.ones((len(axes), len(specs)))
        for i, (t, _) in enumerate(dims):
            share[:, t] /= split[:, i]
        inputs = tuple(
            _combined(np.array([need_code(choice.inputs[i]) for choice in choices]), axes)
            for i in range(len(unit.operands))
        )
        outputs = tuple(
            _combined(np.array([source_code(choice.outputs[o]) for choice in choices]), axes)
            for o in range(len(unit.outputs))
        )
        read = len(unit.operands)
        every = Options(choices, axes, inputs, outputs, share[:, :read], share[:, read:], work)
        return cls(every, split, _go_together(choices, axes, shape))

    def options(self, unit: Unit, symbols: Mapping[sympy.Symbol, int], batch: sympy.Symbol) -> Options:
        """Return the combinations that divide what they split."""
        numbers = tuple(symbols.values())
        found = self.by_sizes.get(numbers)
        if found is None:
            specs = (*unit.operands, *unit.outputs)
            extent = np.array([size for spec in specs for size in sizes_of(spec, symbols)], dtype=np.int64)
            whole = self.split == 1  # an empty dimension, too
            divides = (whole | ((extent % self.split == 0) & (extent >= self.split))).all(axis=1)
            divides &= self.counted
            for column, size in enumerate(size for spec in specs for size in spec.shape):
                if _is_multiple(size):
                    continue
                for parts in np.unique(self.split[:, column]).tolist():
                    if not splits_into(size, parts, batch, symbols[batch]):
                        divides &= self.split[:, column] != parts
            found = self.by_combinations.setdefault(divides.tobytes(), self.every.keep(divides))
            self.by_sizes[numbers] = found
        return found


def _is_multiple(size: Dim) -> bool:
    """Tell whether a size is a number or a multiple of a symbol, whose value shows what it divides by."""
    return isinstance(size, int) or bool(size.as_coeff_Mul()[1].is_Symbol)


_products: WeakKeyDictionary[Unit, dict[tuple[int, ...], _ChoiceProducts]] = WeakKeyDictionary()
"""The products of the choices of each unit, by the shape of the mesh."""


def _go_together(choices: Sequence[Choice], axes: IntArray, shape: Sequence[int]) -> NDArray[np.bool_]:
    """Tell whether every count that choices name is divided by the product of the axes that split it, and axes nest. Shape
    [options]."""
    fits = np.ones(len(axes), dtype=bool)
    for count in {number for choice in choices for number in choice.divides}:
        parts = np.ones(len(axes), dtype=np.int64)
        for axis, size in enumerate(shape):
            parts *= np.array([size if count in choice.divides else 1 for choice in choices])[axes[:, axis]]
        fits &= count % parts == 0
    if any(choice.local in (QUERIES, TOKENS_OF_KEYS) for choice in choices):
        fits &= [are_nested([choices[k] for k in row]) for row in axes.tolist()]
    return fits


def placements_of(choice: Choice) -> tuple[Placement, ...]:
    """Return the placements of the tensors that an op reads, then of those that it makes."""
    return (*(need.placement for need in choice.inputs), *choice.outputs)


def _combined(code: NDArray[np.int64], axes: IntArray) -> IntArray:
    total = np.zeros(len(axes), dtype=np.int64)
    for axis in range(axes.shape[1]):
        total = total << BITS | code[axes[:, axis]]
    return total


def storage_share(storage: str, output_share: FloatArray, work_share: FloatArray) -> FloatArray:
    """The part of a saved storage that a rank has: an output's; of what is hidden in the op, as much as of its work."""
    if "~" in storage:
        return work_share
    _, _, number = storage.partition(".")
    share: FloatArray = output_share[:, int(number) if number.isdecimal() else 0]
    return share


@dataclass(frozen=True)
class StoredChoice:
    """One way to keep a parameter on one axis: stored, where its gradient and optimizer state are, and its code.

    Of a value from another part of the model: how it arrives, and how its gradient goes back.
    """

    stored: Placement
    state: Placement
    code: int

    def __str__(self) -> str:
        later = ", gradient summed once per step" if self.code == DEFERRED else ""
        state = f", state {short(self.state)}" if self.state != self.stored else ""
        return f"stored {short(self.stored)}{state}{later}"


def stored_choices(dims: Sequence[int], trained: bool) -> tuple[StoredChoice, ...]:
    """Ways to store a parameter on one axis: whole, or split along a dimension; the state of a whole one whole, or split
    (ZeRO-1 and 2)."""
    whole: Placement = Replicate()
    split = [StoredChoice(Shard(d), Shard(d), 2 + d) for d in range(len(dims))]
    if not trained:
        return (StoredChoice(whole, whole, 0), *split)
    kept = [StoredChoice(whole, whole, code) for code in (WHOLE, DEFERRED)]
    states = [StoredChoice(whole, Shard(d), code) for d in range(len(dims)) for code in (WHOLE, DEFERRED)]
    return (*kept, *states, *split)


@cache
def stored_options(
    dims: tuple[int, ...], trained: bool, shape: tuple[int, ...]
) -> tuple[tuple[StoredChoice, ...], ...]:
    """Per option, one choice per axis, such that every split divides."""
    ways = stored_choices(dims, trained)
    return tuple(
        option
        for option in itertools.product(ways, repeat=len(shape))
        if _divides(dims, [c.stored for c in option], shape)
        and _divides(dims, [c.state for c in option], shape)
    )


def arriving_options(
    spec: TensorSpec,
    gradient: bool,
    shape: tuple[int, ...],
    symbols: Mapping[sympy.Symbol, int],
    batch: sympy.Symbol,
) -> tuple[tuple[StoredChoice, ...], ...]:
    """Per option, one choice per axis, of how a value arrives: whole or split. Of the gradient of a whole one each rank may
    send its part back, to at most ``MOST_PARTS`` of them."""
    whole: Placement = Replicate()
    dims = sizes_of(spec, symbols)
    ways = [StoredChoice(p, p, source_code(p)) for p in (whole, *(Shard(d) for d in range(len(dims))))]
    if gradient:
        ways.append(StoredChoice(whole, Partial(), DEFERRED))

    def surely(stored: Sequence[Placement]) -> bool:
        parts = [ways_of(tuple(stored), dim, len(dims), shape) for dim in range(len(dims))]
        sized = zip(spec.shape, parts, strict=True)
        return all(_is_multiple(size) or splits_into(size, n, batch, symbols[batch]) for size, n in sized)

    return tuple(
        option
        for option in itertools.product(ways, repeat=len(shape))
        if _divides(dims, [c.stored for c in option], shape)
        and surely([c.stored for c in option])
        and parts_of([c.state for c in option], shape) <= MOST_PARTS
    )


def parts_of(placements: Sequence[Placement], shape: Sequence[int]) -> int:
    """Count the parts of a sum that ranks have in a layout."""
    return math.prod(size for p, size in zip(placements, shape, strict=True) if isinstance(p, Partial))


def _divides(dims: Sequence[int], placements: Sequence[Placement], shape: Sequence[int]) -> bool:
    split = [1] * len(dims)
    for placement, size in zip(placements, shape, strict=True):
        if isinstance(placement, Shard):
            split[placement.dim] *= size
    return all(
        parts == 1 or (dim % parts == 0 and dim >= parts) for dim, parts in zip(dims, split, strict=True)
    )


@dataclass(frozen=True, eq=False)
class UnitNumbers:
    """Arrays over one unit's options. ``detail``: what the options are: one-axis choices, or ways to store a parameter."""

    seconds: FloatArray
    bytes: FloatArray
    working_bytes: FloatArray
    """Held on top of all that was saved while the backward of one of the unit's ops runs."""
    inputs: tuple[IntArray, ...]
    outputs: tuple[IntArray, ...]
    detail: Options | tuple[tuple[StoredChoice, ...], ...]
    index: IntArray
    """The index of each option in ``detail``: dominated ones are gone."""

    def keep(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> UnitNumbers:
        return UnitNumbers(
            self.seconds[chosen],
            self.bytes[chosen],
            self.working_bytes[chosen],
            tuple(codes[chosen] for codes in self.inputs),
            tuple(codes[chosen] for codes in self.outputs),
            self.detail,
            self.index[chosen],
        )


def undominated(own: UnitNumbers) -> UnitNumbers:
    """Keep the options that no other with the same codes beats in seconds and in bytes; of equal ones the first."""
    if isinstance(own.detail, Options) and own.detail.unlike:
        return own
    codes = list(zip(*(c.tolist() for c in (*own.inputs, *own.outputs)), strict=True))
    if not codes:
        codes = [()] * len(own.seconds)
    best: dict[object, list[int]] = {}
    order = np.lexsort((np.arange(len(own.seconds)), own.working_bytes, own.bytes, own.seconds))
    for k in order.tolist():
        rivals = best.setdefault(codes[k], [])
        if all(own.bytes[r] > own.bytes[k] or own.working_bytes[r] > own.working_bytes[k] for r in rivals):
            rivals.append(k)
    return own.keep(np.array(sorted(k for rivals in best.values() for k in rivals), dtype=np.intp))
