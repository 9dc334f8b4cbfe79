"""``torch.compile`` over a segment's graph, with calls into Python left as they are.

    before   a = linear(x, w1);  emit_value(0, a);  b = relu(a);  c = split_linear(b, w2)
    after    [linear]            emit_value(0, a)   [relu]        split_linear(b, w2)          [ ]: compiled

A segment's graph holds operations, which compile, and calls into Python: sends from inside it
(``runtime.execute.early_sends``), ops whose weight gradients wait (``runtime.segment.split_backward``), recomputed blocks
(``runtime.segment.recompute``, which compiles the block itself). These do things when they are called, so the compiler must
not look into them: it compiles what is between them. Sizes that change from one micro-batch to the next make it
compile once more, for any size. Random numbers differ from the uncompiled ones unless
``options={"fallback_random": True}``.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from cost_models.errors import UsageError
from runtime.ops.flex import FLEX_ATTENTION

CompileOptions = Mapping[str, Any]
"""Keyword arguments of ``torch.compile``."""


def compile_options(compile: bool | CompileOptions) -> CompileOptions | None:
    """Read a user's ``compile=``: None for no. Raises UsageError for options that cannot be had."""
    if isinstance(compile, bool):
        return {} if compile else None
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    problems = [f"torch.compile has no {name!r}" for name in compile if name not in known]
    if compile.get("fullgraph"):
        problems.append("fullgraph=True: values are sent from inside a segment, which no graph can hold")
    if _replays(compile):
        problems.append(
            "CUDA graphs: they write the outputs of one micro-batch over those of another that is still in flight"
        )
    if problems:
        raise UsageError(
            "cannot compile with these options",
            problems,
            [
                f"torch.compile takes {', '.join(known)}",
                "mode='max-autotune-no-cudagraphs' tunes without CUDA graphs",
            ],
        )
    return dict(compile)


def _replays(compile: CompileOptions) -> bool:
    """Tell whether the options turn CUDA graphs on."""
    options = compile.get("options") or {}
    return (
        compile.get("mode") in ("reduce-overhead", "max-autotune")
        or compile.get("backend") == "cudagraphs"
        or bool(options.get("triton.cudagraphs"))
    )


def compiled(module: fx.GraphModule, options: CompileOptions) -> Callable[..., Any]:
    """Compile ``module.forward``."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, val_map={}))
    for node in graph.nodes:
        if node.op == "call_function" and not _is_operation(node.target):
            node.target = torch.compiler.disable(node.target)  # type: ignore[no-untyped-call]
    function: Callable[..., Any] = torch.compile(fx.GraphModule(module, graph).forward, **options)
    return function


def _is_operation(target: Any) -> bool:
    """Tell whether a call computes only, so that the compiler may look into it. flex_attention is compiled by itself."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return target is not FLEX_ATTENTION
    return getattr(operator, getattr(target, "__name__", ""), None) is target
