"""Lower bounds on an option's pipelines, by the surrogate: cheap ones first, better ones while they may decide.

each stage alone on its devices, at once ─► together, at once ─► alone ─► by how many blocks are computed again ─► together
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cost_models.arrays import FloatArray
from passes.search.bisect import Bisected, Bisection
from passes.search.hybrid.pairs import Pairs
from passes.search.hybrid.program import Pipeline, PipelineProgram
from passes.search.hybrid.recipes.composed import Composed
from passes.search.hybrid.staged import RangeTableT, Staged
from passes.search.hybrid.together import Together

GAP = 1e-3
"""Relative gap to which an option's surrogate is minimized: far below its error against the simulation."""


def quick_bound(staged: Staged[RangeTableT], cutoff_seconds: float) -> float:
    """Return a bound on an option; anything above the cutoff where it is above that."""
    program = PipelineProgram(staged.option, staged.alone(None), staged.links)
    bound = program.quick_seconds()
    if bound < cutoff_seconds and staged.option.chunks > 1:
        bound = max(bound, Together(staged, staged.priced(staged.equal_rooms, None)).quick_seconds())
    if bound < cutoff_seconds:
        bound = max(bound, best_pipeline(program, cutoff_seconds).bound_seconds)
    return bound


def full_bound(staged: Staged[Composed], cutoff_seconds: float, known_seconds: float = math.inf) -> float:
    """Return a better bound than ``quick_bound``, by how many blocks each stage computes again.

    ``known_seconds``: of another option's pipeline, below the cutoff: whether this one can beat it is looked at closely.
    """
    quick = Together(staged, staged.priced(staged.equal_rooms, None))
    longest = _longest(staged, quick.total_seconds, cutoff_seconds)
    alone = staged.alone(longest)
    program = PipelineProgram(staged.option, alone, staged.links)
    bound = best_pipeline(program, cutoff_seconds).bound_seconds
    if bound < cutoff_seconds and staged.option.chunks > 1:
        priced = staged.priced(staged.equal_rooms, longest)
        together = Together(staged, priced)
        bound = max(bound, together.seconds(alone, cutoff_seconds))
        if staged.weight and bound < known_seconds < math.inf and staged.option.in_pairs:
            bound = max(bound, _in_pairs(staged, priced, together.total_seconds, bound, known_seconds))
    return min(bound, cutoff_seconds)  # longer stages were left out: they are above the cutoff


def _in_pairs(
    staged: Staged[Composed],
    priced: Sequence[FloatArray],
    total_seconds: float,
    bound_seconds: float,
    known_seconds: float,
) -> float:
    """Return a bound by the least bottleneck at which both stages of every group fit."""
    pairs, fill, weight = Pairs(staged), staged.option.fill, staged.weight
    low, high = ((seconds - fill * total_seconds) / weight for seconds in (bound_seconds, known_seconds))
    least = pairs.least_seconds(low, high, pairs.least_bytes(priced, staged.equal_rooms))
    return fill * total_seconds + weight * least


def best_pipeline(program: PipelineProgram, cutoff_seconds: float) -> Bisected[Pipeline]:
    """Search the best pipeline below the cutoff."""
    return Bisection(program, keep=1, relative_gap=GAP, cutoff_seconds=cutoff_seconds).run()


def _longest(staged: Staged[Composed], total_seconds: float, cutoff_seconds: float) -> int:
    """Return the most pieces of a stage of a pipeline below the cutoff, whose stages take ``total_seconds`` at least."""
    room = cutoff_seconds - staged.option.fill * total_seconds
    most = room / staged.weight if staged.weight > 0 else math.inf
    tables = {id(table): table for table in staged.tables}
    return max(table.longest(staged.option.microbatches, most) for table in tables.values())
