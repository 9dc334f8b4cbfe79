"""Nothing fits as the user fixed it: what is short, and the single changes with which it fits, each planned anew.

recompute, micro-batch, ZeRO, interleave      the same groups, less in each device
tensor, pipeline                              twice as many devices share an op or follow each other, where that goes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cost_models.errors import InfeasibleError, TimeLimitError, UsageError
from cost_models.units import format_bytes
from cost_models.variants import with_memory
from passes.interrupts import may_be_lost
from passes.progress import report_phase
from passes.search.hybrid.degrees import Degrees
from passes.search.hybrid.fix import Fix
from passes.search.hybrid.relax.relaxed import NEAR, priced
from passes.search.hybrid.request import HybridRequest
from passes.search.infeasible import shortfalls
from passes.search.judge import Judge, Simulated, fastest_fitting
from passes.search.outcome import Label

HALVINGS = 3
"""Times that the micro-batch is halved. By hand: beyond, other changes cost less."""
GROWTH = (2.0, 4.0, 8.0)
"""Times the memory of a device at which a plan is made, where none can be simulated with what there is."""
RESERVES = (NEAR, 1.1, 1.25)
"""Times the memory that a plan was simulated to need: the searches of stages leave some of it free. By hand."""
MOST_LINES = 6
FEWEST_TRIED = 8
"""Plans that may be simulated in looking for changes, however few were before; else twice as many as before."""


def fixed_infeasible(
    request: HybridRequest,
    judge: Judge,
    degrees: Degrees,
    tried: Sequence[Simulated],
    refused: Sequence[InfeasibleError | TimeLimitError],
    plan: Callable[[HybridRequest, Judge], Sequence[Simulated]],
) -> InfeasibleError | TimeLimitError:
    """Say what is short in the plan that overflows least, or which stage's search was cut off, and what would do.

    ``tried``: what was simulated; ``refused``: the reasons of what could not be; ``plan``: plans another request, for the
    judge of another cluster too.
    """
    late = [error for error in refused if isinstance(error, TimeLimitError)]
    if late:
        return late[-1]
    least = min(tried, key=lambda s: s.overflow_bytes, default=None)
    if least is not None:
        because = [f"{Label.of_stages(least.candidate)}, simulated:"]
        because += shortfalls(enumerate(map(int, least.peak_bytes)), judge.cluster.devices)
    else:
        because = list(refused[-1].because)
    report_phase("what would fit")
    ways: list[str] = []
    most = len(judge.tried) + max(FEWEST_TRIED, 2 * (len(tried) + len(refused)))
    try:
        with may_be_lost():
            for name, changes in changes_of(request, degrees, least):
                found = _first(changes, plan, judge, most)
                if found is not None:
                    ways.append(f"{found[0]}{name}: fits, {priced(found[1])}")
                if len(ways) == MOST_LINES - 1 or len(judge.tried) >= most:
                    break
            if not ways:
                together = _first([lean_request(request, degrees)], plan, judge, most)
                ways += [] if together is None else [f"{together[0]}: fits, {priced(together[1])}"]
            ways += _memory(request, least, judge, plan)
    except KeyboardInterrupt:
        ways.append("(interrupted: more was not looked for)")
    return InfeasibleError(
        f"{judge.graph.model_name} does not fit {judge.cluster.name} with {request.fix or 'nothing fixed'}",
        because,
        ways or ["fewer things fixed: no single change of them was found with which it fits"],
    )


def changes_of(
    request: HybridRequest, degrees: Degrees, least: Simulated | None
) -> Iterator[tuple[str, list[tuple[str, HybridRequest]]]]:
    """Yield the kinds of changes, the smallest first: what is said after each, and (words, request) from small to large.

    ``least``: the plan that overflows least; where the number of micro-batches is open, changes are planned with its own.
    """
    fix = request.fix
    known = request
    if least is not None and fix.microbatch is None:
        known = replace(request, microbatches=least.candidate.microbatches)

    def fixed(words: str, **changed: object) -> tuple[str, HybridRequest]:
        return words, replace(known, fix=replace(fix, **changed))  # type: ignore[arg-type]

    recompute = fix.recompute or request.recompute
    if recompute in ("none", "gathers"):
        yield f" (of {recompute})", [fixed("recompute=auto", recompute="auto")]
    replicas = [degrees.replicas(group) or 1 for group in range(len(degrees.groups))]
    if fix.zero in (0, 1) and max(replicas) > 1:
        yield f" (of {fix.zero})", [fixed(f"zero={z}", zero=z) for z in (1, 3) if z > fix.zero]
    if fix.microbatch is not None:
        halves = [fix.microbatch >> i for i in range(1, HALVINGS + 1) if fix.microbatch >> i]
        yield (
            f" (of {fix.microbatch})",
            [fixed(f"microbatch={n}", microbatch=n) for n in halves],
        )
    if fix.interleave not in (None, 1) and fix.borders is None:
        yield f" (of {fix.interleave})", [fixed("interleave=1", interleave=1)]
    for name in ("tensor", "sequence", "pipeline"):
        degree: int | None = getattr(fix, name)
        if degree is None or fix.groups is not None or (name == "pipeline" and fix.borders is not None):
            continue
        twice: list[tuple[str, HybridRequest]] = [fixed(f"{name}={2 * degree}", **{name: 2 * degree})]
        if fix.data is not None and fix.data % 2 == 0:
            words = f"{name}={2 * degree} data={fix.data // 2}"
            twice.append(fixed(words, **{name: 2 * degree, "data": fix.data // 2}))
        elif name == "tensor" and fix.pipeline is not None and fix.pipeline % 2 == 0 and fix.borders is None:
            words = f"tensor={2 * degree} pipeline={fix.pipeline // 2}"
            twice.append(fixed(words, tensor=2 * degree, pipeline=fix.pipeline // 2))
        yield f" (of {_degrees(fix, name)})", twice


def lean_request(request: HybridRequest, degrees: Degrees) -> tuple[str, HybridRequest]:
    """Make all the changes at once that leave the groups as they are."""
    replicated = any((degrees.replicas(group) or 1) > 1 for group in range(len(degrees.groups)))
    changed = replace(
        request.fix,
        recompute="auto",
        zero=3 if replicated and request.fix.zero is not None else request.fix.zero,
        microbatch=None if request.fix.microbatch is None else 1,
    )
    return f"{changed}", replace(request, fix=changed)


def _degrees(fix: Fix, name: str) -> str:
    beside = f", data={fix.data}" if fix.data is not None else ""
    return f"{name}={getattr(fix, name)}{beside}"


def _first(
    changes: Sequence[tuple[str, HybridRequest]],
    plan: Callable[[HybridRequest, Judge], Sequence[Simulated]],
    judge: Judge,
    most: int,
) -> tuple[str, Simulated] | None:
    """Plan one change after the other; return the first that fits."""
    for words, request in changes:
        if len(judge.tried) >= most:
            return None
        try:
            found = fastest_fitting(plan(request, judge))
        except (UsageError, InfeasibleError, TimeLimitError):
            continue
        if found is not None:
            return words, found
    return None


def _memory(
    request: HybridRequest,
    least: Simulated | None,
    judge: Judge,
    plan: Callable[[HybridRequest, Judge], Sequence[Simulated]],
) -> list[str]:
    """Plan with as much memory as the plan that overflows least was simulated to need."""
    devices = judge.cluster.devices
    sizes = {device.memory_bytes for device in devices}
    size = max(sizes)
    if len(sizes) > 1:
        return []

    def planned(factor: float, asked: HybridRequest) -> Simulated | None:
        larger = with_memory(judge.cluster, factor)
        try:
            return fastest_fitting(plan(asked, Judge(judge.graph, judge.costs, larger, judge.job)))
        except (InfeasibleError, TimeLimitError):
            return None

    factor, found = 0.0, None
    if least is None:
        for factor in GROWTH:
            if (found := planned(factor, request)) is not None:
                break
        least = found
    if least is not None:
        asked = replace(request, microbatches=least.candidate.microbatches)
        needed = max(least.peak_bytes) / size
        for reserve in RESERVES:
            if (smaller := planned(needed * reserve, asked)) is not None:
                factor, found = needed * reserve, smaller
                break
    if found is None:
        return []
    has = format_bytes(factor * size)
    return [f"devices with {has} of usable memory (of {format_bytes(size)}): fits, {priced(found)}"]
