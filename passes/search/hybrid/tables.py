"""The ranges of each kind of group at each size of micro-batch, composed once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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

    def of_stages(self, option: GroupOption, searches: Sequence[PieceSearch] = ()) -> list[Composed]:
        """Return the table of each stage. Raises ``TooWideError``.

        ``searches``: that of each stage, where something is fixed.
        """
        families = tuple(1 << i for i in range((option.in_flight[-1] - 1).bit_length() + 1))
        found: dict[tuple[int, int], Composed] = {}
        stages = list(zip(option.places, searches or [self.search] * option.stages, strict=True))
        for place, search in stages:
            if (place, id(search)) not in found:
                found[place, id(search)] = self._composed(search, option, *option.members[place], families)
        return [found[place, id(search)] for place, search in stages]

    def _composed(
        self, search: PieceSearch, option: GroupOption, run: Run, number: int, families: tuple[int, ...]
    ) -> Composed:
        key = None if search is self.search else search, run.kind(number), option.microbatches, families
        if key not in self.known:
            group = GroupKind(run.ranks(number), run.replicas, run.tensor)
            work = self.floors.work_seconds(run, option.samples // run.replicas)
            step = work * option.microbatches / option.groups
            self.known[key] = composed(search, group, self.job, option.microbatches, families, step)
        return self.known[key]
