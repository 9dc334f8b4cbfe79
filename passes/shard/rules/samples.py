"""Small inputs for an op of a graph: the same ranks, types and equal sizes, few elements.

    linear, x (s0, 4096, 8192), w (28672, 8192)   ->   x (4, 8, 12), w (16, 12)

Whether the op still is the op with such sizes shows when it runs: it makes as many tensors, of as many dimensions, and
those of a known size have the new one (``alike``). What is tried, in this order: the real sizes if they are
small (open ones as 4); new sizes, arguments as they are; new sizes, arguments that equal an old size replaced; the real
sizes if they are not too many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from passes.graph.graph import tensor_specs
from passes.shard.words import operands
from runtime.ops.opaque import Opaque

OPEN = 4
"""Elements of a dimension whose size is open."""
SMALL = 4096
"""Elements of all operands together that need no shrinking."""
LARGE = 200_000
"""Elements of all operands together that are too many to try anything with."""
STEP = 4
"""New sizes are multiples of it: an axis of 2 or 4 divides them."""


@dataclass(frozen=True)
class Manner:
    """The values that are drawn: how numbers lie, and indices."""

    floats: Literal["normal", "positive", "rounded", "signs", "large", "small", "nan", "infinite"] = "normal"
    integers: Literal["any", "repeated", "sorted", "negative"] = "any"


MANNERS = (Manner(), Manner("positive"), Manner())
"""Every op without a rule must take these: what it does with them is what its choices are found by."""
HARD_MANNERS = (
    Manner("rounded", "repeated"),
    Manner("signs"),
    Manner("large", "sorted"),
    Manner("small"),
    Manner("normal", "negative"),
    Manner("nan"),
    Manner("infinite"),
)
"""Further values, on which choices must hold as well as far as an op takes them: ties, thresholds, no numbers."""

Numbers: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class Sample:
    """Arguments of an op; ``shapes`` and ``dtypes`` of the tensors among them, in the order of ``operands``."""

    node: fx.Node
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    number: Numbers
    """The number that stands for an integer among the arguments."""
    new: Mapping[int, int]
    """The new size of each size."""

    def alike(self, outputs: Sequence[Tensor]) -> bool:
        """Tell whether what came out could be the op's, with new sizes: else the arguments meant something else."""
        wanted = tensor_specs(self.node)
        return len(outputs) == len(wanted) and all(
            made.dim() == len(spec.shape)
            and all(a == self.new.get(_concrete(b), a) for a, b in zip(made.shape, spec.shape, strict=True))
            for made, spec in zip(outputs, wanted, strict=True)
        )

    def draw(
        self, manner: Manner, high: int, double: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Draw tensors; return the arguments with them, and these tensors in order."""
        values = [
            _draw(shape, dtype, manner, high, double)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        args, kwargs = self.arguments(lambda i: values[i])
        return args, kwargs, values

    def arguments(self, tensor: Callable[[int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the op's arguments with ``tensor(i)`` for the i-th operand."""
        count = iter(range(len(self.shapes)))

        def made(value: Any) -> Any:
            if isinstance(value, fx.Node):
                known = value.meta["val"]
                return tensor(next(count)) if isinstance(known, Tensor) else self.number(_concrete(known))
            if isinstance(value, list | tuple):
                return [made(item) for item in value]
            if isinstance(value, bool) or not isinstance(value, int):
                return value
            return self.number(value)

        return tuple(made(v) for v in self.node.args), {name: made(v) for name, v in self.node.kwargs.items()}


def signature(node: fx.Node) -> str:
    """Write what decides how an op is sharded: the op, its operands' shapes (open sizes as 4) and types, the rest."""
    specs = [spec for source in operands(node) for spec in tensor_specs(source)]
    shapes = tuple(tuple(_concrete(size) for size in spec.shape) for spec in specs)
    plain = Sample(node, shapes, tuple(spec.dtype for spec in specs), _same, {})
    tensors = ", ".join(f"{list(s)} {str(d)[6:]}" for s, d in zip(shapes, plain.dtypes, strict=True))
    target = f"opaque {node.target.identity}" if isinstance(node.target, Opaque) else str(node.target)
    return f"{target}({plain.arguments(lambda i: f'#{i}')}; {tensors})"


def samples(node: fx.Node) -> Iterator[Sample]:
    """Yield ways to give the op small inputs, to be tried in order."""
    specs = [spec for source in operands(node) for spec in tensor_specs(source)]
    real = tuple(tuple(_concrete(size) for size in spec.shape) for spec in specs)
    dtypes = tuple(spec.dtype for spec in specs)
    elements = sum(map(math.prod, real))
    if elements <= SMALL:
        yield Sample(node, real, dtypes, _same, {})
    new = _new_sizes(real)
    shrunk = tuple(tuple(new[size] for size in shape) for shape in real)
    yield Sample(node, shrunk, dtypes, _same, new)
    yield Sample(node, shrunk, dtypes, lambda number: new.get(number, number), new)
    if SMALL < elements <= LARGE:
        yield Sample(node, real, dtypes, _same, {})


def _new_sizes(shapes: tuple[tuple[int, ...], ...]) -> Mapping[int, int]:
    """Choose a small size for each size; 0 and 1 mean what they say."""
    distinct = sorted(
        {size for shape in shapes for size in shape if size > 1}
    )  # an index stays the smaller one
    return {0: 0, 1: 1, **{size: STEP * (k + 1) for k, size in enumerate(distinct)}}


def _concrete(size: Any) -> Any:
    """Return a size or number with all open sizes as ``OPEN``."""
    expression = size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size
    if not hasattr(expression, "free_symbols"):
        return expression
    value = expression.subs(dict.fromkeys(expression.free_symbols, OPEN))
    return (
        bool(value)
        if isinstance(size, torch.SymBool)
        else float(value)
        if isinstance(size, torch.SymFloat)
        else int(value)
    )


def _draw(shape: tuple[int, ...], dtype: torch.dtype, manner: Manner, high: int, double: bool) -> Tensor:
    if dtype == torch.bool:
        repeated = manner.integers == "repeated"
        return (torch.rand(() if repeated else shape) > 0.5).expand(shape).clone()
    if not (dtype.is_floating_point or dtype.is_complex):
        return _integers(shape, manner, high).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    drawn = _numbers(shape, wide, manner)
    return drawn if double else drawn.to(dtype)


def _integers(shape: tuple[int, ...], manner: Manner, high: int) -> Tensor:
    match manner.integers:
        case "repeated":
            return torch.randint(high, ()).expand(shape).clone()
        case "sorted":
            return torch.randint(high, (math.prod(shape),)).sort().values.view(shape)
        case "negative":
            return torch.randint(-high, high, shape)
    return torch.randint(high, shape)


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, manner: Manner) -> Tensor:
    if manner.floats == "positive":
        return torch.rand(shape, dtype=dtype) + 0.1
    drawn = torch.randn(shape, dtype=dtype)
    match manner.floats:
        case "rounded":
            return (
                drawn.round()
                if not dtype.is_complex
                else torch.view_as_complex(torch.view_as_real(drawn).round())
            )
        case "signs":
            return drawn.sgn()
        case "large":
            return drawn * 100
        case "small":
            return drawn / 100
        case "nan":
            return drawn.masked_fill(torch.rand(shape) < 0.3, math.nan)
        case "infinite":
            signs = torch.where(torch.rand(shape) < 0.5, math.inf, -math.inf)
            return torch.where(torch.rand(shape) < 0.2, signs, drawn)
    return drawn


def _same(number: Any) -> Any:
    return number
