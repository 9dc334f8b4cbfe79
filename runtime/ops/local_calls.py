"""Calls of ``runtime.ops.local`` in a graph: a function's name, the op that it stands for, and which axes play its roles.

    run_local("cross_entropy", "aten.cross_entropy_loss.default", {"classes": "tensor"}, logits, target)

Several mesh axes may play one role together: "data+tensor", the first outermost. Like bridges, such calls only name their
axes until they are bound; on fake tensors they tell shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from cost_models.errors import InternalError
from runtime.mesh.axis import Axis
from runtime.ops.local import LOCAL

JOINT = "+"
"""Between the names of axes that are taken together."""

LEADING = 3
"""Arguments of ``run_local`` before the op's own."""


def run_local(function: str, op: str, roles: Mapping[str, str], *args: Any, **options: Any) -> Any:
    """The op on shards, which has the same shapes. ``roles``: axis of each role."""
    given = [a for a in args if isinstance(a, Tensor)]
    if not all(isinstance(a, FakeTensor) or a.is_meta for a in given):
        raise InternalError(f"the local form of {op} was run without its axes")
    return op_called(op)(*args, **options)


def with_axes(axes: Mapping[str, Axis]) -> Callable[..., Any]:
    """``run_local`` on ``axes``."""

    def bound(function: str, op: str, roles: Mapping[str, str], *args: Any, **options: Any) -> Any:
        played = {role: axes[name] for role, name in roles.items()}
        return LOCAL[function](op_called(op), played, *args, **options)

    bound.__name__ = bound.__qualname__ = run_local.__name__
    return bound


@lru_cache
def op_called(name: str) -> Callable[..., Any]:
    """``torch.ops.aten.add.Tensor`` by its name "aten.add.Tensor"."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
