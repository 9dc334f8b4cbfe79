"""Nothing fits: what is short, and the smallest changes of the request with which it fits, each solved and simulated.

what was asked for      recompute, schedule, micro-batches: left to the search
the job                 an optimizer with less state, a smaller batch
the devices             more memory in each, more nodes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cost_models.errors import InfeasibleError, UsageError
from cost_models.memory import OPTIMIZERS
from cost_models.units import counted, format_bytes, percent
from cost_models.variants import with_memory, with_more_nodes
from passes.graph.blocks import block_of
from passes.interrupts import may_be_lost
from passes.progress import report_phase
from passes.search.hybrid.fixed import Fixed
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pools import Run
from passes.search.hybrid.relax.changes import changes_of, lean_request
from passes.search.hybrid.relax.relaxed import NEAR, Allowance, Fit, Relaxed, priced
from passes.search.hybrid.request import HybridRequest
from passes.search.hybrid.search import GroupSearch
from passes.search.hybrid.solve import SolvedOption
from passes.search.infeasible import held_whole, shortfalls
from passes.search.judge import Judge, Simulated
from passes.search.largest import bisected
from passes.search.outcome import Label

GROWTH = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 1024.0)
"""Times a device's memory at which a plan is looked for that says what is short."""
LEANEST = 1.1
"""Options that can be solved with this times the least memory are tried on changed jobs and clusters, by hand."""
ARRANGEMENTS = 4
"""The number of ways to group the devices that are tried of these, by hand."""
FEWEST_TABLES = 32
"""Tables that may be composed for other jobs and clusters, however few the search itself made: a few seconds."""
MOST_CHANGES = 5
"""Changes of what is fixed that are named at most."""
MOST_TIMES = 8
"""Times the nodes that there are: further nodes are looked for up to here."""


Planner = Callable[[HybridRequest], Simulated]


@dataclass(eq=False)
class Relaxations:
    """The changes that help a request that does not fit, the smallest first."""

    given: Relaxed
    one_queue: bool
    plan: Planner | None = None
    """Plans a request in which something else is fixed."""
    least: Simulated | None = None
    """The simulated pipeline that overflows least."""
    leanest: list[GroupOption] = field(default_factory=list)
    """Options that need the least memory, the fastest first."""

    @property
    def search(self) -> GroupSearch:
        """The search that found nothing."""
        return self.given.search

    def growth(self) -> tuple[float, Simulated] | None:
        """Return the first of the larger memories with which there is a pipeline, and this as if it were there."""
        for room in GROWTH:
            found = self.at(room)
            if found is not None:
                return room, found
        return None

    def at(self, room: float) -> Simulated | None:
        """Simulate the fastest pipeline with this share of the memory, as if that were there; None where none was found."""
        solved = self.given.surveyed(room) if self.given.is_in_time else ()
        if not solved:
            return None
        return self.given.judge.measure(self.search.decode(solved[0], one_queue=self.one_queue).candidate)

    def ways(self, growth: float | None) -> Iterator[str]:
        """Yield each change that helps, with its price."""
        fixed = self.search.fixed
        if fixed is None:
            yield from self._recompute()
            yield from self._schedule()
        else:
            yield from self._fixed(fixed)
        least = None if growth is None else self.given.least_room(growth)
        if least is None:
            return
        self.leanest = [solved.option for solved in self.given.surveyed(least * LEANEST)]
        further = self._microbatches, self._optimizer, self._batch, partial(self._memory, least), self._nodes
        for ways in further if fixed is None else [partial(self._memory, least)]:
            if self.given.is_in_time:
                yield from ways()

    def _fixed(self, fixed: Fixed) -> Iterator[str]:
        """Find the smallest change of each thing that is fixed; of all that leave the groups as they are, if none does."""
        helped = 0
        for about, changes in changes_of(fixed.request, fixed.degrees, self.least):
            for words, request in changes:
                found = self._planned(request) if helped < MOST_CHANGES else None
                if found is not None:
                    helped += 1
                    yield f"{words}{about}: fits, {priced(found)}"
                    break
        if not helped:
            words, request = lean_request(fixed.request, fixed.degrees)
            found = self._planned(request)
            if found is not None:
                yield f"{words}: fits, {priced(found)}"

    def _planned(self, request: HybridRequest) -> Simulated | None:
        """Plan a changed request; None where nothing fits, or the change cannot be made."""
        if self.plan is None or not self.given.is_in_time:
            return None
        try:
            return self.plan(request)
        except (UsageError, InfeasibleError):
            return None

    def _recompute(self) -> Iterator[str]:
        if self.search.recompute != "none" or not any(self.search.pieces.blocks):
            return
        allowing = self.given.allowing(recompute=True)
        found = allowing.fastest(allowing.surveyed())
        if found is not None:
            again = sum(map(len, found.candidate.recomputed_blocks))
            blocks = counted(len(set(block_of(self.search.graph).values())), "block")
            free = self.at(GROWTH[-1])
            slower = 0.0 if free is None else max(0.0, found.step_seconds / free.step_seconds - 1)
            above = f" ({percent(slower)} above the same without the limit of memory)" if free else ""
            yield f"recompute=auto: fits, {again} of {blocks} computed again, {priced(found)}{above}"

    def _schedule(self) -> Iterator[str]:
        if self.search.schedule == "auto":
            return
        allowing = self.given.allowing(schedule=True)
        found = allowing.fastest(allowing.surveyed())
        if found is not None:
            yield f"schedule {found.candidate.schedule}: fits, {priced(found)}"

    def _microbatches(self) -> Iterator[str]:
        """Find the smallest larger number of micro-batches."""
        asked = self.search.microbatches
        if asked == "auto":
            return
        allowing, lean = self.given.allowing(microbatches=True), self._arrangements()
        listed = [o for o in allowing.search.options() if (o.runs, o.schedule, o.chunks) in lean]
        for count in sorted({o.microbatches for o in listed if o.microbatches > asked}):
            found = allowing.fastest(allowing.solved([o for o in listed if o.microbatches == count]))
            if found is not None:
                yield f"{counted(count, 'micro-batch')} (of {asked}): fits, {priced(found)}"
                return

    def _optimizer(self) -> Iterator[str]:
        """Find the optimizer with the most state that fits."""
        job = self.search.job
        for name in ("momentum", "sgd"):
            if OPTIMIZERS[name].copies < OPTIMIZERS[job.optimizer].copies:
                lean = self.given.doing(replace(job, optimizer=name))
                found = lean.fastest(lean.solved(self.leanest))
                if found is not None:
                    # all options: with less state there may be room for more than the leanest
                    found = lean.fastest(lean.surveyed()) or found
                    yield f"optimizer_memory={name}, with less state than {job.optimizer}: fits, {priced(found)}"
                    return

    def _batch(self) -> Iterator[str]:
        """Find the largest smaller batch for the leanest ways to group devices: whole samples for every replica."""
        size, most = self.search.job.batch_size, 0
        best: Simulated | None = None
        fixed = self.search.microbatches
        for runs, schedule, chunks in self._arrangements():
            unit = runs[0].replicas * (1 if fixed == "auto" else fixed)

            def solved(number: int, like: GroupOption, unit: int = unit) -> SolvedRelaxation | None:
                smaller = self.given.doing(replace(self.search.job, batch_size=number * unit))
                samples = unit if fixed == "auto" else number * unit // fixed
                option = replace(like, samples=samples, microbatches=number * unit // samples)
                return SolvedRelaxation.of(smaller, [option])

            like = GroupOption(runs, unit, 1, schedule, chunks)
            number, found = largest(partial(solved, like=like), -(-size // unit))
            if found is not None and number * unit > most:
                best, most = found, number * unit
        if best is not None:
            yield f"batch {most:,} (of {size:,}): fits, {priced(best)}"

    def _arrangements(self) -> list[tuple[tuple[Run, ...], str, int]]:
        """List the ways to group devices that need the least memory, the fastest first."""
        return list(dict.fromkeys((o.runs, o.schedule, o.chunks) for o in self.leanest))[:ARRANGEMENTS]

    def _memory(self, least: float) -> Iterator[str]:
        """Say how much would do: what the search reckons with, or what the simulation needs, if that is more."""
        found = self.at(least * NEAR)
        if found is None:
            return
        devices = self.search.cluster.devices
        needed = max(peak / d.room_bytes for peak, d in zip(found.peak_bytes, devices, strict=True))
        factor = max(least * NEAR, needed) * NEAR
        larger = with_memory(self.search.cluster, factor)
        whole = self.given.on(larger)
        found = whole.fastest(whole.surveyed()) or found
        if len({device.memory_bytes for device in devices}) > 1:
            yield f"devices with {factor:.2f} times the memory: fits, {priced(found)}"
            return
        grown = larger.devices[0].memory_bytes
        yield (
            f"devices with {format_bytes(grown)} of usable memory (of {format_bytes(devices[0].memory_bytes)}): "
            f"fits, {priced(found)}"
        )

    def _nodes(self) -> Iterator[str]:
        """Find the smallest number of further nodes."""
        cluster = self.search.cluster
        shapes = {(run.tensor, o.chunks) for o in self.leanest for run in o.runs}

        def solved(count: int) -> SolvedRelaxation | None:
            larger = with_more_nodes(cluster, count)
            if larger is None:
                return None
            grown = self.given.on(larger)
            alike = [
                o
                for o in grown.search.options()
                if all((run.tensor, o.chunks) in shapes and run.replicas == o.samples for run in o.runs)
            ]
            return SolvedRelaxation.of(grown, alike)

        count, found = smallest(solved, MOST_TIMES * len(cluster.ranks_per_node))
        larger = with_more_nodes(cluster, count)
        if found is not None and larger is not None:
            # all options: where a node is added, there is more room than for the leanest
            whole = self.given.on(larger)
            found = whole.fastest(whole.surveyed()) or found
            yield f"{counted(count, 'more node')}: fits, {priced(found)}"


def infeasible(
    search: GroupSearch,
    judge: Judge,
    tried: Sequence[Simulated],
    fit: Fit,
    *,
    one_queue: bool,
    untried: str,
    deadline: float,
    plan: Planner | None = None,
) -> InfeasibleError:
    """Say what is short in the plan that overflows least, and what would do. ``tried``: what was simulated.

    ``untried``: says how many options were left, if any, and why. ``deadline``: value of ``time.perf_counter`` to stop at.
    ``plan``: plans a request in which something else is fixed.
    """
    report_phase("what would fit")
    allowance = Allowance(max(FEWEST_TABLES, len(search.tables.known)))
    relaxations = Relaxations(Relaxed(search, judge, fit, allowance, deadline), one_queue, plan)
    found, ways = list(tried), list[str]()
    try:
        with may_be_lost():
            growth = relaxations.growth()
            if growth is not None and not found:
                found.append(growth[1])
            relaxations.least = min(found, key=lambda s: s.overflow_bytes, default=None)
            for way in relaxations.ways(None if growth is None else growth[0]):
                ways.append(way)
            if not relaxations.given.is_in_time:
                ways.append("a longer time limit: more was not looked for")
    except KeyboardInterrupt:
        ways.append("(interrupted: more was not looked for)")
    because = ["no pipeline of sharded stages fits"]
    if untried:
        because = [f"no pipeline of sharded stages that was looked at fits, {untried}"]
    if found:
        least = min(found, key=lambda s: s.overflow_bytes)
        because = [*because[: bool(untried)], f"{Label.of_groups(least.candidate)}, simulated:"]
        because += shortfalls(enumerate(map(int, least.peak_bytes)), judge.cluster.devices)
    discovery = search.piece_search.discovery
    because += held_whole(search.graph, (n.name for n in search.graph.ops if discovery.only_whole(n)))
    what, other = f"{search.graph.model_name} does not fit {judge.cluster.name}", "another model"
    if search.fixed is not None:
        what, other = f"{what} with {search.fixed.request.fix or 'layouts fixed'}", "fewer things fixed"
    no_way = f"{other}: no single change of the job or the cluster was found with which it fits"
    return InfeasibleError(what, because, ways or [no_way])


@dataclass(frozen=True, eq=False)
class SolvedRelaxation:
    """Options that were solved on a changed job or cluster."""

    relaxed: Relaxed
    options: tuple[SolvedOption, ...]

    @staticmethod
    def of(relaxed: Relaxed, options: Sequence[GroupOption]) -> SolvedRelaxation | None:
        """Solve them; None if nothing fits by the search's own count."""
        found = relaxed.solved(options)
        return SolvedRelaxation(relaxed, tuple(found)) if found else None

    def simulated(self) -> Simulated | None:
        """Simulate the best; None if nothing fits."""
        return self.relaxed.fastest(self.options)


def largest(solved: Callable[[int], SolvedRelaxation | None], end: int) -> tuple[int, Simulated | None]:
    """Find the largest number below ``end`` that fits, if 1 does, by bisection; smaller where simulations overflow."""
    low, last = 1, max(1, end - 1)
    best = solved(low) if end > 1 else None
    if best is not None and last > 1:
        other = solved(last)
        low, best = bisected(solved, low, best, last) if other is None else (last, other)
    found = best.simulated() if best else None
    while best is not None and found is None and low > 1:
        low -= max(1, low // 16)
        best = solved(low)
        found = best.simulated() if best else None
    return low, found


def smallest(solved: Callable[[int], SolvedRelaxation | None], most: int) -> tuple[int, Simulated | None]:
    """Find the smallest number that fits: twice as large each time, up to ``most``, then by bisection."""
    low, high = 0, 1
    best = solved(high)
    while best is None and high < most:
        low, high = high, min(2 * high, most)
        best = solved(high)
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        other = solved(middle)
        low, high, best = (middle, high, best) if other is None else (low, middle, other)
    found = best.simulated() if best else None
    while best is not None and found is None and high < most:
        high += max(1, high // 16)
        best = solved(high)
        found = best.simulated() if best else None
    return high, found
