"""Opaque parts on real arguments: those that they are given when the live model runs on its own batch.

the batch once, twice and three times in a row      sizes that follow from the batch's
its first sample instead of every other             sizes that follow from numbers are others then
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cost_models.errors import ModelError
from cost_models.units import listed
from passes.costs.opaque import measure
from passes.trace.batch import BatchDims, forward_arguments, map_tensors
from passes.trace.export import cast_floating
from passes.trace.opaque.code import OpaqueCode, of_function, state_of
from passes.trace.opaque.cross import NeedsSamplesError, OpaqueParts
from passes.trace.opaque.mark import ACTIVE
from passes.trace.opaque.parts import Parts
from passes.trace.opaque.sizes import Observed, apart, applied, observe_real
from passes.trace.python_state import unchanged
from runtime.ops.opaque import Baked, Opaque, Slot, Tree
from runtime.ops.opaque_code import LOSS
from runtime.user_code import innermost_module

logger = logging.getLogger("partitioner")

Calls = dict[str, list[Observed]]
"""Runs of each part, call by call."""


def samples_of(
    parts: Parts,
    needed: NeedsSamplesError,
    crossing: OpaqueParts,
    batch: Any,
    guess: BatchDims,
    dtype: torch.dtype | None,
) -> Parts:
    """Run the live model, and return ``parts`` with what they did in it; raises ModelError without values.

    ``dtype``: the type that the trace casts inputs and parameters to, if it does.
    """
    held = (*parts.model.named_parameters(), *parts.model.named_buffers())
    meta = [name for name, tensor in held if tensor.is_meta]
    lines = str(needed.error).splitlines() or ["no message"]
    why = f"on tensors without values it ends with {type(needed.error).__name__}: {lines[0]}"
    if meta or needed.name in parts.samples:
        because = [why, *([f"{meta[0]} has no values: it is on the meta device"] if meta else [])]
        unknown = ModelError(
            f"nobody can tell what {needed.called} returns",
            because,
            ["plan with a model that has weights: then the part is run", "write it in tensor operations"],
        )
        parts.refuse(needed.name, unknown)
    functions = needed.name not in crossing.modules and needed.name != LOSS
    runs = []
    for change in _CHANGES:
        try:
            runs.append(_run(parts, crossing, _resized(batch, guess, change), functions, dtype))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            lines = str(error).splitlines() or ["no message"]
            because, ways = _failing_call(batch, guess, change, f"{type(error).__name__}: {lines[0]}")
            failed = ModelError(f"nobody can tell what {needed.called} returns", [why, *because], ways)
            parts.refuse(needed.name, failed)
    samples = {
        name: [[run[name][call] for run in runs] for call in range(len(runs[0][name]))]
        for name in runs[0]
        if all(len(run.get(name, ())) == len(runs[0][name]) for run in runs)
    }
    return replace(parts, samples={**parts.samples, **samples})


_CHANGES: dict[int | None, str] = {
    1: "as it is",
    2: "twice in a row",
    3: "three times in a row",
    None: "all like its first sample",
}
"""Batches that the model is run on, and their words."""


def _failing_call(batch: Any, guess: BatchDims, change: int | None, said: str) -> tuple[list[str], list[str]]:
    """Say whose call ended with ``said``, and what to do; of a call with other sizes, which inputs belong together."""
    if change == 1:
        return [f"the model itself, run on example_inputs, ends with {said}"], [
            "call the model on example_inputs yourself: if that fails too, the inputs do not fit it"
        ]
    whole: dict[str, tuple[int, ...]] = {}
    names = iter(guess.dims)

    def note(_: tuple[str, ...], leaf: Tensor) -> Tensor:
        name = next(names)
        if guess.dims[name] is None:
            whole[name] = tuple(leaf.shape)
        return leaf

    map_tensors(batch, note)
    cut = listed(name for name, dim in guess.dims.items() if dim is not None)
    rows = {
        n: s[0] // guess.size for n, s in whole.items() if s and s[0] > guess.size and not s[0] % guess.size
    }
    beside = f", and {listed(whole)} unchanged" if whole else ""
    return [
        *(
            f"{n}, {whole[n]}, may be {each} rows for each of {guess.size} samples"
            for n, each in rows.items()
        ),
        f"the model itself runs on example_inputs; our call, with {cut} {_CHANGES[change]}{beside}, ends with {said}",
    ], [
        "what belongs to a sample needs a dimension that counts samples: "
        + (
            listed(f"{n} as {(guess.size, each, *whole[n][1:])}" for n, each in rows.items())
            + ", put together in forward"
            if rows
            else "in every input"
        ),
        "make such inputs outside, and give the model what follows from them (features, embeddings)",
    ]


def _resized(batch: Any, guess: BatchDims, times: int | None) -> Any:
    """Return the batch ``times`` in a row; None for its first sample in every place."""
    names = iter(guess.dims)

    def change(path: tuple[str, ...], leaf: Tensor) -> Tensor:
        dim = guess.dims[next(names)]
        if dim is None:
            return leaf.clone()
        if times is None:
            return leaf.index_select(dim, torch.zeros(leaf.shape[dim], dtype=torch.long)).clone()
        return torch.cat([leaf] * (times * (2 if guess.size == 1 else 1)), dim)

    return map_tensors(batch, change)


def _run(
    parts: Parts, crossing: OpaqueParts, batch: Any, functions: bool, dtype: torch.dtype | None
) -> Calls:
    calls: Calls = {}
    model, loss_fn = parts.model, parts.loss_fn
    with (
        unchanged({"": model}, parameters=False),
        torch.enable_grad(),
        _recording(crossing, calls, functions, dtype),
    ):
        args, kwargs = forward_arguments(model, batch, loss_fn is not None)
        output = model(*args, **kwargs)
        if loss_fn is not None:
            if LOSS in parts.why:
                assert crossing.loss is not None
                # The loss gets the batch as it was given, and outputs in 32 bits where the model computes in 16.
                judged = output if dtype is None or dtype.itemsize < 4 else cast_floating(output, dtype)
                calls.setdefault(LOSS, []).append(_observed(crossing.loss, [], (judged, batch), {}, None))
            loss_fn(output, batch)
    return calls


def _observed(
    part: OpaqueCode, state: Sequence[Tensor], args: Any, kwargs: Any, dtype: torch.dtype | None
) -> Observed:
    """Run a part on its own operands. ``dtype``: the type that the trace casts inputs and parameters to."""

    def cast(tensor: Tensor, buffer: bool = False) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() and not buffer else tensor.dtype
        return tensor.detach().to(wanted).requires_grad_(tensor.requires_grad)

    leaves, spec = pytree.tree_flatten((args, kwargs))
    structure = Tree.of(spec)
    assert structure is not None  # args and kwargs are one
    inputs = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
    place = {id(tensor): index for index, tensor in enumerate(inputs)}
    arguments = tuple(Slot(place[id(leaf)]) if isinstance(leaf, Tensor) else Baked(leaf) for leaf in leaves)
    cpu = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    opaque = Opaque(
        part.name, part.source, part.code, arguments, structure, (), (), (), False, cpu, part.text, part.name
    )
    tensors = [*map(cast, inputs), *(cast(tensor, not isinstance(tensor, nn.Parameter)) for tensor in state)]
    seen = observe_real(opaque, tensors)
    try:
        work = apart(lambda: measure(opaque, tensors))
    except Exception as error:  # noqa: BLE001 - control flow of torch does not run while kernels are counted
        logger.debug("cannot measure %s: %s", part.name, error)
        return seen
    return replace(seen, work=work)


@contextlib.contextmanager
def _recording(
    crossing: OpaqueParts, calls: Calls, functions: bool, dtype: torch.dtype | None
) -> Iterator[None]:
    """Record what every opaque part is called with; the calls of Functions and decorated functions if asked for."""

    def stand_in(path: str, module: nn.Module) -> Callable[..., Any]:
        original, part = module.forward, crossing.modules[path]

        def forward(*args: Any, **kwargs: Any) -> Any:
            state = state_of(part.code, module)
            calls.setdefault(path, []).append(_observed(part, state, args, kwargs, dtype))
            return original(*args, **kwargs)

        return forward

    def note(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        path = innermost_module(crossing.model)
        name = ".".join(filter(None, (path, getattr(function, "__name__", "function"))))
        calls.setdefault(name, []).append(
            _observed(of_function(name, function), [], tuple(args), kwargs, dtype)
        )

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            note(cls, args, kwargs)
        return applied(cls)(*args, **kwargs)

    def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        note(function, args, kwargs)
        return function.__wrapped__(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for path in crossing.modules:
            module = crossing.model.get_submodule(path)
            stack.enter_context(mock.patch.dict(module.__dict__, {"forward": stand_in(path, module)}))
        if functions:
            stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        stack.enter_context(mock.patch.object(ACTIVE, "cross", call))
        yield
