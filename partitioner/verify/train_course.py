"""The data of a verified training run, and the plain loop over it in float64 or in the plan's own types."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.batches.order import BatchOrder
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.verify.compare import ORDERS, ROUNDING
from partitioner.verify.grow_batch import grow_batch, ignore_unevenly, rebuilt, to_double
from partitioner.verify.plain_loop import Piece, PlainStep, PlainTypes, plain_loop
from partitioner.verify.reference import (
    counted_means,
    double_copy,
    own_copy,
    weights_by_definition,
    why_in_pieces,
    written_once,
)
from partitioner.verify.rounding import RoundedOnceMore, own_types, spacing
from partitioner.verify.train_compare import Expected
from partitioner.verify.train_hooks import with_hooks_of
from partitioner.verify.train_report import TrainComparison
from partitioner.verify.train_setup import SampleSet, annealing, sample_digests, two_groups
from passes.evaluate.dropout import DropoutOff
from passes.evaluate.float64 import code_in_float64
from passes.graph.graph import OpGraph
from passes.graph.token_counts import user_leaves
from passes.trace.batch import flatten_batch, forward_arguments, forward_names
from passes.trace.export import cast_floating, loss_and_metrics
from passes.trace.mixed_types import products_in
from passes.trace.normal.flex import flex_with_backward
from runtime.segment.microbatch import microbatch_sizes
from runtime.state.step_precision import INITIAL_SCALE

LEARNING_RATE = 1e-2
ORDER_SEED = 1
BATCHES = 3
"""Batches in an epoch; the last step is of the next one."""
SAVED, ENDED, RESUMED_TO = 2, 3, 4
"""The step after which a checkpoint is saved, the last one of that run, and the last one of resumed runs."""
CLIPPED = 0.5
"""The bound of clipping, as a part of the first step's norm: every step is clipped that is not much smaller."""


@dataclass(frozen=True)
class Course:
    """The data of a training run, and the plain loop over it. ``sizes``: the samples of each micro-batch.

    ``hooks``: whether hooks on parameters run.
    """

    plan: PlanData
    workload: Workload
    graph: OpGraph
    sizes: tuple[int, ...]
    samples: SampleSet
    hooks: bool

    @classmethod
    def of(
        cls, plan: PlanData, workload: Workload, graph: OpGraph, sizes: tuple[int, ...], *, hooks: bool
    ) -> Course:
        dims = user_leaves(graph.batch, graph.token_counts).batch_dims
        batch = grow_batch(workload.example_inputs, dims, workload.model, BATCHES * sum(sizes))
        batch = to_double(ignore_unevenly(batch, workload.model, graph))
        leaves = flatten_batch(batch, forward_names(workload.model))
        samples = SampleSet(leaves, {name: dims.get(name) for name in leaves})
        return cls(plan, workload, graph, sizes, samples, hooks)

    @property
    def has_own_types(self) -> bool:
        """True if the plan trains in anything but float64."""
        types = (self.graph.types_of(name, self.plan.precision) for name in self.graph.parameters)
        return any(
            d != torch.float64 for t in types for d in (t.leaf, t.owner, t.gradient) if d.is_floating_point
        )

    @property
    def own_types(self) -> str:
        """The plan's own types in words."""
        return own_types(self.graph, self.plan.precision)

    def sizes_under(self, other: PlanData) -> tuple[int, ...]:
        """Return the micro-batches of the same batches under ``other``."""
        return microbatch_sizes(sum(self.sizes), other.microbatches)

    def order(self) -> list[list[int]]:
        """Return the indices of the samples of each step."""
        order = BatchOrder(len(self.samples), sum(self.sizes), shuffle=True, seed=ORDER_SEED)
        draws = [draw for epoch in range(2) for draw in order.draws(epoch)]
        return [list(draw.indices) for draw in draws[:RESUMED_TO]]

    def expected(
        self, plain: Sequence[PlainStep], *, double: bool, own: Sequence[PlainStep] | None = None
    ) -> Expected:
        """Return what ranks are held against."""
        digests = [
            sample_digests(self._leaves(indices, double), self.samples.batch_dims) for indices in self.order()
        ]
        return Expected(
            plain, digests, LEARNING_RATE, own, spacing(self.graph, self.plan.precision), self.graph.views
        )

    def plain(
        self, *, double: bool, later: tuple[int, ...] = (), turned: bool = False, rounded: bool = False
    ) -> list[PlainStep]:
        """Run the plain loop. ``later``: micro-batches of resumed steps, if others; ``turned``: each in reverse order.

        ``rounded``: every op's results are rounded once more.
        """
        workload = (double_copy if double else own_copy)(self.workload)
        if self.hooks:
            with_hooks_of(self.workload.model, workload.model)
        steps = [
            self._pieces(
                workload, indices, later if later and number > SAVED else self.sizes, double, turned, rounded
            )
            for number, indices in enumerate(self.order(), 1)
        ]
        precision = self.plan.precision
        types = None
        if not double:
            owners = {n: self.graph.types_of(n, precision) for n in self.graph.parameters}
            types = {name: PlainTypes(t.leaf, t.gradient, t.owner) for name, t in owners.items()}
        return plain_loop(
            workload.model,
            steps,
            partial(_loss, workload, None if double else precision.casts_to),
            partial(two_groups, self.plan.optimizer_memory, LEARNING_RATE),
            annealing,
            lambda norm: CLIPPED * norm or 1.0,
            (SAVED, ENDED, RESUMED_TO),
            types,
            INITIAL_SCALE if not double and precision.loss_scale == "dynamic" else None,
            written_once(self.graph),
        )

    def without_rounding(
        self, found: list[TrainComparison], plain: Sequence[PlainStep]
    ) -> tuple[list[TrainComparison], list[str]]:
        """Drop differences in parameters without a gradient that the plain loop has too, in another order of samples."""
        rounding = set.intersection(*(_without_gradient(step) for step in plain))
        suspected = [c for c in found if not c.agrees and c.name.partition(".exp_avg")[0] in rounding]
        if not suspected:
            return found, []
        turned = self.plain(double=True, turned=True)
        dropped = []
        for c in suspected:
            one, two = plain[c.step - 1].state, turned[c.step - 1].state
            if one is None or two is None or not c.kind.startswith("parameter") or math.isinf(c.error):
                continue
            if c.error <= ORDERS * float((one.parameters[c.name] - two.parameters[c.name]).norm()):
                dropped.append(c)
        names = sorted({c.name for c in dropped})
        if not dropped:
            return found, []
        note = (
            f"{len(names)} parameters have no gradient but rounding ({names[0]}{', …' if len(names) > 1 else ''}): they "
            "differ by no more than in the plain loop with its samples in another order"
        )
        return [c for c in found if c not in dropped], [note]

    def _leaves(self, indices: Sequence[int], double: bool) -> dict[str, Tensor]:
        leaves = self.samples.collated([self.samples[index] for index in indices])
        if double:
            return leaves
        given = flatten_batch(self.workload.example_inputs, forward_names(self.workload.model))
        return {name: leaf.to(given[name].dtype) for name, leaf in leaves.items()}

    def _pieces(
        self,
        workload: Workload,
        indices: Sequence[int],
        sizes: tuple[int, ...],
        double: bool,
        turned: bool,
        rounded: bool,
    ) -> list[Piece]:
        """Return one step's batch: whole, or in micro-batches where these are not what the whole batch is."""
        graph, model, dims = self.graph, workload.model, self.samples.batch_dims
        whole = self._leaves(indices, double)
        counted = None
        weights: Sequence[float] = weights_by_definition(graph.loss_reduction, sizes)
        if len(sizes) == 1 or not why_in_pieces(graph):
            sizes, weights = (len(indices),), [1.0]
        elif graph.loss_reduction == "token_mean":
            batch = rebuilt(workload.example_inputs, whole, model)
            counted = counted_means(workload, batch, whole, graph, sizes, double=double)
        pieces, start = [], 0
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            leaves = {}
            for name, leaf in whole.items():
                dim = dims.get(name)
                own = leaf if dim is None else leaf.narrow(dim, start, size)
                leaves[name] = (own.flip(dim) if turned and dim is not None else own).clone()
            within = partial(_world, graph if double else None, counted, number, rounded)
            pieces.append(Piece(rebuilt(workload.example_inputs, leaves, model), weight, within))
            start += size
        return pieces


def _without_gradient(step: PlainStep) -> set[str]:
    """Return the parameters whose gradients are rounding."""
    most = ROUNDING * math.sqrt(sum(norm**2 for norm in step.gradient_norms.values()))
    return {name for name, norm in step.gradient_norms.items() if norm < most}


@contextmanager
def _world(graph: OpGraph | None, counted: Any, number: int, rounded: bool) -> Iterator[None]:
    """Run without dropout, and with the whole batch's counts for micro-batch ``number``.

    ``graph``: what code in float64 is compared with; None for the model's own types.
    """
    with ExitStack() as stack:
        stack.enter_context(DropoutOff())
        stack.enter_context(flex_with_backward())
        if graph is not None:
            stack.enter_context(code_in_float64(graph))
        if rounded:
            stack.enter_context(RoundedOnceMore(number))
        if counted is not None:
            counted.start(number)
            stack.enter_context(counted)
        yield


def _loss(workload: Workload, casts_to: torch.dtype | None, model: nn.Module, batch: Any) -> Tensor:
    """Compute the loss as a user's loop would; with ``casts_to`` as ``Precision`` says that inputs are cast."""
    args, kwargs = forward_arguments(model, batch, workload.loss_fn is not None)
    if casts_to is not None:
        args, kwargs = cast_floating((args, kwargs), casts_to)
    with products_in(casts_to):
        output = model(*args, **kwargs)
    if workload.loss_fn is not None and casts_to is not None and casts_to.itemsize < 4:
        output = cast_floating(output, torch.float32)
    loss, _ = loss_and_metrics(output, batch, workload.loss_fn)
    assert loss is not None
    return loss
