"""The things that the executor and the handlers of a program share: for all batch shapes, for one, and after a run.

    result of the batch = Σ over micro-batches of weight · result of the micro-batch

Sums are made in float64, whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from runtime.execute.early_sends import EarlySends
from runtime.execute.reduce import Sums
from runtime.execute.release import first_uses
from runtime.mesh.axis import Axis
from runtime.mesh.ranks_along import axis_among, axis_of
from runtime.mesh.sharding import Sharding
from runtime.ops.random import Seeded
from runtime.program.program import Message, Program, ReduceGradients, SegmentGraph
from runtime.ranks.collective import Waited
from runtime.ranks.failure import FailureMonitor
from runtime.ranks.groups import Channel
from runtime.segment.code import BatchSpec, Interface, SegmentCode
from runtime.segment.compiled import CompileOptions
from runtime.segment.runner import SegmentRunner

Replan = Callable[[int], Sequence[Program]]
"""Function from a number of micro-batches to all ranks' programs for it."""


@dataclass(frozen=True)
class Surroundings:
    """The things that all graphs of an executor share."""

    device: torch.device
    group: Any
    monitor: FailureMonitor
    waited: Waited
    seeded: Seeded
    timeout_seconds: float
    compile: CompileOptions | None = None


@dataclass(frozen=True)
class RankProgram:
    """Everything that a rank runs of one graph: its program, and what that names."""

    programs: Sequence[Program]
    """The programs of all ranks: what others do tells when a sent buffer may be freed."""
    rank: int
    """This rank, in the group."""
    codes: Mapping[int, SegmentCode]
    """At least the segments of this rank."""
    graph: SegmentGraph
    state: Mapping[str, Tensor]
    """Every tensor that they name: parameters, buffers and constants, on the executor's device."""
    batch_spec: BatchSpec
    replan: Replan | None = None
    """Makes the programs for another number of micro-batches; without it there is one number."""
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    """Shardings of the tensors that ranks have blocks of."""

    @property
    def program(self) -> Program:
        """The program of this rank."""
        return self.programs[self.rank]


@dataclass(frozen=True)
class ProgramContext:
    """The things that stay the same for every batch shape."""

    own: RankProgram
    around: Surroundings
    program: Program
    """The program of this rank for a number of micro-batches, in training or in evaluation."""
    runners: Mapping[int, SegmentRunner]
    channels: Mapping[str, Channel]
    released: Mapping[int, list[int]]
    early: Mapping[int, tuple[tuple[int, ...], EarlySends]]
    """Outputs that each segment can send early, and their sender."""
    sums: Sums
    """Parts of gradients' sums that scattering reductions leave, by parameter."""
    training: bool

    def scattered(self, reduction: ReduceGradients) -> tuple[dict[str, int], Axis]:
        """Return the dimension along which a scattering reduction cuts each parameter, and the axis of its ranks."""
        of = {name: self.own.shardings[name] for name in reduction.parameters}
        first = next(iter(of.values()))
        at = axis_among(first, reduction.ranks, self.program.rank)
        axis = axis_of(first.mesh, first.mesh.axes[at], self.program.rank, self.channels)
        return {name: dict(sharding.cuts)[at] for name, sharding in of.items()}, axis

    @cached_property
    def fresh(self) -> frozenset[str]:
        """Parameters whose gradients on this rank are in memory of their own."""
        found: dict[str, bool] = {}
        for index in self.runners:
            code = self.own.codes[index]
            fresh = code.fresh
            for name in code.held:
                found[name] = found.get(name, True) and name in fresh
        return frozenset(name for name, own in found.items() if own)

    @cached_property
    def interfaces(self) -> Mapping[str, Interface]:
        """The layouts on both sides of the values that go in pieces."""
        return {name: way for index in self.runners for name, way in self.own.codes[index].interfaces.items()}

    @cached_property
    def value_numbers(self) -> Mapping[str, int]:
        """Number of each value, the same on every rank, so that tags agree."""
        return {value.name: number for number, value in enumerate(self.own.graph.values)}

    @cached_property
    def first_uses(self) -> Mapping[Message, int]:
        return first_uses(self.program, self.own.graph)


@dataclass
class Shared:
    """The things that the executor and the handlers of one batch shape hand each other in a step."""

    microbatches: int
    shapes: list[Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
    """Shape and dtype of every value that this rank sends or receives, for each micro-batch."""
    weights: tuple[float, ...]
    """Factor of each micro-batch's loss, and so of its gradients."""
    pieces: dict[str, list[Tensor]]
    """Part of each batch leaf in each micro-batch. The lists stay, their contents change every step."""
    losses: list[Tensor | None] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)
    outputs: list[dict[str, Tensor]] = field(default_factory=list)
    """Results of an evaluation, by name, for each micro-batch; empty where nobody wants them."""
    seeds: list[Tensor | None] = field(default_factory=list)
    """Gradient that each micro-batch's loss starts backward with; kept while the weights stay."""
    gradient_scale: float = 1.0
    """Factor of all gradients, not of the loss."""
    step: int = 0
    """Number of the training step: with it, the masks of dropout change."""
    first_wait: int = 0
    """Number of the wait at position 0 of the program. Numbers never repeat on a rank."""
    checked: bool = False
    """True once a step has shown that values have the shapes that were promised."""

    def begin(self, weights: tuple[float, ...], gradient_scale: float, step: int, first_wait: int) -> None:
        """Make ready for another step."""
        if (weights, gradient_scale) != (self.weights, self.gradient_scale) or not self.seeds:
            self.weights, self.gradient_scale = weights, gradient_scale
            self.seeds[:] = [None] * self.microbatches
        self.step, self.first_wait = step, first_wait
        self.losses = [None] * self.microbatches
        self.metrics = [{} for _ in range(self.microbatches)]


@dataclass(frozen=True)
class StepSums:
    """This rank's share of a batch's results."""

    loss: Tensor | None
    """Σ weight · loss over the micro-batches; None on ranks that compute none."""
    metrics: Mapping[str, Tensor]
    """Metrics that this rank computes, by name; weighted like the loss."""
    weights: tuple[float, ...]
    """Weight of each micro-batch."""
    outputs: Sequence[Mapping[str, Tensor]]
    """The model's outputs that this rank computes in an evaluation, by name, for each micro-batch."""
    share: float = 1.0
    """Part of each result that this rank's is: ranks that run one segment on shards have parts of a sum."""

    @classmethod
    def of(cls, shared: Shared, share: float = 1.0) -> Self:
        """Return the results that a finished run has left."""
        names = dict.fromkeys(name for metrics in shared.metrics for name in metrics)
        metrics = {
            name: _weighted_sum([found[name] for found in shared.metrics], shared.weights) for name in names
        }
        losses = [loss for loss in shared.losses if loss is not None]
        loss = _weighted_sum(losses, shared.weights) if losses else None
        return cls(loss, metrics, shared.weights, shared.outputs, share)


def _weighted_sum(results: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ weightᵢ · resultᵢ; results have the shape ()."""
    stacked = torch.stack(list(results)).double()
    return (stacked * stacked.new_tensor(weights)).sum()
