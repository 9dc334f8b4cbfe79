"""Measured seconds of ops by kind: what a calibration knows beyond one rate per class.

On a CPU an op's time is not one roofline: small ops are overhead, ops whose data fit a cache run several times faster
than those that touch fresh pages, ``gelu`` computes where ``add`` only moves, and backward differs from forward. So a
calibration measures each common kind of op (``gelu``, ``linear``, …), forward and both halves of backward apart, and
keeps one of two shapes:

    ``CostCurve``   seconds over the bytes moved, points joined by straight lines in log-log coordinates;
                    beyond the ends: constant seconds below, constant bytes/s above
    ``CostLine``    seconds = o + W · a + Q · b   for ops with arithmetic: W FLOPs, Q bytes, o seconds of overhead.
                    (A sum, not the roofline's maximum: one core computes and loads with the same instructions.)

An op of a kind that was not measured is charged as ``launches`` elementwise kernels (``GENERIC``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch

from cost_models.arrays import FloatArray

Phase: TypeAlias = Literal["forward", "backward_input", "backward_weight"]
PHASES: tuple[Phase, ...] = ("forward", "backward_input", "backward_weight")

GENERIC = "elementwise"
"""The kind that stands for all that were not measured."""
VIEW = "view"
"""The kind of ops that move nothing: only their overhead counts."""

ALIASES = {
    "clone": "contiguous",
    "reshape": "contiguous",
    "flatten": "contiguous",
    "_to_copy": "contiguous",
    "to": "contiguous",
    "sub": "add",
    "rsub": "add",
    "div": "mul",
    "neg": "mul",
    "relu_": "relu",
    "add_": "add",
    "bmm": "matmul",
    "mm": "matmul",
    "addmm": "linear",
    "conv1d": "conv2d",
    "convolution": "conv2d",
    "log_softmax": "softmax",
    "sum": "mean",
    "rms_norm": "layer_norm",
    "sigmoid": "tanh",
    "exp": "tanh",
    "cos": "tanh",
    "sin": "tanh",
    "masked_fill": "where",
    "stack": "cat",
}
"""Kinds that are charged as another one that does the same work."""

MATH_ATTENTION = "math_attention"
"""The kind of attention that is not one kernel, but products and a softmax (the backend "math")."""

ARITHMETIC = frozenset(
    {"linear", "matmul", "conv2d", "conv_transpose2d", "scaled_dot_product_attention", MATH_ATTENTION}
)
"""Kinds with a ``CostLine``; the others have a ``CostCurve``."""


def kind_of(target: Any) -> str:
    """Name the kind that an op is charged as: ``aten.gelu.default`` → ``gelu``."""
    name = target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class CostCurve:
    """Seconds over the bytes moved: ``points`` are (bytes, seconds), bytes rising."""

    points: tuple[tuple[float, float], ...]

    def seconds(self, flops: FloatArray, moved_bytes: FloatArray) -> FloatArray:
        """Return the seconds per op, in the shape of the arguments."""
        x, y = np.log(np.array(self.points)).T
        given = np.log(np.maximum(moved_bytes, 1.0))
        inside: FloatArray = np.exp(np.interp(given, x, y))
        # np.interp holds the last value; above the last point the rate stays instead.
        beyond: FloatArray = np.exp(y[-1] + given - x[-1])
        return np.where(given > x[-1], beyond, inside)

    def slower(self, factor: float) -> CostCurve:
        """Return the cost with every duration ``factor`` times as long."""
        return CostCurve(tuple((moved, seconds * factor) for moved, seconds in self.points))


@dataclass(frozen=True)
class CostLine:
    """Seconds of an op with arithmetic: overhead + flops · seconds_per_flop + bytes · seconds_per_byte."""

    overhead_seconds: float
    seconds_per_flop: float
    seconds_per_byte: float

    def seconds(self, flops: FloatArray, moved_bytes: FloatArray) -> FloatArray:
        """Return the seconds per op, in the shape of the arguments."""
        return self.overhead_seconds + flops * self.seconds_per_flop + moved_bytes * self.seconds_per_byte

    def slower(self, factor: float) -> CostLine:
        """Return the cost with every duration ``factor`` times as long."""
        return CostLine(
            self.overhead_seconds * factor, self.seconds_per_flop * factor, self.seconds_per_byte * factor
        )


Cost: TypeAlias = CostCurve | CostLine


@dataclass(frozen=True)
class OpTimes:
    """Measured costs by kind and phase: ``costs`` is ((kind, phase), cost), sorted, a frozen and hashable mapping.

    Arithmetic was measured in float32; ``CostLine`` is scaled by the ratio of the device's rates for other types.
    """

    costs: tuple[tuple[tuple[str, Phase], Cost], ...]

    def get(self, kind: str, phase: Phase) -> Cost | None:
        """Return the cost that was measured of ``kind``; None if it was not."""
        return _index(self).get((kind, phase))

    @property
    def covers_ops(self) -> bool:
        """True if ops are charged by it; False if it knows optimizers alone, as a GPU's calibration does."""
        return self.get(GENERIC, "forward") is not None

    def slower(self, factor: float) -> OpTimes:
        """Return the costs with every duration ``factor`` times as long."""
        return OpTimes(tuple((key, cost.slower(factor)) for key, cost in self.costs))

    def to_dict(self) -> dict[str, dict[str, object]]:
        """Return plain data: ``{kind: {phase: {"points": …} or {"line": …}}}``."""
        data: dict[str, dict[str, object]] = {}
        for (kind, phase), cost in self.costs:
            if isinstance(cost, CostCurve):
                entry: dict[str, object] = {"points": [[float(b), float(s)] for b, s in cost.points]}
            else:
                entry = {"line": [cost.overhead_seconds, cost.seconds_per_flop, cost.seconds_per_byte]}
            data.setdefault(kind, {})[phase] = entry
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> OpTimes:
        """Read what ``to_dict`` wrote; raises ``ValueError`` saying what is wrong."""
        costs: dict[tuple[str, Phase], Cost] = {}
        for kind, phases in data.items():
            if not isinstance(phases, Mapping):
                raise ValueError(f"{kind}: expected a mapping from phases, got {phases!r}")
            for phase, entry in phases.items():
                if phase not in PHASES:
                    raise ValueError(f"{kind}.{phase}: expected one of {', '.join(PHASES)}")
                costs[kind, cast("Phase", phase)] = _cost(f"{kind}.{phase}", entry)
        if (GENERIC, "forward") not in costs and not all(
            kind.startswith("optimizer ") for kind in data or [""]
        ):
            raise ValueError(f"expected at least {GENERIC}.forward")
        return cls(tuple(sorted(costs.items(), key=lambda item: item[0])))


@cache
def _index(times: OpTimes) -> dict[tuple[str, Phase], Cost]:
    return dict(times.costs)


def _cost(where: str, entry: object) -> Cost:
    if isinstance(entry, Mapping) and set(entry) == {"line"} and _numbers(entry["line"], 3):
        return CostLine(*(float(n) for n in entry["line"]))
    if isinstance(entry, Mapping) and set(entry) == {"points"} and isinstance(entry["points"], list | tuple):
        points = entry["points"]
        rising = all(_numbers(p, 2) and p[0] > 0 and p[1] > 0 for p in points) and all(
            a[0] < b[0] for a, b in itertools.pairwise(points)
        )
        if points and rising:
            return CostCurve(tuple((float(b), float(s)) for b, s in points))
    raise ValueError(f"{where}: expected points [[bytes, seconds], …] with bytes rising, or line [o, a, b]")


def _numbers(value: object, count: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == count
        and all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < 1e300 for n in value)
    )


def op_phase_seconds(
    times: OpTimes,
    kind: str,
    phase: Phase,
    flops: FloatArray,
    moved_bytes: FloatArray,
    launches: FloatArray,
    arithmetic_scale: float = 1.0,
) -> FloatArray:
    """Return the seconds of one phase of ops of one kind, overhead included; 0 where there is nothing to do.

    ``arithmetic_scale`` is float32's rate of multiplying over that of the op's data type.
    """
    # One kernel may compute both halves of a backward (convolution, layer norm): the input half then launches nothing of
    # its own, but has work.
    active = (launches > 0) | (flops > 0) | (moved_bytes > 0)
    cost = times.get(kind, phase)
    if cost is not None:
        per_op = cost.seconds(flops * arithmetic_scale, moved_bytes)
        return np.where(active, per_op, 0.0)
    idle = moved_bytes <= 0
    stand_in = (
        times.get(GENERIC, phase) or times.get(GENERIC, "backward_input") or times.get(GENERIC, "forward")
    )
    view = times.get(VIEW, phase) or times.get(VIEW, "forward") or stand_in
    assert stand_in is not None  # from_dict requires it
    assert view is not None
    count = np.maximum(launches, 1.0)
    moving = count * stand_in.seconds(flops, moved_bytes / count)
    return np.where(active, np.where(idle, count * view.seconds(flops, moved_bytes), moving), 0.0)
