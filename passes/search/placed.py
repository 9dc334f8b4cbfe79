"""What a search leaves, whatever its strategy: stages on groups of devices, carried through to a simulated step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cost_models.memory import StateBytes
from passes.graph.graph import OpGraph
from passes.lower.bridge import Bridge
from passes.lower.segment import Segmentation
from passes.lower.step import StepCosts
from passes.search.certificate import Certificate
from passes.search.feature.place import FeatureResult
from passes.search.free.place import FreeResult
from passes.search.layer.place import LayerResult, RunnerUp
from passes.shard.shard import Sharded
from passes.shard.sums import GradientSum, UpdateGather
from passes.shard.traffic import Traffic
from passes.split.split import Split
from runtime.program.program import Program, SegmentGraph, TiedGroup
from runtime.simulate.simulate import Simulation


@dataclass(frozen=True)
class Realized:
    """A placement carried through to programs and their simulation.

    ``segmentation``: of the graph that ranks run, which is the model's own unless ranks run it on shards. ``tied``: sums
    of gradients after the last backward.
    """

    segmentation: Segmentation
    segments: SegmentGraph
    tied: tuple[TiedGroup, ...]
    programs: tuple[Program, ...]
    state: tuple[StateBytes, ...]
    step: StepCosts
    simulation: Simulation
    traffic: tuple[Traffic, ...] = ()
    """Collectives inside of segments."""
    sums: tuple[GradientSum, ...] = ()
    """What ``tied`` says of sharded stages, with what it costs."""
    gathers: tuple[UpdateGather, ...] = ()
    """What is put together after the update."""


@dataclass(frozen=True, eq=False)
class Placed:
    """The chosen placement, everything made of it, and how it was found.

    ``stage_of``: of the model's ops; one that every stage recomputes for itself is not in it. ``groups``: per stage its
    devices. ``sharded``: how a group runs its stage on shards; None where every stage has one device. ``graph``: what was
    placed: the model's, with the ops in ``splits`` split into blocks of neurons.
    """

    strategy: Literal["layer", "feature", "free"]
    stage_of: Mapping[str, int]
    groups: tuple[tuple[int, ...], ...]
    microbatches: int
    schedule: str
    recomputed: frozenset[str]
    recomputed_blocks: tuple[tuple[str, ...], ...]
    bridges: tuple[Bridge, ...]
    realized: Realized
    certificate: Certificate
    runner_ups: tuple[RunnerUp, ...]
    search: LayerResult | FeatureResult | FreeResult
    graph: OpGraph
    sharded: Sharded | None = None
    splits: tuple[Split, ...] = ()
    description: str = ""
