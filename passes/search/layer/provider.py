"""Pipelines of single devices, cut anywhere, as proposals: splits of every schedule and number of micro-batches.

OpGraph ─► units ─► for every micro-batch count × schedule: the surrogate's exact minimum and other good splits
        ─► the best of all, the best of each schedule that is nearly as good, a cautious one, one without cuts
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.errors import PartitionerError
from passes.lower.candidate import Candidate
from passes.search.blocks import Blocks
from passes.search.certificate import NAMED, BoundTerm, PipelineTerms, StageTerms, in_rows
from passes.search.fastest import ROOM_LEFT
from passes.search.judge import Judge, Simulated
from passes.search.layer.infeasible import fitting, infeasible, lean_splits
from passes.search.layer.problem import stage_and_link_seconds
from passes.search.layer.request import LayerRequest, prepare
from passes.search.layer.search import LayerSearch, OptionResult, SolvedSplit, busiest_seconds
from passes.search.layer.tuning import TUNING
from passes.search.microbatches import may_cost_less
from passes.search.provider import Judged, Proposal, Proved, Valued

STAGES_RECOMPUTE = {
    "auto": "a stage that does not fit computes all its blocks again (the plan then keeps what fits)",
    "full": "every stage computes its blocks again",
}
"""The part of recompute in the surrogate, in words for the certificate."""


@dataclass(eq=False)
class LayerProvider:
    """Proposes pipelines whose stages run on one device each."""

    judge: Judge
    request: LayerRequest
    words = "stages on single devices"
    objective = "fill * sum(stage + link seconds) + (microbatches - fill) * chunks * largest"
    learns = True
    quickly_bounded = True
    slack = TUNING.one_of_each
    _results: list[Sequence[OptionResult]] = field(default_factory=list)

    @property
    def simulated_first(self) -> int:
        """All: schedules differ in how far off the surrogate is."""
        return self.request.simulations

    @cached_property
    def search(self) -> LayerSearch:
        """The search of the request."""
        judge = self.judge
        return prepare(judge.graph, judge.costs, judge.cluster, self.request)

    @cached_property
    def _work_seconds(self) -> float:
        """Lower bound on the whole step on one device."""
        if may_cost_less(self.judge.graph, self.request.microbatches):
            return 0.0
        devices = {d.speed_alone: d for d in self.judge.cluster.devices}.values()
        return self.judge.costs.least_work_seconds(self.request.job.batch_size, devices)

    @property
    def _floor_seconds(self) -> float:
        """Lower bound on pipelines of single devices: no more of them work than there are places to cut."""
        places = min(self.judge.cluster.world_size, TUNING.most_intervals, len(self.judge.costs.ops))
        return self._work_seconds / places

    def proposals(
        self, known_seconds: float, room: float, deadline: float
    ) -> Sequence[Proposal[SolvedSplit]]:
        """Return the splits that are worth a simulation; see ``Provider``."""
        if self.request.only_fits:  # at once all that may fit, whatever the room
            lean = lean_splits(self.search) if room == 1.0 else ()
            found = [self._proposal(replace(solved, every_block=True)) for solved in lean]
            unlike = {proposal.identity: proposal for proposal in found}.values()
            return sorted(unlike, key=lambda proposal: proposal.peak_bytes)[: self.request.simulations]
        cutoff = known_seconds * self.slack
        if math.isfinite(cutoff) and self._floor_seconds > cutoff:
            return []
        results = self.search.solve(deadline, room, known_seconds)
        self._results.append(results)
        ranked = _ranked(results, self.request.simulations)
        alone = any(len(solved.ranks) == 1 for solved in ranked)
        if not alone and (math.isinf(cutoff) or self._work_seconds <= cutoff):
            ranked += self._on_one_device(room, deadline)
        return [self._proposal(solved) for solved in ranked]

    def _on_one_device(self, room: float, deadline: float) -> list[SolvedSplit]:
        """Return the best without cuts: messages that cost more than they save, only the simulation sees."""
        plain = [option for option in self.search.options if option.chunks == 1]
        if self.search.pins or self.search.min_stages > 1 or not plain:
            return []
        one_schedule = [option for option in plain if option.schedule == plain[0].schedule]
        alone = replace(self.search, max_stages=1, options=one_schedule, _plans={})
        solved = [s for result in alone.solve(deadline, room) for s in result.solved]
        return sorted(solved, key=lambda s: s.split.objective_seconds)[:1]

    def _proposal(self, solved: SolvedSplit) -> Proposal[SolvedSplit]:
        split = solved.split
        return Proposal(
            solved,
            split.objective_seconds,
            option=solved.option,
            identity=(
                solved.option,
                solved.stages.tobytes(),
                split.recomputed,
                solved.every_block,
                solved.left_bytes,
            ),
            ranks=solved.ranks,
            least_seconds=busiest_seconds(self.search, solved),
            peak_bytes=round(float(self._estimated_bytes(solved).max())),
        )

    def candidate(self, proposal: Proposal[SolvedSplit]) -> Candidate:
        """Make the split a placement of the model's ops, with as few blocks computed again as fit."""
        search, solved = self.search, proposal.solved
        return Candidate(
            stage_of=dict(zip(search.model.names, solved.stages.tolist(), strict=True)),
            groups=tuple((rank,) for rank in solved.ranks),
            microbatches=solved.option.microbatches,
            schedule=solved.option.schedule,
            recomputed_blocks=(all_blocks if solved.every_block else fewest_blocks)(search, solved),
        )

    def leaner(
        self, judged: Judged[SolvedSplit], room: float, known_seconds: float
    ) -> tuple[Proposal[SolvedSplit], float] | None:
        """Compute all blocks of stages that recompute again; after that, solve the option with less memory.

        Where it is the allocator that overflows, blocks leave room for it first, and the option is solved again with what
        its stages need beyond their tensors.
        """
        solved, simulated = judged.proposal.solved, judged.simulated
        by_tensors = simulated.tensors_fit(self.judge.cluster.devices)
        if simulated.candidate.recomputed_blocks != all_blocks(self.search, solved):
            if by_tensors and not solved.left_bytes:
                left = tuple(float(simulated.allocator_bytes[rank]) for rank in solved.ranks)
                return self._proposal(replace(solved, left_bytes=left)), room
            return self._proposal(replace(solved, every_block=True)), room
        if self.request.only_fits:
            return self._learned_from(judged, room)
        if by_tensors and solved.option.chunks == 1:
            self._learn(solved, simulated)
        elif by_tensors:
            size = solved.option.size(self.search.batch_size)
            self.search.learned.learn_share(solved.option, size, ROOM_LEFT * self._estimated_share(judged))
        else:
            room = ROOM_LEFT * self._estimated_share(judged)
        result = self.search.solve_option(solved.option, 0.0, math.inf, known_seconds * self.slack, room)
        return (self._proposal(result.solved[0]), room) if result.solved else None

    def _learned_from(
        self, judged: Judged[SolvedSplit], room: float
    ) -> tuple[Proposal[SolvedSplit], float] | None:
        """Return a split that fits with what the stages of one that overflows need beyond estimates; None if none does."""
        option = judged.proposal.solved.option
        if option.chunks > 1:
            return None
        self._learn(judged.proposal.solved, judged.simulated)
        solved = next(fitting(self.search, option, 1.0, self.search.plan(option)), None)
        return None if solved is None else (self._proposal(replace(solved, every_block=True)), room)

    def _learn(self, solved: SolvedSplit, simulated: Simulated) -> None:
        """Take in what each stage needs beyond what the search counts, on devices with one stage each."""
        search, plan = self.search, self.search.plan(solved.option)
        beside = [search.cluster.devices[rank].room_bytes - plan.room_of(rank) for rank in solved.ranks]
        sizes = zip(solved.ranks, beside, solved.split.memory_bytes, strict=True)
        beyond = [max(0.0, simulated.peak_bytes[rank] - own - size) for rank, own, size in sizes]
        size = solved.option.size(search.batch_size)
        search.learned.learn(solved.space, solved.problem, size, solved.split, plan, beyond)

    def _estimated_bytes(self, solved: SolvedSplit) -> FloatArray:
        """[ranks] bytes that each holds, as the surrogate counts them."""
        return solved.split.bytes_on(solved.ranks, len(self.search.cluster.devices))

    def _estimated_share(self, judged: Judged[SolvedSplit]) -> float:
        """Estimated / simulated bytes of tensors, of the memory left for them: the least where it is short."""
        devices = self.search.cluster.devices
        plan = self.search.plan(judged.proposal.solved.option)
        ranks = zip(
            self._estimated_bytes(judged.proposal.solved), judged.simulated.tensors_of(devices), devices,
            strict=True,
        )  # fmt: skip
        return min(
            float(own) / held * (room / plan.room_of(device.rank))
            for own, (held, room), device in ranks
            if held > room
        )

    def proved(self) -> Proved:
        """Return the bound over all options, and each option's, the lowest by name."""
        if not self._results:
            together, floor = "stages on single devices, bounded together", self._floor_seconds
            return Proved(together, "work / devices", floor, (BoundTerm(together, 1, floor),))
        bounded = (own for own in self._results if any(math.isfinite(r.bound_seconds) for r in own))
        search, results = self.search, next(bounded, self._results[0])
        space = "; and ".join(s.name for s in search.spaces)
        if search.min_stages > 1:
            space += f"; {search.min_stages} devices or more"
        if search.recompute != "none" and search.model.blocks:
            space += f"; {STAGES_RECOMPUTE[search.recompute]}"
        solved = sum(result.looked_at for result in results)
        space += (
            f"; {search.plan(search.options[0]).text}; {solved} of {len(results)} schedules and micro-batch counts "
            f"solved, the rest bounded"
        )
        return Proved(
            space,
            "dynamic program over cuts, branch and bound over bottlenecks",
            min((result.bound_seconds for result in results), default=math.inf),
            tuple(_bound_terms(results)),
            "" if all(result.optimal for result in results) else "time limit",
            search.lower_bound_seconds(),
        )

    def valued(self, proposal: Proposal[SolvedSplit]) -> Valued:
        """Value the split by its definition (``passes.search.layer.problem``), stage by stage."""
        solved = proposal.solved
        problem, split = solved.problem, solved.split
        seconds, link = stage_and_link_seconds(problem, split.stage_of, split.kinds, split.recomputed)
        held = problem.in_flight[: split.stages][::-1]
        stages = in_rows(
            StageTerms(1, float(own), 0.0, float(cut)) for own, cut in zip(seconds, link, strict=True)
        )
        m, turn = problem.microbatches, problem.alternating
        return Valued(
            proposal.seconds,
            PipelineTerms(problem.fill, m, problem.chunks, stages, tuple(held), (), turn),
        )

    def refusal(self, tried: Sequence[Judged[SolvedSplit]], room: float) -> PartitionerError:
        """Say what is short in the split that overflows least, and what would fit."""
        least = min(tried, key=lambda own: own.simulated.overflow_bytes, default=None)
        return infeasible(self.search, self.request.microbatches == "auto", least, room)


def _ranked(results: Sequence[OptionResult], count: int) -> list[SolvedSplit]:
    """Best first by surrogate, after the best of every schedule that is nearly as good and one cautious
    split."""
    solved = sorted((s for r in results for s in r.solved), key=lambda s: s.split.objective_seconds)
    if not solved:
        return []
    worth = solved[0].split.objective_seconds * TUNING.one_of_each
    first: dict[tuple[str, int], SolvedSplit] = {}
    for s in solved:
        if s.split.objective_seconds <= worth:
            first.setdefault((s.option.schedule, s.option.chunks), s)
    leaders = list(first.values())
    leaders += [s for s in solved if s.cautious and s not in leaders][:1]
    return [*leaders, *(s for s in solved if s not in leaders)][:count]


def _bound_terms(results: Iterable[OptionResult]) -> Iterable[BoundTerm]:
    """Yield the bounds of all options, the lowest by name, the others together."""
    bounds = sorted(results, key=lambda result: result.bound_seconds)
    for result in bounds[:NAMED]:
        yield BoundTerm.of(f"single devices, {result.option}", 1, result.bound_seconds)
    if others := [result.bound_seconds for result in bounds[NAMED:]]:
        yield BoundTerm.of("single devices, others", len(others), others[0])


BlocksOfStages = tuple[tuple[str, ...], ...]


def all_blocks(search: LayerSearch, solved: SolvedSplit) -> BlocksOfStages:
    """Per stage, the blocks with ops in it if it computes them again; () if no stage does."""
    return _named(search.model.blocks, _present(search, solved))


def fewest_blocks(search: LayerSearch, solved: SolvedSplit) -> BlocksOfStages:
    """Per stage, the blocks that it must compute again to fit; all of them where that was asked for.

    The surrogate knows two kinds of stages, those that keep all activations and those that compute all blocks again. Of the
    latter, blocks keep their activations after all while there is room for them, those that save the most time per byte
    first. The estimate is the surrogate's; the simulation of the candidate has the last word.
    """
    present = _present(search, solved)
    recompute = solved.problem.recompute
    if recompute is not None and not recompute.always:
        room = _room(solved)
        for stage, again in enumerate(solved.split.recomputed):
            if again:
                present[stage] -= _kept(search, solved, stage, present[stage], room)
    return _named(search.model.blocks, present)


def _present(search: LayerSearch, solved: SolvedSplit) -> list[set[int]]:
    """Per stage that computes its blocks again, the blocks with ops in it; nothing for the others."""
    found: list[set[int]] = [set() for _ in solved.ranks]
    for stage, block in zip(solved.stages.tolist(), search.model.blocks.of.tolist(), strict=True):
        if block >= 0 and solved.split.recomputed and solved.split.recomputed[stage]:
            found[stage].add(block)
    return found


def _named(blocks: Blocks, present: list[set[int]]) -> BlocksOfStages:
    if not any(present):
        return ()
    return tuple(tuple(blocks.names[block] for block in sorted(found)) for found in present)


def _room(solved: SolvedSplit) -> FloatArray:
    """[kinds or devices, by rank] bytes left on each rank, by the surrogate's estimate."""
    room = np.zeros(max(solved.ranks) + 1)
    for rank, kind in zip(solved.ranks, solved.split.kinds, strict=True):
        room[rank] = solved.problem.kinds[kind].capacity_bytes
    np.subtract.at(room, list(solved.ranks), solved.split.memory_bytes)
    if solved.left_bytes:
        np.subtract.at(room, list(solved.ranks), solved.left_bytes)
    return room


def _kept(
    search: LayerSearch, solved: SolvedSplit, stage: int, present: set[int], room: FloatArray
) -> set[int]:
    """Blocks of ``present`` whose activations fit the room on the stage's rank, which shrinks by them."""
    size, rank = solved.option.size(search.batch_size), solved.ranks[stage]
    held = max(whole for whole, _ in solved.problem.held_at(len(solved.ranks) - stage))
    bytes_of, seconds_of = _savings(search, solved, stage, present, size)
    kept: set[int] = set()
    for block in sorted(present, key=lambda b: -seconds_of[b] / max(bytes_of[b], 1.0)):
        needed = held * bytes_of[block]
        if needed <= room[rank]:
            room[rank] -= needed
            kept.add(block)
    return kept


def _savings(
    search: LayerSearch, solved: SolvedSplit, stage: int, present: set[int], size: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes per micro-batch that recomputing each block of the stage frees, and seconds that it takes."""
    model, blocks = search.model, search.model.blocks
    again = model.again_seconds(size, search.table.device(solved.ranks[stage]))
    stages = solved.stages
    sizes = model.costs.storage_bytes(size)
    bytes_of: dict[int, float] = {}
    seconds_of: defaultdict[int, float] = defaultdict(float)
    for block in present:
        mine = [op for op in blocks.members[block] if stages[op] == stage]
        inside = set(blocks.inside[block])
        saved = {name for op in mine for name in model.costs.saved[model.rows[op]]} & inside
        bytes_of[block] = float(sum(sizes[name] for name in saved))
        seconds_of[block] = float(again[mine].sum())
    return bytes_of, seconds_of
