"""The attempts to export a model: guess the batch dimension, leave it open, see what stayed open; make opaque what fails.

guess ─► export ─► settled? ─► one batch symbol ─► convert ─► sizes known?
  ▲                  │ no                            │ code that cannot be traced
  └── the next one ──┘        the whole again ◄──────┘ with that part as one opaque op
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from unittest import mock

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram

from cost_models.errors import ModelError, PartitionerError
from cost_models.precision import Precision
from passes.trace.batch import (
    BatchDims,
    batch_dim_candidates,
    map_tensors,
    misnamed,
    tile,
)
from passes.trace.batch_symbols import (
    Settled,
    assumed_in,
    batch_spec,
    check_guards,
    check_known,
    lines_that_fix,
    merge,
    settle,
    size_of,
    watch_fixed,
)
from passes.trace.build import Converted, convert, leaf_nodes
from passes.trace.errors import model_error
from passes.trace.export import LossFunction, ModelWithLoss, export
from passes.trace.held_parameters import HeldParameters
from passes.trace.names import StateNames
from passes.trace.opaque.cross import NeedsSamplesError, OpaqueParts
from passes.trace.opaque.growth import watch_growth
from passes.trace.opaque.parts import Parts
from passes.trace.opaque.refused import PartError
from passes.trace.opaque.samples import samples_of
from passes.trace.python_state import PythonState
from passes.trace.repeat.reuse import reuse_blocks
from passes.trace.watch import (
    distributions_unchecked,
    export_fake_mode,
    state_as_traced,
    torch_quiet,
)
from runtime.segment.code import BatchSpec
from runtime.user_code import line_in, users_frame


@dataclass(frozen=True)
class Subject:
    """The model and batch that are to be traced, and how."""

    model: nn.Module
    batch: Any
    leaves: Mapping[str, Tensor]
    loss_fn: LossFunction | None
    training: bool
    model_name: str
    dynamic: Mapping[str, frozenset[int]]
    precision: Precision
    crossing: OpaqueParts


@dataclass(frozen=True)
class Exported:
    """One export, and what became of the guess it was made with."""

    program: ExportedProgram
    module: ModelWithLoss
    fake_mode: FakeTensorMode
    leaves: Mapping[str, fx.Node]
    settled: Settled
    batch_size: int
    attributes: Mapping[str, Tensor]
    """The model's own tensors where a plain attribute had a stand-in, by name."""
    fixing: Mapping[str, str | None]
    """Lines of the user's code in which sizes became numbers, and their modules."""


def trace_parts(
    subject: Subject, parts: Parts, overrides: Mapping[str, int | None] | None, state: StateNames
) -> tuple[Exported, BatchSpec, Converted, list[str]]:
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


WHOLE = "has no batch dimension"
"""The words of a note on a leaf whose size became a number."""

_TracedExport: TypeAlias = tuple[Exported, sympy.Symbol, list[str]]
"""The export that was chosen, its one batch symbol, and remarks on what was inferred."""


def _trace_batch_dims(subject: Subject, overrides: Mapping[str, int | None] | None) -> _TracedExport:
    """Trace with the first guess whose leading leaf keeps a symbolic size, else the first in which any leaf does."""
    fallback: Exported | None = None
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
            chosen, symbol, notes = _finish(subject, exported, overrides)
            leading = exported.settled.leading
            if tried:
                notes = [
                    f"dimension {guess.dims[leading]} of {leading} is taken for its samples, as {tried[0]} "
                    f"(batch_dims={{{leading!r}: dim}} says which it is)",
                    *notes,
                ]
            return chosen, symbol, notes
        if exported.settled.open and fallback is None:
            fallback = exported
        fixing = lines_that_fix(exported.fixing)
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


def _export(subject: Subject, guess: BatchDims) -> Exported:
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
    held = HeldParameters(subject.model)  # looks for the parameters before others stand in for them
    try:
        # Gradients on: inside no_grad the whole model would be traced as frozen.
        with (
            _put_back(subject),
            torch.enable_grad(),
            torch_quiet(),
            distributions_unchecked(),
            state_as_traced(subject.model, fake_mode, subject.precision) as attributes,
            held,
            subject.crossing.active(),
            watch_growth(subject.model_name),
            watch_fixed(subject.model, fake_mode) as fixing,
            _keep_lines(),
            reuse_blocks(subject.model, fake_mode),
        ):
            program = export(module, leaves, symbolic, fake_mode)
    except (PartitionerError, NeedsSamplesError):
        raise
    except Exception as error:
        unfit = misnamed(subject.model, subject.batch, error)
        raise unfit or model_error(error, subject.model, subject.model_name) from error
    nodes = leaf_nodes(program, tuple(leaves))
    batch_size = 2 if doubled else guess.size
    return Exported(program, module, fake_mode, nodes, settle(guess, nodes), batch_size, attributes, fixing)


@contextlib.contextmanager
def _keep_lines() -> Iterator[None]:
    """Add the innermost frame that is the user's to the stack of every node that has none of theirs.

    torch keeps the frames of functions called ``forward`` only. The operations of a loss function, of a forward that is
    another function, and ops over functions (``torch.cond``, ``scan``) would name code of torch's, or none.
    """
    original = fx.proxy.TracerBase.create_node

    def create_node(tracer: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = original(tracer, *args, **kwargs)
        stack = node.stack_trace or ""
        frame = None if line_in(stack) else users_frame()
        if frame is not None:
            node.stack_trace = (
                f'{stack}\n  File "{frame.filename}", line {frame.lineno}, in {frame.name}'.strip()
            )
        return node

    with mock.patch.object(fx.proxy.TracerBase, "create_node", create_node):
        yield


@contextlib.contextmanager
def _put_back(subject: Subject) -> Iterator[None]:
    """Forget what forward remembered: the next attempt, or the user, would find tensors without values."""
    state = PythonState.of({"": subject.model, "loss_fn": subject.loss_fn}, values=False)
    try:
        yield
    finally:
        state.restore()


def _open_dims(subject: Subject, guess: BatchDims) -> dict[str, frozenset[int]]:
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
    subject: Subject, exported: Exported, overrides: Mapping[str, int | None] | None
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
    lines = lines_that_fix(exported.fixing)
    modules = [module for module in dict.fromkeys(exported.fixing.values()) if module]
    if problems:
        whole = [f"opaque={modules!r} runs that code as it is, as one op" for _ in modules[:1]]
        raise ModelError(
            f"cannot keep these sizes of {subject.model_name} open",
            [f"{problem}{lines}" for problem in problems],
            [
                *whole,
                "take the size from tensor.shape in the model, not from a constant",
                "leave the dimension out",
            ],
        )
    symbol, by_convention = merge(exported.settled, exported.leaves)
    shape_env = exported.fake_mode.shape_env
    assert shape_env is not None
    notes = check_guards([(shape_env.replace(g.expr), assumed_in(g.sloc)) for g in shape_env.guards], symbol)
    otherwise = f", opaque={modules!r} if not" if modules else ""
    notes += [
        f"{leaf} {WHOLE}, as the code fixes its size{lines}: every micro-batch gets all of it "
        f"(batch_dims={{{leaf!r}: None}} if that is right{otherwise})"
        for leaf in exported.settled.fixed
    ]
    notes += [
        f"{leaf}: dimension {exported.settled.dims[leaf]} is taken for the batch because of its size alone "
        f"(batch_dims={{{leaf!r}: None}} if it is not)"
        for leaf in by_convention
        if leaf not in (overrides or {})
    ]
    return exported, symbol, notes
