"""Layouts of a profile over all n devices, every op by samples, by features or by inputs: the problem and its costs.

A step trains n mini-batches, as data parallelism does (with every op by samples it *is* data parallelism). Per op:

    samples    a device has one mini-batch and all of the op's parameters, whose gradients are all-reduced once per step
    features   a device has all n mini-batches and 1/n of the op's output neurons with their parameters: nothing to reduce
    inputs     a device has all n mini-batches of 1/n of the op's input neurons with their parameters; outputs are sums

Whatever the layout, a device does 1/n of the op's work. Outputs of "samples" are by samples, of "features" by features, of
"inputs" in either form, once summed. What readers need of a producer whose output is ``a`` bytes per mini-batch (n·a per
step), and the bytes that a device then sends, forward; backward the conjugate moves as many, where there is a gradient:

    reader                                   needs        producer by samples     producer by features
    any, by samples; the loss                samples      0                       all-to-all  (n-1)/n·a
    channel by channel, by features          features     all-to-all (n-1)/n·a    0
    neurons (linear, conv), by inputs        features     all-to-all (n-1)/n·a    0
    neurons, by features                     whole        all-gather (n-1)·a      all-gather (n-1)·a

    producer by inputs: reduce-scatter (n-1)·a into the form its readers need, before the above

Derivation: a device holds a bytes in either form, a/n of them in both, and n·a are everything; it gets what it needs and
does not hold. Backward of a gather is a reduce-scatter, and the reverse: every device has a part of the sum for all n·a
bytes. Once per producer, whoever reads: what is whole is in both forms too, and partial gradients are added before they are
scattered. Ring formulas: ``cost_models.communication`` (Patarasuk, Yuan 2009; Thakur et al. 2005), full duplex, latency not
counted, nothing overlapped.

That fully connected layers gain by features and convolutions by samples is Krizhevsky 2014 ("one weird trick"): a linear op
of o outputs by features pays 2(n-1)·B·in elements for the 2(n-1)/n·in·o of its gradients, so it gains where n·B < o. Inputs
after features are the pairs of Megatron-LM (Shoeybi et al. 2019). The searches are in ``layouts_cut`` and
``layouts_ilp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from cost_models.communication import (
    AlphaBeta,
    all_to_all_seconds,
    ring_all_gather_seconds,
    ring_all_reduce_seconds,
)
from cost_models.errors import InternalError
from passes.search.certificate import Certificate, relative_gap
from passes.search.cost_graph.graph import readers

SplitBy: TypeAlias = Literal["samples", "features", "inputs"]
OpKind: TypeAlias = Literal["neurons", "channels", "samples", "input"]
STEP = "time of a step of one mini-batch per device"


@dataclass(frozen=True)
class LayoutOp:
    """An op of a profile; seconds and bytes of one mini-batch.

    ``kind``: "neurons" each output neuron needs the whole input; "channels" each output channel needs the same channel of
    its inputs; "samples" nothing but samples is known to split it; "input" is the data loader, which gives every device
    what it needs. ``neurons``, ``inputs``: how many there are to split, None where unknown: as many as it takes.
    """

    id: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float
    parameter_bytes: float
    kind: OpKind
    has_gradient: bool = True
    neurons: int | None = None
    inputs: int | None = None


@dataclass(frozen=True)
class LayoutProblem:
    """``edges``: positions of (producer, reader). ``bytes_per_second``: what a device sends while it receives as much."""

    ops: tuple[LayoutOp, ...]
    edges: tuple[tuple[int, int], ...]
    devices: int
    bytes_per_second: float

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Readers of every op, each once."""
        return readers(len(self.ops), self.edges)

    @cached_property
    def link(self) -> AlphaBeta:
        return AlphaBeta(0.0, self.bytes_per_second)

    def exchange_seconds(self, u: int) -> float:
        """Return the time from samples to features or back, gradient included, for n mini-batches: (n-1)/n·a each."""
        op = self.ops[u]
        return _ways(op) * all_to_all_seconds(op.activation_bytes, self.devices, self.link)

    def gather_seconds(self, u: int) -> float:
        """Return the time to gather an output, and to reduce its gradients back, for n mini-batches: (n-1)·a each."""
        op = self.ops[u]
        return _ways(op) * ring_all_gather_seconds(
            op.activation_bytes * self.devices, self.devices, self.link
        )

    def reduce_seconds(self, v: int) -> float:
        """Return the time to all-reduce an op's gradients, by samples: 2(n-1)/n·parameter bytes."""
        return ring_all_reduce_seconds(self.ops[v].parameter_bytes, self.devices, self.link)

    def compute_seconds(self, v: int, layout: SplitBy) -> float:
        """Return the time of n mini-batches on the busiest device: the one with ⌈parts/n⌉ of the neurons or inputs."""
        op, n = self.ops[v], self.devices
        seconds = op.forward_seconds + op.backward_seconds
        parts = self._parts(v, layout)
        return seconds * (-(-parts // n) * n / parts) if parts else seconds

    def can_be(self, v: int, layout: SplitBy) -> bool:
        """Tell whether an op is known to split so, with a part for every device."""
        kinds: dict[SplitBy, tuple[OpKind, ...]] = {
            "features": ("neurons", "channels", "input"),
            "inputs": ("neurons",),
        }
        parts = self._parts(v, layout)
        return layout == "samples" or (
            self.ops[v].kind in kinds[layout] and (parts is None or parts >= self.devices)
        )

    def _parts(self, v: int, layout: SplitBy) -> int | None:
        if layout == "samples":
            return None
        return self.ops[v].neurons if layout == "features" else self.ops[v].inputs


@dataclass(frozen=True)
class LayoutCosts:
    """Seconds of a step of n mini-batches, on every device."""

    compute_seconds: float
    reduce_seconds: float
    gather_seconds: float
    """Gathers, with the sums of partial outputs and gradients."""
    exchange_seconds: float
    parameter_bytes: float
    """Parameters that a device holds."""

    @property
    def step_seconds(self) -> float:
        return math.fsum(
            (self.compute_seconds, self.reduce_seconds, self.gather_seconds, self.exchange_seconds)
        )


@dataclass(frozen=True)
class LayoutResult:
    """Layouts, one per op, what a step of n mini-batches costs with them, and how good that is known to be."""

    layouts: tuple[SplitBy, ...]
    costs: LayoutCosts
    certificate: Certificate

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of n mini-batches: the objective."""
        return self.costs.step_seconds


def layout_result(
    layouts: tuple[SplitBy, ...],
    costs: LayoutCosts,
    bound_seconds: float,
    *,
    space: str,
    method: str,
    search_seconds: float,
) -> LayoutResult:
    """Return the answer of a search; a bound at the step itself is the proof that the layouts are optimal."""
    value = costs.step_seconds
    certificate = Certificate(
        objective=STEP,
        objective_seconds=value,
        bound_seconds=bound_seconds,
        gap=relative_gap(value, bound_seconds),
        simulated_lower_bound_seconds=bound_seconds,
        space=space,
        method=method,
        solver_status="optimal" if bound_seconds == value else "time limit",
        search_seconds=search_seconds,
    )
    return LayoutResult(layouts, costs, certificate)


def evaluate_layouts(problem: LayoutProblem, layouts: Sequence[SplitBy]) -> LayoutCosts:
    """Price layouts by the tables above. The loss, which no profile has, is computed by samples."""
    compute, reduced, gathered, exchanged, held = [], [], [], [], []
    for v, op in enumerate(problem.ops):
        layout = layouts[v]
        if not problem.can_be(v, layout):
            raise InternalError(f"{op.id} cannot be split by {layout}", [f"its kind is {op.kind}"])
        compute.append(problem.compute_seconds(v, layout))
        held.append(op.parameter_bytes / (1 if layout == "samples" else problem.devices))
        if layout == "samples":
            reduced.append(problem.reduce_seconds(v))
        if op.kind == "input":
            continue
        needs = {_need(problem, reader, layouts) for reader in problem.readers[v]} or {"samples"}
        if layout == "inputs":
            gathered.append(problem.gather_seconds(v))
        if "whole" in needs:
            gathered.append(problem.gather_seconds(v))
        elif len(needs) == 2 or (layout != "inputs" and needs != {layout}):
            exchanged.append(problem.exchange_seconds(v))
    return LayoutCosts(*map(math.fsum, (compute, reduced, gathered, exchanged, held)))


def _need(problem: LayoutProblem, reader: int, layouts: Sequence[SplitBy]) -> str:
    if layouts[reader] == "features" and problem.ops[reader].kind == "neurons":
        return "whole"
    return "samples" if layouts[reader] == "samples" else "features"


def _ways(op: LayoutOp) -> int:
    return 2 if op.has_gradient else 1
