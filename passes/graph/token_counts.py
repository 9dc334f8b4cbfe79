"""The numbers that a loss takes from the whole batch, counted before its micro-batches run: divisors, and totals.

    batch leaves ──(a small graph: shift, pad, flatten)──► targets ──► valid ones, N ──► leaf ``loss_normalizer``
                                                     └───► the sum of a mask, or of weights ──► leaf ``loss_total``

Micro-batch i, with its share wᵢ = samples in it / samples in the batch, computes lossᵢ = Sᵢ / (N · wᵢ), Sᵢ being the sum
over its own valid targets. Then Σ wᵢ · lossᵢ = Σ Sᵢ / N: the loss of the whole batch, and one without valid targets adds
exactly 0. If no target of the batch is valid, N = 0 and the loss is nan, as it is in eager code; gradients are 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from passes.graph.nodes import op_name, relocated
from runtime.segment.code import BatchSpec
from runtime.segment.microbatch import cut_at


@dataclass(frozen=True)
class Normalizer:
    """One extra batch leaf, of shape (samples,).

    ``ignore_index``: the target that does not count; None if the graph of counts tells which ones do.
    ``class_counts``: for a loss with class weights, a second leaf of shape (classes,): valid targets of the whole batch
    per class. The model's graph then computes Σ counts · weights, as only it holds the weights.
    """

    leaf: str
    ignore_index: int | None
    class_counts: str = ""
    classes: int = 0

    @property
    def numbers(self) -> int:
        """Count of numbers that ``counted`` returns of it."""
        return self.classes if self.class_counts else 1


@dataclass(frozen=True)
class TokenCounts:
    """The way to fill the extra leaves. ``module(*leaves, *constants)`` returns one tensor per normalizer and total."""

    module: fx.GraphModule
    leaves: tuple[str, ...]
    constants: Mapping[str, Tensor]
    normalizers: tuple[Normalizer, ...]
    totals: tuple[str, ...] = ()
    """Leaves without a batch dimension: what the module returns of the whole batch."""
    inverse_shares: tuple[str, ...] = ()
    """Leaves, (samples,), of the inverse of the micro-batch's share of the samples: sums are multiplied by it."""
    metric_share: str = ""
    """One more leaf, (samples,): the micro-batch's share of the valid tokens over its share of the samples."""
    shared_by: int | None = None
    """Number of the result of ``module`` that counts the valid tokens; None if there is none."""
    _on_device: dict[torch.device, fx.GraphModule] = field(default_factory=dict, repr=False, compare=False)

    @property
    def made(self) -> frozenset[str]:
        """Names of the leaves that no user's batch has."""
        names = [name for n in self.normalizers for name in (n.leaf, n.class_counts)]
        return frozenset(
            name for name in (*names, *self.totals, *self.inverse_shares, self.metric_share) if name
        )

    def numbers(self, spec: BatchSpec, microbatches: int) -> int:
        """Return the count of numbers that ``counted`` returns."""
        own = sum(normalizer.numbers for normalizer in self.normalizers)
        return (
            own
            + sum(_elements(spec, leaf) for leaf in self.totals)
            + (microbatches if self.metric_share else 0)
        )

    def results(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the targets and totals of ``batch``, on the device of its first leaf."""
        if not self.leaves:
            return ()
        device = batch[self.leaves[0]].device
        if device not in self._on_device:
            self._on_device[device] = _relocated(self.module, device)
        arguments = [batch[name].detach().to(device).contiguous() for name in self.leaves]
        constants = [constant.to(device) for constant in self.constants.values()]
        with torch.no_grad():
            found: tuple[Tensor, ...] = self._on_device[device](*arguments, *constants)
        return found


def user_leaves(spec: BatchSpec, counts: TokenCounts | None) -> BatchSpec:
    """Return ``spec`` without the leaves that are made: what a user's batch must have."""
    if counts is None:
        return spec
    made = counts.made
    return replace(
        spec,
        batch_dims={name: dim for name, dim in spec.batch_dims.items() if name not in made},
        leaves={name: leaf for name, leaf in spec.leaves.items() if name not in made},
    )


def filled(
    counts: TokenCounts,
    spec: BatchSpec,
    batch: Mapping[str, Tensor],
    sizes: Sequence[int],
    numbers: Tensor | None = None,
) -> dict[str, Tensor]:
    """Fill the extra leaves of ``counts`` into ``batch``. Runs where the batch is; never waits for a device.

    ``loss_normalizer``[sample] = 1 / (N · w), w the share of the sample's micro-batch; (samples,), floating.
    ``sizes``: samples of each micro-batch. ``numbers``: those of ``counted``, if this rank has only a part of the batch.
    """
    if numbers is None:
        numbers = counted(counts, spec, batch, sizes)
    device = numbers.device
    samples_of = torch.tensor(list(sizes))
    inverse_share = sum(sizes) / samples_of.double()
    per_sample = inverse_share.repeat_interleave(samples_of).to(device, non_blocking=True)
    made: dict[str, Tensor] = {}
    at = 0
    for normalizer in counts.normalizers:
        found = numbers[at : at + normalizer.numbers]
        at += normalizer.numbers
        if normalizer.class_counts:
            made[normalizer.class_counts] = found
        made[normalizer.leaf] = per_sample if normalizer.class_counts else per_sample / found
    for leaf in counts.totals:
        shape, elements = spec.leaves[leaf].shape, _elements(spec, leaf)
        made[leaf] = numbers[at : at + elements].reshape([int(size) for size in shape])
        at += elements
    made |= dict.fromkeys(counts.inverse_shares, per_sample)
    if counts.metric_share:
        tokens = numbers[at:]
        share = tokens / tokens.sum() * inverse_share.to(device, non_blocking=True)
        made[counts.metric_share] = torch.cat([s.expand(n) for s, n in zip(share, sizes, strict=True)])
    return {**batch, **{name: value.to(spec.leaves[name].dtype) for name, value in made.items()}}


def counted(
    counts: TokenCounts, spec: BatchSpec, batch: Mapping[str, Tensor], sizes: Sequence[int]
) -> Tensor:
    """Count everything that ``filled`` needs to know of the contents: one vector, float64.

    Per normalizer its denominator, or the valid targets per class; the totals; where metrics are shared, valid targets per
    micro-batch, unweighted. Vectors of parts of a batch add up where ``adds_up``. ``sizes``: samples of micro-batches.
    """
    results = counts.results(batch)
    numbers = [
        _per_class(normalizer, found) if normalizer.class_counts else _valid(normalizer, found).reshape(1)
        for normalizer, found in zip(counts.normalizers, results, strict=False)
    ]
    numbers += [total.double().reshape(-1) for total in results[len(counts.normalizers) :]]
    if counts.metric_share:
        numbers.append(_valid_tokens(counts, spec, batch, sizes))
    return torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.float64)


def adds_up(counts: TokenCounts, spec: BatchSpec) -> bool:
    """Tell, conservatively, whether counts of parts of a batch add up to those of the whole one.

    Targets must be made sample by sample; a total must be a sum of such a thing, and nothing be made of it.
    """
    if any(spec.batch_dims[name] != 0 for name in counts.leaves):
        return False
    output = counts.module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple)
    sums = set(results[len(counts.normalizers) :])
    if any(op_name(node) not in ("sum", "count_nonzero") for node in sums):
        return False
    if any(user not in sums and user is not output for node in sums for user in node.users):
        return False
    return all(
        node in sums or _sample_by_sample(node)
        for node in counts.module.graph.nodes
        if node.op == "call_function"
    )


_CASTS = frozenset({"_to_copy", "to", "alias", "clone", "detach"})
_SHAPES = frozenset(
    {
        *("_unsafe_view", "constant_pad_nd", "contiguous", "empty_like", "flatten", "full_like", "ones_like"),
        *("pad", "reshape", "scalar_tensor", "squeeze", "sym_numel", "sym_size", "unflatten", "unsqueeze"),
        *("view", "zeros_like"),
    }
)


def _sample_by_sample(node: fx.Node) -> bool:
    """Tell whether an op works sample by sample: sizes, views, what is done to each element, parts of samples."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # arithmetic on sizes
    name = op_name(node)
    if name in ("slice", "select"):
        dim, start, end = (*node.args[1:], *(None,) * 3)[:3]
        all_of_it = name == "slice" and not start and isinstance(end, int) and end >= _TO_THE_END
        return all_of_it or (isinstance(dim, int) and dim > 0)
    return torch.Tag.pointwise in node.target.tags or name in _CASTS or name in _SHAPES


_TO_THE_END = 2**62
"""The number that an open end of a slice is traced as."""


def valid_tokens(counts: TokenCounts, batch: Mapping[str, Tensor]) -> Tensor:
    """Count the valid targets of the batch, by the loss's first mean: (), float64, unweighted."""
    assert counts.shared_by is not None
    found = counts.results(batch)[counts.shared_by]
    means = counts.normalizers
    return (
        _valid(means[counts.shared_by], found)
        if counts.shared_by < len(means)
        else found.double().reshape(())
    )


def _valid_tokens(
    counts: TokenCounts, spec: BatchSpec, batch: Mapping[str, Tensor], sizes: Sequence[int]
) -> Tensor:
    """Count the valid targets of each micro-batch, by the loss's first mean: (microbatches,), float64, unweighted."""
    ends = list(itertools.accumulate(sizes))
    pieces = {name: cut_at(batch[name], spec.batch_dims[name], ends) for name in counts.leaves}
    return torch.stack(
        [
            valid_tokens(counts, {name: parts[index] for name, parts in pieces.items()})
            for index in range(len(sizes))
        ]
    )


def _valid(normalizer: Normalizer, targets: Tensor) -> Tensor:
    valid = targets if normalizer.ignore_index is None else targets != normalizer.ignore_index
    return valid.sum().double()


def _elements(spec: BatchSpec, leaf: str) -> int:
    return math.prod(int(size) for size in spec.leaves[leaf].shape)


def _per_class(normalizer: Normalizer, targets: Tensor) -> Tensor:
    """Count how often each class is a valid target; the ignored ones fall into a bin that is cut off."""
    assert normalizer.ignore_index is not None
    flat = targets.reshape(-1)
    bins = flat.masked_fill(torch.eq(flat, normalizer.ignore_index), normalizer.classes)
    counts = torch.zeros(normalizer.classes + 1, dtype=torch.float64, device=flat.device)
    return counts.index_add(0, bins, torch.ones_like(bins, dtype=torch.float64))[:-1]


def _relocated(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            relocated(node, device)
    return fx.GraphModule(torch.nn.Module(), graph)
