"""The out-of-place form of an op that writes an argument.

    add_.Tensor(x, y)            →  add.Tensor(x, y)             the overload whose other arguments are the same
    mm.out(a, b, out=o)          →  mm(a, b)
    copy_(x, y)                  →  y, cast to x's dtype and expanded to x's shape
    zero_(x) / fill_(x, 0)       →  zeros_like(x) / full_like(x, 0)
    fill_diagonal_(x, 0)         →  diagonal_scatter(x, full_like(diagonal(x), 0)), for a matrix
    t_(x), unsqueeze_(x, 0), …   →  t(x), …                      (a view: nothing is written)

The result always has the written tensor's dtype, as in-place ops do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes.trace.normal.aliasing import Writer, sizes_of, written_arguments

aten = torch.ops.aten

_OTHER_NAMES: dict[Any, Any] = {
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten.dropout_.default: aten.dropout.default,
    aten.alpha_dropout_.default: aten.alpha_dropout.default,
    aten.feature_dropout_.default: aten.feature_dropout.default,
    aten.feature_alpha_dropout_.default: aten.feature_alpha_dropout.default,
}
"""Forms whose name or first argument's name is another one; their arguments are the same, in the same order."""


def functional_form(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload that computes the same and writes nothing; None if ATen has none."""
    if target in _OTHER_NAMES:
        found: torch._ops.OpOverload = _OTHER_NAMES[target]
        return found
    packet_name = target._schema.name.split("::")[1]
    if packet_name.startswith("__i"):
        packet_name = "__" + packet_name[3:]
    elif packet_name.endswith("_") and not packet_name.endswith("__"):
        packet_name = packet_name[:-1]
    packet = getattr(getattr(torch.ops, target.namespace), packet_name, None)
    if packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if not a.is_out]
    for name in packet.overloads():
        candidate: torch._ops.OpOverload = getattr(packet, name)
        if candidate._schema.is_mutable:
            continue
        if [(a.name, str(a.type)) for a in candidate._schema.arguments] == wanted:
            return candidate
    return None


def out_of_place(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], writer: Writer) -> Any:
    """Emit the op without its writes on up-to-date ``args``; returns one node per written tensor, or None."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target == aten.copy_.default:
        return [_copied(args[0], args[1], writer)]
    if target == aten.fill_.Scalar:
        return [writer.call(aten.full_like.default, args[0], args[1])]
    if target == aten.zero_.default:
        return [writer.call(aten.zeros_like.default, args[0])]
    if target == aten.fill_diagonal_.default:
        return _with_diagonal(*args, writer=writer, **kwargs)
    form = functional_form(target)
    if form is None:
        return None
    outs = {a.name for a in target._schema.arguments if a.is_out}
    kept = {key: value for key, value in kwargs.items() if key not in outs}
    for argument in target._schema.arguments[len(args) :]:  # bernoulli_(p=0.5), bernoulli(p)
        if argument.has_default_value() and argument.name not in kept and not argument.is_out:
            wanted = next((a for a in form._schema.arguments if a.name == argument.name), None)
            if wanted is not None and not wanted.has_default_value():
                kept[argument.name] = argument.default_value
    result = writer.call(form, *args, **kept)
    count = len(written_arguments(node))
    if isinstance(result.meta["val"], list | tuple):
        return [writer.call(operator.getitem, result, index) for index in range(count)]
    return [result]


def fitted(new: fx.Node, written: fx.Node, writer: Writer) -> fx.Node:
    """Cast ``new`` to the dtype of the tensor that it overwrites."""
    dtype = written.meta["val"].dtype
    return new if new.meta["val"].dtype == dtype else writer.call(aten.to.dtype, new, dtype)


def _with_diagonal(
    matrix: fx.Node, value: Any, wrap: bool = False, *, writer: Writer
) -> list[fx.Node] | None:
    """Make the matrix with another diagonal; None for more dimensions, and for a diagonal that starts anew below."""
    if wrap or matrix.meta["val"].dim() != 2:
        return None
    diagonal = writer.call(aten.full_like.default, writer.call(aten.diagonal.default, matrix), value)
    return [writer.call(aten.diagonal_scatter.default, matrix, diagonal)]


def _copied(target: fx.Node, source: fx.Node, writer: Writer) -> fx.Node:
    """Make what ``target.copy_(source)`` leaves in ``target``; no op at all if dtype and shape are equal."""
    new = fitted(source, target, writer)
    if tuple(new.meta["val"].shape) != tuple(target.meta["val"].shape):
        sizes = sizes_of(target, writer)
        if -1 in sizes:  # expand's -1 would keep the source's size
            dim = sizes.index(-1)
            sizes[dim] = writer.call(aten.sym_size.int, target, dim)
        new = writer.call(aten.expand.default, new, sizes)
    return new
