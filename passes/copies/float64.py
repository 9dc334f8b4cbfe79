"""A model in float64, in the graph and in eager code: verification compares at 1e-9, below what 32 bits can hold.

Models cast inside (a norm in float32, a softmax with ``dtype=``). Both sides have every narrower floating type replaced
by float64, so no cast rounds, and the graph keeps the very ops that were planned. Some things are said alike on both:

    in the model's own types                      in float64
    a number made a tensor in forward             as it was rounded in the graph, which keeps the tensor
    a tensor of a closure or global, narrower     its values, wide
    a grouped matrix product                      a product per group: torch's kernels know no float64
    torch.finfo(x.dtype) in forward               that of the model's type, whose numbers the graph keeps
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from cost_models.precision import Precision
from passes.copies.copied_module import convert_module
from passes.graph.graph import OpGraph
from passes.graph.nodes import copy_graph
from passes.graph.token_counts import TokenCounts
from runtime.ops.grouped import GROUPED, grouped_mm
from runtime.ops.opaque import Opaque

WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def widened(argument: Any) -> Any:
    """Return float64 (complex128) for a narrower floating (complex) type; anything else as it is."""
    return WIDE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def wide(tensor: Tensor) -> Tensor:
    """Cast a tensor to the wide type of its kind; itself if it has that or is of integers."""
    return tensor.to(widened(tensor.dtype))


def widen_module(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Make parameters, buffers and tensors kept as plain attributes wide, in place. What is shared stays shared.

    ``device``: where they go, if not given where they are.
    """
    return convert_module(model, wide if device is None else lambda tensor: wide(tensor).to(device))


def in_float64(graph: OpGraph) -> OpGraph:
    """Let the same ops run in float64: casts to narrower floating types and the types of all values are widened."""
    module = fx.GraphModule(graph.module, copy_graph(graph.graph))
    for node in module.graph.nodes:
        node.meta = {**node.meta, "val": _wide_value(node.meta.get("val"))}
        if isinstance(node.target, Opaque):
            node.target = _wide_part(node.target, graph)
    _widen_arguments(module)
    leaves = {n: replace(spec, dtype=widened(spec.dtype)) for n, spec in graph.batch.leaves.items()}
    return replace(
        graph,
        module=module,
        precision=Precision(),
        constants={name: wide(c) for name, c in graph.constants.items()},
        batch=replace(graph.batch, leaves=leaves),
        token_counts=None if graph.token_counts is None else _wide_counts(graph.token_counts),
        parameters={n: replace(s, dtype=widened(s.dtype)) for n, s in graph.parameters.items()},
        buffers={n: replace(s, dtype=widened(s.dtype)) for n, s in graph.buffers.items()},
    )


def _widen_arguments(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args = map_aggregate(node.args, widened)
            node.kwargs = map_aggregate(node.kwargs, widened)
    module.recompile()


def _wide_counts(counts: TokenCounts) -> TokenCounts:
    """Let sums of masks and weights be as exact as what is divided by them."""
    module = fx.GraphModule(counts.module, copy_graph(counts.module.graph))
    _widen_arguments(module)
    constants = {name: wide(c) for name, c in counts.constants.items()}
    return replace(counts, module=module, constants=constants, _on_device={})


def _wide_part(opaque: Opaque, graph: OpGraph) -> Opaque:
    """Let the user's own code compute in float64, as the eager reference does."""
    target = opaque.code.target
    if isinstance(target, nn.Module):
        target = widen_module(copy.deepcopy(target))
    results = tuple(replace(result, dtype=widened(result.dtype)) for result in opaque.results)
    wide = replace(opaque, code=replace(opaque.code, target=target), results=results)
    as_wide = partial(Float64, graph.constants, own_type(graph))
    return wide.within(float64_by_default, "wide").within(as_wide, "float64")


def _wide_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_wide_value(item) for item in value)
    return wide(value) if isinstance(value, Tensor) else value


@contextmanager
def code_in_float64(graph: OpGraph) -> Iterator[None]:
    """Let eager code compute what ``graph``, in the model's own types, computes in float64."""
    with Float64(graph.constants, own_type(graph)), float64_by_default():
        yield


def own_type(graph: OpGraph) -> torch.dtype | None:
    """Return the one floating type of ``graph``'s inputs; None if there are several."""
    state = (*graph.parameters.values(), *graph.buffers.values())
    given = (*(spec.dtype for spec in state), *(leaf.dtype for leaf in graph.batch.leaves.values()))
    types = {dtype for dtype in given if dtype.is_floating_point}
    return types.pop() if len(types) == 1 else None


class Float64(TorchFunctionMode):
    """Within it, eager code computes in float64, whatever narrower type it asks for or has a tensor of.

    ``constants``: those of the graph that the code is compared with. ``narrow``: the type whose limits code is told when it
    asks for those of float64, where that is known.
    """

    _CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})
    _MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})
    """The functions whose result a graph keeps as a constant."""

    def __init__(
        self, constants: Mapping[str, Tensor] | None = None, narrow: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._constants = tuple(map(wide, (constants or {}).values()))
        self._narrow, self._limits = narrow, ExitStack()

    def __enter__(self) -> Float64:
        if self._narrow is not None:
            told = partial(_limits, torch.finfo, self._narrow)
            self._limits.enter_context(mock.patch.object(torch, "finfo", told))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._limits.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in self._CASTS:
            return args[0].double()
        change = widened if _changes_tensors(func, kwargs) else _wide_argument
        args = tuple(map(change, args))
        options = {name: change(value) for name, value in (kwargs or {}).items()}
        result = func(*args, **options)
        return self._as_kept(result) if func in self._MAKERS else result

    def _as_kept(self, made: Tensor) -> Tensor:
        """Return ``made`` as a constant of the graph has it that was made of the same numbers in a narrower type."""
        for constant in self._constants:
            if made.shape == constant.shape and made.dtype == constant.dtype:
                for narrow, own in WIDE.items():
                    if own == made.dtype and torch.equal(made.detach().to(narrow).to(own), constant):
                        return constant.to(made.device, copy=True).requires_grad_(made.requires_grad)
        return made


def _limits(finfo: Any, narrow: torch.dtype, dtype: torch.dtype | None = None) -> Any:
    """Return the limits of ``dtype``, those of ``narrow`` for float64."""
    asked = torch.get_default_dtype() if dtype is None else dtype
    return finfo(narrow if asked == torch.float64 else asked)


def _changes_tensors(func: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Tell whether ``func`` is about the very tensors that it is given, of which it must not get wide copies."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    about = name in ("__get__", "__set__", "__delete__", "__setitem__", "backward") or name.startswith(
        "register_"
    )
    return in_place or about or "out" in (kwargs or {})


def _wide_argument(argument: Any) -> Any:
    """Widen a type or a tensor, or those in a list or tuple."""
    if isinstance(argument, Tensor):
        return wide(argument)
    if type(argument) in (list, tuple):
        return type(argument)(map(_wide_argument, argument))
    return widened(argument)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make new tensors float64 unless code says otherwise; ops of which torch has no kernel for that run all the same."""
    with default_dtype(torch.float64), _GroupedProducts():
        yield


class _GroupedProducts(TorchFunctionMode):
    """Within it, float64 is multiplied group by group."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in GROUPED and args[0].dtype == torch.float64:
            func = grouped_mm
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors in ``dtype`` unless code says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
