"""Changes of what is fixed, from small to large, for requests of which nothing fits.

recompute, micro-batch, ZeRO, interleave      the same groups, less in each device
tensor, pipeline                              twice as many devices share an op or follow each other, where that goes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from passes.search.hybrid.fix import Fix
from passes.search.hybrid.fixed import Degrees
from passes.search.hybrid.request import HybridRequest
from passes.search.judge import Simulated
from passes.search.words import of_activations

HALVINGS = 3
"""Times that the micro-batch is halved. By hand: beyond, other changes cost less."""


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
    if of_activations(recompute) == "none":
        yield f" (of {recompute})", [fixed("recompute=auto", recompute="auto")]
    replicas = [len(group) // (degrees.tensor or len(group)) for group in degrees.groups]
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
    replicated = any(len(group) > (degrees.tensor or len(group)) for group in degrees.groups)
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
