"""Copies of a user's model for a verification, in float64 or not, here and in other processes, with hooks on parameters.

    the user's model ─► Hooked: model and hooks, copied and sent as one ─► in a worker: the same hooks on the model there
    a model with hooks ─► its copy, in float64 or not ─► Following: the same hooks, which find the copy's values

Neither a copy nor a pickle of a parameter has hooks. A hook that cannot be pickled (a lambda, a function in a function)
stays behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

from torch import Tensor, nn

from cost_models.errors import UsageError
from partitioner.engine.gradient_hooks import live
from partitioner.models.workload import Workload
from partitioner.verify.grow_batch import to_double
from passes.copies.copied_module import copied_with
from passes.copies.float64 import widen_module
from passes.trace.hook_reads import hook_tables, register_hooks


def workload_copy(workload: Workload, *, double: bool, hooks: bool = False) -> Workload:
    """Return the workload with a copy of its model on the CPU, in float64 if ``double``: the user's is never touched.

    ``hooks``: hooks on parameters run on the copy as well.
    """
    copied = workload.copied()
    model = widen_module(copied.model, "cpu") if double else copied.model.cpu()
    if hooks:
        _hook_alike(workload.model, model)
    inputs = to_double(workload.example_inputs) if double else workload.example_inputs
    return replace(copied, model=model, example_inputs=inputs)


class Hooked(nn.Module):
    """A model, and its hooks as plain attributes: what copies or pickles it keeps which tensors the hooks hold."""

    model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        named = model.named_parameters()
        self.hooks = {name: [list(table.values()) for table in hook_tables(p)] for name, p in named}

    @property
    def has_hooks(self) -> bool:
        """True if any parameter has a hook."""
        return any(before or after for before, after in self.hooks.values())

    def registered(self) -> nn.Module:
        """Return the model with the hooks on its parameters."""
        for name, parameter in self.model.named_parameters():
            register_hooks(parameter, *self.hooks[name])
        return self.model


@dataclass(frozen=True, eq=False)
class Following:
    """A hook of ``original``, on a copy of it: by name, the hook finds the copy's values in the original."""

    hook: Callable[[Any], Any]
    original: nn.Parameter
    copy: nn.Parameter

    def __call__(self, hooked: Tensor) -> Any:
        with live(self.original, self.copy.data) as original:
            original.grad = self.copy.grad
            return self.hook(hooked)


def _hook_alike(model: nn.Module, copy: nn.Module) -> None:
    """Put the hooks on parameters of ``model`` on a copy of it, which has none."""
    copies = dict(copy.named_parameters())
    for name, original in model.named_parameters():
        followed = partial(Following, original=original, copy=copies[name])
        register_hooks(copies[name], *(map(followed, table.values()) for table in hook_tables(original)))


@dataclass(frozen=True)
class SentWorkload:
    """The source of a workload that can be sent to other processes. ``hooked``: its model with hooks, if these go along."""

    workload: Workload
    hooked: Hooked | None = None

    def __call__(self) -> Workload:
        if self.hooked is not None:
            self.hooked.registered()
        return self.workload


def sent_workload(workload: Workload) -> tuple[SentWorkload, list[str]]:
    """Return a copy of the workload that can be sent to other processes, with a note on what stays behind, or refuse it.

    Hooks on parameters go along if they can.
    """
    left_out: list[str] = []
    if Hooked(workload.model).has_hooks:
        try:
            both, loss_fn = copied_with(Hooked(workload.model), workload.loss_fn)
            hooked = cast("Hooked", both.cpu())
            source = SentWorkload(replace(workload, model=hooked.model, loss_fn=loss_fn), hooked)
            ForkingPickler.dumps(source)
            return source, []
        except Exception as error:  # noqa: BLE001 a user's hook may raise anything
            lines = str(error).splitlines() or ["no message"]
            left_out = [
                "hooks on parameters are left out of this comparison, on both sides: they cannot be sent to other "
                f"processes ({type(error).__name__}: {lines[0]}); functions that a module defines can"
            ]
    copied = workload.copied()
    source = SentWorkload(replace(copied, model=copied.model.cpu()))
    try:
        ForkingPickler.dumps(source)
    except Exception as error:  # whatever a user's class raises
        raise UsageError(
            f"cannot train {type(workload.model).__name__} on local processes",
            [f"it cannot be sent to them: {type(error).__name__}: {error}"],
            [
                "define its class, its loss and what it holds in a module, not in a function or a notebook",
                "partitioner verify PLAN file.py:factory --train makes the model in every process",
            ],
        ) from error
    return source, left_out
