"""The ranges of each kind of group at each size of micro-batch, composed once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from passes.lower.job import Job
from passes.search.hybrid.floors import Floors
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pools import Run
from passes.search.hybrid.recipes.composed import Composed, composed
from passes.search.hybrid.recipes.pieces import GroupKind, PieceSearch


@dataclass(eq=False)
class Tables:
    """Composes ranges and keeps them."""

    search: PieceSearch
    job: Job
    floors: Floors
    known: dict[Hashable, Composed] = field(default_factory=dict)
    """The ranges composed so far."""

    def of_groups(self, option: GroupOption) -> list[Composed]:
        """Return the table of each group. Raises ``TooWideError``."""
        families = tuple(1 << i for i in range((option.in_flight[-1] - 1).bit_length() + 1))
        return [self._composed(option, run, number, families) for run, number in option.members]

    def _composed(self, option: GroupOption, run: Run, number: int, families: tuple[int, ...]) -> Composed:
        key = run.kind(number), option.microbatches, families
        if key not in self.known:
            group = GroupKind(run.ranks(number), run.replicas, run.tensor)
            work = self.floors.work_seconds(run, option.samples // run.replicas)
            step = work * option.microbatches / option.groups
            self.known[key] = composed(self.search, group, self.job, option.microbatches, families, step)
        return self.known[key]
