"""One training step as numbers: its micro-batches, the results that every rank learns, and modes that are refused.

Loss and metrics of a batch are Σ weight · (that of a micro-batch). Some ranks compute a result, some do not, some
compute the same one (shards) or their part of it (replicas), so each rank brings a pair, all pairs are summed over the
ranks in one small all-reduce, and

    result = Σ weight · result of a micro-batch   ·   (Σ weights of the batch) / (Σ weights that were brought)

where the factor is exactly 1 when each micro-batch's result was brought once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cost_models.errors import PlanError, UsageError
from runtime.execute.context import StepSums
from runtime.ranks.collective import Collectives, Pending
from runtime.segment.code import BatchSpec
from runtime.segment.microbatch import Microbatches, microbatch_sizes


@dataclass(frozen=True)
class StepInfo:
    """The results of a training step, the same on every rank; ``engine.last_step``. Tensors are of shape (), float64."""

    loss: Tensor
    grad_norm: Tensor | None
    """The norm before clipping; None where gradients were not clipped, infinite where they overflowed (``skipped``)."""
    metrics: Mapping[str, Tensor]
    samples: int
    tokens: int | None
    """Token ids in the batch, padding included; None if the model has no embedding of token ids."""
    seconds: float
    """The time of this rank's call, from its beginning to its return."""
    step: int
    """Number of the step, from 1."""
    skipped: bool = False
    """True if gradients overflowed under the loss scale and were dropped on all ranks: nothing was updated."""


@dataclass(frozen=True)
class SharedResults:
    """Loss and metrics of a batch on their way to every rank."""

    _pending: Pending
    _names: Sequence[str]
    _weight: float

    def wait(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, metrics), float64 tensors of shape (). On a GPU nobody waits but the stream."""
        pairs = self._pending.wait().view(-1, 2)
        loss, *metrics = (pairs[:, 0] * (self._weight / pairs[:, 1])).unbind()
        return loss, dict(zip(self._names, metrics, strict=True))


def share_results(
    sums: StepSums, metric_names: Sequence[str], weights: Sequence[float], collectives: Collectives
) -> SharedResults:
    """Start to sum what every rank brings. Collective. ``weights``: one for each micro-batch of the whole batch."""
    brought: list[Tensor | None] = [sums.loss, *(sums.metrics.get(name) for name in metric_names)]
    own = sum(sums.weights) * sums.share
    pairs = [number for result in brought for number in (0.0, 0.0 if result is None else own)]
    vector = torch.tensor(pairs, dtype=torch.float64).to(collectives.device, non_blocking=True)
    for at, result in enumerate(brought):
        if result is not None:
            vector[2 * at] = result
    return SharedResults(collectives.all_reduce(vector, "the loss"), metric_names, sum(weights))


def tokens_in(
    spec: BatchSpec, leaf: str | None, leaves: Mapping[str, Tensor], samples: int, parts: int = 1
) -> int | None:
    """Count the token ids in a batch of ``samples``, also where this rank was not given ``leaf``, which has them.

    ``parts``: the number of parts of the batch, of which this rank was given one.
    """
    if leaf is None or leaf in leaves:
        return None if leaf is None else leaves[leaf].numel() * parts
    if leaf not in spec.leaves:
        return None
    sizes = [
        samples if dim == spec.batch_dims[leaf] else size for dim, size in enumerate(spec.leaves[leaf].shape)
    ]
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) else None


@dataclass(frozen=True)
class BatchCuts:
    """The way in which batches are cut into micro-batches; it depends on their size alone, so all ranks cut alike.

    batch_size, microbatches   those of the plan
    least                      the samples that a micro-batch needs at least, for ``reason``
    multiple                   the number that a micro-batch's samples are a multiple of: ranks share them
    """

    batch_size: int = 1
    microbatches: int = 1
    least: int = 1
    reason: str = ""
    multiple: int = 1

    def of_training(self, samples: int, model_name: str) -> Microbatches:
        """Cut a batch of ``samples`` into the plan's number of micro-batches, or as many as it is enough for.

            plan: 8 samples, 4 micro-batches         8 -> 2 2 2 2     5 -> 2 1 1 1    3 -> 1 1 1
            plan: 16 in 4, two ranks share each     16 -> 4 4 4 4    10 -> 4 2 2 2    6 -> 2 2 2    5 is refused

        Raises PlanError for more samples than were planned, because memory for them was not, and for a number that
        cannot be cut so.
        """
        title = f"this batch does not fit the plan for {model_name}"
        if samples > self.batch_size:
            raise PlanError(
                title,
                because=[
                    f"it has {samples} samples, the plan is made for {self.batch_size} a step, "
                    "and memory for more was not planned"
                ],
                suggestions=[
                    f"give batches of at most {self.batch_size}",
                    f"plan again with batch_size={samples}",
                ],
            )
        if samples < self.least:
            raise PlanError(
                title,
                because=[f"it has {samples} samples, and {self.reason or 'a step'} needs {self.least}"],
                suggestions=["drop the last batch: drop_last=True"],
            )
        if samples % self.multiple:
            raise PlanError(
                title,
                because=[
                    f"it has {samples} samples, and ranks share the samples of a micro-batch: "
                    f"it has a multiple of {self.multiple}"
                ],
                suggestions=[
                    "drop the last batch: drop_last=True",
                    f"give batches of multiples of {self.multiple} samples",
                    "plan with inputs that are not split: pins={name of an input: 'R'} for each of them",
                ],
            )
        return Microbatches(self.shared_and_rest(samples)[0])

    def shared_and_rest(self, samples: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the micro-batches that ranks share (multiples of ``multiple``), and of the rest.

        There are as many micro-batches as planned, more where the batch is larger, fewer where it is small. A
        micro-batch of the rest has no more samples than a rank's part of a shared one.
        """
        rest = samples % self.multiple
        least_shared = -(-self.least // self.multiple) * self.multiple
        while rest and rest < self.least:
            rest += self.multiple
        if samples - rest < least_shared:
            rest = samples if self.multiple > 1 else 0
        largest = microbatch_sizes(self.batch_size, self.microbatches, self.multiple)[0]
        both: list[tuple[int, ...]] = []
        for count, smallest, most, step, usual in (
            (samples - rest, least_shared, largest, self.multiple, self.microbatches),
            (rest, self.least, max(1, largest // self.multiple), 1, 1),
        ):
            number = min(count // smallest, max(usual, -(-count // most)))
            both.append(microbatch_sizes(count, number, step) if count else ())
        return both[0], both[1]


def seed_scale(weights: Sequence[float], samples: int, loss_dtype: torch.dtype) -> float:
    """Return a factor that makes a loss's weights exact in its type: gradients are computed times it, then divided by it.

        6 samples, 3 micro-batches: 1/3 is 0.334 in bfloat16, and 1/3 · 6/8 = 0.25 is itself

    It is 1 where they are exact already. With it they are small integers over a power of two.
    """
    if loss_dtype.itemsize >= 4:
        return 1.0
    exact = torch.tensor(weights, dtype=torch.float64)
    if torch.equal(exact.to(loss_dtype).double(), exact):
        return 1.0
    return samples / 2.0 ** math.ceil(math.log2(samples))


def refuse_autocast(method: str, device_type: str) -> None:
    """Raise UsageError under ``torch.autocast``: it would cast inside this rank's segments, against the trace."""
    active = [kind for kind in dict.fromkeys(("cpu", device_type)) if torch.is_autocast_enabled(kind)]
    if active:
        raise UsageError(
            f"engine.{method} was called under torch.autocast",
            because=[
                f"autocast is enabled for {', '.join(active)}; the data type of every op was fixed when the model "
                "was traced, and ranks exchange tensors of exactly those types"
            ],
            suggestions=[
                "call it outside of torch.autocast",
                "plan with precision=Precision(compute=torch.bfloat16)",
                "call partition under torch.autocast: the trace records its casts",
            ],
        )


def refuse_no_grad(method: str) -> None:
    """Raise UsageError where no gradients can be computed."""
    mode = (
        "torch.inference_mode"
        if torch.is_inference_mode_enabled()
        else "torch.no_grad"
        if not torch.is_grad_enabled()
        else None
    )
    if mode:
        raise UsageError(
            f"engine.{method} was called under {mode}",
            because=["a training step computes gradients"],
            suggestions=["call it outside", "engine.eval_step(batch) evaluates"],
        )
