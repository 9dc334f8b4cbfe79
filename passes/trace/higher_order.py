"""Lines of the user's code that call ops over functions (``torch.cond``, ``scan``): their nodes name code of torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import fx
from torch._ops import HigherOrderOperator

from passes.graph.user_code import caller, line_in


@contextlib.contextmanager
def watch_higher_order() -> Iterator[dict[str, list[str]]]:
    """Collect the lines of the user's code that call higher-order ops, by the op's name."""
    original: Any = HigherOrderOperator.__call__
    lines: dict[str, list[str]] = {}

    def call(op: HigherOrderOperator, /, *args: Any, **kwargs: Any) -> Any:
        known, line = lines.setdefault(op.__name__, []), caller()
        if line not in known:
            known.append(line)
        return original(op, *args, **kwargs)

    with mock.patch.object(HigherOrderOperator, "__call__", call):
        yield lines


def note_lines(graph: fx.Graph, lines: Mapping[str, list[str]]) -> None:
    """Set the source of nodes that know none: the line of the call, or all lines that call this op."""
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and not line_in(node.meta.get("stack_trace") or ""):
            node.meta["source"] = ", ".join(lines.get(node.target.__name__, []))
