"""Dropout off, in the graph and in eager code: what verification needs, because two random draws cannot be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from passes.graph.graph import OpGraph
from passes.graph.nodes import copy_graph, replaced
from passes.graph.recomputed import draws_random_numbers
from runtime.ops.opaque import Opaque

_PROBABILITY_NAMES = ("p", "dropout_p", "dropout")
_DROPPING_OPS = ("dropout", "attention", "lstm", "gru", "rnn")


def without_dropout(graph: OpGraph) -> tuple[OpGraph, int]:
    """Set every dropout probability of the graph to zero, and count how many ops that changed."""
    module = fx.GraphModule(graph.module, copy_graph(graph.graph))
    changed = 0
    for node in module.graph.nodes:
        if node.op == "call_function" and draws_random_numbers(node) and _set_probability(node):
            changed += 1
    module.recompile()
    return replace(graph, module=module), changed


def random_ops(graph: OpGraph) -> tuple[str, ...]:
    """Name the ops that still draw random numbers."""
    return tuple(node.name for node in graph.ops if draws_random_numbers(node))


class DropoutOff(TorchFunctionMode):
    """Within it, eager dropout is the identity and attention drops nothing."""

    _IDENTITY = frozenset(
        {
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
            torch.dropout,
            torch.feature_dropout,
            torch.alpha_dropout,
            torch.feature_alpha_dropout,
        }
    )

    _ARGUMENT: ClassVar[Mapping[Callable[..., Any], tuple[str, int]]] = {
        F.scaled_dot_product_attention: ("dropout_p", 4),
        F.multi_head_attention_forward: ("dropout_p", 10),
        torch.lstm: ("dropout", 5),
        torch.gru: ("dropout", 5),
        torch.rnn_tanh: ("dropout", 5),
        torch.rnn_relu: ("dropout", 5),
    }
    """The argument that holds their dropout probability. A mode does not see the calls that a composite function makes."""

    _PACKED = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in self._ARGUMENT:
            name, position = self._ARGUMENT[func]
            if func in self._PACKED and isinstance(args[3], list | tuple):
                position += 1  # packed sequences: the sizes of batches come second
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                options[name] = 0.0
        if func in self._IDENTITY:
            return args[0] if args else options["input"]
        return func(*args, **options)


def _set_probability(node: fx.Node) -> bool:
    """Write 0.0 over the op's dropout probability; False if it has none. An opaque part's own code runs without."""
    if isinstance(node.target, Opaque):
        node.target = node.target.within(DropoutOff, "without dropout")
        return True
    assert isinstance(node.target, torch._ops.OpOverload)
    if not any(name in node.target._schema.name for name in _DROPPING_OPS):
        return False
    for argument in node.target._schema.arguments:
        if argument.name in _PROBABILITY_NAMES and not isinstance(argument.type, torch.TensorType):
            node.args, node.kwargs = replaced(node, node.args, node.kwargs, argument.name, 0.0)
            return True
    return False
