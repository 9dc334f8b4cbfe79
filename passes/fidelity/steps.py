"""One step of the eager model, and one of its traced graph, on the same batch: loss, gradients and buffers.

The eager step runs the user's own module, not a copy: hooks and closures hold the original. Dropout is off on both sides.
Other random numbers are drawn from the same seed; whoever compares knows that a graph may draw them in another order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

from passes.evaluate.dropout import DropoutOff
from passes.fidelity.agree import Numbers
from passes.graph.graph import OpGraph
from passes.trace.export import LossFunction, ModelWithLoss, writes_for_assignments
from passes.trace.loss.reduction import step_batch, step_weights
from passes.trace.normal.flex import flex_with_backward
from passes.trace.watch import caching_off, training_mode
from runtime.user_code import caller

SEED = 20_240_229
"""Seed of torch's generators before each step."""


@dataclass(frozen=True)
class Subject:
    """The model that is run, and the batch that it is run on. ``batch``: in the user's own structure; ``leaves``: of it.

    ``compiler``: the stance of ``torch.compiler``. What the user compiles runs as it is written; ``torch.while_loop`` and
    its like run compiled only.
    """

    model: nn.Module
    batch: Any
    leaves: Mapping[str, Tensor]
    loss_fn: LossFunction | None
    compiler: Literal["force_eager", "default"] = "force_eager"


def eager_step(subject: Subject) -> Numbers:
    """Run forward and backward of the user's own module in training mode. Its state changes as in any step.

    It gets a copy of the batch, which it may write to.
    """
    model = subject.model
    module = ModelWithLoss(model, subject.batch, subject.loss_fn, training=True, assignments_as_writes=False)
    for parameter in model.parameters():
        parameter.grad = None
    with (
        _as_in_training(model, subject.compiler),
        writes_for_assignments(model),
    ):  # after backward reads the old
        loss = module(*(leaf.detach().clone() for leaf in subject.leaves.values()))[0]
        if loss.requires_grad:
            loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return Numbers(loss.detach(), gradients, buffers)


def graph_step(
    graph: OpGraph,
    subject: Subject,
    in_type: Callable[[Tensor], Tensor],
    leaves: Mapping[str, Tensor] | None = None,
) -> Numbers:
    """Run forward and backward of the traced graph on the model's state, cast by ``in_type``.

    Hooks on parameters run here as well: a plan runs them. ``leaves``: a micro-batch, with all that the graph reads,
    instead of the whole batch; its loss is not weighed.
    """
    model = subject.model
    parameters = dict(model.named_parameters())
    buffers = {name: in_type(b.detach()) for name, b in model.named_buffers()}
    state: dict[str, Tensor] = {
        name: in_type(p.detach()).detach().requires_grad_(p.requires_grad) for name, p in parameters.items()
    }
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            _hooked_alike(state[name], parameter)
    weight = 1.0
    if leaves is None:
        leaves = step_batch(graph, subject.leaves, 1)
        (weight,) = step_weights(graph, subject.leaves, 1)
    device = next(iter(subject.leaves.values())).device
    values = {
        "parameter": state,
        "buffer": buffers,
        "constant": {name: constant.to(device) for name, constant in graph.constants.items()},
        "batch": leaves,
    }
    arguments = []
    for entry in graph.inputs:
        value = values[entry.kind][entry.name]
        wanted = graph.nodes[entry.node].meta["val"].dtype
        if (
            entry.kind == "parameter" and value.dtype != wanted
        ):  # a plan's precision: cast as a master copy is
            value = value.to(wanted)
        arguments.append(value)
    with torch.enable_grad(), _quietly():
        outputs = graph.module(*arguments)
        after = dict(buffers)
        loss = torch.zeros(())
        for output, value in zip(graph.outputs, outputs, strict=True):
            if output.kind == "loss":
                loss = value * weight
            elif output.kind == "buffer":
                after[output.name] = value.detach()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: leaf.grad.detach() for name, leaf in state.items() if leaf.grad is not None}
    return Numbers(loss.detach(), gradients, after)


@contextlib.contextmanager
def without_gradient_hooks(model: nn.Module) -> Iterator[None]:
    """Let no hook on gradients run but those on parameters."""
    original = Tensor.register_hook
    kept = {id(parameter) for parameter in model.parameters()}

    def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        return original(tensor, hook if id(tensor) in kept else _nothing)  # type: ignore[no-untyped-call]

    tables = [t for m in model.modules() for t in (m._backward_hooks, m._backward_pre_hooks)]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        with mock.patch.object(Tensor, "register_hook", register_hook):
            yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


@contextlib.contextmanager
def drawing_hooks(model: nn.Module, seen: list[Callable[[Any], Any]]) -> Iterator[None]:
    """Note into ``seen`` the hooks on parameters that draw random numbers with torch."""
    tables: list[Any] = [
        table
        for parameter in model.parameters()
        for table in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if table
    ]
    saved = [dict(table) for table in tables]

    def watched(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(given: Any) -> Any:
            before = torch.get_rng_state()
            result = hook(given)
            if not torch.equal(before, torch.get_rng_state()):
                seen.append(hook)
            return result

        return call

    for table, hooks in zip(tables, saved, strict=True):
        table.update({key: watched(hook) for key, hook in hooks.items()})
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


@contextlib.contextmanager
def watch_tensor_hooks(model: nn.Module, seen: dict[str, None]) -> Iterator[None]:
    """Note into ``seen`` where hooks on tensors are registered, but for those on parameters."""
    original = Tensor.register_hook
    parameters = {id(parameter) for parameter in model.parameters()}

    def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        place = caller()
        if id(tensor) not in parameters and place != "an unknown place":
            seen.setdefault(f"a hook on a tensor, registered in {place}")
        return original(tensor, hook)  # type: ignore[no-untyped-call]

    with mock.patch.object(Tensor, "register_hook", register_hook):
        yield


def parameter_hooks(parameter: Tensor) -> tuple[Callable[[Any], Any], ...]:
    """Return the hooks on the gradient of a parameter, in the order in which they run."""
    tables = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return tuple(hook for table in tables for hook in (table or {}).values())


def _hooked_alike(twin: Tensor, parameter: Tensor) -> None:
    """Register the hooks of a parameter on the tensor that stands for it."""
    for hook in (parameter._backward_hooks or {}).values():
        twin.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        twin.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _nothing(gradient: Tensor) -> None:
    """Leave a gradient as it is."""


@contextlib.contextmanager
def _as_in_training(model: nn.Module, compiler: str) -> Iterator[None]:
    """Run the model as it is traced: in training mode, without caches or dropout, with gradients."""
    with (
        training_mode(model, True, []),
        caching_off(model, []),
        torch.enable_grad(),
        torch.compiler.set_stance(compiler),
        DropoutOff(),
        flex_with_backward(),
        _quietly(),
    ):
        yield


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        yield
