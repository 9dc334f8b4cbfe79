"""Every way to shard an op that holds on a drawn example: all placements of operands, and what comes out.

operands   R, S(d) of any dimension that an axis of 2 divides, P (floats only): every combination
outputs    whichever of R, S(d), P the ranks' results turn out to be
gradients  of operands taken R: equal on all ranks (R), or parts of a sum (~)
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.shard.rules.local import has_local_sizes
from passes.shard.rules.shapes import operand_names
from passes.shard.rules.simulate import (
    RankResult,
    Trial,
    difference,
    gather,
    gradient_from,
    is_float,
    no_gradients,
    run_shards,
)
from passes.shard.words import Choice, Need

AXIS = 2
MOST_COMBINATIONS = 4096
R, P = Replicate(), Partial()


def choices_that_hold(trial: Trial, seconds: float) -> list[Choice]:
    """Find the choices that hold on an axis of 2. Stops after ``seconds`` of a processor with what was found by then."""
    ends = time.thread_time() + seconds
    found: list[Choice] = []
    for placements in combinations(trial):
        if time.thread_time() > ends:
            break
        for supposed in _supposed_outputs(trial):
            choice = _whatever_holds(trial, placements, supposed)
            if choice is not None and choice not in found:
                found.append(choice)
    return found


def combinations(trial: Trial) -> Iterator[tuple[Placement, ...]]:
    """Yield placements of the operands. If there are too many, the tensors of a list are all placed alike."""
    options = [_options(value) for value in trial.values]
    ties = list(range(len(options)))
    if math.prod(map(len, options)) > MOST_COMBINATIONS:
        names = operand_names(trial.node)
        ties = [
            next(j for j in ties if names[j] == names[i] and trial.values[j].shape == trial.values[i].shape)
            for i in ties
        ]
    leaders = sorted(set(ties))
    every = itertools.product(*(options[leader] for leader in leaders))
    for chosen in itertools.islice(every, MOST_COMBINATIONS):
        of = dict(zip(leaders, chosen, strict=True))
        yield tuple(of[tie] for tie in ties)


def _options(value: Tensor) -> list[Placement]:
    shards: list[Placement] = [Shard(d) for d, size in enumerate(value.shape) if size and size % AXIS == 0]
    return [R, *shards, *([P] if is_float(value) else [])]


def _supposed_outputs(trial: Trial) -> Iterator[Sequence[Placement]]:
    """Yield shardings of the output that local sizes among the arguments may follow from; most ops need none."""
    yield [R] * len(trial.outputs)
    if has_local_sizes(trial.node):
        for d, size in enumerate(trial.outputs[0].shape):
            if size and size % AXIS == 0:
                yield [Shard(d)]


def _whatever_holds(
    trial: Trial, placements: Sequence[Placement], supposed: Sequence[Placement]
) -> Choice | None:
    """Return the choice with these operands, if the ranks' results are anything of the whole op's."""
    needs = tuple(Need(placement) for placement in placements)
    outputs = _outputs(trial, Choice(needs, tuple(supposed)))
    if outputs is None:
        return None
    if has_local_sizes(trial.node) and isinstance(supposed[0], Shard) and outputs[0] != supposed[0]:
        return None
    choice = Choice(needs, outputs)
    results = _attempt(lambda: list(run_shards(trial, [choice], [AXIS]).values()))
    if results is None:
        return None
    found = [
        need if of_whole is None else _with_gradient(trial, need, results, i)
        for i, (need, of_whole) in enumerate(zip(needs, trial.gradients, strict=True))
    ]
    return None if None in found else Choice(tuple(need for need in found if need is not None), outputs)


def _outputs(trial: Trial, choice: Choice) -> tuple[Placement, ...] | None:
    with no_gradients(trial.node.target):
        results = _attempt(lambda: list(run_shards(trial, [choice], [AXIS], backward=False).values()))
    if results is None or any(len(r.outputs) != len(trial.outputs) for r in results):
        return None
    found = [
        next((p for p in _could_be(parts[0], whole) if holds(parts, p, whole, trial.tolerance)), None)
        for whole, *parts in zip(trial.outputs, *(r.outputs for r in results), strict=True)
    ]
    return None if None in found else tuple(p for p in found if p is not None)


def _could_be(part: Tensor, whole: Tensor) -> Iterator[Placement]:
    """Yield the placements that an output may have, judged by the shape of one rank's part."""
    if part.shape == whole.shape:
        yield R
        if whole.dtype != torch.bool:
            yield P
        return
    for d in range(whole.dim() if part.dim() == whole.dim() else 0):
        if part.shape[d] * AXIS == whole.shape[d]:
            yield Shard(d)


def _with_gradient(trial: Trial, need: Need, results: Sequence[RankResult], operand: int) -> Need | None:
    parts = [g for r in results if (g := r.gradients[operand]) is not None]
    whole = trial.gradients[operand]
    assert whole is not None
    replicated = isinstance(need.placement, Replicate)
    for candidate in (need, Need(R, partial_gradient=True)) if replicated else (need,):
        if holds(parts, gradient_from(candidate), whole, trial.tolerance):
            return candidate
    return None


def holds(parts: Sequence[Tensor], placement: Placement, whole: Tensor, tolerance: float) -> bool:
    """Tell whether the ranks' parts are the whole tensor in this placement."""
    try:
        together = gather(parts, placement, tolerance)
    except ValueError:
        return False
    return difference(together, whole, tolerance) is None


def _attempt(run: Callable[[], list[RankResult]]) -> list[RankResult] | None:
    """Run the op on shards; None if it does not take them: whatever an unknown op raises says so."""
    try:
        return run()
    except Exception:  # noqa: BLE001
        return None
