"""One step of the eager model, and one of its traced graph, on the same batch: loss, gradients and buffers.

The eager step runs the user's own module, not a copy: hooks and closures hold the original. Dropout is off on both sides.
Other random numbers are drawn from the same seed; whoever compares knows that a graph may draw them in another order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

from cost_models.precision import Precision
from passes.copies.dropout import DropoutOff
from passes.copies.float64 import code_in_float64, wide, widen_module
from passes.fidelity.agree import StepResult
from passes.graph.graph import OpGraph
from passes.trace.export import LossFunction, ModelWithLoss, writes_for_assignments
from passes.trace.hook_reads import hook_tables, register_hooks
from passes.trace.loss.reduction import step_batch, step_weights
from passes.trace.normal.flex import flex_with_backward
from passes.trace.python_state import PythonState, unchanged
from passes.trace.watch import caching_off, training_mode
from runtime.user_code import caller

SEED = 20_240_229
"""Seed of torch's generators before each step."""


@dataclass(frozen=True)
class EagerSubject:
    """The model that is run, and the batch that it is run on: ``leaves``, in the user's own structure, as ``batch`` has it.

    ``compiler``: the stance of ``torch.compiler``. What the user compiles runs as it is written; ``torch.while_loop`` and
    its like run compiled only.
    """

    model: nn.Module
    batch: Any
    leaves: Mapping[str, Tensor]
    loss_fn: LossFunction | None
    compiler: Literal["force_eager", "default"] = "force_eager"

    @property
    def roots(self) -> dict[str, object]:
        """The objects that hold Python state."""
        return {"": self.model, "loss_fn": self.loss_fn}


@contextlib.contextmanager
def widened_to_float64(graph: OpGraph, subject: EagerSubject) -> Iterator[tuple[EagerSubject, PythonState]]:
    """Widen model and batch, and what code makes, to float64; yields them with their state. All is put back afterwards."""
    with unchanged(subject.roots):
        for parameter in subject.model.parameters():
            parameter.grad = None
        widen_module(subject.model)
        widened = replace(subject, leaves={name: wide(leaf) for name, leaf in subject.leaves.items()})
        with code_in_float64(graph), unchanged(widened.roots) as state:
            yield widened, state


def eager_step(subject: EagerSubject) -> StepResult:
    """Run forward and backward of the user's own module in training mode. Its state changes as in any step.

    It gets a copy of the batch, which it may write to.
    """
    model = subject.model
    module = eager_module(model, subject.batch, subject.loss_fn)
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
    return StepResult(float(loss.detach()), gradients, {}, buffers)


def eager_module(
    model: nn.Module, batch: object, loss_fn: LossFunction | None, precision: Precision | None = None
) -> ModelWithLoss:
    """Return a module from the leaves of a batch like ``batch`` to the loss, its first result, as in a user's own loop.

    ``precision``: says how inputs are cast.
    """
    return ModelWithLoss(
        model, batch, loss_fn, training=True, precision=precision, assignments_as_writes=False
    )


def cut(
    leaves: Mapping[str, Tensor],
    batch_dims: Mapping[str, int | None],
    sizes: Sequence[int],
    *,
    turned: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Yield copies of the micro-batches of these sizes. ``turned``: the samples of each in reverse order.

    It is written out once more than in the engine: one that has them wrong must differ.
    """
    start = 0
    for size in sizes:
        part = {}
        for name, leaf in leaves.items():
            dim = batch_dims.get(name)
            samples = leaf if dim is None else leaf.narrow(dim, start, size)
            part[name] = (samples.flip(dim) if turned and dim is not None else samples).clone()
        yield part
        start += size


def graph_step(
    graph: OpGraph,
    subject: EagerSubject,
    in_type: Callable[[Tensor], Tensor],
    leaves: Mapping[str, Tensor] | None = None,
) -> StepResult:
    """Run forward and backward of the traced graph on the model's state, cast by ``in_type``.

    Hooks on parameters run here as well: a plan runs them. ``leaves``: a micro-batch, with all that the graph reads,
    instead of the whole batch; its loss is not weighed.
    """
    parameters = dict(subject.model.named_parameters())
    buffers = {name: in_type(b.detach()) for name, b in subject.model.named_buffers()}
    state: dict[str, Tensor] = {
        name: in_type(p.detach()).detach().requires_grad_(p.requires_grad) for name, p in parameters.items()
    }
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            register_hooks(state[name], *(table.values() for table in hook_tables(parameter)))
    weight = 1.0
    if leaves is None:
        leaves = step_batch(graph, subject.leaves, 1)
        (weight,) = step_weights(graph, subject.leaves, 1)
    device = next(iter(subject.leaves.values())).device
    constants = {name: constant.to(device) for name, constant in graph.constants.items()}
    read: dict[str, Tensor] = {**constants, **buffers, **state}
    for entry in graph.inputs:
        if entry.kind == "parameter":  # a plan's precision: cast as a master copy is
            read[entry.name] = state[entry.name].to(graph.nodes[entry.node].meta["val"].dtype)
    with torch.enable_grad(), _quietly():
        loss, written = run_graph(graph, read, leaves, weight)
    gradients = {name: leaf.grad.detach() for name, leaf in state.items() if leaf.grad is not None}
    return StepResult(loss, gradients, {}, {**buffers, **written})


def run_graph(
    graph: OpGraph,
    state: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    weight: float,
    run: Callable[..., Sequence[Tensor]] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Run the graph on one batch, and backward from its loss times ``weight``. Returns that, and the written buffers.

    ``run``: runs the graph's ops, if not the module itself does.
    """
    arguments = [(leaves if entry.kind == "batch" else state)[entry.name] for entry in graph.inputs]
    results = (graph.module if run is None else run)(*arguments)
    loss, written = torch.zeros(()), {}
    for output, value in zip(graph.outputs, results, strict=True):
        if output.kind == "loss":
            loss = value * weight
        elif output.kind == "buffer":
            written[output.name] = value.detach()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), written


@contextlib.contextmanager
def without_gradient_hooks(model: nn.Module) -> Iterator[None]:
    """Let no hook on gradients run but those on parameters."""
    original = Tensor.register_hook
    kept = {id(parameter) for parameter in model.parameters()}

    def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        return original(tensor, hook if id(tensor) in kept else _nothing)  # type: ignore[no-untyped-call]

    tables = [t for m in model.modules() for t in (m._backward_hooks, m._backward_pre_hooks)]
    with _changed_hooks(tables, lambda _: None), mock.patch.object(Tensor, "register_hook", register_hook):
        yield


@contextlib.contextmanager
def drawing_hooks(model: nn.Module, seen: list[Callable[[Any], Any]]) -> Iterator[None]:
    """Note into ``seen`` the hooks on parameters that draw random numbers with torch."""

    def watched(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(gradient: Any) -> Any:
            before = torch.get_rng_state()
            result = hook(gradient)
            if not torch.equal(before, torch.get_rng_state()):
                seen.append(hook)
            return result

        return call

    with _changed_hooks([table for p in model.parameters() for table in hook_tables(p)], watched):
        yield


@contextlib.contextmanager
def _changed_hooks(
    tables: Sequence[dict[int, Any]], change: Callable[[Callable[..., Any]], Callable[..., Any] | None]
) -> Iterator[None]:
    """Replace each hook by what ``change`` returns for it, if anything, and put the hooks back afterwards."""
    saved = [dict(table) for table in tables]
    for table, hooks in zip(tables, saved, strict=True):
        table.clear()
        table.update({key: hook for key, old in hooks.items() if (hook := change(old)) is not None})
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
