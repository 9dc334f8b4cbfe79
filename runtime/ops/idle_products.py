"""Products that autograd is to keep the operands of, and whose results nobody reads: they run no kernel.

    y = without_products(aten.linear.default)(x, w)    y.grad_fn keeps x and w as that of linear(x, w) does; y is empty

Below autograd the kernels that multiply are left out; whatever else the op does, views, copies, collectives, is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from runtime.ops.fused_linear import is_linears
from runtime.ops.products import CONVOLUTIONS, PRODUCTS, aten

KERNELS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default})
"""The ops that products become below autograd."""


def multiplies(node: fx.Node) -> bool:
    """Tell whether the node is a product, or several behind one bridge."""
    return node.target in PRODUCTS or node.target in CONVOLUTIONS or is_linears(node)


def without_products(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``op`` without its products: what it returns has the right shapes, and no numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _NoProducts():  # type: ignore[no-untyped-call]
            return op(*args, **kwargs)

    return run


class _NoProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in KERNELS:
            return func(*args, **(kwargs or {}))
        on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (tuple(args), dict(kwargs or {})))
        shape = func(*on_meta[0], **on_meta[1]).shape
        given = next(value for value in args if isinstance(value, Tensor))
        return given.new_empty(()).expand(shape)  # one number for all: no memory
