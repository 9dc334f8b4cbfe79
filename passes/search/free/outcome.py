"""Outcome of the free search's attempts: the fastest, its segments merged, beside those that were not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from passes.search.certificate import Certificate, relative_gap
from passes.search.free.variants import Attempt, TimeBudget
from passes.search.outcome import Label, Outcome, RunnerUp


def fastest(found: Sequence[Attempt], start: Outcome | None, budget: TimeBudget) -> Outcome:
    """Choose the fastest in simulation of all variants, its segments merged; the layer-wise plan where that is as fast."""
    best = min(found, key=lambda attempt: attempt.carried.seconds, default=None)
    if best is not None:
        merged = best.judge.merged(best.carried, budget.left_seconds)
        if start is None or merged.seconds < start.best.step_seconds:
            best.judge.choose(merged)
            certificate = best.search.certificate
            if best.variant.splits:  # its ops are blocks: that they are whole says nothing of the model's
                certificate = replace(certificate, whole_ops_bound_seconds=0.0)
            return replace(
                best.search,
                certificate=certificate,
                best=best.judge.simulated(merged.candidate, merged.realized),
                splits=best.variant.splits,
                runner_ups=(
                    *_others([attempt for attempt in found if attempt is not best], start),
                    *best.search.runner_ups,
                ),
            )
    assert start is not None
    runner_ups = (*_others(found, None), *start.runner_ups)
    return replace(start, certificate=_unbeaten(start, found), runner_ups=runner_ups)


def _unbeaten(start: Outcome, found: Sequence[Attempt]) -> Certificate:
    """Certify the layer-wise plan among all placements: its own certificate is about contiguous ones only."""
    whole = next((attempt.search.certificate for attempt in found if not attempt.variant.splits), None)
    if whole is None:
        return replace(start.certificate, space=f"nothing found beats: {start.certificate.space}", terms=None)
    seconds = start.best.step_seconds
    lower = min(whole.whole_ops_bound_seconds, start.certificate.whole_ops_bound_seconds)
    bound = min(lower, seconds)
    gap = relative_gap(seconds, bound)
    return replace(
        whole,
        objective="simulated step",
        objective_seconds=seconds,
        bound_seconds=bound,
        whole_ops_bound_seconds=lower,
        gap=gap,
        space=f"the layer-wise plan, unbeaten: {whole.space}",
        method=f"layer-wise: {start.certificate.method}; bound: work, longest path, largest op",
        solver_status="optimal" if gap <= 1e-6 else "stalled",
        search_seconds=start.certificate.search_seconds + whole.search_seconds,
    )


def _others(found: Sequence[Attempt], start: Outcome | None) -> tuple[RunnerUp, ...]:
    """List the other variants' best, and the layer-wise plan."""
    others = [
        RunnerUp.of(
            attempt.label, attempt.judge.simulated(attempt.carried.candidate, attempt.carried.realized)
        )
        for attempt in found
    ]
    if start is not None:
        label = Label.of_layer_wise(start.best.candidate)
        others.append(replace(RunnerUp.of(label, start.best), named=True))
    return tuple(others)
