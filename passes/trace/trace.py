"""trace: a model and an example batch become an OpGraph.

    model, batch ─► leaves (cloned, named) ─► torch.export with an open batch size ─► simplify ─► functional ─► OpGraph

The user's model is never changed: what tracing needs different (mode, cache flag, meta parameters) is put back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cost_models.errors import ModelError, UsageError
from cost_models.precision import Precision
from passes.graph.code_on_demand import code_on_demand
from passes.graph.graph import OpGraph
from passes.graph.per_batch import with_once_written
from passes.trace.attempts import Subject, trace_parts
from passes.trace.batch import (
    flatten_batch,
    forward_names,
    open_dims,
    private_copy,
)
from passes.trace.draws import draws_restored, watch_draws
from passes.trace.export import LossFunction
from passes.trace.fingerprint import fingerprint
from passes.trace.hook_reads import refuse_hooks_that_read_others
from passes.trace.loss.reduction import LossReduction, checked_reduction, reduce_loss
from passes.trace.names import frozen_modules, state_names
from passes.trace.normal.flex import flex_as_ops
from passes.trace.normal.flex_visible import count_visible
from passes.trace.opaque.parts import Parts
from passes.trace.precision import refuse_mixed_types
from passes.trace.python_state import PythonState
from passes.trace.watch import (
    caching_off,
    training_mode,
    watch_checkpointing,
    watch_gradient_hooks,
)
from passes.trace.wrappers import refuse_data_parallel, unwrapped
from runtime.collector import collector_paused
from runtime.ops.opaque import Opaque
from runtime.ranks.alone import SourceLine, alone
from runtime.user_code import is_users

__all__ = ["trace"]

logger = logging.getLogger("partitioner")


@collector_paused()
@code_on_demand()
def trace(
    model: nn.Module,
    example_inputs: object,
    *,
    loss_fn: LossFunction | None = None,
    training: bool = True,
    batch_dims: Mapping[str, int | None] | None = None,
    dynamic_dims: Mapping[str, Sequence[int]] | None = None,
    precision: Precision | None = None,
    loss_reduction: LossReduction | None = None,
    opaque: Sequence[str] = (),
    name: str | None = None,
) -> OpGraph:
    """Trace ``model`` on ``example_inputs`` into an OpGraph whose batch size is a symbol.

    ``example_inputs``: a tensor, tuple, list or mapping, nested at will; only shapes and dtypes matter. A
    mapping's keys that ``forward`` takes go to ``forward``, or all of it where ``forward(self, batch)`` needs one
    argument that no key names; a tuple's elements go by position.
    ``loss_fn(output, batch)`` sees the whole batch and returns the loss, or ``(loss, {"name": metric})``; without it
    the model must return its loss itself.
    ``training=False`` traces evaluation mode; the graph's outputs are then the model's, after the loss if
    there is one.

    ``batch_dims`` ``{leaf name: dim or None}`` overrides the inferred batch dimension (dimension 0 of every
    tensor whose dimension 0 is as large as the first tensor's). ``dynamic_dims`` ``{leaf name: dims}``
    leaves further sizes open. A batch of one sample is doubled first, since export bakes sizes of 1 in.

    ``precision``: with ``compute`` (or ``parameters``) set, parameters are traced in that data type, the
    floating-point inputs of ``forward`` are cast to it, and ``loss_fn`` gets outputs in float32 again, where it
    is a 16-bit type. ``loss_fn`` sees the batch as it was given. Buffers keep their type.

    ``loss_reduction``: the way from micro-batches' losses to the batch's, "mean", "sum" or "token_mean"; that of the
    loss's own form if not given (``passes.trace.loss.reduction``).

    ``opaque``: paths of modules that run whole, their own code as it is, as one op each (``*`` as in file names; "loss" is
    the loss function). What cannot be traced, and every custom ``autograd.Function``, becomes such an op by itself.

    The model may be on the meta device. Nothing of it is copied or changed.
    """
    model, compiled = unwrapped(model)
    model_name = name or type(model).__name__
    _check_module(model)
    refuse_hooks_that_read_others(model, model_name)
    loss_reduction = checked_reduction(loss_reduction)
    batch = private_copy(example_inputs, model)
    leaves = flatten_batch(batch, forward_names(model))
    if not leaves:
        raise ModelError(
            f"cannot trace {model_name}", ["example_inputs holds no tensor"], ["pass an example batch"]
        )
    _refuse_layouts(leaves)
    state = state_names(model)
    parts = Parts.chosen(model, loss_fn, opaque)
    notes, checkpointing = ([] if compiled is None else [compiled]), list[str]()
    whole = set[str]()  # the modules that turn out to be opaque
    with contextlib.ExitStack() as changes:
        asked = changes.enter_context(alone())
        changes.enter_context(draws_restored())
        draws = changes.enter_context(watch_draws())
        changes.callback(PythonState.of({"": model}, values=False).restore)
        changes.enter_context(training_mode(model, training, notes))
        changes.enter_context(caching_off(model, notes))
        changes.enter_context(flex_as_ops(notes))
        changes.enter_context(watch_checkpointing(model, checkpointing))
        changes.enter_context(watch_gradient_hooks(model, notes, whole))
        subject = Subject(
            model,
            batch,
            leaves,
            loss_fn,
            training,
            model_name,
            open_dims(leaves, dynamic_dims or {}),
            Precision.checked(precision),
            parts.crossing(),  # copies of the parts, which are to run as the model is traced
        )
        exported, spec, converted, remarks = trace_parts(subject, parts, batch_dims, state)
        whole.update(n.target.name for n in converted.module.graph.nodes if isinstance(n.target, Opaque))
    notes += [*remarks, *draws.notes(), *_asked(asked)]
    notes += [
        f"forward changes the Python number {changed}; the traced graph keeps what its first call saw"
        for changed in exported.module.record.changed
    ]
    if not any(placeholder.kind == "batch" for placeholder in converted.inputs):
        raise ModelError(
            f"nothing that {model_name} computes depends on the batch",
            [f"the batch has {', '.join(leaves)}"],
            ["compute the loss from the model's output"],
        )
    held = {**dict(model.named_buffers(remove_duplicate=False)), **converted.constants}
    notes += count_visible(converted.module.graph, converted.inputs, leaves, held)
    reduced = reduce_loss(converted, spec, loss_reduction, model_name)
    converted, spec = reduced.traced, reduced.batch
    notes += reduced.notes
    everything = {**state.parameters, **state.buffers}
    graph = OpGraph(
        module=converted.module,
        inputs=converted.inputs,
        outputs=converted.outputs,
        parameters=state.parameters,
        buffers=state.buffers,
        aliases=state.aliases,
        views=converted.views,
        constants=converted.constants,
        batch=spec,
        example_batch_size=exported.batch_size,
        example_shapes={leaf: tuple(tensor.shape) for leaf, tensor in leaves.items()},
        training=training,
        model_name=model_name,
        fingerprint=fingerprint(converted, everything, spec.symbols, training, reduced.reduction),
        notes=tuple(dict.fromkeys(notes)),
        checkpointing=checkpointing[-1] if checkpointing else None,
        frozen_modules=frozen_modules(model),
        module_classes={path: type(module).__name__ for path, module in model.named_modules()},
        precision=subject.precision,
        loss_reduction=reduced.reduction,
        token_counts=reduced.counts,
        unlike_whole=reduced.unlike_whole,
        reduction_declared=loss_reduction is not None,
        opaque=tuple(opaque),
    )
    graph = with_once_written(graph)
    if graph.precision.casts_to is not None:
        refuse_mixed_types(graph)
    logger.info("traced %s: %d operations", model_name, len(graph))
    return graph


def _asked(lines: Sequence[SourceLine]) -> list[str]:
    """Say that the user's code asked for a process group, and what was traced."""
    places = dict.fromkeys(f"{Path(file).name}:{line}" for file, line in lines if is_users(file))
    return [
        f"forward asks for a process group in {place}: planned is what one process without one computes of the whole batch"
        for place in places
    ][:1]


def _refuse_layouts(leaves: Mapping[str, Tensor]) -> None:
    """Refuse sparse and nested tensors: micro-batches are slices of a batch, and ranks send each other dense tensors."""
    others = [f"{name} is {leaf.layout}" for name, leaf in leaves.items() if leaf.layout is not torch.strided]
    if others:
        raise ModelError(
            "the batch holds tensors that are not dense",
            others,
            ["pass x.to_dense(), or indices and values as two tensors, and make it sparse in forward"],
        )


def _check_module(model: nn.Module) -> None:
    """Refuse wrappers that hide the model's code or its names: they are to be taken off first."""
    if not isinstance(model, nn.Module):
        raise UsageError("the model is no torch.nn.Module", [f"got {type(model).__name__}"])
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise ModelError(
            "code of TorchScript cannot be traced",
            [f"module {scripted[0]!r} was scripted" if scripted[0] else "the model itself was scripted"],
            ["pass the module that was scripted"],
        )
    lazy = [
        name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)
    ]
    if lazy:
        raise ModelError(
            "the model has parameters without a shape",
            [f"{name} belongs to a lazy module" for name in lazy[:5]],
            ["call the model on one batch first"],
        )
    refuse_data_parallel(model)
