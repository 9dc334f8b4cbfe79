"""A candidate: one placement of a model's ops, in the form that every search hands down and ``realize`` takes.

layer      stages are runs of the program, a device each          contiguous, groups of one
feature    one stage, all devices share it over a mesh            contiguous, ``shardings[0]`` says how
free       stage k is whatever runs on device k                   not contiguous: segments follow by reach
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from passes.shard.words import FeaturePlacement


class Origin(Enum):
    """The way in which a search came by a placement; the value is what people read, ``{}`` stands for a number."""

    EARLIEST_FINISH = "earliest finish"
    CONTIGUOUS_RUNS = "{} contiguous runs"
    INTEGER_PROGRAM = "integer program"
    MOVED = "moved"
    MOVED_IN_SIMULATION = "moved in simulation"
    START = "start"
    LAYER_WISE = "layer-wise"
    BLOCKS_APART = "blocks apart"


@dataclass(frozen=True)
class Trail:
    """The origins of a placement, one after the other: earliest finish, then moved."""

    steps: tuple[tuple[Origin, int], ...] = ()

    @staticmethod
    def of(origin: Origin, number: int = 0) -> Trail:
        """Begin a trail."""
        return Trail(((origin, number),))

    def then(self, origin: Origin) -> Trail:
        """Go on from here."""
        return Trail((*self.steps, (origin, 0)))

    def __str__(self) -> str:
        return ", ".join(origin.value.format(number) for origin, number in self.steps)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placement of every op that is not recomputed wherever it is needed."""

    stage_of: Mapping[str, int]
    """Op -> stage."""
    groups: tuple[tuple[int, ...], ...]
    """Stage -> the ranks that run it together."""
    microbatches: int
    schedule: str
    recomputed_blocks: tuple[tuple[str, ...], ...] = ()
    """Stage -> the blocks (``passes.graph.blocks``, ``GATHERS`` too) that it computes again in backward. Empty: none."""
    shardings: Mapping[int, FeaturePlacement] = field(default_factory=dict)
    """Stage -> the way in which its group shares it; a stage without one runs on a single rank."""
    contiguous: bool = True
    """True where each stage is one segment; False where segments follow from which values cross between devices."""
    one_queue: bool = False
    """True where every device may have one queue for all that it communicates (``runtime.program.order``)."""
    trail: Trail = field(default=Trail())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The first rank of each stage: the only one, unless the stage is sharded."""
        return tuple(group[0] for group in self.groups)

    @property
    def rank_of(self) -> dict[str, int]:
        """Op -> the first rank of its group."""
        ranks = self.ranks
        return {name: ranks[stage] for name, stage in self.stage_of.items()}


def anywhere(
    rank_of: Mapping[str, int], world_size: int, microbatches: int, trail: Trail | None = None
) -> Candidate:
    """Make the candidate of a free placement, op -> rank."""
    groups = tuple((rank,) for rank in range(world_size))
    trail = trail or Trail.of(Origin.START)
    return Candidate(rank_of, groups, microbatches, "list", contiguous=False, trail=trail)
