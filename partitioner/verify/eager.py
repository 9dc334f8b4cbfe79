"""Steps of the unpartitioned, eager model: what a plan's ranks are held against, in float64 or in the model's own types.

A step runs on the whole batch at once, which is what the user would compute without micro-batches. If a whole batch is no
sum over its samples (batch norm; an auxiliary loss over all tokens; a declared mean of unlike micro-batches), it goes
micro-batch by micro-batch, gradients accumulated; under "token_mean" the mean cross-entropies are then divided by the whole
batch's valid labels by hand.

Samples and weights of micro-batches are written out here once more: an engine that has them wrong must differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cost_models.errors import UsageError
from cost_models.precision import Precision
from partitioner.models.workload import Workload
from partitioner.verify.copies import workload_copy
from partitioner.verify.draws import RecordedDraws
from partitioner.verify.grow_batch import grow_batch, ignore_unevenly, to_double
from partitioner.verify.plain_loop import WeighedPart, plain_loop
from partitioner.verify.rounding import RoundedOnceMore
from passes.copies.dropout import DropoutOff, random_ops
from passes.copies.float64 import code_in_float64
from passes.fidelity.agree import StepResult
from passes.fidelity.steps import cut, eager_module
from passes.graph.graph import OpGraph
from passes.shard.couplings import couplings
from passes.trace.batch import flatten_batch, forward_names
from passes.trace.loss.reduction import LossReduction
from passes.trace.normal.flex import flex_with_backward
from runtime.state.step_precision import INITIAL_SCALE

Named: TypeAlias = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class EagerModel:
    """The unpartitioned model, and how it is trained.

    workload        the user's own, which is never touched
    graph           its trace in its own types, without dropout
    make_optimizer  from the parameters by name
    precision       the plan's types, in steps that are not in float64; None: the model's own, as they are
    hooks           True if hooks on parameters run
    """

    workload: Workload
    graph: OpGraph
    make_optimizer: Callable[[Named], torch.optim.Optimizer]
    precision: Precision | None = None
    hooks: bool = False
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    max_norm: Callable[[float], float] | None = None
    kept: Collection[int] = (1,)
    """The numbers of the steps whose tensors are kept."""
    generator: Tensor = field(default_factory=torch.get_rng_state)
    """The state of torch's generator before the first step: all courses draw alike."""

    def grown(self, samples: int) -> dict[str, Tensor]:
        """Return the leaves of a batch of this many unlike samples, in float64."""
        model, example = self.workload.model, to_double(self.workload.example_inputs)
        batch = grow_batch(example, self.graph.batch.batch_dims, model, samples)
        return ignore_unevenly(flatten_batch(batch, forward_names(model)), self.graph)

    def batch(self, leaves: Mapping[str, Tensor], *, double: bool) -> dict[str, Tensor]:
        """Return ``leaves``, which are in float64, in the types that a step takes."""
        example = flatten_batch(self.workload.example_inputs, forward_names(self.workload.model))
        return {name: leaf if double else leaf.to(example[name].dtype) for name, leaf in leaves.items()}

    def steps(
        self,
        batches: Sequence[tuple[Mapping[str, Tensor], Sequence[int]]],
        *,
        double: bool,
        turned: bool = False,
        rounded: int | None = None,
        recorded: RecordedDraws | None = None,
    ) -> list[StepResult]:
        """Train a copy of the model, one step per batch: its leaves, and the samples of each of the plan's micro-batches.

        double    in float64, whatever its code asks for
        turned    the samples of each micro-batch in reverse order
        rounded   the seed by which results of ops are rounded once more
        recorded  takes the random draws of each micro-batch
        """
        workload = workload_copy(self.workload, double=double, hooks=self.hooks)
        precision = None if double else self.precision
        module = eager_module(workload.model, workload.example_inputs, workload.loss_fn, precision)
        modes = [nullcontext() if rounded is None else RoundedOnceMore(rounded)]
        torch.set_rng_state(self.generator)
        steps = [
            self._parts(workload, self.batch(leaves, double=double), sizes, double, turned, modes, recorded)
            for leaves, sizes in batches
        ]
        types = None
        if precision is not None:
            types = {name: self.graph.types_of(name, precision) for name in self.graph.parameters}
        return plain_loop(
            workload.model,
            steps,
            lambda leaves: module(*leaves.values())[0],
            self.make_optimizer,
            self.make_scheduler,
            self.max_norm,
            self.kept,
            types,
            INITIAL_SCALE if precision is not None and precision.loss_scale == "dynamic" else None,
            written_once(self.graph),
        )

    def _parts(
        self,
        workload: Workload,
        leaves: Mapping[str, Tensor],
        sizes: Sequence[int],
        double: bool,
        turned: bool,
        modes: Sequence[AbstractContextManager[Any]],
        recorded: RecordedDraws | None,
    ) -> list[WeighedPart]:
        """Return one step's batch: whole, or in micro-batches where these are not what the whole batch is."""
        graph = self.graph
        weights: Sequence[float] = weights_by_definition(graph.loss_reduction, sizes)
        means: WholeBatchMeans | None = None
        if len(sizes) == 1 or not why_in_pieces(graph):
            sizes, weights = (sum(sizes),), [1.0]
        elif graph.loss_reduction == "token_mean":
            means = counted_means(workload, leaves, graph, sizes, double=double)
        parts = []
        for number, part in enumerate(cut(leaves, graph.batch.batch_dims, sizes, turned=turned)):
            within = _world(graph, double, modes, means, number, recorded)
            parts.append(WeighedPart(part, weights[number], within))
        return parts


@contextmanager
def _world(
    graph: OpGraph,
    double: bool,
    modes: Sequence[AbstractContextManager[Any]] = (),
    means: WholeBatchMeans | None = None,
    number: int = 0,
    recorded: RecordedDraws | None = None,
) -> Iterator[None]:
    """Let eager code run as the graph does: without dropout, in float64 if ``double``, micro-batch ``number``."""
    with ExitStack() as stack:
        stack.enter_context(DropoutOff())
        stack.enter_context(flex_with_backward())
        if double:
            stack.enter_context(code_in_float64(graph))
        for mode in modes:
            stack.enter_context(mode)
        if means is not None:
            means.start(number)
            stack.enter_context(means)
        if recorded is not None:
            stack.enter_context(recorded.recording())
        yield


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
    for coupling in couplings(graph):
        match coupling.kind:
            case "batch statistics" | "synchronized statistics":
                return f"batch norm sees one micro-batch at a time ({coupling})"
            case "running state":
                return f"a buffer kept of the batch advances with each micro-batch ({coupling})"
            case "samples":
                return f"samples are coupled at {coupling}"
    if drawn := random_ops(graph):
        return f"each micro-batch draws its own random numbers ({drawn[0]})"
    if written := [output.name for output in graph.outputs if output.kind == "buffer" and not output.once]:
        return f"each micro-batch writes the buffer {written[0]}"
    if graph.unlike_whole and graph.loss_reduction != "sum":  # a loss declared a sum is held to be one
        return f"the whole batch's loss is not made of the micro-batches' at {graph.unlike_whole[0]}"
    return ""


def failure(workload: Workload, leaves: Mapping[str, Tensor], graph: OpGraph | None = None) -> str:
    """Say how a step of a copy of the model on ``leaves`` fails; "" if it does not.

    ``graph``: what float64 is compared with; None for the model's own types.
    """
    double = graph is not None
    copied = workload_copy(workload, double=double)
    module = eager_module(copied.model.train(), copied.example_inputs, copied.loss_fn)
    batch = {name: leaf.clone() for name, leaf in leaves.items()}
    try:
        with DropoutOff(), nullcontext() if graph is None else code_in_float64(graph):
            loss = module(*(to_double(batch) if double else batch).values())[0]
            if loss.requires_grad:
                loss.backward()
    except Exception as error:  # noqa: BLE001 the user's code may raise anything
        return words_of(error)
    return ""


def words_of(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def counted_means(
    workload: Workload,
    leaves: Mapping[str, Tensor],
    graph: OpGraph,
    sizes: Sequence[int],
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
    copied = workload.copied()
    module = eager_module(copied.model.train(), copied.example_inputs, copied.loss_fn)
    means = WholeBatchMeans([size / sum(sizes) for size in sizes])
    for number, part in enumerate(cut(leaves, graph.batch.batch_dims, sizes)):
        with torch.no_grad(), _world(graph, double, (), means, number):
            module(*part.values())
    means.counting = False
    return means


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
