"""A workload: everything of a model that planning, verifying and deploying ask for; and the memory of it in a plan.

``deploy`` and ``verify`` need again what a plan was made with, in the process that made it:

    plan = partition(model, cluster, example_inputs=batch, loss_fn=loss_fn)
    plan.deploy(model, optimizer=...)            example, loss and open sizes are known; the trace too, of this very model

It is no part of the plan: files do not have it, copies in other processes neither, and plans that differ in it are equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from passes.copies.copied_module import copied_with
from passes.graph.graph import OpGraph


@dataclass(frozen=True)
class Workload:
    """A model, a batch as its data loader would yield it, and the loss unless the model returns it itself."""

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[[Any, Any], Any] | None = None
    name: str = ""

    def copied(self) -> Workload:
        """Return the workload with a copy of the model, and with a loss that reads the copy where it read the model."""
        model, loss_fn = copied_with(self.model, self.loss_fn)
        return replace(self, model=model, loss_fn=loss_fn)


def workload_of(
    model: Any, example_inputs: Any = None, loss_fn: Callable[[Any, Any], Any] | None = None
) -> Workload:
    """Put together a model, or a workload, with the example and the loss that were given beside it."""
    given = model if isinstance(model, Workload) else Workload(model, None)
    return replace(
        given,
        example_inputs=given.example_inputs if example_inputs is None else example_inputs,
        loss_fn=given.loss_fn if loss_fn is None else loss_fn,
    )


_TRACED_WITH = ("example_inputs", "loss_fn", "batch_dims", "dynamic_dims")


@dataclass(frozen=True)
class MadeWith:
    """The arguments of ``partition`` that are needed again: none for a plan from a file; of a trace, the trace alone."""

    example_inputs: Any = field(default=None, compare=False, repr=False)
    loss_fn: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    batch_dims: Mapping[str, int | None] | None = field(default=None, compare=False, repr=False)
    dynamic_dims: Mapping[str, list[int]] | None = field(default=None, compare=False, repr=False)
    graph: OpGraph | None = field(default=None, compare=False, repr=False)
    model: weakref.ref[nn.Module] | None = field(default=None, compare=False, repr=False)
    state: object = field(default=None, compare=False, repr=False)
    """The model's state when it was traced (``_state_of``)."""

    @classmethod
    def of(
        cls,
        model: object,
        example_inputs: Any,
        loss_fn: Callable[..., Any] | None,
        batch_dims: Mapping[str, int | None] | None,
        dynamic_dims: Mapping[str, list[int]] | None,
        graph: OpGraph,
    ) -> MadeWith:
        """Remember a call of :func:`partition`. ``graph``: what it traced."""
        workload = workload_of(model, example_inputs, loss_fn)
        module: object = workload.model
        if not isinstance(module, nn.Module):
            return cls(graph=graph)
        brought = workload.example_inputs, workload.loss_fn
        return cls(*brought, batch_dims, dynamic_dims, graph, weakref.ref(module), _state_of(module))

    def completed(self, model: object, options: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the options of ``deploy`` or ``verify`` by what is missing; a Workload brings its example and loss."""
        result = dict(options)
        own = {name: getattr(self, name) for name in _TRACED_WITH}
        brought: dict[str, Any] = {}
        if isinstance(model, Workload):
            brought = {"example_inputs": model.example_inputs, "loss_fn": model.loss_fn}
            model = model.model
        for name, value in own.items():
            if result.get(name) is None and brought.get(name) is None and value is not None:
                result[name] = value
        used = {name: brought.get(name) if result.get(name) is None else result[name] for name in own}
        same = all(used[name] is value for name, value in own.items())
        if same and result.get("graph") is None and self._has_traced(model):
            result["graph"] = self.graph
        return result

    def _has_traced(self, model: object) -> bool:
        """Tell whether the trace is of this model, as it is now."""
        same = self.model is not None and self.model() is model
        return same and isinstance(model, nn.Module) and _state_of(model) == self.state

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay in this process: a copy in another one is empty."""
        return MadeWith, ()


def _state_of(model: nn.Module) -> object:
    """Return what a trace depends on and people change between two calls: types, what trains, modes of modules."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    tensors = [(name, id(tensor), tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in named]
    return tensors, [(name, id(module), module.training) for name, module in model.named_modules()]
