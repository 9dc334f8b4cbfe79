"""The data of a verified training run, and the plain loop over it in float64 or in the plan's own types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor

from partitioner.batches.order import BatchOrder
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.verify.eager import EagerModel
from partitioner.verify.report import TrainComparison
from partitioner.verify.rounding import ORDERS, own_types, spacing, without_gradient
from partitioner.verify.samples import NoNumberError
from partitioner.verify.train_compare import ExpectedRun
from partitioner.verify.train_rank import (
    ENDED,
    ORDER_SEED,
    RESUMED_TO,
    SAVED,
    annealing,
    batch_of,
    sample_digests,
    two_groups,
)
from passes.fidelity.agree import StepResult, distance
from passes.graph.graph import OpGraph

BATCHES = 3
"""Batches in an epoch; the last step is of the next one."""
CLIPPED = 0.5
"""The bound of clipping, as a part of the first step's norm: every step is clipped that is not much smaller."""


def clipped(norm: float) -> float:
    """Return the bound of clipping, from the norm of the first step's gradients."""
    return CLIPPED * norm or 1.0


def trained_model(plan: PlanData, workload: Workload, graph: OpGraph, *, hooks: bool) -> EagerModel:
    """Return the model as it is trained. ``graph``: without dropout; ``hooks``: whether hooks on parameters run."""
    return EagerModel(
        workload,
        graph,
        partial(two_groups, plan.optimizer_memory),
        plan.precision,
        hooks,
        annealing,
        clipped,
        (SAVED, ENDED, RESUMED_TO),
    )


@dataclass(frozen=True)
class TrainCourse:
    """The data of a training run, and the plain loop over it. ``sizes``: the samples of each micro-batch."""

    eager: EagerModel
    plan: PlanData
    sizes: tuple[int, ...]

    @cached_property
    def leaves(self) -> Mapping[str, Tensor]:
        """All samples of an epoch, in float64."""
        return self.eager.grown(self.samples)

    @property
    def samples(self) -> int:
        """The number of samples in an epoch."""
        return BATCHES * sum(self.sizes)

    @property
    def batch_dims(self) -> Mapping[str, int | None]:
        """The dimension of each leaf along which its samples lie."""
        return self.eager.graph.batch.batch_dims

    @property
    def has_own_types(self) -> bool:
        """True if the plan trains in anything but float64."""
        graph = self.eager.graph
        types = (graph.types_of(name, self.plan.precision) for name in graph.parameters)
        return any(
            d != torch.float64 for t in types for d in (t.leaf, t.owner, t.gradient) if d.is_floating_point
        )

    @property
    def own_types(self) -> str:
        """The plan's own types in words."""
        return own_types(self.eager.graph, self.plan.precision)

    def batches(self) -> list[Mapping[str, Tensor]]:
        """Return the leaves of each step's batch."""
        order = BatchOrder(self.samples, sum(self.sizes), shuffle=True, seed=ORDER_SEED)
        draws = [draw for epoch in range(2) for draw in order.draws(epoch)]
        return [batch_of(self.leaves, self.batch_dims, draw.indices) for draw in draws[:RESUMED_TO]]

    def plain(
        self, *, double: bool, later: tuple[int, ...] = (), turned: bool = False, rounded: bool = False
    ) -> list[StepResult]:
        """Run the plain loop. ``later``: micro-batches of resumed steps, if others; ``turned``: each in reverse order.

        ``rounded``: every op's results are rounded once more.
        """
        sizes = [self.sizes] * SAVED + [later or self.sizes] * (RESUMED_TO - SAVED)
        steps = list(zip(self.batches(), sizes, strict=True))
        return self.eager.steps(steps, double=double, turned=turned, rounded=0 if rounded else None)

    def expected(
        self, plain: Sequence[StepResult], *, double: bool, own: Sequence[StepResult] | None = None
    ) -> ExpectedRun:
        """Return what ranks are held against."""
        eager, dims = self.eager, self.batch_dims
        digests = [sample_digests(eager.batch(leaves, double=double), dims) for leaves in self.batches()]
        return ExpectedRun(plain, digests, own, spacing(eager.graph, self.plan.precision), eager.graph.views)

    def without_rounding(
        self, compared: list[TrainComparison], plain: Sequence[StepResult]
    ) -> tuple[list[TrainComparison], list[str]]:
        """Drop differences in parameters without a gradient that the plain loop has too, in another order of samples."""
        rounding = set.intersection(*(without_gradient(step.gradient_norms) for step in plain))
        suspected = [
            c for c in compared if not c.agrees and c.kind.startswith("parameter") and c.name in rounding
        ]
        if not suspected:
            return compared, []
        turned = self.plain(double=True, turned=True)
        dropped = []
        for c in suspected:
            one, two = (steps[c.step - 1].parameters.get(c.name) for steps in (plain, turned))
            if one is not None and two is not None and c.error <= ORDERS * distance(one, two):
                dropped.append(c)
        names = sorted({c.name for c in dropped})
        if not dropped:
            return compared, []
        note = (
            f"{len(names)} parameters have no gradient but rounding ({names[0]}{', …' if len(names) > 1 else ''}): they "
            "differ by no more than in the plain loop with its samples in another order"
        )
        return [c for c in compared if c not in dropped], [note]


Tried: TypeAlias = tuple[TrainCourse, list[StepResult], list[StepResult] | None]
"""A course, the plain loop over it, and another whose rounding says what is allowed."""


def tried(eager: EagerModel, plan: PlanData, double: bool, sizes: tuple[int, ...]) -> Tried:
    """Train by the plain loop alone. Raises NoNumberError where it computes none."""
    course = TrainCourse(eager, plan, sizes)
    plain = course.plain(double=double)
    for number, step in enumerate(plain, 1):
        if step.loss is None or not math.isfinite(step.loss):
            raise NoNumberError(f"its loss is {step.loss} in step {number} of a plain loop")
    if not double:
        return course, plain, course.plain(double=False, rounded=True)
    return course, plain, course.plain(double=False) if course.has_own_types else None
