"""Views: which ops return one of an input, how to take it again, and how to write through it.

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

from passes.graph.nodes import argument, call, given_argument, reshaping, storage_key

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
        """Return the traced op's argument, or its default."""
        return given_argument(self.target, self.args, self.kwargs, name, default)


@dataclass(frozen=True)
class Writer:
    """The place for new nodes: ``like`` is the op on whose behalf they are made."""

    graph: fx.Graph
    mode: FakeTensorMode | None
    like: fx.Node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, self.mode, target, args, kwargs, like=self.like)


_ALWAYS_COPIES = (aten.clone.default, aten.lift_fresh_copy.default)
"""The exporter records some of their results with their input's memory."""


def view_of(node: fx.Node) -> View | None:
    """Return the aliasing step that ``node`` takes, None if its memory is its own."""
    if node.op != "call_function" or node.target in _ALWAYS_COPIES:
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
    """Tell whether two tensors share memory: ops such as ``reshape`` and ``to`` decide at run time whether they copy."""
    key = storage_key(node.meta.get("val"))
    return key is not None and key == storage_key(source.meta.get("val"))


def written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensors that the op declares to write, in the order of its schema."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return ()
    found: list[fx.Node] = []
    for declared in node.target._schema.arguments:
        if declared.alias_info is not None and declared.alias_info.is_write:
            value = argument(node, declared.name)
            items = value if isinstance(value, list | tuple) else (value,)
            found += [item for item in items if isinstance(item, fx.Node)]
    return tuple(found)


def changes_view_only(node: fx.Node) -> bool:
    """Tell whether an op is ``t_``, ``unsqueeze_``, ``detach_``: another view of the same memory, which is not written."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target == aten.detach_.default or torch.Tag.inplace_view in target.tags


def written_storages(graph: fx.Graph) -> set[int | None]:
    """Return the keys of the memory that some op declares to write, by whichever of its names."""
    written: set[int | None] = set()
    for node in reversed(graph.nodes):
        targets = written_arguments(node)
        if not targets and not written:
            continue
        mine = storage_key(node.meta.get("val"))
        if not changes_view_only(node):
            written.update(storage_key(target.meta["val"]) for target in targets)
        if mine is not None and mine in written:
            # A result may be recorded with memory of its own although it is its source's (dropout in evaluation,
            # an in-place op of the exporter): what is written through it is written in the source.
            view = view_of(node)
            sources = (view.source,) if view is not None else targets
            written.update(storage_key(source.meta["val"]) for source in sources)
    return written


# --------------------------------------------------------------------------------------------------
# Replay

_NEEDS_DENSE = (aten.as_strided.default, aten.view_as_complex.default, aten.view.dtype)
"""Views whose meaning or legality depends on strides."""


def replay(view: View, parent: fx.Node, writer: Writer) -> fx.Node:
    """Take the same view of ``parent``, the new contents of ``view.source``."""
    args, kwargs = fx.map_arg((view.args, view.kwargs), lambda n: parent if n is view.source else n)
    if view.target in _NEEDS_DENSE:
        args = (_dense(parent, writer), *args[1:])
    again = writer.call(reshaping(view.target), *args, **kwargs)
    return again if view.index is None else writer.call(operator.getitem, again, view.index)


def same_strides(left: fx.Node, right: fx.Node) -> bool:
    """Tell whether two tensors are laid out alike in memory (compared as expressions: no size gets fixed)."""
    values = (left.meta["val"], right.meta["val"])
    if not all(isinstance(value, torch.Tensor) for value in values):
        return True
    first, second = ([str(stride) for stride in value.stride()] for value in values)
    return first == second


def accept_any_strides(node: fx.Node, writer: Writer) -> None:
    """Make an op that reads a tensor with other strides than the traced one legal, its result the same."""
    node.target = reshaping(node.target)
    if node.target in _NEEDS_DENSE and isinstance(node.args[0], fx.Node):
        node.update_arg(0, _dense(node.args[0], writer))


def _dense(node: fx.Node, writer: Writer) -> fx.Node:
    return writer.call(aten.contiguous.default, node)


# --------------------------------------------------------------------------------------------------
# Writing through a view

WriteThrough = Callable[[View, fx.Node, fx.Node, Writer], fx.Node]


def can_write(view: View) -> bool:
    """Tell whether ``write`` knows the view's inverse."""
    if view.target == aten.as_strided.default:
        value = view.source.meta["val"]
        return bool(value.is_contiguous()) and value.storage_offset() == 0
    return view.target in _INVERSE


def write(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    """Make the parent's contents once its alias holds ``new``."""
    return _INVERSE[view.target](view, parent, new, writer)


def _same(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return new


def _again(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    """Transpose two dimensions again: that is its own inverse."""
    return replay(view, new, writer)


def _reshape(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return writer.call(aten.reshape.default, new, sizes_of(parent, writer))


def sizes_of(node: fx.Node, writer: Writer) -> list[Any]:
    """Make the shape as an argument of ``reshape``: numbers, -1 for one dynamic size, ``sym_size`` nodes for several."""
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


def _scattered(op: Any, parent: fx.Node, new: fx.Node, writer: Writer, dim: int, *place: Any) -> fx.Node:
    """Write ``new`` at a place along ``dim``. Complex numbers are written as pairs: autograd cannot scatter them."""
    value = parent.meta["val"]
    if not value.is_complex():
        return writer.call(op, parent, new, dim, *place)
    plain = (writer.call(aten.resolve_conj.default, part) for part in (parent, new))
    both, pair = (writer.call(aten.view_as_real.default, part) for part in plain)
    written = writer.call(op, both, pair, dim % value.dim(), *place)
    return writer.call(aten.view_as_complex.default, _dense(written, writer))


def _slice(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    dim, start, end, step = (view.argument(name) for name in ("dim", "start", "end", "step"))
    if start in (None, 0) and end in (None, sys.maxsize) and step == 1:
        return new
    return _scattered(aten.slice_scatter.default, parent, new, writer, dim, start, end, step)


def _narrow(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    dim, start, length = (view.argument(name) for name in ("dim", "start", "length"))
    if isinstance(start, int) and start < 0:
        start = writer.call(operator.add, writer.call(aten.sym_size.int, parent, dim), start)
    literal = isinstance(start, int) and isinstance(length, int)
    end = start + length if literal else writer.call(operator.add, start, length)
    return _scattered(aten.slice_scatter.default, parent, new, writer, dim, start, end)


def _select(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    dim, index = view.argument("dim"), view.argument("index")
    return _scattered(aten.select_scatter.default, parent, new, writer, dim, index)


def _unbind(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return _scattered(aten.select_scatter.default, parent, new, writer, view.argument("dim", 0), view.index)


def _pieces(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    """Write one piece of ``split`` or ``chunk`` along ``dim`` into the parent."""
    assert view.index is not None
    assert view.multi is not None
    dim = view.argument("dim", 0)
    pieces = [piece.shape[dim] for piece in view.multi.meta["val"]]
    start = sum(pieces[: view.index])
    if not isinstance(start, int) or not isinstance(pieces[view.index], int):
        raise NotImplementedError("a piece of a dimension whose size is dynamic")
    return _scattered(aten.slice_scatter.default, parent, new, writer, dim, start, start + pieces[view.index])


def _diagonal(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    offset, dim1, dim2 = (view.argument(name) for name in ("offset", "dim1", "dim2"))
    return writer.call(aten.diagonal_scatter.default, parent, new, offset, dim1, dim2)


def _as_strided(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    size, stride, offset = (view.argument(name) for name in ("size", "stride", "storage_offset"))
    return writer.call(aten.as_strided_scatter.default, _dense(parent, writer), new, size, stride, offset)


def _bits(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return writer.call(aten.view.dtype, _dense(new, writer), parent.meta["val"].dtype)


def _cast_back(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    return new if new.meta["val"].dtype == parent.meta["val"].dtype else _bits(view, parent, new, writer)


def _complex_pair(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
    if view.target == aten.view_as_real.default:
        return writer.call(aten.view_as_complex.default, _dense(new, writer))
    return writer.call(aten.view_as_real.default, new)


def _half(index: int) -> WriteThrough:
    """Write the real (0) or imaginary (1) half. (``complex(new, imag)`` would fix dynamic sizes when traced.)"""

    def inverse(view: View, parent: fx.Node, new: fx.Node, writer: Writer) -> fx.Node:
        both = writer.call(aten.view_as_real.default, parent)
        pair = writer.call(aten.select_scatter.default, both, new, -1, index)
        return writer.call(aten.view_as_complex.default, _dense(pair, writer))

    return inverse


def _table(*rows: tuple[WriteThrough, tuple[Any, ...]]) -> dict[Any, WriteThrough]:
    return {op: inverse for inverse, ops in rows for op in ops}


_INVERSE: dict[Any, WriteThrough] = _table(
    (_same, (aten.alias.default, aten.detach.default, aten.contiguous.default, aten.dropout.default)),
    (
        _same,
        (aten.positive.default, aten.lift_fresh.default, aten.resolve_conj.default, aten.resolve_neg.default),
    ),
    (_cast_back, (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other)),
    (_again, (aten.transpose.int, aten.t.default, aten.swapaxes.default, aten.swapdims.default)),
    (_again, (aten.numpy_T.default, aten.mT.default, aten.mH.default, aten.adjoint.default)),
    (_again, (aten._conj.default, aten._neg_view.default)),
    (_reshape, (aten.view.default, aten.reshape.default, aten.view_as.default, aten.reshape_as.default)),
    (_reshape, (aten.ravel.default, aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default)),
    (_reshape, (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)),
    (_permute, (aten.permute.default,)),
    (_movedim, (aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist)),
    # Only an expansion of sizes 1 to 1 can be written in PyTorch; leading dimensions of size 1 fall away.
    (_reshape, (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)),
    (_slice, (aten.slice.Tensor,)),
    (_narrow, (aten.narrow.default,)),
    (_select, (aten.select.int,)),
    (_unbind, (aten.unbind.int,)),
    (_pieces, (aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default)),
    (_pieces, (aten.tensor_split.sections, aten.tensor_split.indices)),
    (_diagonal, (aten.diagonal.default,)),
    (_as_strided, (aten.as_strided.default,)),
    (_bits, (aten.view.dtype,)),
    (_complex_pair, (aten.view_as_real.default, aten.view_as_complex.default)),
    (_half(0), (aten.real.default,)),
    (_half(1), (aten.imag.default,)),
)
