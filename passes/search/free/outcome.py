"""From the attempts of the free search to what is kept: the fastest, its segments merged, beside what was not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.layout import Layout
from passes.lower.bridge import bridges
from passes.search.certificate import Certificate, relative_gap
from passes.search.free.request import SimulatedFree
from passes.search.free.variants import Attempt, TimeBudget
from passes.search.layer.place import RunnerUp
from passes.search.placed import Placed


def fastest(
    found: Sequence[Attempt], start: Placed | None, cluster: ClusterSpec, budget: TimeBudget
) -> Placed:
    """The fastest in simulation of all variants, its segments merged; the layer-wise plan where that is as fast."""
    best = min(found, key=lambda attempt: attempt.scheduled.seconds, default=None)
    if best is not None:
        chosen = best.search.best.candidate
        merged = best.candidates.merged(chosen, best.scheduled, budget.left_seconds)
        best = replace(best, scheduled=merged)
        if start is None or best.scheduled.seconds < _seconds(start):
            placed = _placed(best, cluster)
            others = [attempt for attempt in found if attempt.variant is not best.variant]
            return replace(
                placed, runner_ups=(*_others(others, start, best.scheduled.seconds), *placed.runner_ups)
            )
    assert start is not None
    runner_ups = (*_others(found, None, _seconds(start)), *start.runner_ups)
    certificate = _unbeaten(start, found)
    return replace(start, strategy="free", certificate=certificate, runner_ups=runner_ups)


def _unbeaten(start: Placed, found: Sequence[Attempt]) -> Certificate:
    """Of the layer-wise plan among all placements: its own is about contiguous ones only."""
    whole = next((attempt.search.certificate for attempt in found if not attempt.variant.splits), None)
    if whole is None:
        return replace(start.certificate, space=f"nothing found beats: {start.certificate.space}")
    seconds = _seconds(start)
    bound = min(whole.simulated_lower_bound_seconds, seconds)
    gap = relative_gap(seconds, bound)
    return replace(
        whole,
        objective="simulated step",
        objective_seconds=seconds,
        bound_seconds=bound,
        gap=gap,
        space=f"the layer-wise plan, unbeaten: {whole.space}",
        method=f"layer-wise: {start.certificate.method}; bound: work, longest path, largest op",
        solver_status="optimal" if gap <= 1e-6 else "stalled",
        search_seconds=start.certificate.search_seconds + whole.search_seconds,
    )


def _placed(attempt: Attempt, cluster: ClusterSpec) -> Placed:
    graph, search, realized = attempt.variant.graph, attempt.search, attempt.scheduled.realized
    chosen = search.best.candidate
    layouts = {name: Layout.on(rank) for name, rank in chosen.rank_of.items()}
    return Placed(
        strategy="free",
        stage_of=realized.segmentation.segment_of,
        groups=realized.segmentation.ranks,
        microbatches=chosen.microbatches,
        schedule=attempt.scheduled.schedule,
        recomputed=realized.segmentation.recomputed,
        recomputed_blocks=(),
        bridges=bridges(graph, layouts),
        realized=realized,
        certificate=search.certificate,
        runner_ups=_runner_ups(search.tried, search.best, cluster),
        search=search,
        graph=graph,
        splits=attempt.variant.splits,
        description=attempt.description,
    )


def _seconds(placed: Placed) -> float:
    return placed.realized.simulation.step_seconds


def _others(found: Sequence[Attempt], start: Placed | None, best_seconds: float) -> tuple[RunnerUp, ...]:
    """The other variants' best, and the layer-wise plan."""
    named = [(attempt.description, attempt.scheduled.realized) for attempt in found]
    if start is not None:
        named.append((f"layer-wise: {start.description}", start.realized))
    return tuple(
        RunnerUp(
            description=description,
            feasible=True,
            reason=f"{realized.simulation.step_seconds / best_seconds - 1:.1%} slower",
            step_seconds=realized.simulation.step_seconds,
            peak_memory_bytes=max(realized.simulation.peak_bytes),
        )
        for description, realized in named
    )


def _runner_ups(
    tried: Sequence[SimulatedFree], best: SimulatedFree, cluster: ClusterSpec
) -> tuple[RunnerUp, ...]:
    """What was simulated and not chosen."""
    found = []
    for other in tried:
        if other is best:
            continue
        over = max(
            peak - device.memory_bytes
            for peak, device in zip(other.peak_memory_bytes, cluster.devices, strict=True)
        )
        slower = other.step_seconds / best.step_seconds - 1 if best.step_seconds > 0 else 0.0
        found.append(
            RunnerUp(
                description=f"{other.candidate.description}, {other.candidate.microbatches} micro-batches",
                feasible=over <= 0,
                reason=f"{slower:.1%} slower" if over <= 0 else f"exceeds a device by {over:,} bytes",
                step_seconds=other.step_seconds,
                peak_memory_bytes=max(other.peak_memory_bytes),
            )
        )
    return tuple(found)
