"""A training run of all ranks, held against the plain loop, in the order in which the run meets things.

In float64 quantities agree as ``passes.fidelity.agree`` says. In the plan's own types both worlds round. Two computations
that round in the same types and add in other orders are equally far from float64 in the mean, so the ranks may be
``ORDERS`` times as far from it as the plain loop in these types is, which is measured; and at least u times the size of
what is compared, u being the spacing of the types' numbers at 1. A single number of the plain loop may be right by chance:
of losses and norms, the step in which it is furthest off counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partitioner.verify.report import TrainComparison
from partitioner.verify.rounding import ORDERS
from partitioner.verify.train_rank import LEARNING_RATE, RankRun, RankTensor
from passes.fidelity.agree import TOLERANCE, StepResult, distance, norm, size_of
from runtime.state.state_view import StateView


@dataclass(frozen=True)
class ExpectedRun:
    """The plain loop's part of one run. ``own``: the plain loop in the plan's types; ``spacing``: theirs at 1."""

    steps: Sequence[StepResult]
    samples: Sequence[tuple[int, ...]]
    """Digests of the samples of each step."""
    own: Sequence[StepResult] | None = None
    spacing: float = 0.0
    views: Mapping[str, StateView] = field(default_factory=dict)
    """Buffers of the model that no rank holds: they are views of what is trained."""

    def number(self, of: Callable[[StepResult], float], step: int) -> tuple[float, float]:
        """Return a number of ``step``, and the error that is allowed."""
        value = of(self.steps[step - 1])
        size = max(abs(value), 1.0)
        if self.own is None:
            return value, TOLERANCE * size
        errors = [abs(of(own) - of(plain)) for own, plain in zip(self.own, self.steps, strict=True)]
        return value, max(ORDERS * max(errors), self.spacing * size)


_NUMBERS: Mapping[str, Callable[[StepResult], float]] = {
    "loss": lambda step: step.loss or 0.0,
    "gradient norm": lambda step: step.norm,
}


def line(
    run: str,
    step: int,
    rank: int | None,
    kind: str,
    error: float,
    said: str = "",
    *,
    name: str = "",
    allowed: float = 0.0,
) -> TrainComparison:
    """Return a comparison. ``said``: what differs, if it does."""
    return TrainComparison(kind, name, error, allowed, run, step, rank, "" if error <= allowed else said)


def compare_run(
    run: str,
    ranks: Sequence[RankRun],
    expected: ExpectedRun,
    *,
    first: int,
    stored: int | None = None,
    loaded: int | None = None,
    marks: Sequence[tuple[float, ...]] = (),
) -> Iterator[TrainComparison]:
    """Compare a run whose first step is number ``first``. ``stored``, ``loaded``: the step whose state it saved or read.

    ``marks``: what each rank's generators were about to draw when the state was saved, where they are restored.
    """
    if loaded is not None:
        for rank, told in enumerate(ranks):
            off = float(abs((told.loaded_step or 0) - loaded))
            yield line(
                run, loaded, rank, "loaded step", off, f"the step is {told.loaded_step}, saved was {loaded}"
            )
        yield from _compare_state(f"{run}, after loading", expected, loaded, [r.loaded for r in ranks])
        said = "they draw other numbers than they would have when the state was saved"
        for rank, (told, mark) in enumerate(zip(ranks, marks, strict=False)):
            yield line(run, loaded, rank, "random states", float(told.marks != mark), said)
    for rank, told in enumerate(ranks):
        for narrow in told.narrow_sums:
            name, _, said = narrow.partition(" ")
            yield line(run, first, rank, "gradient", 1.0, f"it {said}", name=name)
    last = first + max(len(told.steps) for told in ranks) - 1
    for step in range(first, last + 1):
        steps = [told.steps[step - first] for told in ranks]
        parts = [(told.data_rank, told.samples[step - first]) for told in ranks]
        yield from _compare_samples(run, step, parts, expected.samples[step - 1])
        for kind, of in _NUMBERS.items():
            value, allowed = expected.number(of, step)
            for rank, at in enumerate(steps):
                own = of(at)
                error = 0.0 if own == value else abs(own - value)
                said = f"it is {own!r}, expected {value!r} (allowed {allowed:.1e})"
                yield line(run, step, rank, kind, error, said, allowed=allowed)
        rates = expected.steps[step - 1].rates
        for rank, at in enumerate(steps):
            off = math.inf
            if len(at.rates) == len(rates):
                off = max(abs(a - b) for a, b in zip(at.rates, rates, strict=True))
            said = f"they are {at.rates}, expected {rates}"
            yield line(run, step, rank, "learning rates", off, said, allowed=TOLERANCE * max(rates))
        if step == stored:
            yield from _compare_state(run, expected, step, [told.loaded for told in ranks])
        if step == last:
            yield from _compare_state(run, expected, step, [told.last for told in ranks])


def _compare_samples(
    run: str, step: int, parts: Sequence[tuple[int, tuple[int, ...] | None]], wanted: tuple[int, ...]
) -> Iterator[TrainComparison]:
    """Compare what ranks were given: those of one part the same, all parts together each sample of the batch once.

    ``parts``: number of the part and its samples, by rank.
    """
    seen: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank, (part, samples) in enumerate(parts):
        if samples is None:
            continue
        first, others = seen.setdefault(part, (rank, samples))
        said = f"it has other samples than rank {first}, which takes the same part"
        yield line(run, step, rank, "samples", float(samples != others), said)
    counts = Counter(sample for _, samples in seen.values() for sample in samples)
    expected = Counter(wanted)
    missing, extra = (expected - counts).total(), (counts - expected).total()
    twice = sum(count - expected[sample] for sample, count in counts.items() if 0 < expected[sample] < count)
    said = f"of the batch's {len(wanted)} samples {missing} are missing, {twice} were given twice"
    said += f", and {extra - twice} are of other batches" if extra > twice else ""
    yield line(run, step, None, "samples", float(missing + extra), said)


def _compare_state(
    run: str, expected: ExpectedRun, step: int, held: Sequence[Sequence[RankTensor]]
) -> Iterator[TrainComparison]:
    """Compare every block that ranks hold after ``step``, and look for elements that nobody holds.

    The optimizer's state in the plan's types is left out: it is of the same sums, whose error parameters show.
    """
    state = expected.steps[step - 1]
    own_state = None if expected.own is None else expected.own[step - 1]
    keys = {key for values in state.optimizer.values() for key in values}
    of_all = {key: math.hypot(*(norm(v[key]) for v in state.optimizer.values() if key in v)) for key in keys}
    seen: dict[tuple[str, str, str], Tensor] = {}
    for rank, tensors in enumerate(held):
        for item in tensors:
            if own_state is not None and item.kind == "optimizer state":
                continue
            value = _tensor(state, item.kind, item.name, item.key)
            own = None if own_state is None else _tensor(own_state, item.kind, item.name, item.key)
            error, allowed, said = math.inf, 0.0, "the plain loop has no such tensor"
            if value is not None:
                mask = torch.zeros(value.shape, dtype=torch.bool)
                mask = seen.setdefault((item.kind, item.name, item.key), mask)
                if item.block is not None:
                    value, own = item.block.of(value), None if own is None else item.block.of(own)
                    mask = item.block.of(mask)
                mask.fill_(True)
                said = f"its shape is {tuple(item.value.shape)}, expected {tuple(value.shape)}"
                if value.shape == item.value.shape:
                    error, said = distance(value, item.value), ""
                    all_of_key = of_all.get(item.key, 0.0)
                    size = size_of(item.kind, norm(value), value.numel(), LEARNING_RATE, all_of_key)
                    allowed = TOLERANCE * size
                    if own is not None:
                        allowed = max(ORDERS * distance(value, own), expected.spacing * size)
            yield line(run, step, rank, item.kind, error, said, name=item.label, allowed=allowed)
    yield from _compare_views(run, expected, step)
    wanted = [("parameter", name, "") for name in state.parameters]
    wanted += [("buffer", name, "") for name in state.buffers if name not in expected.views]
    if own_state is None:
        wanted += [
            ("optimizer state", name, key) for name, values in state.optimizer.items() for key in values
        ]
    for kind, name, key in wanted:
        covered = seen.get((kind, name, key))
        if covered is None or not bool(covered.all()):
            lost = "all" if covered is None else f"{int((~covered).sum())} of {covered.numel()}"
            said = f"{lost} of its elements are on no rank"
            yield line(run, step, None, kind, math.inf, said, name=name + (f".{key}" if key else ""))


def _compare_views(run: str, expected: ExpectedRun, step: int) -> Iterator[TrainComparison]:
    """Compare the plain loop's buffers with the views of its parameters, as which whoever has these has the buffers."""
    if expected.own is not None:
        return  # a plain loop in other types than the model's has other memory for its parameters
    state = expected.steps[step - 1]
    held = {**state.parameters, **state.buffers}
    for name, view in expected.views.items():
        if name in state.buffers:
            value = state.buffers[name]
            allowed = TOLERANCE * size_of("buffer", norm(value), value.numel(), LEARNING_RATE, 0.0)
            error = distance(value, view.of(held[view.owner]))
            yield line(run, step, None, "buffer", error, name=name, allowed=allowed)


def compare_saved(
    run: str, saving: Sequence[RankRun], resumed: Sequence[RankRun]
) -> Iterator[TrainComparison]:
    """Compare each rank's state after loading with what it held when it saved: the very same numbers."""
    for rank, (before, after) in enumerate(zip(saving, resumed, strict=True)):
        own = {(item.kind, item.name, item.key, item.block): item.value for item in before.loaded}
        for item in after.loaded:
            value = own.get((item.kind, item.name, item.key, item.block))
            off = float(value is None or not torch.equal(value, item.value))
            said = f"{item.kind} {item.label} is not what this rank held when it saved"
            yield line(run, after.loaded_step or 0, rank, "saved state", off, said, name=item.label)


def _tensor(state: StepResult, kind: str, name: str, key: str) -> Tensor | None:
    if kind == "optimizer state":
        return state.optimizer.get(name, {}).get(key)
    return (state.buffers if kind == "buffer" else state.parameters).get(name)
