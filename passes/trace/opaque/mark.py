"""``partitioner.opaque``: the decorator by which a model names its own opaque parts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

Marked = TypeVar("Marked", bound=Callable[..., Any])

_MARK = "_partitioner_opaque"


class _Active(threading.local):
    """The trace that is under way in this thread, if it takes calls of opaque functions."""

    cross: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None


ACTIVE = _Active()


def opaque(part: Marked) -> Marked:
    """Run a module class, or a function of tensors, as one op of a plan: its own code, as it is.

    ::

        @partitioner.opaque
        class Router(nn.Module): ...

    Outside of a trace it is what it was. A function gets its tensors, parameters included, as arguments.
    """
    if isinstance(part, type) and issubclass(part, nn.Module):
        setattr(part, _MARK, True)
        return cast("Marked", part)

    @functools.wraps(part)
    def call(*args: Any, **kwargs: Any) -> Any:
        return part(*args, **kwargs) if ACTIVE.cross is None else ACTIVE.cross(call, args, kwargs)

    return cast("Marked", call)


def is_marked(module: nn.Module) -> bool:
    """Tell whether the module's class is decorated."""
    return getattr(type(module), _MARK, False) is True
