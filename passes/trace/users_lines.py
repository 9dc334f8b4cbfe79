"""The user's line of every operation of a trace: torch keeps the frames of functions called ``forward`` only.

Without those the operations of a loss function, of a forward that is another function, and ops over functions
(``torch.cond``, ``scan``) would name code of torch's, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import fx

from runtime.user_code import line_in, users_frame


@contextlib.contextmanager
def keep_lines() -> Iterator[None]:
    """Add the innermost frame that is the user's to the stack of every node that has none of theirs."""
    original = fx.proxy.TracerBase.create_node

    def create_node(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = original(tracer, *args, **kwargs)
        stack = node.stack_trace or ""
        frame = None if line_in(stack) else users_frame()
        if frame is not None:
            node.stack_trace = (
                f'{stack}\n  File "{frame.filename}", line {frame.lineno}, in {frame.name}'.strip()
            )
        return node

    with mock.patch.object(fx.proxy.TracerBase, "create_node", create_node):
        yield
