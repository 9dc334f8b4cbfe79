"""The batch symbol: made from the sizes that stayed symbolic in an export.

Export gives every open dimension of every leaf a symbol of its own and merges those that the model's code
compares. What is left apart (labels that only ever meet a flattened tensor) is merged here, in the shape
environment itself, so that every size of the graph follows.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import sympy
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from cost_models.errors import ModelError
from passes.graph.graph import tensor_specs
from passes.graph.nodes import is_size, symbolic
from passes.trace.batch import BatchDims
from passes.trace.opaque.refused import OPAQUE_ADVICE, PartError, blamed
from runtime.segment.code import BatchSpec
from runtime.user_code import caller, innermost_module, is_users, users_frame


@dataclass(frozen=True)
class Settled:
    """The outcome of a guess. ``fixed``: leaves whose guessed batch dimension got its size baked in."""

    dims: Mapping[str, int | None]
    fixed: tuple[str, ...]
    leading: str

    @property
    def open(self) -> tuple[str, ...]:
        """Leaves that have a batch dimension."""
        return tuple(name for name, dim in self.dims.items() if dim is not None)


def settle(guess: BatchDims, leaves: Mapping[str, fx.Node]) -> Settled:
    """Keep the batch dimensions that stayed symbolic; a leaf whose size was baked in is broadcast."""
    fixed = tuple(
        name
        for name, dim in guess.dims.items()
        if dim is not None and isinstance(size_of(leaves[name], dim), int)
    )
    dims = {name: None if name in fixed else dim for name, dim in guess.dims.items()}
    return Settled(dims, fixed, guess.leading)


def size_of(node: fx.Node, dim: int) -> int | sympy.Expr:
    """Return one size of a node's value: a number, or an expression of the symbols that are still apart."""
    return symbolic(node.meta["val"].shape[dim])


def merge(settled: Settled, leaves: Mapping[str, fx.Node]) -> tuple[sympy.Symbol, tuple[str, ...]]:
    """Make all batch sizes one symbol. Returns it, and the leaves that nothing but convention made batch
    leaves.
    """
    by_convention: list[str] = []
    first, *others = settled.open
    root = leaves[first].meta["val"].shape[settled.dims[first]]
    for name in others:
        size = leaves[name].meta["val"].shape[settled.dims[name]]
        if size.node.expr != root.node.expr:
            by_convention.append(name)
            torch._check(size == root)  # type: ignore[no-untyped-call]
    expressions = {name: size_of(leaves[name], settled.dims[name] or 0) for name in settled.open}
    symbol = expressions[first]
    if not isinstance(symbol, sympy.Symbol) or set(expressions.values()) != {symbol}:
        raise ModelError(
            "the batch size is not free",
            [f"the code makes the size of {name!r} {size}" for name, size in expressions.items()],
            [
                "do not split or pair samples by a fixed count inside the model",
                "batch_dims={leaf name: dim or None}",
            ],
        )
    return symbol, tuple(by_convention)


def batch_spec(
    dims: Mapping[str, int | None], symbol: sympy.Symbol, leaves: Mapping[str, fx.Node]
) -> BatchSpec:
    """Find where the number of each symbol is read at run time: the first used leaf that shows it bare."""
    symbols: dict[sympy.Symbol, tuple[str, int]] = {}
    for name in sorted(leaves, key=lambda leaf: not leaves[leaf].users):
        for dim in range(leaves[name].meta["val"].dim()):
            size = size_of(leaves[name], dim)
            if isinstance(size, sympy.Symbol):
                symbols.setdefault(size, (name, dim))
    specs = {name: tensor_specs(node)[0] for name, node in leaves.items() if node.users}
    return BatchSpec(dict(dims), symbol, symbols, specs)


TRIED_SIZES = range(2, 65)
"""Batch sizes for which an assumption of the trace is evaluated (1 is never assumed about)."""

NOT_ONE_SIZES = 4
"""The number of sizes that may break an assumption of the kind "this size is not 1" before it counts as a branch."""


def assumed_in(place: Any) -> str:
    """Return ", in file.py:12" of where torch says that an assumption was made; "" if it does not."""
    frame = getattr(place, "framework_loc", None)
    if not isinstance(frame, traceback.FrameSummary) or not is_users(frame.filename):
        return ""
    return f", in {os.path.basename(frame.filename)}:{frame.lineno}"


@contextlib.contextmanager
def watch_fixed(model: nn.Module, mode: FakeTensorMode) -> Iterator[dict[str, str | None]]:
    """Collect the lines of the user's code in which sizes become numbers for good, and the modules that run there.

    Assumptions about sizes that are made meanwhile name a line of the user's code, too, and not one of torch's.
    """
    shape_env = mode.shape_env
    assert shape_env is not None
    original, locate = shape_env._set_replacement, shape_env._get_sloc
    lines: dict[str, str | None] = {}

    def replaced(symbol: sympy.Symbol, found: sympy.Expr, reason: str) -> None:
        if found.is_number:
            lines.setdefault(caller(), innermost_module(model))
        original(symbol, found, reason)

    def located(framework_loc: str | None = None) -> Any:
        place, frame = locate(framework_loc), users_frame()
        return place if frame is None else replace(place, framework_loc=frame)

    with (
        mock.patch.object(shape_env, "_set_replacement", replaced),
        mock.patch.object(shape_env, "_get_sloc", located),
    ):
        yield lines


def lines_that_fix(lines: Mapping[str, str | None]) -> str:
    """Say what ``watch_fixed`` has found."""
    return "".join(
        f", in {line}" + (f" of module {module!r}" if module else "") for line, module in lines.items()
    )


def check_guards(guards: Iterable[tuple[sympy.Basic, str]], symbol: sympy.Symbol) -> list[str]:
    """Refuse a graph that holds for some batch sizes only: for the others the model's code takes another way.

    ``guards``: assumptions of the trace, such as ``3 < batch`` from ``if x.shape[0] > 3``, and where they were made. One
    that a single size breaks (``batch != 8``), or that says that some size is not 1 (``batch // 2 != 1``, of
    ``x.chunk(2)``), is returned as a remark: most come from torch itself, which asks this of strides and broadcasts.
    """
    remarks: list[str] = []
    problems: list[str] = []
    for guard, line in guards:
        if guard.free_symbols != {symbol}:
            continue
        broken = [size for size in TRIED_SIZES if guard.subs(symbol, size) == sympy.false]
        readable = str(guard.subs(symbol, sympy.Symbol("batch")))
        not_one = isinstance(guard, sympy.Ne) and guard.rhs == 1
        if len(broken) > (NOT_ONE_SIZES if not_one else 1):
            problems.append(
                f"{readable}{line}, which {broken[0]} and {len(broken) - 1} other sizes below 65 break"
            )
        elif broken:
            sizes = ", ".join(map(str, broken))
            remarks.append(f"the code was traced for batch sizes other than {sizes} ({readable})")
    if problems:
        raise ModelError(
            "the model's code depends on the batch size",
            [f"it was traced under the assumption {text}" for text in problems],
            [
                "make forward do the same for every batch size",
                "opaque=[the module's path] runs such code as it is, as one op",
                "batch_dims={leaf name: dim or None}",
            ],
        )
    return remarks


def check_known(graph: fx.Graph, known: BatchSpec) -> None:
    """Refuse sizes that cannot be computed from the batch's own: those that depend on tensor contents."""
    strangers: dict[str, str] = {}
    made_by: dict[str, None] = {}
    for node in graph.nodes:
        where = f"{node.meta.get('module_path') or 'the model'} ({node.meta.get('source', '?')})"
        for size in _symbolic_sizes(node.meta.get("val")):
            for stranger in size.free_symbols - known.symbols.keys():
                if str(stranger) not in strangers:
                    strangers[str(stranger)] = f"{node.name} in {where} has a size or a value of {size}"
                    made_by[blamed(node)] = None
    if strangers:
        raise PartError(
            "sizes or Python numbers depend on the numbers in tensors",
            [text for _, text in sorted(strangers.items())],
            [
                "use masks of a fixed size instead of nonzero, unique or boolean indexing",
                "keep numbers as tensors: no .item(), .tolist() or float(tensor)",
                OPAQUE_ADVICE,
            ],
            list(made_by),
        )


def _symbolic_sizes(value: object) -> Iterator[sympy.Expr]:
    for item in value if isinstance(value, list | tuple) else (value,):
        if is_size(item):
            yield item.node.expr
        if isinstance(item, torch.Tensor):
            sizes: tuple[Any, ...] = tuple(item.shape)
            yield from (size.node.expr for size in sizes if isinstance(size, torch.SymInt))
