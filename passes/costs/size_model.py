"""The numbers of every signature as polynomials of the batch size.

Each signature is profiled at a few small sizes. FLOPs, bytes and storage sizes are polynomials of degree at most 2 in the
batch size b (attention over the batch's own rows would be 2; everything usual is 1): two sizes determine a line, a third
size a parabola where some number is on no line, and one more size checks. A signature that fails the check, or whose
structure changes with the size, is profiled anew at each size.

    linear, s = 16, h = 8 → 32:   forward FLOPs at b = 2, 3: 16384, 24576   →   8192·b      checked at b = 8
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.compute import OpWork
from passes.costs.saved import OpProfile, OpStructure

FIT_SIZES = (2, 3, 5)
"""Two for a line, all for a parabola."""
CHECK_SIZE = 8

WORK_FIELDS = tuple(f.name for f in fields(OpWork))
OUTPUT_BYTES = len(WORK_FIELDS)
"""Column of the output's bytes."""
BACKWARD_PEAK_BYTES = OUTPUT_BYTES + 1
"""Column of the most bytes alive in the op's backward."""
FIRST_STORAGE = OUTPUT_BYTES + 2
"""First of the columns of storages."""

Parabola: TypeAlias = tuple[float, float, float]
"""Coefficients of 1, b and b²."""

Profiler = Callable[[int, int], OpProfile]
"""(signature index, batch size) -> profile."""


@dataclass(frozen=True, eq=False)
class SizeModel:
    """``coefficients[row, k]`` of b**k. Signature s owns rows ``first_row[s]`` up to ``first_row[s + 1]``."""

    coefficients: FloatArray
    first_row: tuple[int, ...]
    structures: tuple[OpStructure, ...]
    direct: tuple[int, ...]
    """Signatures that no polynomial fits."""
    profiler: Profiler
    only_size: int | None = None
    """The one size whose numbers these are, if it was profiled for that alone."""
    _cache: dict[int, FloatArray] = field(default_factory=dict, repr=False)

    def at(self, batch_size: int) -> FloatArray:
        """Return every number of every signature, shape [rows]."""
        if self.only_size not in (None, batch_size):
            raise ValueError(f"these are the costs of {self.only_size} samples, not of {batch_size}")
        if batch_size not in self._cache:
            powers = np.array([1.0, batch_size, float(batch_size) ** 2])
            numbers = self.coefficients @ powers
            for signature in self.direct:
                first, end = self.first_row[signature], self.first_row[signature + 1]
                exact = _numbers(self.profiler(signature, batch_size))[: end - first]
                numbers[first:end] = 0  # a structure that changes with the size may have fewer storages
                numbers[first : first + len(exact)] = exact
            self._cache[batch_size] = np.rint(numbers)
        return self._cache[batch_size]


def fit(signatures: int, profiler: Profiler) -> SizeModel:
    """Profile each signature at two of ``FIT_SIZES`` and ``CHECK_SIZE``: three short runs, and one more off the line."""
    found: list[tuple[list[Parabola], OpStructure]] = []
    direct: list[int] = []
    for signature in range(signatures):
        rows, structure = _fitted(signature, profiler)
        if rows is None:
            direct.append(signature)
            rows = [(0.0, 0.0, 0.0)] * len(_numbers(profiler(signature, CHECK_SIZE)))
        found.append((rows, structure))
    return _model(found, tuple(direct), profiler, None)


def _model(
    found: Sequence[tuple[list[Parabola], OpStructure]],
    direct: tuple[int, ...],
    profiler: Profiler,
    only_size: int | None,
) -> SizeModel:
    """Make the model of each signature's rows and structure."""
    table = np.array([row for rows, _ in found for row in rows], dtype=np.float64).reshape(-1, 3)
    first_row = tuple(itertools.accumulate((len(rows) for rows, _ in found), initial=0))
    return SizeModel(table, first_row, tuple(s for _, s in found), direct, profiler, only_size)


def _fitted(signature: int, profiler: Profiler) -> tuple[list[Parabola] | None, OpStructure]:
    """Fit (coefficients of each number, structure); no coefficients if no polynomial fits."""
    check = profiler(signature, CHECK_SIZE)
    profiles: list[OpProfile] = []
    for size in FIT_SIZES:
        profiles.append(profiler(signature, size))
        if profiles[-1].structure != check.structure:
            break
        if len(profiles) == 1:
            continue
        rows = [_polynomial(*values) for values in zip(*map(_numbers, profiles), strict=True)]
        if [c0 + c1 * CHECK_SIZE + c2 * CHECK_SIZE**2 for c0, c1, c2 in rows] == _numbers(check):
            return [(float(c0), float(c1), float(c2)) for c0, c1, c2 in rows], check.structure
    return None, check.structure


def at_one_sample(model: SizeModel) -> SizeModel:
    """Profile micro-batches of one sample as such, numbers and structures: there, some copies become views.

    ``x.transpose(0, 1).contiguous()`` copies, unless one of the two dimensions is 1. Ops that refuse a single sample (a
    normalization over the batch) keep their polynomials.
    """
    fitted = model.at(1)

    def refused(signature: int) -> tuple[list[float], OpStructure]:
        first, end = model.first_row[signature : signature + 2]
        return fitted[first:end].tolist(), model.structures[signature]

    return _at_one_size(len(model.structures), model.profiler, 1, refused)


def at_one_size(signatures: int, profiler: Profiler, size: int) -> SizeModel:
    """Profile one micro-batch size, for a graph that is asked about no other: one run per signature.

    Ops that refuse the size (a normalization over a single sample) have the polynomials that larger ones give.
    """

    def refused(signature: int) -> tuple[list[float], OpStructure]:
        rows, structure = _fitted(signature, profiler)
        if rows is None:
            return [float(n) for n in _numbers(profiler(signature, size))], structure
        return [float(round(c0 + c1 * size + c2 * size**2)) for c0, c1, c2 in rows], structure

    return _at_one_size(signatures, profiler, size, refused)


def _at_one_size(
    signatures: int,
    profiler: Profiler,
    size: int,
    refused: Callable[[int], tuple[list[float], OpStructure]],
) -> SizeModel:
    found: list[tuple[list[Parabola], OpStructure]] = []
    for signature in range(signatures):
        profile = profiler(signature, size)
        numbers, structure = [float(n) for n in _numbers(profile)], profile.structure
        if structure.estimated:
            others, other = refused(signature)
            numbers, structure = (numbers, structure) if other.estimated else (others, other)
        found.append(([(number, 0.0, 0.0) for number in numbers], structure))
    return _model(found, (), profiler, size)


def _numbers(profile: OpProfile) -> list[int]:
    work = [int(getattr(profile.work, name)) for name in WORK_FIELDS]
    return [*work, profile.output_bytes, profile.backward_peak_bytes, *profile.storage_bytes]


def _polynomial(y0: int, y1: int, y2: int | None = None) -> tuple[Fraction, Fraction, Fraction]:
    """Fit coefficients (of 1, b, b²) at ``FIT_SIZES`` (Newton's divided differences). A line through two."""
    x0, x1, x2 = FIT_SIZES
    first = Fraction(y1 - y0, x1 - x0)
    second = Fraction(0) if y2 is None else (Fraction(y2 - y1, x2 - x1) - first) / (x2 - x0)
    return y0 - first * x0 + second * x0 * x1, first - second * (x0 + x1), second
