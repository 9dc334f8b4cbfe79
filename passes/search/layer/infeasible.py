"""Nothing fits: by how much, on which device, and which change would help. Every suggestion is solved, not guessed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from cost_models.errors import InfeasibleError
from cost_models.units import counted, format_bytes
from passes.search.infeasible import shortfalls
from passes.search.layer.dp import solve_dp
from passes.search.layer.options import Option, layer_problem, microbatch_counts, numbers
from passes.search.layer.problem import DeviceKind, LayerProblem, Split
from passes.search.layer.search import LayerSearch, Solved, device_overflow
from passes.search.layer.spaces import Space
from passes.search.layer.table import Geometry
from passes.search.layer.tuning import TUNING

NO_WAY = (
    "devices with more memory; more micro-batches, a smaller batch, more devices or recompute do not help"
)
NO_SPLIT = "other pins, another number of stages or another schedule: together they leave no split"


def infeasible(
    search: LayerSearch,
    auto_microbatches: bool,
    least: Solved | None = None,
    peak_bytes: Sequence[int] | None = None,
    capacity_scale: float = 1.0,
) -> InfeasibleError:
    """The error for a request that does not fit, with the shortfall of the least-bad split and what would
    fit.

    ``least`` and ``peak_bytes`` (per rank): the least-bad candidate that was simulated; None if not even the
    surrogate's memory fitted anything.
    """
    devices = search.cluster.devices
    option = _leanest(search.options)
    because = [f"{_words(search, option)}, the least-bad split:"]
    found: tuple[LayerProblem, Split] | None = None
    if least is not None and peak_bytes is not None:
        because = [f"{_words(search, least.option)}, the least-bad split, simulated:"]
        because += shortfalls(enumerate(peak_bytes), devices)
    else:
        found = _least_bad(search, option)
        if found is None:
            because.append(
                "no split obeys the pins, the number of stages and the schedule, whatever the memory"
            )
        else:
            _, split = found
            ranks = search.plan(option).ranks_of(split.kinds, option.chunks)
            used: Counter[int] = Counter()
            for rank, size in zip(ranks, split.memory_bytes, strict=True):
                used[rank] += round(size)
            because += shortfalls(sorted(used.items()), devices)
    ways = list(_ways_out(search, option, auto_microbatches, capacity_scale))
    return InfeasibleError(
        f"no layer-wise plan fits {len(devices)} devices at batch size {search.batch_size}",
        because,
        ways or [NO_WAY if least is not None or found is not None else NO_SPLIT],
    )


def _leanest(options: Sequence[Option]) -> Option:
    """The option that holds the least: smallest micro-batches, then the order that releases them first."""
    order = {"1f1b": 0, "list": 1, "zb-h1": 2}
    return max(options, key=lambda o: (o.microbatches, -order.get(o.schedule, 3)))


def _words(search: LayerSearch, option: Option) -> str:
    return (
        f"{option.schedule} with {counted(option.microbatches, 'micro-batch')} of up to "
        f"{counted(option.size(search.batch_size), 'sample')}"
    )


def fitting_split(problem: LayerProblem | None, space: Space) -> Split | None:
    """Any split that fits, quickly; None if there is none."""
    if problem is None:
        return None
    geometry = (
        space.geometry if space.geometry.structure is problem.structure else Geometry(problem.structure)
    )
    for split in solve_dp(problem, geometry=geometry, keep=4, relative_gap=math.inf).splits:
        if problem.chunks == 1 or device_overflow(problem, split) <= 0:
            return split
    return None


def _least_bad(search: LayerSearch, option: Option) -> tuple[LayerProblem, Split] | None:
    """The split that would fit if all devices had the least larger memory, by bisection of that factor."""
    found: tuple[LayerProblem, Split] | None = None
    low, high = 1.0, 2.0
    while high <= TUNING.most_scale and found is None:
        found = _at_scale(search, option, high)
        if found is None:
            low, high = high, high * 2
    if found is None:
        return None
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        smaller = _at_scale(search, option, middle)
        if smaller is None:
            low = middle
        else:
            high, found = middle, smaller
    return found


def _at_scale(search: LayerSearch, option: Option, scale: float) -> tuple[LayerProblem, Split] | None:
    for index, space in enumerate(search.spaces):
        problem = search.problem(index, option, scale)
        split = fitting_split(problem, space)
        if problem is not None and split is not None:
            return problem, split
    return None


def _ways_out(search: LayerSearch, option: Option, auto_microbatches: bool, scale: float) -> Iterator[str]:
    """The first setting that fits, of each kind, the cheapest kind first."""
    if search.min_stages > 1 and _fits(replace(search, min_stages=1), option, search.batch_size, scale):
        yield f"fewer stages: min_stages={search.min_stages} keeps out what fits"
    if not auto_microbatches:
        for m in microbatch_counts(search.batch_size, "auto")[-TUNING.most_counts :]:
            if m > option.microbatches and _fits(
                search, replace(option, microbatches=m), search.batch_size, scale
            ):
                yield f"more micro-batches: {m} fit ({option.schedule})"
                break
    lean = replace(option, schedule="1f1b", chunks=1)
    lean_fits = option.schedule != "1f1b" and _fits(search, lean, search.batch_size, scale)
    if lean_fits:
        yield f"schedule 1f1b, which holds fewer micro-batches at once: it fits with {lean.microbatches}"
    yield from _recompute(search, option, scale)
    batch = search.batch_size // 2
    while batch >= 1:
        m = microbatch_counts(batch, "auto")[-1] if auto_microbatches else min(option.microbatches, batch)
        if _fits(search, replace(option, microbatches=m), batch, scale):
            yield f"a smaller batch: {counted(batch, 'sample')}, as {counted(m, 'micro-batch')}"
            break
        batch //= 2
    for factor in TUNING.growth if not (lean_fits and option.chunks > 1) else ():
        if _fits_on_more(search, option, factor, scale):
            count = factor * len(search.cluster.devices)
            under = " under 1f1b" if option.chunks > 1 else ""  # all that was tried
            yield f"more devices of the same kind: {count} fit{under} ({factor} times as many)"
            break


def _fits(search: LayerSearch, option: Option, batch_size: int, scale: float) -> bool:
    size = option.size(batch_size)
    for space in search.spaces:
        costs = numbers(search.model, space, search.table, size)
        problem = layer_problem(
            space,
            costs,
            search.plan(option),
            option,
            search.pins,
            search.stage_counts,
            scale,
            search.recompute,
        )
        if fitting_split(problem, space) is not None:
            return True
    return False


def _fits_on_more(search: LayerSearch, option: Option, factor: int, scale: float) -> bool:
    """Tell whether ``factor`` times as many devices of each kind would do, with the worst links of the cluster."""
    single = replace(option, schedule="1f1b", chunks=1) if option.chunks > 1 else option
    plan = search.plan(single)
    counts: Counter[tuple[int, float]] = Counter()
    for kind in plan.kinds:
        counts[kind.row, kind.capacity_bytes] += kind.count * factor
    if math.prod(n + 1 for n in counts.values()) > 4096:
        return False
    kinds = tuple(DeviceKind(f"kind {i}", row, size, n) for i, ((row, size), n) in enumerate(counts.items()))
    worst = np.ones((len(kinds), len(kinds)))
    grown = replace(
        plan,
        kinds=kinds,
        latency_seconds=worst * plan.latency_seconds.max(),
        seconds_per_byte=worst * plan.seconds_per_byte.max(),
        assignment="unordered",
        sequence=(),
    )
    for index, space in enumerate(search.spaces):
        costs = search.numbers(index, single.size(search.batch_size))
        problem = layer_problem(
            space, costs, grown, single, search.pins, search.stage_counts, scale, search.recompute
        )
        if fitting_split(problem, space) is not None:
            return True
    return False


def _recompute(search: LayerSearch, option: Option, scale: float) -> Iterator[str]:
    """Recompute in the stages that need it, if that was not allowed."""
    if search.recompute == "auto" or not search.model.blocks:
        return
    allowed = replace(search, recompute="auto")
    for index, space in enumerate(search.spaces):
        problem = allowed.problem(index, option, scale)
        split = fitting_split(problem, space)
        if split is not None:
            yield (
                f'recompute the activations of blocks in backward (recompute "auto"): in {sum(split.recomputed)} '
                f"of {counted(split.stages, 'stage')}, {format_bytes(max(split.memory_bytes))} on the fullest "
                f"device with {counted(option.microbatches, 'micro-batch')}"
            )
            return
