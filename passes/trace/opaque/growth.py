"""A trace that grows: progress is told, and a module whose loop unrolls without end becomes one opaque op."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import fx

from passes.trace.opaque.mark import ACTIVE
from passes.trace.opaque.refused import PartError
from runtime.ops.opaque_code import LOSS

logger = logging.getLogger("partitioner")

MOST_NODES = 20_000
"""The most operations that one module's own code may add to a graph.

The 80 layers of a large transformer are 6,000 operations in all, and tracing takes 3 ms each: what adds more than this by
itself is a loop over positions or steps, which takes minutes to trace and longer to place.
"""

PROGRESS_SECONDS = 10.0
"""The time between two words on a trace that takes long."""


@contextlib.contextmanager
def watch_growth(model_name: str) -> Iterator[None]:
    """Count the operations of an export by the module whose code they are; raises PartError for one with too many."""
    counts: Counter[str] = Counter()
    original = fx.proxy.TracerBase.create_node
    said = time.monotonic()

    def create_node(tracer: Any, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        nonlocal said
        node = original(tracer, kind, *args, **kwargs)
        if kind != "call_function" or ACTIVE.cross is None:
            return node
        stack = getattr(tracer, "module_stack", None)
        path = str(next(reversed(stack.values()))[0]) if stack else ""
        path = path.removeprefix("_export_root").removeprefix(".")
        counts[path] += 1
        if counts[path] > MOST_NODES:
            raise _grown(path.removeprefix("model").removeprefix(".") if path else LOSS)
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            logger.info("tracing %s: %d operations, now in %s", model_name, counts.total(), path or LOSS)
        return node

    with mock.patch.object(fx.proxy.TracerBase, "create_node", create_node):
        yield


def _grown(path: str) -> PartError:
    place = f"module {path!r}" if path not in ("", LOSS) else path or "forward"
    return PartError(
        "a loop of the model unrolls without end",
        [f"{place} adds more than {MOST_NODES:,} operations to the graph"],
        [
            "write the loop over positions as one operation (cumsum, convolution, scan kernels)",
            f"opaque=[{path!r}] runs it whole, as one op"
            if path
            else "move the loop into a module of its own",
            "plan with shorter sequences",
        ],
        [path],
    )
