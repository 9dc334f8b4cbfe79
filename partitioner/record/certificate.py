"""The certificate of a pipeline, added up again from the plan alone: no code of the search, only what the plan says.

    t_s  = microbatch_seconds + once_seconds / m         x_s = cut_seconds, in front of stage s
    D_s  = Σ_{r ≥ s} t_r + Σ_{r > s} x_r                 what stage s waits for until a micro-batch is back
    T    = max over stages of  t_s,  x_s,  and D_s / (in_flight_s · chunks) where in_flight_s < m; and q
    q    = where stages run in turn: max over stages of t_s and the cuts charged to s; a cut behind a stage with
           in_flight < m is charged to the stage before or behind it, whichever way makes q least

    objective = fill · Σ_s (t_s + x_s) + (m - fill) · chunks · T
    bound     = least bound of any option, or the objective        gap = (objective - bound) / objective

Fill is 1 of 1f1b and gpipe. Of the others it falls with the number of micro-batches: from 1 to 1 / chunks of interleaved,
from 2/3 to 1/3 of zb-h1 and zb-h2, to 1/6 of zb-v. It is the least where they are no fewer than twice the devices, and in
plans of earlier versions. In flight are all m micro-batches of gpipe, and of 1f1b as many as there are stages from here on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from passes.search.certificate import ROUNDING, Certificate, PipelineTerms

if TYPE_CHECKING:
    from partitioner.record.records import PlanFields


def added_up(terms: PipelineTerms) -> tuple[float, float]:
    """Return objective and bound in seconds; a bound is infinite where no option fits."""
    m, chunks = terms.microbatches, terms.chunks
    each = [
        (row.microbatch_seconds + row.once_seconds / m, row.cut_seconds)
        for row in terms.stages
        for _ in range(row.stages)
    ]
    total = sum(stage + cut for stage, cut in each)
    longest, before = 0.0, 0.0
    for (stage, cut), flying in zip(each, terms.in_flight, strict=True):
        waits = (total - before - cut) / (flying * chunks) if flying < m else 0.0
        longest = max(longest, stage, cut, waits)
        before += stage + cut
    if terms.in_turn:
        longest = max(longest, _charged(each, terms.in_flight, m))
    bounds = [row.bound_seconds for row in terms.options if row.bound_seconds is not None]
    return terms.fill * total + (m - terms.fill) * chunks * longest, min(bounds, default=float("inf"))


def _charged(each: Sequence[tuple[float, float]], in_flight: Sequence[int], microbatches: int) -> float:
    """Return the least longest stage, over all ways to charge each cut to the stage before or behind it."""
    longest_of = {
        0.0: 0.0
    }  # what the stage at hand pays for the cut in front of it -> the longest stage before
    for number, (seconds, _) in enumerate(each):
        behind = each[number + 1][1] if number + 1 < len(each) and in_flight[number] < microbatches else 0.0
        paying: dict[float, float] = {}
        for paid, longest in longest_of.items():
            for mine in (0.0, behind):  # the rest of the cut behind is the next stage's
                total = max(longest, seconds + paid + mine)
                paying[behind - mine] = min(total, paying.get(behind - mine, float("inf")))
        longest_of = paying
    return min(longest_of.values())


def contradictions(plan: PlanFields) -> Iterator[str]:
    """Yield where a certificate does not follow from its terms, or its terms are not those of the plan."""
    certificate, terms = plan.certificate, plan.certificate.terms
    if terms is None:
        return
    where, count = "certificate.terms", sum(row.stages for row in terms.stages)
    if count != len(plan.stages) or len(terms.in_flight) != count:
        yield f"{where}: {count} stages, {len(terms.in_flight)} of them in flight; the plan has {len(plan.stages)}"
        return
    if terms.microbatches != plan.microbatches:
        yield f"{where}.microbatches: {terms.microbatches}, the plan has {plan.microbatches}"
        return
    if terms.chunks * len({stage.devices for stage in plan.stages}) != count:
        yield f"{where}.chunks: {terms.chunks} stages of each group do not make {count}"
    yield from _of_schedule(plan.schedule, terms, plan.cluster.world_size)
    yield from _sums(certificate, terms)


def _of_schedule(schedule: str, terms: PipelineTerms, devices: int) -> Iterator[str]:
    """Yield what the schedule says otherwise."""
    where, m, count = "certificate.terms", terms.microbatches, len(terms.in_flight)
    least, most = {
        "interleaved": (1 / terms.chunks, 1.0),
        "zb-h1": (1 / 3, 2 / 3),
        "zb-h2": (1 / 3, 2 / 3),
        "zb-v": (1 / 6, 2 / 3),
    }.get(schedule, (1.0, 1.0))
    most = least if m >= 2 * devices else most
    if not least - ROUNDING <= terms.fill <= most + ROUNDING:
        yield f"{where}.fill: {terms.fill!r}, {schedule} has {least!r}{'' if least == most else f' to {most!r}'}"
    expected = {"gpipe": [m] * count, "1f1b": [min(m, count - s) for s in range(count)]}.get(schedule)
    if expected is not None and list(terms.in_flight) != expected:
        yield f"{where}.in_flight: {list(terms.in_flight)}, {schedule} has {expected}"
    elif max(terms.in_flight) > m:
        yield f"{where}.in_flight: {max(terms.in_flight)} of {m} micro-batches"


def _sums(certificate: Certificate, terms: PipelineTerms) -> Iterator[str]:
    """Yield the sums that are not those of the terms."""
    objective, least = added_up(terms)
    bound = min(least, objective)
    if _differ(objective, certificate.objective_seconds):
        yield f"certificate.objective_seconds: {certificate.objective_seconds!r}, its terms make {objective!r}"
    if least > objective * (1 + ROUNDING):
        yield f"certificate.terms.options: none is below {least!r} s, and the plan has {objective!r} s"
    if _differ(bound, certificate.bound_seconds):
        yield f"certificate.bound_seconds: {certificate.bound_seconds!r}, its terms make {bound!r}"
    gap = (objective - bound) / objective if objective else 0.0
    if abs(gap - certificate.gap) > ROUNDING:
        yield f"certificate.gap: {certificate.gap!r}, its terms make {gap!r}"


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > ROUNDING * max(one, other)
