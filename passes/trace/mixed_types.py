"""Products of tensors of two types, under a precision: cast as autocast casts them, in traces and in eager code.

A precision casts parameters and inputs. A buffer, or what forward makes of one, may be float32 still, and no kernel
multiplies it with bfloat16. Such a call alone runs under ``torch.autocast`` for the type that is computed in:

    linear(x: bfloat16, w: float32)     ─►     linear(x, w.to(bfloat16))       torch's own lists say to what
    add(x: bfloat16, b: float32)        ─►     itself: types are promoted
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

PRODUCTS = frozenset(
    {"linear", "matmul", "rmatmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum"}
    | {f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)}
    | {"scaled_dot_product_attention"}
)
"""Names of functions and ops, without underscores, whose operands must have one type and that autocast casts."""


def products_in(compute: torch.dtype | None) -> AbstractContextManager[Any]:
    """Cast products of unlike types to ``compute``; a context that changes nothing for None, or for 32 bits and more."""
    return nullcontext() if compute is None or compute.itemsize >= 4 else _ProductsIn(compute)


class _ProductsIn(TorchFunctionMode):
    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if getattr(func, "__name__", "").strip("_") in PRODUCTS:
            tensors = [leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, Tensor)]
            if len({t.dtype for t in tensors if t.is_floating_point()}) > 1:
                with torch.autocast(tensors[0].device.type, dtype=self.compute):
                    return func(*args, **options)
        return func(*args, **options)
