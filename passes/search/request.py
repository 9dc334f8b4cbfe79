"""The request that every search is given: the job, and what the user fixed about its placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.search.words import StrategyName


@dataclass(frozen=True)
class Request:
    """One training step to place, with what is fixed; the rest is left to the search.

    A strategy's own request adds what only that strategy knows.
    """

    strategy: ClassVar[StrategyName]
    """The strategy that answers it, a key of ``STRATEGY_WORDS``."""

    job: Job
    microbatches: int | Literal["auto"] = "auto"
    whole_batch: str = ""
    """The reason why ``microbatches`` is 1, where that follows from the model and nobody asked for it."""
    pins: Mapping[str, int] | Mapping[str, str] = field(default_factory=dict)
    """Glob over module paths or names -> place: a stage, a device or a layout, as the strategy has it."""
    time_limit_seconds: float | None = None
    """Seconds after which the search ends with the best found so far; None: when nothing is left to try."""
    gap: float = 0.0
    """Relative gap that is good enough: what may be better by less is not looked for. 0: only what is not better."""
    known: Candidate | None = None
    """The placement to take: nothing is searched."""
    only_fits: bool = False
    """Asked only whether anything fits: the first plan that does ends the search, and where there is none, no ways out are
    looked for."""
