"""An option stage by stage: the table of each stage, the micro-batches that it holds, the cut behind it, its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from cost_models.arrays import FloatArray, IntArray
from passes.search.hybrid.options import GroupOption
from passes.search.words import RecomputeMode

T = TypeVar("T")


class RangeTable(Protocol):
    """Ranges of pieces, and what they cost at least: ``Composed``, or a ``Cover`` of it."""

    @property
    def number(self) -> IntArray:
        """[first piece, last + 1] which of the unlike ranges it is; -1: none."""

    def plane(self, seconds: FloatArray) -> FloatArray:
        """[first piece, last + 1] seconds of each range; infinite where there is none."""

    def priced(
        self, microbatches: int, held: int, room_bytes: float, recompute: RecomputeMode, longest: int | None
    ) -> FloatArray:
        """[unlike ranges, kinds of ways, scales of prices] seconds + price · (bytes - room) of the cheapest way."""


RangeTableT = TypeVar("RangeTableT", bound=RangeTable)


@dataclass(frozen=True, eq=False)
class Staged(Generic[RangeTableT]):
    """Lists are per stage, counted from the end, if they do not say otherwise."""

    option: GroupOption
    tables: Sequence[RangeTableT]
    """The costs of all ranges of pieces that a stage at that position may be."""
    links: Sequence[FloatArray]
    """[pieces + 1] seconds of the cut behind it, at each joint."""
    capacity_bytes: Sequence[float]
    """Per group, the bytes to plan with on each of its devices."""
    recompute: RecomputeMode
    beyond: Mapping[tuple[int, RangeTableT, int], FloatArray] = field(default_factory=dict)
    """(Micro-batches, table, those that a stage holds) -> [unlike ranges] bytes that a stage needs beyond what its table
    counts, as far as simulations told: without them rooms are larger, so that bounds hold."""

    def left_of(self, room_bytes: float, table: RangeTableT, held: int) -> float | FloatArray:
        """Return what is left of a stage's bytes; [unlike ranges] where some are known to need more than is counted."""
        beyond = self.beyond.get((self.option.microbatches, table, held))
        return room_bytes if beyond is None else room_bytes - beyond

    @property
    def groups(self) -> tuple[int, ...]:
        """The group of each stage."""
        return self.option.places[::-1]

    @property
    def weight(self) -> float:
        """The factor of the bottleneck in the surrogate."""
        return (self.option.microbatches - self.option.fill) * self.option.chunks

    @property
    def equal_rooms(self) -> list[float]:
        """The bytes of each stage, if those of a group share its memory equally."""
        return [self.capacity_bytes[group] / self.option.chunks for group in self.groups]

    def each(self, rooms: Sequence[float], of_stage: Callable[[RangeTableT, int, float], T]) -> list[T]:
        """Ask about every stage: its table, the micro-batches that it holds, its bytes. Equal ones are asked about once."""
        known: dict[tuple[int, int, float], T] = {}
        found = []
        for table, held, room in zip(self.tables, self.option.in_flight, rooms, strict=True):
            key = id(table), held, room
            if key not in known:
                known[key] = of_stage(table, held, room)
            found.append(known[key])
        return found

    def priced(self, rooms: Sequence[float], longest: int | None) -> list[FloatArray]:
        """Return ``Composed.priced`` of every stage."""
        m = self.option.microbatches
        return self.each(
            rooms, lambda table, held, room: table.priced(m, held, room, self.recompute, longest)
        )

    def alone(self, longest: int | None) -> list[FloatArray]:
        """[first piece, last + 1] lower bound on a stage that has its devices for itself."""
        priced = self.priced([self.capacity_bytes[group] for group in self.groups], longest)
        pairs = {id(own): (table, own) for table, own in zip(self.tables, priced, strict=True)}
        known = {key: table.plane(own.max(axis=-1).min(axis=1)) for key, (table, own) in pairs.items()}
        return [known[id(own)] for own in priced]
