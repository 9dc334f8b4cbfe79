"""trace: a model and an example batch become an OpGraph.

    model, batch ─► leaves (cloned, named) ─► torch.export with an open batch size ─► simplify ─► functional ─► OpGraph

The user's model is never changed: what tracing needs different (mode, cache flag, meta parameters) is put back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram

from cost_models.errors import ModelError, PartitionerError, UsageError
from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from passes.trace.batch import (
    BatchDims,
    batch_dim_candidates,
    flatten_batch,
    forward_names,
    map_tensors,
    open_dims,
    private_copy,
    tile,
)
from passes.trace.batch_symbols import (
    Settled,
    batch_spec,
    check_guards,
    check_known,
    line_of,
    lines_that_fix,
    merge,
    settle,
    size_of,
)
from passes.trace.build import Converted, convert, leaf_nodes
from passes.trace.draws import draws_restored, watch_draws
from passes.trace.errors import model_error
from passes.trace.export import LossFunction, ModelWithLoss, export
from passes.trace.fingerprint import fingerprint
from passes.trace.held_parameters import HeldParameters
from passes.trace.loss.reduction import LossReduction, checked_reduction, reduce_loss
from passes.trace.names import StateNames, frozen_modules, state_names
from passes.trace.opaque.cross import Crossing, NeedsSamplesError
from passes.trace.opaque.growth import watch_growth
from passes.trace.opaque.parts import Parts
from passes.trace.opaque.refused import PartError
from passes.trace.opaque.samples import samples_of
from passes.trace.precision import refuse_mixed_types
from passes.trace.python_state import PythonState
from passes.trace.watch import (
    caching_off,
    export_fake_mode,
    state_as_traced,
    torch_quiet,
    training_mode,
    watch_checkpointing,
    watch_gradient_hooks,
)
from passes.trace.wrappers import refuse_data_parallel, unwrapped
from runtime.segment.code import BatchSpec

__all__ = ["trace"]

logger = logging.getLogger("partitioner")


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
    mapping's keys that ``forward`` takes go to ``forward``; a tuple's elements go by position.
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
    loss_reduction = checked_reduction(loss_reduction)
    batch = private_copy(example_inputs, model)
    leaves = flatten_batch(batch, forward_names(model))
    if not leaves:
        raise ModelError(
            f"cannot trace {model_name}", ["example_inputs holds no tensor"], ["pass an example batch"]
        )
    state = state_names(model)
    parts = Parts.chosen(model, loss_fn, opaque)
    subject = _Subject(
        model,
        batch,
        leaves,
        loss_fn,
        training,
        model_name,
        open_dims(leaves, dynamic_dims or {}),
        Precision.checked(precision),
        parts.crossing(),
    )
    notes, checkpointing = ([] if compiled is None else [compiled]), list[str]()
    with contextlib.ExitStack() as changes:
        changes.enter_context(draws_restored())
        draws = changes.enter_context(watch_draws())
        changes.callback(PythonState.of({"": model}, values=False).restore)
        changes.enter_context(training_mode(model, training, notes))
        changes.enter_context(caching_off(model, notes))
        changes.enter_context(watch_checkpointing(model, checkpointing))
        changes.enter_context(watch_gradient_hooks(model, notes))
        exported, spec, converted, remarks = _trace_parts(subject, parts, batch_dims, state)
    notes += [*remarks, *draws.notes()]
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
        precision=subject.precision,
        loss_reduction=reduced.reduction,
        token_counts=reduced.counts,
        opaque=tuple(opaque),
    )
    if graph.precision.casts_to is not None:
        refuse_mixed_types(graph)
    logger.info("traced %s: %d operations", model_name, len(graph))
    return graph


def _check_module(model: nn.Module) -> None:
    """Refuse wrappers that hide the model's code or its names: they are to be taken off first."""
    if not isinstance(model, nn.Module):
        raise UsageError("the model is no torch.nn.Module", [f"got {type(model).__name__}"])
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "a TorchScript model cannot be traced", suggestions=["pass the module that was scripted"]
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


# --------------------------------------------------------------------------------------------------
# Finding the batch dimension: guess, export with the guess left open, see what stayed open


@dataclass(frozen=True)
class _Subject:
    """The model and batch that are to be traced, and how."""

    model: nn.Module
    batch: Any
    leaves: Mapping[str, Tensor]
    loss_fn: LossFunction | None
    training: bool
    model_name: str
    dynamic: Mapping[str, frozenset[int]]
    precision: Precision
    crossing: Crossing


@dataclass(frozen=True)
class _Exported:
    """One export, and what became of the guess it was made with."""

    program: ExportedProgram
    module: ModelWithLoss
    fake_mode: FakeTensorMode
    leaves: Mapping[str, fx.Node]
    settled: Settled
    batch_size: int
    attributes: Mapping[str, Tensor]
    """The model's own tensors where a plain attribute had a stand-in, by name."""


def _trace_parts(
    subject: _Subject, parts: Parts, overrides: Mapping[str, int | None] | None, state: StateNames
) -> tuple[_Exported, BatchSpec, Converted, list[str]]:
    """Trace again and again, with one more opaque part each time, until nothing is left that cannot be traced.

    Returns the export that was chosen, its batch, the graph made of it, and remarks.
    """
    while True:
        try:
            exported, symbol, remarks = _trace_batch_dims(subject, overrides)
            spec = batch_spec(exported.settled.dims, symbol, exported.leaves)
            converted = convert(
                exported.program,
                exported.module.record,
                state,
                exported.fake_mode,
                tuple(subject.leaves),
                subject.model,
                subject.crossing.calls,
                exported.attributes,
            )
            check_known(converted.module.graph, spec)
            return exported, spec, converted, remarks + parts.notes(subject.crossing.calls.values())
        except PartError as error:
            parts = parts.enlarged(error)
        except NeedsSamplesError as needed:
            guess = next(iter(batch_dim_candidates(subject.leaves, overrides)))
            parts = samples_of(
                parts, needed, subject.crossing, subject.batch, guess, subject.precision.casts_to
            )
        subject = replace(subject, crossing=parts.crossing())


_TracedExport: TypeAlias = tuple[_Exported, sympy.Symbol, list[str]]
"""The export that was chosen, its one batch symbol, and remarks on what was inferred."""


def _trace_batch_dims(subject: _Subject, overrides: Mapping[str, int | None] | None) -> _TracedExport:
    """Trace with the first guess whose leading leaf keeps a symbolic size, else the first in which any leaf does."""
    fallback: _Exported | None = None
    failure: ModelError | None = None
    tried: list[str] = []
    for guess in batch_dim_candidates(subject.leaves, overrides):
        try:
            exported = _export(subject, guess)
        except ModelError as error:
            if guess.size > 1:
                raise
            # Doubling along a wrong dimension makes shapes that do not fit: not the model's fault.
            failure = failure or error
            continue
        if not exported.settled.fixed or exported.settled.leading in exported.settled.open:
            return _finish(subject, exported, overrides)
        if exported.settled.open and fallback is None:
            fallback = exported
        fixing = lines_that_fix(exported.fake_mode)
        tried += [
            f"the code fixes {leaf} at {guess.size} in dimension {guess.dims[leaf]}{fixing}"
            for leaf in exported.settled.fixed
        ]
    if fallback is not None:
        return _finish(subject, fallback, overrides)
    if failure is not None:
        raise failure
    raise ModelError(
        f"no batch dimension found in the inputs of {subject.model_name}",
        list(dict.fromkeys(tried)),
        [
            "batch_dims={leaf name: dim or None} says which dimension of which input counts samples",
            "take sizes from tensor.shape in the model, never from constants: the batch size must stay free",
            "opaque=[the module's path] runs code that depends on the batch size as it is, as one op",
        ],
    )


def _export(subject: _Subject, guess: BatchDims) -> _Exported:
    """Return the export with the guessed and the requested dimensions open. A batch of one is doubled."""
    doubled = guess.size == 1
    leaves = {
        name: tile(leaf, dim) if doubled and (dim := guess.dims[name]) is not None else leaf
        for name, leaf in subject.leaves.items()
    }
    remaining = iter(leaves.values())
    batch = map_tensors(subject.batch, lambda path, old: next(remaining))
    loss_fn = subject.crossing.loss_function(subject.loss_fn)
    module = ModelWithLoss(subject.model, batch, loss_fn, subject.training, subject.precision)
    fake_mode = export_fake_mode()
    symbolic = _open_dims(subject, guess)
    try:
        # Gradients on: inside no_grad the whole model would be traced as frozen.
        with (
            torch.enable_grad(),
            torch_quiet(),
            HeldParameters(subject.model),
            state_as_traced(subject.model, fake_mode, subject.precision) as attributes,
            subject.crossing.active(),
            watch_growth(subject.model_name),
        ):
            program = export(module, leaves, symbolic, fake_mode)
    except (PartitionerError, NeedsSamplesError):
        raise
    except Exception as error:
        raise model_error(error, subject.model, subject.model_name) from error
    nodes = leaf_nodes(program, tuple(leaves))
    batch_size = 2 if doubled else guess.size
    return _Exported(program, module, fake_mode, nodes, settle(guess, nodes), batch_size, attributes)


def _open_dims(subject: _Subject, guess: BatchDims) -> dict[str, frozenset[int]]:
    """Choose the dimensions to leave open per leaf: the batch, what was asked for, equal sizes at the same place elsewhere.

    Opening ``input_ids`` alone would be in vain if ``labels`` of the same length stayed fixed.
    """
    wanted = {(d, subject.leaves[name].shape[d]) for name, dims in subject.dynamic.items() for d in dims}
    result = {}
    for name, leaf in subject.leaves.items():
        batch_dim = guess.dims[name]
        more = {d for d, size in enumerate(leaf.shape) if (d, size) in wanted}
        result[name] = frozenset(more | ({batch_dim} if batch_dim is not None else set()))
    return result


def _finish(
    subject: _Subject, exported: _Exported, overrides: Mapping[str, int | None] | None
) -> _TracedExport:
    """Leave one batch symbol for all leaves, and every requested size really open; remark on what was inferred."""
    problems = [
        f"the code fixes {leaf} in dimension {dim}, which batch_dims calls its batch dimension"
        for leaf, dim in (overrides or {}).items()
        if leaf in exported.settled.fixed
    ]
    problems += [
        f"the code fixes dimension {dim} of {leaf} at {subject.leaves[leaf].shape[dim]}"
        for leaf, dims in subject.dynamic.items()
        for dim in sorted(dims)
        if isinstance(size_of(exported.leaves[leaf], dim), int)
    ]
    if problems:
        raise ModelError(
            f"cannot keep these sizes of {subject.model_name} open",
            problems,
            ["take the size from tensor.shape in the model, not from a constant", "leave the dimension out"],
        )
    symbol, by_convention = merge(exported.settled, exported.leaves)
    shape_env = exported.fake_mode.shape_env
    assert shape_env is not None
    notes = check_guards([(shape_env.replace(g.expr), line_of(g.sloc)) for g in shape_env.guards], symbol)
    notes += [
        f"{leaf} has no batch dimension: every micro-batch gets all of it" for leaf in exported.settled.fixed
    ]
    notes += [
        f"{leaf}: dimension {exported.settled.dims[leaf]} is taken for the batch because of its size alone "
        f"(batch_dims={{{leaf!r}: None}} if it is not)"
        for leaf in by_convention
        if leaf not in (overrides or {})
    ]
    return exported, symbol, notes
