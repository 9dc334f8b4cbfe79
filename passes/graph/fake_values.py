"""Example values of new nodes: equal ops on equal operands are run once.

The 32 equal layers of a transformer have equal ops: one run on fake tensors says what all of them make, and they share the
fake tensor that came out. So these values do not tell whose memory a tensor shares (views of one base);
``passes.costs.storages`` names storages by the graph's edges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache

from passes.graph.nodes import fake_call, symbolic, value_of
from passes.graph.signatures import hashable
from runtime.segment.code import Dim


class FakeValues:
    """Values that ops make of fake operands, each computed once.

    The key of a value: the op, its operands' shapes, strides and types, its other arguments.

    ``made``: values by these keys that were made before, in the same mode; new ones are put there. By default all
    that graphs of this mode have made: the stages of a pipeline have equal ops, too.
    """

    def __init__(self, mode: FakeTensorMode | None, made: dict[Hashable, Any] | None = None) -> None:
        self._mode = mode
        self._made = _made_in(mode) if made is None else made
        self._keys: dict[fx.Node, Hashable] = {}

    def of(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the value of ``target(*args, **kwargs)``, where arguments may be nodes."""
        if _invents_sizes(target):
            return self._run(target, args, kwargs)
        key = (target, hashable(args, self.key), hashable(dict(kwargs), self.key))
        if key not in self._made:
            self._made[key] = self._run(target, args, kwargs)
        return self._made[key]

    def empty(
        self, shape: tuple[Dim, ...], like: torch.Tensor, number: Callable[[Dim], int | torch.SymInt]
    ) -> torch.Tensor:
        """Make a placeholder's value; ``number``: turns a size into what fake tensors take."""
        key = (shape, like.dtype, like.requires_grad)
        if key not in self._made:
            options = {"dtype": like.dtype}
            empty = fake_call(self._mode, torch.empty, (list(map(number, shape)),), options)
            self._made[key] = empty.requires_grad_(like.requires_grad)
        made: torch.Tensor = self._made[key]
        return made

    def key(self, node: fx.Node) -> Hashable:
        """Return all that a node's value tells the ops that read it."""
        if node not in self._keys:
            value = node.meta.get("val")
            items = value if isinstance(value, list | tuple) else (value,)
            self._keys[node] = (isinstance(value, list | tuple), *map(_described, items))
        return self._keys[node]

    def _run(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with disable_fake_tensor_cache(self._mode) if self._mode is not None else nullcontext():
            return fake_call(self._mode, target, value_of(args), value_of(dict(kwargs)))


def _made_in(mode: FakeTensorMode | None) -> dict[Hashable, Any]:
    """Return the values that were made in a mode, kept as long as it: they hold it, so nothing else may hold them."""
    if mode is None:
        return {}
    by_type: dict[torch.dtype, dict[Hashable, Any]] = vars(mode).setdefault("_partitioner_made", {})
    return by_type.setdefault(torch.get_default_dtype(), {})


def _described(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return (type(value), symbolic(value))
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return (value.dim(), *map(symbolic, sizes), value.dtype, value.device)


def _invents_sizes(target: Any) -> bool:
    """Tell whether sizes of the output depend on data: each run then has symbols of its own."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.dynamic_output_shape in target.tags
