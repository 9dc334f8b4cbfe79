"""A profile of a real run laid over the prediction of its plan: residuals, and what they say of the rates and the choice.

residual            measured / predicted, by kind of compute of each segment, by rank, by link; of waiting too
device's factor     Σ measured / Σ predicted seconds of computing, over the ranks on devices of one model
links' factor       the same of messages: of each pair and size the least on either side. A message whose receiver came
                    late is recorded until the receiver took it, so more than the least says nothing of the link
corrected           the plan simulated again with devices, optimizer steps and links slower by their factors
still chosen        alternatives are stored with their seconds, not with their programs. If everything that one takes is
                    off by a factor between the least and the greatest of those above, its step lies between the least
                    and the greatest times its predicted one; the plan's corrected step is compared with that
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.units import counted
from partitioner.record.data import PlanData
from partitioner.record.other_rates import at_seconds, with_device_seconds, with_network, with_node_links
from partitioner.record.rebuild import at_costs_of, proved_programs, simulate_plan
from partitioner.report.comparison import (
    Factors,
    LinkResidual,
    ProfileComparison,
    RankResidual,
    SegmentResidual,
)
from partitioner.report.profile_file import Beside, MeasuredTrace, SentMessage, Slice
from runtime.measure.measured_step import RankTimes, simulated_times
from runtime.simulate.simulation import Simulation

KINDS = {"F": "forward", "B": "backward", "I": "input half", "W": "weight half"}
_COMPUTE = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


def compare(plan: PlanData, trace: MeasuredTrace) -> ProfileComparison:
    """Lay the measured step of ``trace`` over the prediction of ``plan``. Raises UsageError if it is of another plan."""
    groups = proved_programs(plan)
    predicted = simulate_plan(plan, groups)
    devices = trace.facts.devices
    _refuse_other_plan(plan, trace, predicted)
    own = [
        tuple(Slice(span.start_seconds, span.end_seconds, span.text) for span in predicted.timeline[device])
        for device in devices
    ]
    ranks = tuple(
        _rank(plan, rank, device, times, simulated_times(predicted, device))
        for rank, (device, times) in enumerate(zip(devices, trace.facts.times, strict=True))
    )
    links = tuple(_links(plan, trace, predicted))
    factors = Factors(
        {
            model: factor
            for model in dict.fromkeys(rank.model for rank in ranks)
            if (factor := _factor(rank.computing for rank in ranks if rank.model == model)) is not None
        },
        _factor(rank.optimizer for rank in ranks),
        _factor(link.seconds for link in links if not link.between_nodes),
        _factor(link.seconds for link in links if link.between_nodes),
    )
    if not factors.devices:
        raise UsageError(
            "cannot compare the profile with the plan", ["the plan predicts that nothing takes time"]
        )
    cluster, uncorrected = _corrected_cluster(plan.cluster, factors, ranks)
    summing = factors.network if factors.network is not None else factors.node_links
    other = at_seconds(
        plan,
        cluster,
        {rank.device: factors.devices.get(rank.model, 1.0) for rank in ranks},
        {rank.device: 1.0 if factors.optimizer is None else factors.optimizer for rank in ranks},
        1.0 if summing is None else summing,
    )
    return ProfileComparison(
        plan,
        trace,
        Beside(trace.step_seconds, predicted.step_seconds),
        Beside(_bubble(trace), predicted.bubble_fraction),
        tuple(_segments(trace.slices, own)),
        ranks,
        links,
        factors,
        cluster,
        tuple(uncorrected),
        simulate_plan(other, at_costs_of(other, groups)).step_seconds,
    )


def _refuse_other_plan(plan: PlanData, trace: MeasuredTrace, predicted: Simulation) -> None:
    """Raise UsageError unless the ranks of ``trace`` ran the programs of ``plan`` on whole batches."""
    facts, because = trace.facts, []
    if facts.fingerprint != plan.model.fingerprint:
        because.append(
            f"it is of {facts.model} with fingerprint {facts.fingerprint[:12]}, "
            f"the plan of {plan.model.name} with {plan.model.fingerprint[:12]}"
        )
    if tuple(sorted(facts.devices)) != plan.used_devices:
        because.append(
            f"it is of devices {_some(sorted(facts.devices))}, the plan uses {_some(plan.used_devices)}"
        )
    if not because:
        for rank, (slices, device) in enumerate(zip(trace.slices, facts.devices, strict=True)):
            ran, planned = (
                Counter(s.name for s in slices),
                Counter(s.text for s in predicted.timeline[device]),
            )
            # A rank whose optimizer steps while it sums, or has nothing to step, may have no such slice.
            missing = sorted((planned - ran).keys() - {"step"})
            extra = sorted((ran - planned).keys() - {"step"})
            if missing or extra:
                what = f"did not run {_some(missing)}" if missing else f"ran {_some(extra)} beside"
                because.append(
                    f"rank {rank} {what} (F forward, B backward, + sum): another schedule, or other stages"
                )
        if not because and facts.samples != plan.batch_size:
            because.append(
                f"its step had {counted(facts.samples, 'sample')}, the plan's have {plan.batch_size}: "
                "their seconds are not the same thing"
            )
    if because:
        raise UsageError(
            "cannot compare the profile with the plan",
            because[:5],
            ["give the plan that was profiled, with the trace of engine.profile(batches).save(FILE)"],
        )


def _some(items: Iterable[object], most: int = 4) -> str:
    found = [str(item) for item in items]
    return ", ".join(found[:most]) + (", …" if len(found) > most else "")


def _rank(plan: PlanData, rank: int, device: int, measured: RankTimes, predicted: RankTimes) -> RankResidual:
    return RankResidual(
        rank,
        device,
        plan.cluster.devices[device].model,
        computing=Beside(measured.forward + measured.backward, predicted.forward + predicted.backward),
        waiting=Beside(measured.waiting, predicted.waiting),
        communication=Beside(measured.communication, predicted.communication),
        optimizer=Beside(measured.optimizer, predicted.optimizer),
        other_seconds=measured.other,
    )


def _bubble(trace: MeasuredTrace) -> float:
    """Return the measured bubble as ``Simulation.bubble_fraction`` defines it."""
    busy = [
        sum(s.end_seconds - s.start_seconds for s in slices if _COMPUTE.fullmatch(s.name))
        for slices in trace.slices
        if slices
    ]
    step = trace.step_seconds
    return 1.0 - sum(busy) / (len(busy) * step) if busy and step else 0.0


def _segments(
    measured: Sequence[Sequence[Slice]], predicted: Sequence[Sequence[Slice]]
) -> Iterable[SegmentResidual]:
    """Yield the residual of every kind of compute of every segment, with means over micro-batches and ranks."""
    sides: list[defaultdict[tuple[int, str], list[float]]] = []
    for ranks in (measured, predicted):
        seconds: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        for name, lasts in ((s.name, s.end_seconds - s.start_seconds) for slices in ranks for s in slices):
            if match := _COMPUTE.fullmatch(name):
                seconds[int(match[1]), match[2]].append(lasts)
        sides.append(seconds)
    for segment, letter in sorted(sides[0], key=lambda key: (key[0], "FBIW".index(key[1]))):
        found = [side[segment, letter] for side in sides]
        means = Beside(*(sum(side) / len(side) for side in found))
        yield SegmentResidual(segment, KINDS[letter], len(found[0]), means)


def _links(plan: PlanData, trace: MeasuredTrace, predicted: Simulation) -> Iterable[LinkResidual]:
    """Yield the residual of every ordered pair of ranks that send each other messages."""
    devices = trace.facts.devices
    rank_of = {device: rank for rank, device in enumerate(devices)}
    simulated = [
        SentMessage(start, end, m.label, rank_of[m.source], rank_of[m.target], int(size))
        for start, end, m, size in predicted.transfers
    ]
    least = [_least(messages) for messages in (trace.messages, simulated)]
    pairs: defaultdict[tuple[int, int], list[SentMessage]] = defaultdict(list)
    for sent in trace.messages:
        if all((sent.source, sent.target, sent.size_bytes) in side for side in least):
            pairs[sent.source, sent.target].append(sent)
    for (source, target), messages in sorted(pairs.items()):
        seconds = Beside(*(sum(side[source, target, m.size_bytes] for m in messages) for side in least))
        ends = [plan.cluster.devices[devices[rank]].node for rank in (source, target)]
        size = sum(message.size_bytes for message in messages)
        yield LinkResidual(source, target, ends[0] != ends[1], len(messages), size, seconds)


def _least(messages: Iterable[SentMessage]) -> dict[tuple[int, int, int], float]:
    """Return the least seconds by (source, target, bytes)."""
    found: dict[tuple[int, int, int], float] = {}
    for sent in messages:
        key = sent.source, sent.target, sent.size_bytes
        found[key] = min(found.get(key, float("inf")), sent.end_seconds - sent.start_seconds)
    return found


def _factor(parts: Iterable[Beside]) -> float | None:
    """Return Σ measured / Σ predicted; None where one of them is nothing."""
    found = list(parts)
    measured, predicted = sum(part.measured for part in found), sum(part.predicted for part in found)
    return measured / predicted if measured > 0.0 and predicted > 0.0 else None


def _corrected_cluster(
    cluster: ClusterSpec, factors: Factors, ranks: Sequence[RankResidual]
) -> tuple[ClusterSpec, list[str]]:
    """Return the cluster at corrected rates, and what could not be corrected."""
    host = _factor(rank.computing for rank in ranks) or 1.0
    provenance = f"{cluster.provenance}, corrected by a profile"
    found, uncorrected = with_device_seconds(cluster, factors.devices, host, provenance), []
    if factors.node_links is not None:
        scaled = with_node_links(found, 1.0 / factors.node_links, factors.node_links)
        if scaled is None:
            uncorrected.append("links inside nodes: pairs of devices have links of their own")
        found = scaled or found
    if factors.network is not None:
        scaled = with_network(found, 1.0 / factors.network, factors.network)
        if scaled is None:
            uncorrected.append("the network: it is a graph of links or has switches")
        found = scaled or found
    return found, uncorrected
