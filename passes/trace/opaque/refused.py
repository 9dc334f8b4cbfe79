"""Errors that name the modules at fault: what cannot be traced may still run as one opaque op."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from cost_models.errors import ModelError
from passes.trace.opaque.mark import ACTIVE
from runtime.ops.opaque_code import LOSS
from runtime.user_code import caller, innermost_module

_SLICE = re.compile(r"(?P<container>[\w.]+)\.slice\((?P<limits>[^)]*)\)\.(?P<index>\d+)(?P<rest>.*)")

_AOT = str(Path(torch.__file__).parent / "_functorch" / "_aot_autograd")
"""The folder in which torch makes the backward of a higher-order op: gradients that nobody asked for in forward."""

OPAQUE_ADVICE = "move it into a module of its own: that runs whole, as one opaque op"


class PartError(ModelError):
    """An error of the trace. ``modules``: paths of the modules whose code is at fault; "" is the model's own forward.

    ``part``: the opaque part that cannot be one, if that is the fault. ``whole``: the model's own forward may become one.
    """

    def __init__(
        self,
        what: str,
        because: Sequence[str] = (),
        suggestions: Sequence[str] = (),
        modules: Sequence[str] = (),
        part: str | None = None,
        whole: bool = False,
    ) -> None:
        super().__init__(what, because, suggestions)
        self.modules, self.part, self.whole = tuple(modules), part, whole

    def __reduce__(self) -> tuple[Any, ...]:
        return PartError, (self.what, self.because, self.suggestions, self.modules, self.part, self.whole)


def blamed(node: fx.Node) -> str:
    """Return the path of the module that made a node of an export; ``LOSS`` for the loss function's."""
    if "part" in node.meta:
        return str(node.meta["part"])
    stack = [entry[0] for entry in node.meta.get("nn_module_stack", {}).values() if isinstance(entry, tuple)]
    if not stack or stack[-1] == "":
        return LOSS
    return str(stack[-1]).removeprefix("model").removeprefix(".")


def without_slices(path: str, model: nn.Module) -> str:
    """Return the path of a module in ``model``.

    ``for layer in self.layers[1:]`` is reported as "layers.slice(1, None, None).0", which is "layers.1".
    """
    while match := _SLICE.match(path):
        container = model.get_submodule(match["container"])
        limits = slice(*(None if n == "None" else int(n) for n in match["limits"].split(", ")))
        index = range(len(container))[limits][int(match["index"])]  # type: ignore[arg-type]
        path = f"{match['container']}.{index}{match['rest']}"
    return path


@contextlib.contextmanager
def refuse_inner_gradients(model: nn.Module) -> Iterator[None]:
    """Refuse code that asks autograd for gradients in forward: its trace would compute something else."""

    def inside(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if ACTIVE.cross is None:
                return original(*args, **kwargs)
            if sys._getframe(1).f_code.co_filename.startswith(_AOT):
                with mock.patch.object(ACTIVE, "cross", None):  # it comes here a second time
                    return original(*args, **kwargs)
            path = innermost_module(model)
            raise PartError(
                "forward asks for gradients itself, which the traced graph cannot hold",
                [f"{original.__module__}.{original.__name__} is called in {caller()}"],
                ["write the derivative out in tensor operations", OPAQUE_ADVICE],
                [LOSS if path is None else path],
                whole=True,
            )

        return call

    with (
        mock.patch.object(torch.autograd, "grad", inside(torch.autograd.grad)),
        mock.patch.object(torch.func, "grad", inside(torch.func.grad)),
    ):
        yield
