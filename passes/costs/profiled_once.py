"""Profiles of ops, each kept: an op at one size is run on fake tensors once in a process.

Plans are made again and again of graphs whose ops are mostly the same: each split of neurons is a graph of its own, so is
each precision, and so is the next model of one family. A profile follows from the op, the sizes and types of what it reads
and makes, its other arguments and the device's kind; nothing else of the graph is in it.

    linear [8, 16] x [32, 16], trained, cpu   ─►   one entry, whichever graph asks
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import sympy
import torch
from torch import fx

from passes.costs.saved import OpProfile, profile
from passes.graph.nodes import is_size, symbolic
from passes.graph.signatures import Signature, concrete, hashable
from runtime.ops.opaque import Opaque

KEPT = 100_000
"""Profiles that are kept, of about 1 KB each; the memory of 100 MB is less than a small model's."""

_profiles: dict[Hashable, OpProfile] = {}


def profile_once(
    signature: Signature,
    symbols: Mapping[sympy.Symbol, int],
    *,
    attention: str | None = None,
    device_kind: str = "cpu",
) -> OpProfile:
    """Return the profile of the signature's op (``passes.costs.saved``) at the sizes that ``symbols`` give."""
    if isinstance(signature.target, Opaque):  # the user's code: two objects may do different work
        return profile(signature, symbols, attention=attention, device_kind=device_kind)
    key = (_key(signature, symbols), attention, device_kind, torch.get_default_dtype())
    if key not in _profiles:
        if len(_profiles) >= KEPT:
            _profiles.clear()
        _profiles[key] = profile(signature, symbols, attention=attention, device_kind=device_kind)
    return _profiles[key]


def _key(signature: Signature, symbols: Mapping[sympy.Symbol, int]) -> Hashable:
    """Return all that a profile depends on, with every size a number."""
    operands = iter(signature.operands)

    def number(size: object) -> int:
        return concrete(symbolic(size), symbols)

    def read(node: fx.Node) -> Hashable:
        value = node.meta.get("val")
        items = value if isinstance(value, list | tuple) else (value,)
        if not any(isinstance(item, torch.Tensor) for item in items):
            return "number", number(value) if is_size(value) else str(value)
        described: list[Hashable] = []
        for item in items:
            if isinstance(item, torch.Tensor):
                operand = next(operands)
                shape, stride = tuple(map(number, operand.spec.shape)), tuple(map(number, operand.stride))
                described.append((shape, stride, operand.spec.dtype, operand.role))
            else:
                described.append(None)
        return ("tensors", isinstance(value, list | tuple), *described)

    exemplar = signature.exemplar
    made = tuple((tuple(map(number, spec.shape)), spec.dtype) for spec in signature.outputs)
    given = hashable(exemplar.args, read), hashable(dict(exemplar.kwargs), read)
    return exemplar.target, *given, made, signature.differentiated
