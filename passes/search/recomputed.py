"""Blocks of a sharded model that backward computes again, as a search of shardings counts them.

seconds   of an op up to the block's last that saves something: its forward twice
          of a bridge that the block repeats (``passes.shard.regions``) and such an op needs: its way there twice
bytes     held: what other ops save, and what blocks read of others; beside it, all that one block saves, the one
          that saves most as a whole

value                                           its bridges
the block makes it, and reads it itself         repeated
others make it, nobody but the block reads it   repeated if they leave more of it than there is
others make it, others read it too              run once; copies are held for the block
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from passes.costs.costs import GraphCosts
from passes.costs.recompute import computed_again, region_bytes
from passes.graph.graph import OpGraph

Regions = tuple[tuple[str, ...], ...]
"""The ops of each block that backward computes again, by name."""
Reader = tuple[str, int]
"""(op, operand)."""


@dataclass(frozen=True)
class BridgeUse:
    """The way in which backward has the bridged copies of a value."""

    kept: bool
    """Copies stay from forward until backward, as far as their bridges are not repeated."""
    repeated: Literal["none", "growing", "all"] = "none"
    """The bridges that run a second time; growing: those that leave more of a value than there is."""
    beside: bool = False
    """Repeated copies are alive when most is."""


@dataclass(frozen=True, eq=False)
class Recomputed:
    """The blocks of a graph that backward computes again; none are a way to count, too."""

    graph: OpGraph
    costs: GraphCosts
    again: Regions = ()
    alike: int = 0
    """0: the graph is all that its devices run, so that the block that saves most counts with all it saves. Else it is one
    of so many pieces of a model that are alike, and who composes pieces counts that."""

    @cached_property
    def regions(self) -> tuple[tuple[int, ...], ...]:
        """The ops of each block, by their index."""
        index_of = {name: index for index, name in enumerate(self.costs.ops)}
        return tuple(tuple(index_of[op] for op in names) for names in self.again)

    @cached_property
    def region_of(self) -> Mapping[str, int]:
        """The block of each op that is in one."""
        return {self.costs.ops[op]: number for number, region in enumerate(self.regions) for op in region}

    @cached_property
    def twice(self) -> frozenset[str]:
        """Ops that run a second time."""
        return frozenset(
            self.costs.ops[op]
            for region in self.regions
            for op in computed_again(self.costs, region, deferring=False)
        )

    @cached_property
    def _needed(self) -> frozenset[str]:
        """Ops whose operands the second forward makes: up to the last that saves something."""
        savers = ([at for at, op in enumerate(region) if self.costs.saved[op]] for region in self.regions)
        return frozenset(
            self.costs.ops[op]
            for region, found in zip(self.regions, savers, strict=True)
            for op in (region[: found[-1] + 1] if found else ())
        )

    @cached_property
    def _largest(self) -> int:
        """The block that saves most; -1 without blocks."""
        if self.alike:
            return -1
        samples = self.graph.example_batch_size
        sizes = [region_bytes(self.costs, region, samples) for region in self.regions]
        return sizes.index(max(sizes)) if sizes else -1

    def storages(self, samples: int) -> set[str]:
        """Name the storages of a micro-batch that are alive when most is."""
        exact = self.costs.exact(samples)
        inside = {op for region in self.regions for op in region}
        found = {name for op, names in enumerate(exact.saved) if op not in inside for name in names}
        for number, region in enumerate(self.regions):
            found |= exact.inputs_of(set(region))
            if number == self._largest:
                found |= {name for op in region for name in exact.saved[op]}
        return found

    def use(self, maker: str, readers: Sequence[Reader], saved: Collection[Reader]) -> BridgeUse:
        """Tell how backward gets the copies of a value. ``saved``: readers whose operands autograd keeps."""
        kept = any(reader in saved for reader in readers)
        regions = {self.region_of.get(op) for op, _ in readers}
        if regions <= {None}:
            return BridgeUse(kept)
        made_in = self.region_of.get(maker)
        own = made_in is not None and made_in in regions
        if not own and len(regions) > 1:
            return BridgeUse(kept=True)
        (region,) = {made_in} if own else regions
        if not any(op in self._needed and self.region_of.get(op) == region for op, _ in readers):
            return BridgeUse(kept=not own or (kept and len(regions) > 1))
        beside = len(regions) > 1 or (kept and region == self._largest)  # others than the block hold theirs
        return BridgeUse(kept=True, repeated="all" if own else "growing", beside=beside)
