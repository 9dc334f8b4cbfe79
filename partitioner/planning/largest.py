"""The largest batch, or sequence, that fits: sizes are searched, and the simulation of what was found decides.

    u ─► further     what is found for a batch, or nearly is, is simulated with others, quicker than by a search:
                     the largest that fits; then the next is searched. u: what all devices and micro-batches share equally
    + u 2u 4u …      ahead, until nothing is found that fits
    bisected         over multiples of u
    bisected         one by one, up to the next multiple of u

The peak need not grow with the size: a search may cut or recompute a larger batch in another way, and what divides it
grows and falls. With the size above the answer the search finds nothing: that it does not fit is proved by this where there
is one plan only, on one device without recomputation. Not every size beyond was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError, InfeasibleError, ModelError, TimeLimitError, UsageError
from cost_models.precision import Precision
from partitioner.planning.best import best_in_room, best_plan
from partitioner.planning.options import PlanOptions
from partitioner.record.data import PlanData, PlanT
from partitioner.report.intervals import risk_text
from passes.compile import Nearest, what_fits
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.search.hybrid.fix import read_fix
from passes.search.largest import bisected, furthest, largest
from passes.search.request import Request
from runtime.collector import collector_paused

MOST_SAMPLES = 1 << 16
"""Batches beyond are not looked for unless asked: cut into micro-batches, any batch fits."""
MOST_TOKENS = 1 << 20
"""Sequences beyond are not looked for unless asked."""
STEP_TOKENS = 128
"""Sequences are multiples of it unless asked: as kernels like them, and each is traced for itself."""
FIRST_STEPS = 8
"""The shortest sequence that is tried first, in steps: shorter ones only if it does not fit. By hand."""


@dataclass(frozen=True)
class Largest(Generic[PlanT]):
    """The plan with the largest batch or sequence that fits."""

    size: int
    """Samples, or tokens; 0 where nothing fits."""
    plan: PlanT | None
    """None where nothing fits."""
    why: tuple[str, ...] = ()
    """The reasons why nothing fits, of the smallest size."""
    ways: tuple[str, ...] = ()
    """Ways to make it fit, where they are known."""
    beyond: int | None = None
    """The size above, for which nothing was found that fits; None where as much fits as was asked for: more may."""


def largest_batch(
    kind: type[PlanT],
    graph: OpGraph,
    cluster: ClusterSpec,
    options: PlanOptions,
    precision: Precision | None = None,
    *,
    most: int = MOST_SAMPLES,
    step: int = 1,
) -> Largest[PlanT]:
    """Plan the largest batch of a multiple of ``step`` samples, up to ``most``, that fits; a plan of class ``kind``.

    ``options``: their batch size is not read. Of strategy "auto", only the first strategy that knows all that is given.
    Raises UsageError for options that hold for no size.
    """

    def step_of(samples: int) -> tuple[OpGraph, Request]:
        return graph, replace(options, batch_size=samples).requests(graph, precision)[0]

    cut = 1 if options.microbatches == "auto" else options.microbatches
    keeps = read_fix(options.fix).microbatch is None
    sizes = _Sizes(step_of, cluster, cut * least_samples(graph)[0], step, keeps)
    return sizes.largest(kind, cut * cluster.world_size, most)


def largest_sequence(
    kind: type[PlanT],
    traced: Callable[[int], OpGraph],
    cluster: ClusterSpec,
    options: PlanOptions,
    precision: Precision | None = None,
    *,
    most: int = MOST_TOKENS,
    step: int = STEP_TOKENS,
) -> Largest[PlanT]:
    """Plan the longest sequence of a multiple of ``step`` tokens that fits. ``traced``: the model's graph for so many.

    Otherwise as :func:`largest_batch`, for batches of ``options.batch_size`` samples. A sequence for which ``traced``
    raises a ModelError or UsageError, as models with positions for so many tokens do, does not fit.
    """

    def step_of(tokens: int) -> tuple[OpGraph, Request]:
        graph = traced(tokens)
        return graph, options.requests(graph, precision)[0]

    return _Sizes(step_of, cluster, 1, step, keeps=False).largest(kind, FIRST_STEPS * step, most)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a step: multiples of ``step``, ``least`` and more."""

    step_of: Callable[[int], tuple[OpGraph, Request]]
    cluster: ClusterSpec
    least: int
    step: int
    keeps: bool
    """True if a placement may be kept for larger ones: for batches of one graph, whose micro-batches no user fixed."""

    def largest(self, kind: type[PlanT], shared: int, most: int) -> Largest[PlanT]:
        """Find the largest size up to ``most``. ``shared``: what a multiple of can be shared equally."""
        first = _multiple(self.least, self.step)
        if first > most:
            raise UsageError(
                f"cannot look for what fits up to {most:,}",
                [f"the smallest size is {first:,}, a multiple of {self.step:,} of {self.least:,} or more"],
                ["a larger --most, a smaller --step, or fewer --microbatches"],
            )
        unit = _multiple(first, math.lcm(self.step, shared))
        units, fits = largest(
            lambda count: self._found(count * unit), most // unit, partial(self._reach, 0, unit, most // unit)
        )
        base = units * unit if fits else first - self.step
        if fits and units < most // unit:
            between = unit // self.step
            reach = partial(self._reach, base, self.step, between - 1)
            steps, fits = bisected(
                lambda count: self._found(base + count * self.step), reach(fits, 0, 0), fits, between, reach,
                reached=self.keeps,
            )  # fmt: skip
        else:  # the next multiple is beyond what is asked for, or not even the first fits
            top = most if fits else min(most, unit - self.step)
            count = (top - base) // self.step
            reach = partial(self._reach, base, self.step, count)
            steps, found = largest(lambda count: self._found(base + count * self.step), count, reach)
            fits = found or fits
        if not fits:
            return Largest(0, None, *self._nothing(first), first)
        size = base + steps * self.step
        beyond = size + self.step
        return Largest(size, self._plan(kind, size, fits), beyond=beyond if beyond <= most else None)

    def _found(self, size: int) -> Nearest | None:
        """Return something that fits, or nearly does, None if nothing is found."""
        try:
            graph, request = self.step_of(size)
            return what_fits(graph, self.cluster, request)
        except (ModelError, UsageError):
            return None

    def _reach(self, base: int, step: int, most: int, found: Nearest, number: int, low: int) -> int:
        """Return the most steps beyond ``base``, from ``low`` up to ``most``, with which what was found fits."""
        best, size = found.simulated, found.judge.job.batch_size
        if not self.keeps:
            return number if best.fits else low

        def overflow(count: int) -> float:
            return found.overflow_bytes(self.cluster, base + count * step)

        each = max(best.peak_bytes) / size
        over = best.overflow_bytes if base + number * step == size else overflow(number)
        guess = (int(size - best.overflow_bytes / each) - base) // step
        if over <= 0:
            return furthest(overflow, number, over, guess, most)
        return furthest(overflow, low, over - each * step * (number - low), guess, number - 1)

    def _plan(self, kind: type[PlanT], size: int, fits: Nearest) -> PlanT:
        """Plan a size, with which ``fits`` fits: as fast as can be, or as that is if no search then finds anything."""
        graph, request = self.step_of(size)
        with collector_paused():
            try:
                return best_in_room(kind, graph, self.cluster, [request])
            except (InfeasibleError, TimeLimitError):
                known = fits.simulated.candidate if fits.judge.graph is graph else None
                asked = replace(request, known=known, only_fits=known is None)
                return best_in_room(kind, graph, self.cluster, [asked])

    def _nothing(self, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Say why the smallest size does not fit, and what would make it fit."""
        graph, request = self.step_of(size)
        try:
            plan = best_plan(PlanData, graph, self.cluster, [request])
        except (ClusterError, InfeasibleError, TimeLimitError) as error:
            return tuple(error.because) or (error.what,), tuple(error.suggestions)
        return (risk_text(plan),), () if plan.risk is None else plan.risk.ways


def _multiple(least: int, of: int) -> int:
    """Return the smallest multiple of ``of`` that is at least ``least``."""
    return -(-least // of) * of
