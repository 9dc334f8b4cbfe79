"""``check_fidelity``: does the traced graph compute what the model computes? Two steps of it tell.

    model, one batch ─┬─► eager step                                     A
                      ├─► the same step, Python state as a step left it  B   ≠ A: depends on Python state     refused
                      └─► the traced graph                               G   ≠ A: something is lost           refused
                            └─► A again, no hooks on gradients           C   ≠ A: hooks change gradients

All run the user's own module; afterwards every tensor, attribute, list and generator is what it was. B runs only with other
values of ``random`` and ``numpy.random``, and with attributes as they are after a step: parameters, buffers and torch's own
generator start alike; several times where Python's random numbers are drawn. Where A has changed attributes, the step
before B is on other samples: an attribute made of the first batch would fit that batch. C tells why G differs: hooks in an
opaque part are in the graph as well.

Numbers are compared in the model's own types first. A and B are the same kernels on the same numbers, so they agree bit for
bit; G may round otherwise in 32 bits. What differs there is compared again in float64, which decides. In 16 bits a counter
or a lost factor of some percent is rounding, so float64 decides there also where attributes changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cost_models.errors import ModelError, PartitionerError
from cost_models.units import format_seconds
from passes.copies.dropout import random_ops, without_dropout
from passes.copies.float64 import in_float64, wide
from passes.fidelity.agree import TOLERANCES, StepResult, difference, tolerance
from passes.fidelity.example import another_batch, has_example, subject_of
from passes.fidelity.lines import (
    module_hooks,
    watch_switched_gradients,
    why_backward_fails,
)
from passes.fidelity.parts import refuse_coupled_guess, whole_leaves, why_parts_differ
from passes.fidelity.refusals import (
    backward_fails,
    computes_something_else,
    depends_on_state,
    hook_draws,
    hooks_matter,
    parts_need_more,
    writes_parameters,
)
from passes.fidelity.steps import (
    EagerSubject,
    drawing_hooks,
    eager_step,
    graph_step,
    watch_tensor_hooks,
    widened_to_float64,
    without_gradient_hooks,
)
from passes.graph.graph import OpGraph
from passes.progress import report_phase
from passes.trace.draws import DRAWN, Draws, extreme_draws, watch_draws
from passes.trace.export import LossFunction
from passes.trace.noted import Change
from passes.trace.python_state import PythonState, unchanged
from passes.trace.watch import NOT_RUN, torch_quiet
from runtime.ranks.alone import alone
from runtime.user_code import TORCH, caller, is_users

log = logging.getLogger("partitioner")

DRAWS = 8
"""Steps with other values of Python's random numbers, two of which take every uniform draw as small or large as can be."""
MOST_BYTES = 32 * 2**30
"""Bytes of parameters above which a model is not run: a step of it needs three times that for gradients and copies."""
MOST_SECONDS = 10.0
"""Seconds of a step above which it is not made again: a check takes seven at most. By hand: what a user waits for."""
WIDER = 4.0
"""Times that a step in float64 takes longer than one in 16 bits. Measured: GPT-2 of two layers, 1.5 s and 5.9 s."""
_MANNERS: tuple[tuple[bool, Literal["force_eager", "default"]], ...] = (
    (True, "force_eager"),
    (True, "default"),
    (False, "force_eager"),
)
"""The manners in which a step is tried, until one works: the batch drawn or as it is, and the compiler's stance."""
NARROW = (TOLERANCES[torch.float16], TOLERANCES[torch.bfloat16])
"""Tolerances of types that hide a difference of a percent."""


@alone(threads=True)
def check_fidelity(
    graph: OpGraph,
    model: nn.Module,
    example_inputs: Any,
    loss_fn: LossFunction | None = None,
    declared: Collection[str] = (),
) -> OpGraph:
    """Return ``graph`` with what was found out in its notes. Raises ModelError where it is not what the model computes.

    A model without values (on the meta device) is not run, nor is one whose forward cannot be run on its example batch: a
    note says so. Nothing of the model is changed. ``declared``: leaves whose batch dimension the user has given.
    """
    refuse_coupled_guess(graph, declared)
    if graph.loss is None or not has_values(model):
        return graph
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if size_bytes > MOST_BYTES:
        return _noted(
            graph, f"not compared with its trace: it has {size_bytes / 2**30:.0f} GiB of parameters"
        )
    report_phase("comparing the trace with the model: a step of each")
    failure: Exception | None = None
    last = Exception()
    given_whole = whole_leaves(graph, declared)
    for drawn, compiler in _MANNERS:
        subject = subject_of(graph, model, example_inputs, loss_fn, drawn=drawn, whole=bool(given_whole))
        subject = replace(subject, compiler=compiler)
        with unchanged(subject.roots) as state:
            try:
                found = _checked(graph, subject, state)
                state.restore()
                if given_whole and (why := why_parts_differ(graph, subject, state)):
                    raise parts_need_more(graph, given_whole, why)
                return found
            except _CannotRunError as error:
                failure, last = failure or error.reason, error.reason
    try:
        return _checked_in_float64(graph, subject)
    except _CannotRunError as error:
        log.debug("fidelity: no step in float64 either: %s", error)
        failing = why_backward_fails(graph, last) if has_example(example_inputs) else []
        if failing and why_backward_fails(graph, error.reason):
            raise backward_fails(graph, failing) from last
    lines = str(failure).strip().splitlines() or ["no message"]
    return _noted(
        graph,
        f"not compared with its trace: a step on the example fails, {type(failure).__name__}: {lines[0]}",
    )


def has_values(model: nn.Module) -> bool:
    """Tell whether all tensors of the model have values."""
    return not any(
        tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers())
    )


def _checked_in_float64(graph: OpGraph, subject: EagerSubject) -> OpGraph:
    """Compare a model that does not run in its own types, such as one whose loss has weights of another type."""
    with widened_to_float64(graph, subject) as (widened, state):
        found = _checked(in_float64(graph), widened, state)
    return replace(graph, notes=found.notes)


class _CannotRunError(Exception):
    """A step of the eager model raised ``reason``."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass
class _Seen:
    """Everything that the first step showed beside its numbers."""

    draws: Draws
    hooks: list[str]
    changes: tuple[Change, ...]
    seconds: float
    """The time that it took."""

    @property
    def slow(self) -> bool:
        """True where no further step is made but that of the graph, and that of a difference in question."""
        return self.seconds > MOST_SECONDS

    @property
    def slow_in_float64(self) -> bool:
        """True where steps in float64 are made for nothing but a difference in question."""
        return self.seconds * WIDER > MOST_SECONDS


def _checked(graph: OpGraph, subject: EagerSubject, state: PythonState) -> OpGraph:
    """Run the steps of the table above, and return the graph with its notes."""
    model = subject.model
    tensor_hooks: dict[str, None] = {}
    drawing: list[Callable[[Any], Any]] = []
    with (
        watch_draws() as draws,
        watch_tensor_hooks(model, tensor_hooks),
        drawing_hooks(model, drawing),
        RefuseWithoutValues(graph.model_name),
    ):
        began = time.perf_counter()
        first = _run(subject)
        seconds = time.perf_counter() - began
    seen = _Seen(draws, [*module_hooks(model), *tensor_hooks], state.changes(), seconds)
    if drawing:
        raise hook_draws(graph, drawing[0])
    written = state.written()
    if written:
        raise writes_parameters(graph, model, written)
    if not seen.slow and (why := _repeat_differs(graph, subject, state, seen, first)):
        raise depends_on_state(graph, model, seen.draws, seen.changes, why)
    notes = [f"{n}; others change nothing here" if n.startswith(DRAWN) else n for n in graph.notes]
    state.restore()
    report_phase("comparing the trace with the model: a step of the trace")
    why = _graph_differs(graph, subject, state, seen, first)
    if seen.hooks and why:
        state.restore()
        with without_gradient_hooks(model):
            if lost := difference(first, _run(subject), 0.0):
                raise hooks_matter(graph, seen.hooks, lost)
    if seen.hooks:
        notes = [f"{n}; they change no gradient here" if n.startswith(NOT_RUN) else n for n in notes]
    if why and random_ops(without_dropout(graph)[0]):
        op = random_ops(without_dropout(graph)[0])[0]
        return _noted(
            replace(graph, notes=tuple(notes)),
            f"not compared with its trace in full: {op} draws random numbers",
        )
    took = f"compared with its trace in one step of {format_seconds(seconds)}"
    if seen.slow:
        notes.append(f"{took}: whether Python state changes a later one was not tried")
    elif seen.slow_in_float64 and _tolerance(subject) in NARROW:
        notes.append(f"{took}, in 16 bits alone: they hide a difference of some percent")
    if why:
        state.restore()
        with watch_switched_gradients() as switched:
            _run(subject)
        raise computes_something_else(graph, model, why, switched, seen.changes)
    return replace(graph, notes=tuple(notes))


def _repeat_differs(
    graph: OpGraph, subject: EagerSubject, state: PythonState, seen: _Seen, first: StepResult
) -> str:
    """Say what a later step computes otherwise than the first, whose state is still there; "" if nothing."""
    own, fits = _tolerance(subject), _fits_in_float64(subject.model)
    why = _later_step_differs(graph, subject, state, seen, first, 0.0 if fits else own)
    if not fits or not (why or (seen.changes and own in NARROW and not seen.slow_in_float64)):
        return why
    log.debug("fidelity: %s; comparing in float64", why or "16 bits hide what an attribute does")
    state.restore()
    try:
        with widened_to_float64(graph, subject) as (widened, widened_state):
            return _later_step_differs(graph, widened, widened_state, seen, _run(widened), tolerance(set()))
    except _CannotRunError as error:
        log.debug("fidelity: no step in float64: %s", error)
    state.restore()
    return _later_step_differs(graph, subject, state, seen, _run(subject), own)


def _later_step_differs(
    graph: OpGraph, subject: EagerSubject, state: PythonState, seen: _Seen, first: StepResult, allowed: float
) -> str:
    """Say what a step computes otherwise after one that left its Python state; ``first`` is what it computes before."""
    if seen.changes and (other := another_batch(graph, subject)):
        state.restore()
        try:
            _run(other)
        except _CannotRunError as error:
            log.debug("fidelity: no step on other samples: %s", error)
            state.restore()
            _run(subject)
    manners: list[contextlib.AbstractContextManager[None]] = [contextlib.nullcontext()]
    if seen.draws:
        manners = [extreme_draws(high=True), extreme_draws(high=False), *manners * (DRAWS - 3)]
    for manner in manners:
        state.restore_registered()
        with manner:
            second = _run(subject)
        if why := difference(first, second, allowed):
            return why
    return ""


def _graph_differs(
    graph: OpGraph, subject: EagerSubject, state: PythonState, seen: _Seen, first: StepResult
) -> str:
    """Say what the graph computes otherwise, in the model's types and in float64 as well; "" if nothing."""
    plain, _ = without_dropout(graph)
    own = _tolerance(subject)
    why = found = "the types of a step are not the model's own"
    if graph.precision.casts_to is None:
        try:
            numbers = graph_step(plain, subject, lambda tensor: tensor)
            why = difference(first, numbers, own)
            closely = own in NARROW and not seen.slow_in_float64
            found = why or (difference(first, numbers, 0.0) if closely else "")
        except Exception as error:  # noqa: BLE001 an op of the user may raise anything
            why = found = f"a step on the example fails: {type(error).__name__}: {error}"
        if not found or not (why or _fits_in_float64(subject.model)):
            return ""
    state.restore()
    log.debug("fidelity: %s; comparing in float64", found)
    try:
        with widened_to_float64(graph, subject) as (widened, _):
            computed = graph_step(in_float64(plain), widened, wide)
            return difference(_run(widened), computed, tolerance(set()))
    except (_CannotRunError, RuntimeError, TypeError, NotImplementedError) as error:
        log.debug("fidelity: no step in float64: %s", error)
        return why if graph.precision.casts_to is None else ""


def _tolerance(subject: EagerSubject) -> float:
    """Return the tolerance of the types in which the model runs."""
    tensors = (*subject.model.parameters(), *subject.leaves.values())
    return tolerance({tensor.dtype for tensor in tensors})


def _fits_in_float64(model: nn.Module) -> bool:
    return sum(p.numel() for p in model.parameters()) * 8 <= MOST_BYTES


def _run(subject: EagerSubject) -> StepResult:
    try:
        with torch_quiet():
            return eager_step(subject)
    except PartitionerError:
        raise
    except Exception as error:
        raise _CannotRunError(error) from error


def _noted(graph: OpGraph, note: str) -> OpGraph:
    return replace(graph, notes=(*graph.notes, note))


_COMPILER = os.path.join(TORCH, "_dynamo") + os.sep


class RefuseWithoutValues(TorchFunctionMode):
    """Within it, eager code that computes with a tensor of a trace, kept by user code, is refused with its line."""

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self.model_name = model_name

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = next((value for value in tree_leaves((args, kwargs)) if isinstance(value, FakeTensor)), None)
        if found is not None and not _in_compiler():
            raise _remembered(self.model_name, found, caller())
        return func(*args, **(kwargs or {}))


def _in_compiler() -> bool:
    """Tell whether torch's compiler called: an op that compiles itself looks at its operands without values."""
    frame = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_COMPILER):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _remembered(model_name: str, tensor: Tensor, place: str) -> ModelError:
    return ModelError(
        f"code of {model_name} remembers a tensor of its trace, which has no values",
        [f"{place} computes with one of shape {tuple(tensor.shape)}, kept where it cannot be put back"],
        [
            "empty the cache that holds it, which the model itself cannot use either",
            "keep it on the module (self.cache = {}), in a dictionary of the same file, or by functools.lru_cache",
        ],
    )
