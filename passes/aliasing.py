"""Which ops return a view of an input, how to take the view again, and how to write through it.

A ``View`` is one step from a parent tensor to an alias of its memory.

    replay   alias = view(parent): take the same view of the parent's new contents
    write    parent' = inverse(parent, alias'): the parent after its alias was overwritten

``alias'`` has the alias's shape, ``parent'`` the parent's. Writes are differentiable where the view is.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.node_tools import argument, call, storage_key

aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """One aliasing step: ``node`` is the view, ``source`` the input that it aliases.

    ``target``, ``args`` and ``kwargs`` are the op as traced (``args`` mention ``source``). ``index`` is the projection
    if the op returns several views (``split``), ``multi`` then that op.
    """

    node: fx.Node
    source: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None = None
    multi: fx.Node | None = None

    @classmethod
    def of(
        cls, node: fx.Node, source: fx.Node, index: int | None = None, multi: fx.Node | None = None
    ) -> View:
        op = multi or node
        return cls(node, source, op.target, tuple(op.args), dict(op.kwargs), index, multi)

    def argument(self, name: str, default: Any = None) -> Any:
        """The traced op's argument, or its default."""
        for position, declared in enumerate(self.target._schema.arguments):
            if declared.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                return self.args[position] if position < len(self.args) else declared.default_value
        return default


@dataclass(frozen=True)
class Writer:
    """Where new nodes go: ``like`` is the op on whose behalf they are made."""

    graph: fx.Graph
    mode: FakeTensorMode | None
    like: fx.Node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, self.mode, target, args, kwargs, like=self.like)


def view_of(node: fx.Node) -> View | None:
    """The aliasing step that ``node`` takes, None if its memory is its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        multi = node.args[0]
        if isinstance(multi, fx.Node) and isinstance(multi.target, torch._ops.OpOverload):
            source = _declared_source(multi)
            if source is not None and _shares(node, source):
                return View.of(node, source, int(node.args[1]), multi)  # type: ignore[arg-type]
        return None
    if not isinstance(node.target, torch._ops.OpOverload) or isinstance(node.meta.get("val"), list | tuple):
        return None
    if node.target == aten.dropout.default and (node.args[2] is False or node.args[1] == 0):
        return View.of(node, node.args[0])  # type: ignore[arg-type]  # returns its input; its schema does not say so
    source = _declared_source(node)
    if source is not None and _shares(node, source):
        return View.of(node, source)
    if source is None and not node.target._schema.is_mutable:
        shared = [s for s in node.all_input_nodes if _shares(node, s)]
        return View.of(node, shared[0]) if shared else None
    return None


def _declared_source(node: fx.Node) -> fx.Node | None:
    assert isinstance(node.target, torch._ops.OpOverload)
    for declared in node.target._schema.arguments:
        if declared.alias_info is not None and not declared.alias_info.is_write:
            value = argument(node, declared.name)
            return value if isinstance(value, fx.Node) else None
    return None


def _shares(node: fx.Node, source: fx.Node) -> bool:
    """By memory, since ops such as ``reshape`` and ``to`` decide at run time whether they copy."""
    key = storage_key(node.meta.get("val"))
    return key is not None and key == storage_key(source.meta.get("val"))


# --------------------------------------------------------------------------------------------------
# Replay

_STRIDE_FREE = {aten.view.default: aten.reshape.default}
"""A rewritten tensor may have other strides, which ``view`` would refuse."""


def replay(view: View, parent: fx.Node, writer: Writer) -> fx.Node:
    """The same view of ``parent``, the new contents of ``view.source``."""
    args, kwargs = fx.map_arg((view.args, view.kwargs), lambda n: parent if n is view.source else n)
    if view.target == aten.as_strided.default:
        args = (writer.call(aten.contiguous.default, parent), *args[1:])
    again = writer.call(_STRIDE_FREE.get(view.target, view.target), *args, **kwargs)
    return again if view.index is None else writer.call(operator.getitem, again, view.index)


# --------------------------------------------------------------------------------------------------
# Writing through a view

Inverse = Callable[[View, fx.Node, fx.Node, Writer], fx.Node]


def can_write(view: View) -> bool:
    """Whether ``write`` knows the view's inverse."""
    if view.target == aten.as_strided.default:
        value = view.source.meta["val"]
        return bool(value.is_contiguous()) and value.storage_offset() == 0
    return view.target in _INVERSE


def write(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    """The parent's contents once its alias holds ``new``."""
    return _INVERSE[view.target](view, parent, new, writer)


def _same(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return new


def _again(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    """Transpositions of two dimensions are their own inverse."""
    return replay(view, new, writer)


def _reshape(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return writer.call(aten.reshape.default, new, sizes_of(parent, writer))


def sizes_of(node: fx.Node, writer: Writer) -> list[Any]:
    """The shape as an argument of ``reshape``: numbers, -1 for one dynamic size, ``sym_size`` nodes for several."""
    shape = node.meta["val"].shape
    dynamic = [d for d, size in enumerate(shape) if not isinstance(size, int)]
    sizes: list[Any] = list(shape)
    if len(dynamic) == 1 and all(
        isinstance(s, int) and s > 0 for d, s in enumerate(sizes) if d != dynamic[0]
    ):
        sizes[dynamic[0]] = -1
        return sizes
    for dim in dynamic:
        sizes[dim] = writer.call(aten.sym_size.int, node, dim)
    return sizes


def _permute(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    rank = parent.meta["val"].dim()
    order = [d % rank for d in view.argument("dims")]
    return writer.call(aten.permute.default, new, [order.index(d) for d in range(rank)])


def _movedim(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return writer.call(view.target, new, view.argument("destination"), view.argument("source"))


def _expand(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    """Only an expansion of sizes 1 to 1 can be written in PyTorch; leading dimensions of size 1 fall away."""
    return _reshape(view, parent, new, writer)


def _slice(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    dim, start, end, step = (view.argument(name) for name in ("dim", "start", "end", "step"))
    if start in (None, 0) and end in (None, sys.maxsize) and step == 1:
        return new
    return writer.call(aten.slice_scatter.default, parent, new, dim, start, end, step)


def _narrow(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    dim, start, length = (view.argument(name) for name in ("dim", "start", "length"))
    if isinstance(start, int) and start < 0:
        start = writer.call(operator.add, writer.call(aten.sym_size.int, parent, dim), start)
    literal = isinstance(start, int) and isinstance(length, int)
    end = start + length if literal else writer.call(operator.add, start, length)
    return writer.call(aten.slice_scatter.default, parent, new, dim, start, end)


def _select(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    dim, index = view.argument("dim"), view.argument("index")
    return writer.call(aten.select_scatter.default, parent, new, dim, index)


def _unbind(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return writer.call(aten.select_scatter.default, parent, new, view.argument("dim", 0), view.index)


def _pieces(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    """One piece of ``split`` or ``chunk`` along ``dim``."""
    assert view.index is not None and view.multi is not None
    dim = view.argument("dim", 0)
    pieces = [piece.shape[dim] for piece in view.multi.meta["val"]]
    start = sum(pieces[: view.index])
    if not isinstance(start, int) or not isinstance(pieces[view.index], int):
        raise NotImplementedError("a piece of a dimension whose size is dynamic")
    return writer.call(aten.slice_scatter.default, parent, new, dim, start, start + pieces[view.index])


def _diagonal(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    offset, dim1, dim2 = (view.argument(name) for name in ("offset", "dim1", "dim2"))
    return writer.call(aten.diagonal_scatter.default, parent, new, offset, dim1, dim2)


def _as_strided(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    size, stride, offset = (view.argument(name) for name in ("size", "stride", "storage_offset"))
    dense = writer.call(aten.contiguous.default, parent)
    return writer.call(aten.as_strided_scatter.default, dense, new, size, stride, offset)


def _bits(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return writer.call(aten.view.dtype, new, parent.meta["val"].dtype)


def _cast_back(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return new if new.meta["val"].dtype == parent.meta["val"].dtype else _bits(view, parent, new, writer)


def _complex_pair(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    if view.target == aten.view_as_real.default:
        return writer.call(aten.view_as_complex.default, new)
    return writer.call(aten.view_as_real.default, new)


def _real(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return writer.call(aten.complex.default, new, writer.call(aten.imag.default, parent))


def _imag(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return writer.call(aten.complex.default, writer.call(aten.real.default, parent), new)


_INVERSE: dict[Any, Inverse] = {
    **dict.fromkeys(
        [
            aten.alias.default,
            aten.detach.default,
            aten.contiguous.default,
            aten.dropout.default,
            aten.positive.default,
        ]
        + [aten.lift_fresh.default, aten.resolve_conj.default, aten.resolve_neg.default],
        _same,
    ),
    **dict.fromkeys([aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other], _cast_back),
    **dict.fromkeys(
        [
            aten.transpose.int,
            aten.t.default,
            aten.swapaxes.default,
            aten.swapdims.default,
            aten.numpy_T.default,
        ]
        + [
            aten.mT.default,
            aten.mH.default,
            aten.adjoint.default,
            aten._conj.default,
            aten._neg_view.default,
        ],
        _again,
    ),
    **dict.fromkeys(
        [
            aten.view.default,
            aten.reshape.default,
            aten.view_as.default,
            aten.reshape_as.default,
            aten.ravel.default,
        ]
        + [aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default]
        + [aten.squeeze.dim, aten.squeeze.dims],
        _reshape,
    ),
    aten.permute.default: _permute,
    aten.movedim.int: _movedim,
    aten.movedim.intlist: _movedim,
    aten.moveaxis.int: _movedim,
    aten.moveaxis.intlist: _movedim,
    aten.expand.default: _expand,
    aten.expand_as.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    **dict.fromkeys(
        [aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default]
        + [aten.tensor_split.sections, aten.tensor_split.indices],
        _pieces,
    ),
    aten.diagonal.default: _diagonal,
    aten.as_strided.default: _as_strided,
    aten.view.dtype: _bits,
    aten.view_as_real.default: _complex_pair,
    aten.view_as_complex.default: _complex_pair,
    aten.real.default: _real,
    aten.imag.default: _imag,
}
