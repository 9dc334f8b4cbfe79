"""Hooks on parameters in a verified training run: they go with a model to other processes, and with each copy of it.

    the user's model ─► Hooked: model and hooks, copied and sent as one ─► in a worker: the same hooks on the model there
    a model with hooks ─► its copy, in float64 or not ─► Following: the same hooks, which find the copy's values

Neither a copy nor a pickle of a parameter has hooks. A hook that cannot be pickled (a lambda, a function in a function)
stays behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from partitioner.engine.gradient_hooks import live

M = TypeVar("M", bound=nn.Module)


class Hooked(nn.Module):
    """A model, and its hooks as plain attributes: what copies or pickles it keeps which tensors the hooks hold."""

    model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.before = {n: list((p._backward_hooks or {}).values()) for n, p in model.named_parameters()}
        self.after = {
            n: list((p._post_accumulate_grad_hooks or {}).values()) for n, p in model.named_parameters()
        }

    @property
    def has_hooks(self) -> bool:
        """True if any parameter has a hook."""
        return any(self.before.values()) or any(self.after.values())

    def registered(self) -> nn.Module:
        """Return the model with the hooks on its parameters."""
        for name, parameter in self.model.named_parameters():
            for hook in self.before[name]:
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            for hook in self.after[name]:
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return self.model


@dataclass(frozen=True, eq=False)
class Following:
    """A hook of ``original``, on a copy of it: by name, the hook finds the copy's values in the original."""

    hook: Callable[[Any], Any]
    original: nn.Parameter
    copy: nn.Parameter

    def __call__(self, given: Tensor) -> Any:
        with live(self.original, self.copy.data) as original:
            original.grad = self.copy.grad
            return self.hook(given)


def with_hooks_of(model: nn.Module, copy: M) -> M:
    """Put the hooks on parameters of ``model`` on a copy of it, which has none; return the copy."""
    copies = dict(copy.named_parameters())
    for name, original in model.named_parameters():
        for hook in (original._backward_hooks or {}).values():
            following = Following(hook, original, copies[name])
            copies[name].register_hook(following)  # type: ignore[no-untyped-call]
        for hook in (original._post_accumulate_grad_hooks or {}).values():
            following = Following(hook, original, copies[name])
            copies[name].register_post_accumulate_grad_hook(following)  # type: ignore[no-untyped-call]
    return copy
