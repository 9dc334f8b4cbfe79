"""Nothing fits: by how much, on which device, and which change would help. Every suggestion is solved, not guessed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cost_models.errors import InfeasibleError
from cost_models.units import counted, format_bytes
from passes.search.infeasible import shortfalls
from passes.search.layer.options import DevicePlan, ScheduleOption, microbatch_counts
from passes.search.layer.problem import DevicePool, LayerProblem, StageSplit
from passes.search.layer.search import LayerSearch, SolvedSplit, device_overflow, solve_dp
from passes.search.layer.spaces import Space
from passes.search.layer.tuning import TUNING
from passes.search.provider import Judged

NO_WAY = (
    "devices with more memory; more micro-batches, a smaller batch, more devices or recompute do not help"
)
SHARES = (1.08, 1.06, 1.04, 1.02, 1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.85, 0.8)
"""Shares of the memory for which splits are solved where it is asked only whether any fits: estimates are as far off. By
hand."""
NO_SPLIT = "other pins, another number of stages or another schedule: together they leave no split"


def infeasible(
    search: LayerSearch, auto_microbatches: bool, least: Judged[SolvedSplit] | None, capacity_scale: float
) -> InfeasibleError:
    """The error for a request that does not fit, with the shortfall of the least-bad split and what would fit.

    ``least``: the least-bad candidate that was simulated; None if not even the surrogate's memory fitted anything.
    """
    devices = search.cluster.devices
    option = _leanest(search.options)
    no_way = NO_WAY
    if least is not None:
        because = [f"{_words(search, least.proposal.solved.option)}, the least-bad split, simulated:"]
        because += shortfalls(enumerate(least.simulated.peak_bytes), devices)
    else:
        because = [f"{_words(search, option)}, the least-bad split:"]
        split = _least_bad(search, option)
        if split is None:
            no_way = NO_SPLIT
            because.append(
                "no split obeys the pins, the number of stages and the schedule, whatever the memory"
            )
        else:
            plan = search.plan(option)
            ranks = plan.ranks_of(split.kinds, option.chunks)
            used = Counter({rank: round(devices[rank].room_bytes - plan.room_of(rank)) for rank in ranks})
            for rank, size in zip(ranks, split.memory_bytes, strict=True):
                used[rank] += round(size)
            because += shortfalls(sorted(used.items()), devices)
    ways = list(_ways_out(search, option, auto_microbatches, capacity_scale))
    return InfeasibleError(
        f"no layer-wise plan fits {len(devices)} devices at batch size {search.batch_size}",
        because,
        ways or [no_way],
    )


def _leanest(options: Sequence[ScheduleOption]) -> ScheduleOption:
    """The option that holds the least: smallest micro-batches, then the order that releases them first."""
    order = {"1f1b": 0, "list": 1, "zb-h1": 2}
    return max(options, key=lambda o: (o.microbatches, -order.get(o.schedule, 3)))


def _words(search: LayerSearch, option: ScheduleOption) -> str:
    return (
        f"{option.schedule} with {counted(option.microbatches, 'micro-batch')} of up to "
        f"{counted(option.size(search.batch_size), 'sample')}"
    )


def lean_splits(search: LayerSearch) -> Iterator[SolvedSplit]:
    """Yield splits that fit shares of the devices' memory, as small as possible, whatever they take.

    Of all devices and of half of them: a split in fewer stages may hold less beside its activations.
    """
    chunks = {
        option.chunks: [o for o in search.options if o.chunks == option.chunks] for option in search.options
    }
    half = min(search.max_stages, len(search.cluster.devices)) // 2
    searches = [search, replace(search, max_stages=half, _plans={})] if half > 1 else [search]
    for own, alike in itertools.product(searches, chunks.values()):
        option = _leanest(alike)
        for share in SHARES:
            found = list(fitting(own, option, share, own.plan(option)))
            yield from found
            if not found:
                break


def fitting(
    search: LayerSearch, option: ScheduleOption, scale: float, plan: DevicePlan
) -> Iterator[SolvedSplit]:
    """Yield splits that fit ``scale`` times the memory of the plan's devices, quickly; none if there is none."""
    for space, problem, split in _fitting(search, option, scale, plan):
        yield SolvedSplit(option, space, problem, split, plan.ranks_of(split.kinds, option.chunks))


def _fitting(
    search: LayerSearch, option: ScheduleOption, scale: float, plan: DevicePlan | None
) -> Iterator[tuple[Space, LayerProblem, StageSplit]]:
    for index, space in enumerate(search.spaces):
        problem = search.problem(index, option, scale, plan)
        if problem is None:
            continue
        for split in solve_dp(problem, geometry=space.geometry, keep=4, relative_gap=math.inf).pipelines:
            if problem.chunks == 1 or device_overflow(problem, split) <= 0:
                yield space, problem, split


def _fitting_split(
    search: LayerSearch, option: ScheduleOption, scale: float, plan: DevicePlan | None = None
) -> StageSplit | None:
    """Any split that fits ``scale`` times the devices' memory, quickly; None if there is none."""
    return next((split for _, _, split in _fitting(search, option, scale, plan)), None)


def _least_bad(search: LayerSearch, option: ScheduleOption) -> StageSplit | None:
    """The split that would fit if all devices had the least larger memory, by bisection of that factor."""
    found: StageSplit | None = None
    low, high = 1.0, 2.0
    while high <= TUNING.most_scale and found is None:
        found = _fitting_split(search, option, high)
        if found is None:
            low, high = high, high * 2
    while found is not None and high / low > 1.005:
        middle = math.sqrt(low * high)
        smaller = _fitting_split(search, option, middle)
        if smaller is None:
            low = middle
        else:
            high, found = middle, smaller
    return found


def _ways_out(
    search: LayerSearch, option: ScheduleOption, auto_microbatches: bool, scale: float
) -> Iterator[str]:
    """The first setting that fits, of each kind, the cheapest kind first."""

    def fits(option: ScheduleOption, **changed: Any) -> bool:
        return _fitting_split(replace(search, **changed), option, scale) is not None

    if search.min_stages > 1 and fits(option, min_stages=1):
        yield f"fewer stages: min_stages={search.min_stages} keeps out what fits"
    if not auto_microbatches:
        for m in microbatch_counts(search.batch_size, "auto")[-TUNING.most_counts :]:
            if m > option.microbatches and fits(replace(option, microbatches=m)):
                yield f"more micro-batches: {m} fit ({option.schedule})"
                break
    lean = replace(option, schedule="1f1b", chunks=1)
    lean_fits = option.schedule != "1f1b" and fits(lean)
    if lean_fits:
        yield f"schedule 1f1b, which holds fewer micro-batches at once: it fits with {lean.microbatches}"
    yield from _recompute(search, option, scale)
    batch = search.batch_size // 2
    while batch >= 1:
        m = microbatch_counts(batch, "auto")[-1] if auto_microbatches else min(option.microbatches, batch)
        if fits(replace(option, microbatches=m), batch_size=batch):
            yield f"a smaller batch: {counted(batch, 'sample')}, as {counted(m, 'micro-batch')}"
            break
        batch //= 2
    for factor in TUNING.growth if not (lean_fits and option.chunks > 1) else ():
        if _fits_on_more(search, option, factor, scale):
            count = factor * len(search.cluster.devices)
            under = " under 1f1b" if option.chunks > 1 else ""  # all that was tried
            yield f"more devices of the same kind: {count} fit{under} ({factor} times as many)"
            break


def _fits_on_more(search: LayerSearch, option: ScheduleOption, factor: int, scale: float) -> bool:
    """Tell whether ``factor`` times as many devices of each kind would do, with the worst links of the cluster."""
    single = replace(option, schedule="1f1b", chunks=1) if option.chunks > 1 else option
    plan = search.plan(single)
    counts: Counter[tuple[int, float]] = Counter()
    for kind in plan.kinds:
        counts[kind.row, kind.capacity_bytes] += kind.count * factor
    if math.prod(n + 1 for n in counts.values()) > 4096:
        return False
    kinds = tuple(DevicePool(f"kind {i}", row, size, n) for i, ((row, size), n) in enumerate(counts.items()))
    worst = np.ones((len(kinds), len(kinds)))
    grown = replace(
        plan,
        kinds=kinds,
        latency_seconds=worst * plan.latency_seconds.max(),
        seconds_per_byte=worst * plan.seconds_per_byte.max(),
        assignment="unordered",
        sequence=(),
    )
    return _fitting_split(search, single, scale, grown) is not None


def _recompute(search: LayerSearch, option: ScheduleOption, scale: float) -> Iterator[str]:
    """Recompute in the stages that need it, if that was not allowed."""
    if search.recompute == "auto" or not search.model.blocks:
        return
    split = _fitting_split(replace(search, recompute="auto"), option, scale)
    if split is not None:
        yield (
            f'recompute the activations of blocks in backward (recompute "auto"): in {sum(split.recomputed)} '
            f"of {counted(split.stages, 'stage')}, {format_bytes(max(split.memory_bytes))} on the fullest "
            f"device with {counted(option.microbatches, 'micro-batch')}"
        )
