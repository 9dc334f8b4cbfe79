"""The rule of sums: each tied gradient is summed once over its ranks, after their last backward, in one order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from runtime.check.facts import Fault, ProgramFacts
from runtime.program.program import ReduceGradients, group_queue


class _Sum(NamedTuple):
    """A sum, described once for all places that ask: its ranks can be thousands."""

    ranks: tuple[int, ...]
    over: int
    """Number of its set of ranks."""
    named: bool
    """True if its ranks are in order and its queue is theirs."""
    among: frozenset[int]
    """The same ranks, to look one up."""
    here: set[int]
    """The ranks that take part."""


def tied_summed(facts: ProgramFacts) -> Iterator[Fault]:
    """Find gradients of tied parameters that are not summed once over their ranks, after their last backward."""
    numbers: dict[tuple[int, ...], int] = {}
    sums = _sums(facts, numbers)
    tied = [(tuple(sorted(set(group.ranks))), group) for group in facts.tied]
    wanted = {
        (parameter, numbers.setdefault(ranks, len(numbers)), group.scattered): ranks
        for ranks, group in tied
        for parameter in group.parameters
        if facts.training and len(ranks) > 1
    }
    absent = {key: [r for r in found.ranks if r not in found.here] for key, found in sums.items()}
    seen: dict[tuple[str, int], set[int]] = {}
    """The ranks that sum a parameter over a set of ranks."""
    for place, reduction in facts.reductions:
        rank, index = place
        found = sums[id(reduction)]
        if rank not in found.among:
            yield Fault(f"{facts.text(place)} sums over ranks that this one is not among", True)
        for parameter in reduction.parameters:
            key = parameter, found.over
            if (*key, reduction.scattered) not in wanted:
                yield Fault(f"{facts.text(place)} sums {parameter}, which is not tied over these ranks")
            ranks_seen = seen.setdefault(key, set())
            if rank in ranks_seen:
                yield Fault(f"{facts.text(place)} sums {parameter} again")
            ranks_seen.add(rank)
        if not found.named:
            yield Fault(f"{facts.text(place)} uses queue {reduction.queue} and ranks in another order", True)
        if index < facts.last_backward.get(rank, -1):
            yield Fault(f"{facts.text(place)} sums before {facts.text((rank, facts.last_backward[rank]))}")
        for other in absent[id(reduction)]:
            yield Fault(f"{facts.text(place)} waits for rank {other}, which does not take part", True)
    order = {
        (name, numbers.setdefault(ranks, len(numbers))): number
        for number, (ranks, group) in enumerate(tied)
        for name in group.parameters
    }
    yield from _in_order(facts, sums, order)
    for (parameter, over, _), ranks in sorted(wanted.items(), key=lambda item: (item[0][0], item[1])):
        for rank in ranks:
            if rank not in seen.get((parameter, over), ()):
                yield Fault(
                    f"rank {rank}: the gradient of tied parameter {parameter} is never summed over {ranks}"
                )


def _sums(facts: ProgramFacts, numbers: dict[tuple[int, ...], int]) -> dict[int, _Sum]:
    """Describe every reduction, by its ``id``; equal ones share who takes part."""
    taking_part: dict[ReduceGradients, set[int]] = {}
    found: dict[int, _Sum] = {}
    for (rank, _), reduction in facts.reductions:
        known = found.get(id(reduction))
        if known is None:
            ranks = tuple(sorted(reduction.ranks))
            known = found[id(reduction)] = _Sum(
                ranks,
                numbers.setdefault(ranks, len(numbers)),
                reduction.ranks == ranks and reduction.queue == group_queue(ranks),
                frozenset(ranks),
                taking_part.setdefault(reduction, set()),
            )
        known.here.add(rank)
    return found


def _in_order(
    facts: ProgramFacts, sums: dict[int, _Sum], order: dict[tuple[str, int], int]
) -> Iterator[Fault]:
    """Find sums of one parameter in another order than that of ``tied``: after a scatter, sums are of the parts."""
    latest: dict[str, dict[int, int]] = {}
    for place, reduction in facts.reductions:
        rank, over = place[0], sums[id(reduction)].over
        for name in reduction.parameters:
            number, known = order.get((name, over), -1), latest.setdefault(name, {})
            if number < known.get(rank, number):
                yield Fault(f"{facts.text(place)} sums {name} after a sum that is of its result", True)
            known[rank] = number
