"""The reference of a verification: one step of the unpartitioned, eager model in float64, or in its own types, on the whole
batch at once, which is what the user would compute without micro-batches.

If a whole batch is no sum over its samples (batch norm; an auxiliary loss over all tokens; a declared mean of unlike
micro-batches), it goes micro-batch by micro-batch, gradients accumulated; under "token_mean" the mean cross-entropies are
then divided by the whole batch's valid labels by hand.

Samples and weights of micro-batches are written out here once more: an engine that has them wrong must differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cost_models.errors import UsageError
from partitioner.engine.optimizers import make_optimizer
from partitioner.models.workload import Workload
from partitioner.verify.compare import StepResult
from partitioner.verify.draws import RecordedDraws, Recorder
from partitioner.verify.grow_batch import rebuilt, to_double
from partitioner.verify.rounding import RoundedOnceMore
from passes.evaluate.dropout import DropoutOff, random_ops
from passes.evaluate.float64 import code_in_float64, widen_module
from passes.graph.graph import OpGraph
from passes.shard.couplings import Coupling, couplings
from passes.trace.batch import forward_arguments
from passes.trace.export import loss_and_metrics
from passes.trace.loss.reduction import LossReduction
from passes.trace.normal.flex import flex_with_backward


def reference_step(
    reference: Workload,
    batch: Any,
    leaves: Mapping[str, Tensor],
    graph: OpGraph,
    sizes: tuple[int, ...],
    optimizer: str,
    learning_rate: float,
    recorded: RecordedDraws | None = None,
    *,
    double: bool = True,
    rounded: int | None = None,
) -> StepResult:
    """Compute one step of the unpartitioned model. ``sizes``: the samples of each of the plan's micro-batches.

    ``graph``: in the model's own types. ``recorded``: takes the random draws of each micro-batch. ``double``: ``reference``
    is in float64, whatever its code asks for; ``rounded``: the seed by which results of ops are rounded
    once more.
    """
    reference = reference.copied()
    model = reference.model.train()
    weights = weights_by_definition(graph.loss_reduction, sizes)
    mode: WholeBatchMeans | None = None
    if len(sizes) == 1 or not why_in_pieces(graph):
        sizes, weights = (sum(sizes),), [1.0]
    elif graph.loss_reduction == "token_mean":
        mode = counted_means(reference, batch, leaves, graph, sizes, double=double)
    total = 0.0
    pieces = _pieces(batch, leaves, graph, sizes, model)
    once = {name: model.get_buffer(name).detach().clone() for name in written_once(graph)}
    with (
        DropoutOff(),
        flex_with_backward(),
        code_in_float64(graph) if double else nullcontext(),
        nullcontext() if rounded is None else RoundedOnceMore(rounded),
    ):
        for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            recorder = Recorder() if recorded else None
            for name, before in once.items():
                model.get_buffer(name).detach().copy_(before)
            if mode is not None:
                mode.start(index)
            with mode or nullcontext(), recorder or nullcontext():
                loss = _loss(model, reference, piece)
            if recorded is not None and recorder is not None:
                recorded.add(recorder)
            if loss.requires_grad:
                (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * weight
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    stepper = make_optimizer(optimizer, model.parameters(), learning_rate)
    if stepper is not None:
        stepper.step()
    return StepResult(
        total,
        gradients,
        {name: p.detach() for name, p in model.named_parameters()},
        # A parameter that is registered as a buffer too is compared as the parameter.
        {name: b.detach() for name, b in model.named_buffers() if not isinstance(b, nn.Parameter)},
    )


def own_copy(workload: Workload) -> Workload:
    """Return the workload in its own types on the CPU, its model copied."""
    copied = workload.copied()
    return replace(copied, model=copied.model.cpu())


def double_copy(workload: Workload) -> Workload:
    """Return the workload in float64 on the CPU, its model copied: the user's is never touched."""
    copied = workload.copied()
    return replace(
        copied,
        model=widen_module(copied.model, "cpu"),
        example_inputs=to_double(workload.example_inputs),
    )


def weights_by_definition(reduction: LossReduction, sizes: Sequence[int]) -> list[float]:
    """Weigh the losses of micro-batches as the reduction is declared, and not as the engine does.

    A micro-batch of a token mean has its divisor, valid labels times this weight, from ``counted_means``.
    """
    if reduction == "sum":
        return [1.0 for _ in sizes]
    return [size / sum(sizes) for size in sizes]


def written_once(graph: OpGraph) -> list[str]:
    """Name the buffers that a batch writes once, whatever its micro-batches: each starts from what was there before."""
    return [output.name for output in graph.outputs if output.kind == "buffer" and output.once]


def why_in_pieces(graph: OpGraph) -> str:
    """Say what makes a whole batch something else than its micro-batches; "" if nothing is known to."""
    if coupled := couplings(graph):
        return _coupled(coupled[0])
    if drawn := random_ops(graph):
        return f"each micro-batch draws its own random numbers ({drawn[0]})"
    if written := [output.name for output in graph.outputs if output.kind == "buffer" and not output.once]:
        return f"each micro-batch writes the buffer {written[0]}"
    if (
        graph.unlike_whole and graph.loss_reduction != "sum"
    ):  # a loss that is declared a sum is held to be one
        return f"the whole batch's loss is not made of the micro-batches' at {graph.unlike_whole[0]}"
    return ""


def _coupled(coupling: Coupling) -> str:
    match coupling.kind:
        case "batch statistics" | "synchronized statistics":
            return f"batch norm sees one micro-batch at a time ({coupling})"
        case "running state":
            return f"a buffer kept of the batch advances with each micro-batch ({coupling})"
        case "samples":
            return f"samples are coupled at {coupling}"


def _loss(model: nn.Module, reference: Workload, piece: Any) -> Tensor:
    args, kwargs = forward_arguments(model, piece, reference.loss_fn is not None)
    loss, _ = loss_and_metrics(model(*args, **kwargs), piece, reference.loss_fn)
    assert loss is not None
    return loss


def _pieces(
    batch: Any, leaves: Mapping[str, Tensor], graph: OpGraph, sizes: Sequence[int], model: nn.Module
) -> Iterable[Any]:
    start = 0
    for size in sizes:
        own = {}
        for name, leaf in leaves.items():
            dim = graph.batch.batch_dims.get(name)
            own[name] = (leaf if dim is None else leaf.narrow(dim, start, size)).clone()
        yield rebuilt(batch, own, model)
        start += size


def counted_means(
    reference: Workload,
    batch: Any,
    leaves: Mapping[str, Tensor],
    graph: OpGraph,
    sizes: tuple[int, ...],
    *,
    double: bool = True,
) -> WholeBatchMeans:
    """Run all micro-batches on another copy of the model first, to count the labels of each cross-entropy.

    ``double``: the model is in float64, whatever it asks for.
    """
    assert graph.token_counts is not None
    if graph.token_counts.totals or graph.token_counts.inverse_shares:
        raise UsageError(
            f"cannot verify {graph.model_name} under a token mean",
            [f"{why_in_pieces(graph)}, and the loss divides by a count of its own"],
            ["use cross_entropy with reduction='mean' and ignore_index", 'loss_reduction="mean"'],
        )
    reference = reference.copied()
    model = reference.model.train()
    mode = WholeBatchMeans([size / sum(sizes) for size in sizes])
    with ExitStack() as stack:
        for world in (
            DropoutOff(),
            flex_with_backward(),
            torch.no_grad(),
            code_in_float64(graph) if double else nullcontext(),
        ):
            stack.enter_context(world)
        for index, piece in enumerate(_pieces(batch, leaves, graph, sizes, model)):
            mode.start(index)
            with mode:
                _loss(model, reference, piece)
    mode.counting = False
    return mode


class WholeBatchMeans(TorchFunctionMode):
    """A mode that divides each mean cross-entropy by the labels of its call in all micro-batches, times their share."""

    def __init__(self, shares: list[float]) -> None:
        super().__init__()
        self.counting = True
        self._shares: list[float] = shares
        self._counts: list[list[float]] = []
        """The numbers of labels, by call within a forward and by micro-batch."""
        self._call, self._index = 0, 0

    def start(self, index: int) -> None:
        """Expect the forward of micro-batch ``index`` next."""
        self._call, self._index = 0, index

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func not in (F.cross_entropy, F.nll_loss) or options.get("reduction", "mean") != "mean":
            return func(*args, **options)
        target = args[1] if len(args) > 1 else options["target"]
        if target.is_floating_point():
            return func(*args, **options)
        count = self._count(target, args[2] if len(args) > 2 else options.get("weight"), options)
        return func(*args, **{**options, "reduction": "sum"}) / (count * self._shares[self._index])

    def _count(self, target: Tensor, weight: Tensor | None, options: Mapping[str, Any]) -> float:
        """Return the labels of this call over all micro-batches (so far, while counting)."""
        valid = target[target != options.get("ignore_index", -100)]
        if self.counting:
            if self._call == len(self._counts):
                self._counts.append([0.0] * len(self._shares))
            own = valid.numel() if weight is None else float(weight[valid].sum())
            self._counts[self._call][self._index] = own
        self._call += 1
        return sum(self._counts[self._call - 1])
