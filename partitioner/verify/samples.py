"""The samples that a plan is verified on, and who is to blame if the unpartitioned model fails on them.

    tried in turn      samples
    a small batch      two or more a micro-batch, cut from the example or grown from it
    the example's own  where an input refers to samples that the small batch has not: edges to nodes, labels to classes;
                       where the small batch has no loss: all of its labels are ignored

A model that fails on both is called as its users call it then: on its example, whole and in its own types. What fails
there is the model's; what does not is our call, and it is said how that differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from torch import Tensor

from cost_models.errors import ModelError, PartitionerError
from cost_models.units import counted, listed
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.verify.eager import failure, words_of
from passes.fidelity.agree import StepResult
from passes.fidelity.steps import cut
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.trace.batch import flatten_batch, forward_names
from runtime.segment.microbatch import microbatch_sizes

T = TypeVar("T")


class NoNumberError(ArithmeticError):
    """A loss or a gradient of the unpartitioned model that is NaN or infinite: it agrees with nothing."""


def refuse_no_numbers(result: StepResult) -> None:
    """Raise NoNumberError where a loss or a gradient is not finite."""
    if result.loss is not None and not math.isfinite(result.loss):
        raise NoNumberError(f"its loss is {result.loss}")
    for name, gradient in result.gradients.items():
        if not bool(gradient.to_dense().isfinite().all()):
            raise NoNumberError(f"the gradient of {name} holds NaN or infinity")


class FailsInFloat64Error(ModelError):
    """A model runs in its own types, and fails in float64, as we say with ``reason``."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"cannot verify {name}: it fails in float64, in which plans are compared",
            [
                f"our call, with its tensors widened: {reason}",
                "the model itself runs on example_inputs, in its own types",
            ],
            [
                "verify a plan in the model's own types, without a precision",
                "take types from tensors (x.dtype) where the code names one, and make tensors in forward",
                "what a plan trains is not touched by this: it runs in the plan's types",
            ],
        )
        self.reason = reason


def on_samples(
    plan: PlanData, workload: Workload, graph: OpGraph, multiple: int, step: Callable[[tuple[int, ...]], T]
) -> tuple[T, list[str]]:
    """Return what ``step`` does on the first samples that the model runs on, and a note if these are not the first tried.

    ``step``: is given the sizes of micro-batches. Raises ModelError where the model runs on none.
    """
    failures: list[tuple[tuple[int, ...], Exception]] = []
    for sizes in sizes_to_try(plan, graph, multiple):
        try:
            done = step(sizes)
        except PartitionerError:
            raise
        except Exception as error:  # noqa: BLE001 the user's code may raise anything
            failures.append((sizes, error))
            continue
        return done, [
            f"verified on the {sum(sizes)} samples of the example: on {sum(fewer)} of them, "
            + (
                str(reason)
                if isinstance(reason, NoNumberError)
                else f"{words_of(reason)}, so some input refers to others"
            )
            for fewer, reason in failures
        ]
    sizes, last = failures[-1]
    if isinstance(last, NoNumberError):
        raise ModelError(
            f"cannot verify {plan.model.name}: the unpartitioned model computes no number",
            [f"on {counted(sum(sizes), 'sample')}, {reason}" for sizes, reason in failures],
            ["NaN agrees with nothing: give example inputs on which loss and gradients are finite"],
        ) from last
    raise _fails(plan.model.name, workload, graph, sizes, last) from last


def sizes_to_try(plan: PlanData, graph: OpGraph, multiple: int) -> list[tuple[int, ...]]:
    """Return the micro-batch sizes of a small batch, and those of the example if it can be cut like the plan's batch."""
    small, own = small_sizes(plan, multiple, 2 * least_samples(graph)[0]), graph.example_batch_size
    if own == sum(small) or own % multiple or own // multiple < plan.microbatches:
        return [small]
    return [small, microbatch_sizes(own, plan.microbatches, multiple)]


def small_sizes(plan: PlanData, multiple: int, samples: int) -> tuple[int, ...]:
    """Return the micro-batch sizes of a small batch that is cut like the plan's: ``samples`` each, uneven if the plan's is.

    There are single samples only if the plan has them: some models refuse them. Batch norm turns two samples into 1 and
    -1, and nothing before it has a gradient but rounding. ``multiple``: the multiple that ranks that share samples need.
    """
    units = plan.batch_size // multiple
    uneven = units % plan.microbatches != 0
    least = math.ceil(samples / multiple)
    units = min(units, least * plan.microbatches + uneven)
    return microbatch_sizes(units * multiple, plan.microbatches, multiple)


def _fails(
    name: str, workload: Workload, graph: OpGraph, sizes: Sequence[int], error: Exception
) -> ModelError:
    """Say whether the model fails on its own, on parts of its batch, in float64, or only as we train it, and what to do."""
    leaves = flatten_batch(workload.example_inputs, forward_names(workload.model))
    if own := failure(workload, leaves):
        return ModelError(
            f"cannot verify {name}: the unpartitioned model fails on its own",
            [f"on example_inputs, in its own types: {own}"],
            ["call it on example_inputs yourself: it fails the same way"],
        )
    dims = {n: d for n, leaf in leaves.items() if (d := graph.batch.batch_dims.get(n)) is not None}
    cut = f"{listed(dims)} cut to {counted(min(sizes), 'sample')}"
    if own := _failure_of_parts(workload, leaves, dims, sizes):
        whole = [
            n
            for n in dims
            if len(dims) > 1
            and not _failure_of_parts(workload, leaves, {m: d for m, d in dims.items() if m != n}, sizes)
        ]
        return ModelError(
            f"cannot verify {name}: it fails on a part of its batch, as micro-batches are",
            [
                f"our call, with {cut}: {own}",
                "the model itself runs on example_inputs: some input refers to samples of others",
                *(f"it runs with all of {n}" for n in whole),
            ],
            [
                *(f"batch_dims={{{n!r}: None}} if {n} does not count samples" for n in whole),
                "give what belongs together a dimension of samples of its own, or take microbatches=1 and batches of "
                f"{graph.example_batch_size} samples",
            ],
        )
    if own := failure(workload, leaves, graph):
        return FailsInFloat64Error(name, own)
    return ModelError(
        f"cannot verify {name}: our own loop over it fails",
        [
            words_of(error),
            "the model itself runs on example_inputs and on parts of them, in its own types and in float64",
        ],
        ["please report it with the model; what a plan trains is not touched by this"],
    )


def _failure_of_parts(
    workload: Workload, leaves: Mapping[str, Tensor], dims: Mapping[str, int], sizes: Sequence[int]
) -> str:
    """Say how the model fails on the first part of the example that it fails on, cut along ``dims``; "" if on none."""
    samples = min(leaves[name].shape[dim] for name, dim in dims.items())
    fitting = [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end <= samples]
    return next(filter(None, (failure(workload, part) for part in cut(leaves, dims, fitting))), "")
