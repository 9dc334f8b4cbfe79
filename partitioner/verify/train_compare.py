"""A training run of all ranks, held against the plain loop, in the order in which the run meets things.

In float64, with d the difference of two tensors and ‖·‖ the 2-norm, these agree:

    loss, norm of gradients     |d| ≤ 1e-9 · max(|expected|, 1)
    parameter p                 ‖d‖ ≤ 1e-9 · max(‖p‖, lr · √n)
    buffer b                    ‖d‖ ≤ 1e-9 · max(‖b‖, 1)
    optimizer state s, key k    ‖d‖ ≤ 1e-9 · max(‖s‖, 1e-6 · ‖all of key k‖)
    samples, rates, steps       equal

In the plan's own types both worlds round. Two computations that round in the same types and add in other orders are
equally far from float64 in the mean, so the ranks may be ``ORDERS`` times as far from it as the plain loop in these types
is, which is measured; and at least u times the size of what is compared, u being the spacing of the types' numbers at 1. A
single number of the plain loop may be right by chance: of losses and norms, the step in which it is furthest off counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partitioner.verify.compare import ORDERS, TOLERANCE
from partitioner.verify.plain_loop import PlainState, PlainStep
from partitioner.verify.train_rank import Held, RankRun
from partitioner.verify.train_report import TrainComparison
from runtime.state.state_view import StateView

SMALL = 1e-6
"""The part of all of a kind of state below which a tensor of it counts as that large."""


@dataclass(frozen=True)
class Expected:
    """The plain loop's part of one run. ``own``: the plain loop in the plan's types; ``spacing``: theirs at 1."""

    steps: Sequence[PlainStep]
    samples: Sequence[tuple[int, ...]]
    """Digests of the samples of each step."""
    learning_rate: float
    own: Sequence[PlainStep] | None = None
    spacing: float = 0.0
    views: Mapping[str, StateView] = field(default_factory=dict)
    """Buffers of the model that no rank holds: they are views of what is trained."""

    def state(self, step: int) -> PlainState:
        state = self.steps[step - 1].state
        assert state is not None
        return state

    def number(self, of: Callable[[PlainStep], float], step: int) -> tuple[float, float]:
        """Return a number of ``step``, and the error that is allowed."""
        value = of(self.steps[step - 1])
        size = max(abs(value), 1.0)
        if self.own is None:
            return value, TOLERANCE * size
        errors = [abs(of(own) - of(plain)) for own, plain in zip(self.own, self.steps, strict=True)]
        return value, max(ORDERS * max(errors), self.spacing * size)

    def tensor(self, kind: str, name: str, key: str, step: int) -> tuple[Tensor, Tensor | None] | None:
        """Return a tensor after ``step``, and the plain loop's in the plan's own types; None if it has none."""
        value = _tensor(self.state(step), kind, name, key)
        if value is None:
            return None
        own = None if self.own is None else self.own[step - 1].state
        return value, None if own is None else _tensor(own, kind, name, key)

    def size(self, kind: str, key: str, value: Tensor, step: int) -> float:
        """Return the size that an error is measured by."""
        norm = float(value.norm())
        if kind == "buffer":
            return max(norm, 1.0)
        if kind == "optimizer state":
            states = self.state(step).optimizer.values()
            return max(
                norm, SMALL * math.sqrt(sum(float(_double(s[key]).norm()) ** 2 for s in states if key in s))
            )
        return max(norm, self.learning_rate * math.sqrt(value.numel()))


def compare_run(
    run: str,
    ranks: Sequence[RankRun],
    expected: Expected,
    *,
    first: int,
    stored: int | None = None,
    loaded: int | None = None,
    marks: Sequence[tuple[float, ...]] | None = None,
) -> Iterator[TrainComparison]:
    """Compare a run whose first step is number ``first``. ``stored``, ``loaded``: the step whose state it saved or read.

    ``marks``: what each rank's generators were about to draw when the state was saved, where they are restored.
    """
    if loaded is not None:
        for rank, told in enumerate(ranks):
            off = float(abs((told.loaded_step or 0) - loaded))
            said = f"the step is {told.loaded_step}, saved was {loaded}" if off else ""
            yield TrainComparison(run, loaded, rank, "loaded step", "", off, 0.0, said)
        yield from _compare_state(f"{run}, after loading", ranks, expected, loaded, [r.loaded for r in ranks])
        for rank, (told, mark) in enumerate(zip(ranks, marks or [], strict=False)):
            off = float(told.marks != mark)
            said = "they draw other numbers than they would have when the state was saved" if off else ""
            yield TrainComparison(run, loaded, rank, "random states", "", off, 0.0, said)
    for rank, told in enumerate(ranks):
        for line in told.narrow_sums:
            name, _, said = line.partition(" ")
            yield TrainComparison(run, first, rank, "gradient", name, 1.0, 0.0, f"it {said}")
    last = max(told.steps[-1].number for told in ranks)
    for at, step in enumerate(range(first, last + 1)):
        yield from _compare_samples(run, ranks, expected.samples[step - 1], at, step)
        numbers: list[tuple[str, Callable[[PlainStep], float]]] = [
            ("loss", lambda plain: plain.loss),
            ("gradient norm", lambda plain: plain.norm),
        ]
        for kind, of in numbers:
            value, allowed = expected.number(of, step)
            for rank, told in enumerate(ranks):
                own = told.steps[at].loss if kind == "loss" else told.steps[at].norm
                error = 0.0 if own == value else abs(own - value)
                said = (
                    "" if error <= allowed else f"it is {own!r}, expected {value!r} (allowed {allowed:.1e})"
                )
                yield TrainComparison(run, step, rank, kind, "", error, allowed, said)
        wanted = expected.steps[step - 1].rates
        for rank, told in enumerate(ranks):
            off = math.inf
            if len(told.steps[at].rates) == len(wanted):
                off = max(abs(a - b) for a, b in zip(told.steps[at].rates, wanted, strict=True))
            allowed = TOLERANCE * max(wanted)
            said = "" if off <= allowed else f"they are {told.steps[at].rates}, expected {wanted}"
            yield TrainComparison(run, step, rank, "learning rates", "", off, allowed, said)
        if step == stored:
            yield from _compare_state(run, ranks, expected, step, [told.loaded for told in ranks])
        if step == last:
            yield from _compare_state(run, ranks, expected, step, [told.last for told in ranks])


def _compare_samples(
    run: str, ranks: Sequence[RankRun], wanted: tuple[int, ...], at: int, step: int
) -> Iterator[TrainComparison]:
    """Compare what ranks were given: those of one part the same, all parts together each sample of the batch once."""
    parts: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank, told in enumerate(ranks):
        given = told.steps[at].samples
        if given is None:
            continue
        first, others = parts.setdefault(told.data_rank, (rank, given))
        off = float(given != others)
        said = f"it has other samples than rank {first}, which takes the same part" if off else ""
        yield TrainComparison(run, step, rank, "samples", "", off, 0.0, said)
    found = Counter(sample for _, given in parts.values() for sample in given)
    expected = Counter(wanted)
    missing, extra = (expected - found).total(), (found - expected).total()
    twice = sum(count - expected[sample] for sample, count in found.items() if 0 < expected[sample] < count)
    said = ""
    if missing or extra:
        said = f"of the batch's {len(wanted)} samples {missing} are missing, {twice} were given twice"
        said += f", and {extra - twice} are of other batches" if extra > twice else ""
    yield TrainComparison(run, step, None, "samples", "", float(missing + extra), 0.0, said)


def _compare_state(
    run: str, ranks: Sequence[RankRun], expected: Expected, step: int, held: Sequence[Sequence[Held]]
) -> Iterator[TrainComparison]:
    """Compare every block that ranks hold after ``step``, and look for elements that nobody holds."""
    here: dict[tuple[str, str, str], Tensor] = {}
    for rank, tensors in enumerate(held):
        for item in tensors:
            if expected.own is not None and item.kind == "optimizer state":
                continue  # the plain loop's is of the same sums, whose error parameters show
            pair = expected.tensor(item.kind, item.name, item.key, step)
            label = item.name + (f".{item.key}" if item.key else "")
            if pair is None:
                yield TrainComparison(
                    run, step, rank, item.kind, label, math.inf, 0.0, "the plain loop has no such tensor"
                )
                continue
            value, own = pair
            seen = here.setdefault(
                (item.kind, item.name, item.key), torch.zeros(value.shape, dtype=torch.bool)
            )
            if item.block is not None:
                value, own = item.block.of(value), None if own is None else item.block.of(own)
                item.block.of(seen).fill_(True)
            else:
                seen.fill_(True)
            if value.shape != item.value.shape:
                said = f"its shape is {tuple(item.value.shape)}, expected {tuple(value.shape)}"
                yield TrainComparison(run, step, rank, item.kind, label, math.inf, 0.0, said)
                continue
            wide = _double(value)
            error = _distance(item.value, value)
            size = expected.size(item.kind, item.key, wide, step)
            allowed = TOLERANCE * size
            if own is not None:
                allowed = max(ORDERS * _distance(own, value), expected.spacing * size)
            yield TrainComparison(run, step, rank, item.kind, label, error, allowed)
    kinds: dict[str, Mapping[str, Any]] = {
        "parameter": expected.state(step).parameters,
        "buffer": {n: b for n, b in expected.state(step).buffers.items() if n not in expected.views},
    }
    yield from _compare_views(run, expected, step)
    wanted = [(kind, name, "") for kind, tensors in kinds.items() for name in tensors]
    if expected.own is None:
        wanted += [
            ("optimizer state", n, key) for n, keys in expected.state(step).optimizer.items() for key in keys
        ]
    for kind, name, key in wanted:
        seen_here = here.get((kind, name, key))
        if seen_here is None or not bool(seen_here.all()):
            lost = "all" if seen_here is None else f"{int((~seen_here).sum())} of {seen_here.numel()}"
            label = name + (f".{key}" if key else "")
            said = f"{lost} of its elements are on no rank"
            yield TrainComparison(run, step, None, kind, label, math.inf, 0.0, said)


def _compare_views(run: str, expected: Expected, step: int) -> Iterator[TrainComparison]:
    """Compare the plain loop's buffers with the views of its parameters, as which whoever has these has the buffers."""
    if expected.own is not None:
        return  # a plain loop in other types than the model's has other memory for its parameters
    state = expected.state(step)
    held = {**state.parameters, **state.buffers}
    for name, view in expected.views.items():
        if name in state.buffers:
            value = state.buffers[name]
            allowed = TOLERANCE * expected.size("buffer", "", _double(value), step)
            error = _distance(value, view.of(held[view.owner]))
            yield TrainComparison(run, step, None, "buffer", name, error, allowed)


def compare_saved(
    run: str, saving: Sequence[RankRun], resumed: Sequence[RankRun]
) -> Iterator[TrainComparison]:
    """Compare each rank's state after loading with what it held when it saved: the very same numbers."""
    for rank, (before, after) in enumerate(zip(saving, resumed, strict=True)):
        own = {(item.kind, item.name, item.key, item.block): item.value for item in before.loaded}
        for item in after.loaded:
            label = item.name + (f".{item.key}" if item.key else "")
            value = own.get((item.kind, item.name, item.key, item.block))
            same = value is not None and torch.equal(value, item.value)
            said = "" if same else f"{item.kind} {label} is not what this rank held when it saved"
            yield TrainComparison(
                run, after.loaded_step or 0, rank, "saved state", label, float(not same), 0.0, said
            )


def _tensor(state: PlainState, kind: str, name: str, key: str) -> Tensor | None:
    if kind == "optimizer state":
        return state.optimizer.get(name, {}).get(key)
    return (state.buffers if kind == "buffer" else state.parameters).get(name)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((_double(a) - _double(b)).norm())


def _double(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)
