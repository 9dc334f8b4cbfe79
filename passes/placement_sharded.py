"""Lay out every op of a layer profile over all n devices: by samples or by features. The exact optimum, by a minimum cut.

A step trains n mini-batches, as data parallelism does (with every op by samples it *is* data parallelism). Per op:

    samples    a device has one mini-batch and all of the op's parameters, whose gradients are all-reduced once per step
    features   a device has all n mini-batches and 1/n of the op's output neurons with their parameters: nothing to reduce

Either way a device does 1/n of the op's work. What readers need of a producer whose output is ``a`` bytes per mini-batch
(n·a per step), and the bytes that a device then sends, forward; backward the conjugate moves as many, where the output has
a gradient:

    reader                                  needs        producer by samples     producer by features
    any, by samples                         samples      0                       all-to-all  (n-1)/n·a
    channel by channel, by features         features     all-to-all (n-1)/n·a    0
    neurons (linear, conv), by features     whole        all-gather (n-1)·a      all-gather (n-1)·a

Derivation: a device holds a bytes in either form, a/n of them in both, and n·a are everything; it gets what it needs and
does not hold. Backward of a gather is a reduce-scatter: every device has a part of the sum for all n·a bytes. Once per
producer, whoever reads: what is whole is in both forms too, and partial gradients are added before they are scattered. Ring
formulas: ``cost_models.communication`` (Patarasuk, Yuan 2009; Thakur et al. 2005), latency not counted, nothing overlapped.
That fully connected layers gain by features and convolutions by samples is Krizhevsky 2014 ("one weird trick"): a linear op
of o outputs by features pays 2(n-1)·B·in elements for the 2(n-1)/n·in·o of its gradients, so it gains where n·B < o.

Why a cut is exact. Let x = 1 mean features, c the price of an exchange and g ≥ c that of a gather. A producer u costs

    c·[u and its readers not all alike]              readers that are all channel by channel      a hyperedge (Lawler 1973)
    (g-c)·[some neurons reader is 1] + c·[u or some reader is 1]        with a reader by neurons: terms max(x), prices ≥ 0

(if u = 1 and a neurons reader is 0, that one needs samples; if it is 1, the whole.) Both are submodular, so an auxiliary
node each writes them as arcs of a network whose minimum s–t cut is the optimum (Kolmogorov, Zabih 2004). This holds for any
numbers, since g = n·c: no search is ever needed. The largest flow is the proof that no choice costs less.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, TypeAlias

import networkx as nx

from cost_models.communication import (
    AlphaBeta,
    all_to_all_seconds,
    ring_all_gather_seconds,
    ring_all_reduce_seconds,
)
from cost_models.errors import GraphError, InternalError

Layout: TypeAlias = Literal["samples", "features"]
Kind: TypeAlias = Literal["neurons", "channels", "samples", "input"]
Node: TypeAlias = tuple[str, int]
SAMPLES: Node = ("samples", -1)
FEATURES: Node = ("features", -1)
PROVED = 1e-9
"""Relative distance of value and flow that rounding explains."""
SPACE = "every op on all devices, by samples or by features"


@dataclass(frozen=True)
class ShardedOp:
    """An op of a profile; seconds and bytes of one mini-batch.

    ``kind``: "neurons" each output neuron needs the whole input; "channels" each output channel needs the same channel of
    its inputs; "samples" nothing but samples is known to split it; "input" is the data loader, which gives every device
    what it needs. ``neurons``: how many outputs there are to split, None where unknown: as many as it takes.
    """

    id: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float
    parameter_bytes: float
    kind: Kind
    has_gradient: bool = True
    neurons: int | None = None


@dataclass(frozen=True)
class ShardedProblem:
    """``edges``: positions of (producer, reader). ``bytes_per_second``: what a device sends while it receives as much."""

    ops: tuple[ShardedOp, ...]
    edges: tuple[tuple[int, int], ...]
    devices: int
    bytes_per_second: float

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Of every op, each once."""
        found: list[dict[int, None]] = [{} for _ in self.ops]
        for source, target in self.edges:
            found[source][target] = None
        return tuple(tuple(targets) for targets in found)

    @cached_property
    def link(self) -> AlphaBeta:
        return AlphaBeta(0.0, self.bytes_per_second)

    def exchange_seconds(self, u: int) -> float:
        """Samples to features or back, and its gradient, for n mini-batches: (n-1)/n·a each."""
        op = self.ops[u]
        return _ways(op) * all_to_all_seconds(op.activation_bytes, self.devices, self.link)

    def gather_seconds(self, u: int) -> float:
        """Everything to everyone, and the sum of its gradients back, for n mini-batches: (n-1)·a each."""
        op = self.ops[u]
        return _ways(op) * ring_all_gather_seconds(
            op.activation_bytes * self.devices, self.devices, self.link
        )

    def reduce_seconds(self, v: int) -> float:
        """Gradients of the parameters, by samples: 2(n-1)/n·parameter bytes."""
        return ring_all_reduce_seconds(self.ops[v].parameter_bytes, self.devices, self.link)

    def compute_seconds(self, v: int, layout: Layout) -> float:
        """Of n mini-batches on the busiest device: by features the one with ⌈neurons/n⌉ of the neurons."""
        op, n = self.ops[v], self.devices
        seconds = op.forward_seconds + op.backward_seconds
        if layout == "samples" or not op.neurons:
            return seconds
        return seconds * (-(-op.neurons // n) * n / op.neurons)

    def can_split(self, v: int) -> bool:
        """Whether every device gets a neuron."""
        op = self.ops[v]
        return op.kind != "samples" and (op.neurons is None or op.neurons >= self.devices)


@dataclass(frozen=True)
class ShardedCosts:
    """Seconds of a step of n mini-batches, on every device."""

    compute_seconds: float
    reduce_seconds: float
    gather_seconds: float
    exchange_seconds: float
    parameter_bytes: float
    """Held by a device."""

    @property
    def step_seconds(self) -> float:
        return math.fsum(
            (self.compute_seconds, self.reduce_seconds, self.gather_seconds, self.exchange_seconds)
        )


@dataclass(frozen=True)
class Sharded:
    """The best layouts, one per op; seconds are those of a step of n mini-batches. No choice is below ``bound_seconds``."""

    layouts: tuple[Layout, ...]
    costs: ShardedCosts
    bound_seconds: float
    method: str
    search_seconds: float

    @property
    def step_seconds(self) -> float:
        return self.costs.step_seconds

    @property
    def gap(self) -> float:
        """(value - bound) / value."""
        value = self.step_seconds
        return max(0.0, (value - self.bound_seconds) / value) if value > 0 else 0.0


@dataclass(frozen=True)
class _Arc:
    source: Node
    target: Node
    seconds: float


def evaluate_layouts(problem: ShardedProblem, layouts: Sequence[Layout]) -> ShardedCosts:
    """What layouts cost, by the table above. The loss, which no profile has, is computed by samples."""
    compute, reduced, gathered, exchanged, held = [], [], [], [], []
    for v, op in enumerate(problem.ops):
        features = layouts[v] == "features"
        if features and not problem.can_split(v):
            raise InternalError(f"{op.id} cannot be split by features", [f"its kind is {op.kind}"])
        compute.append(problem.compute_seconds(v, layouts[v]))
        held.append(op.parameter_bytes / (problem.devices if features else 1))
        if not features:
            reduced.append(problem.reduce_seconds(v))
        if op.kind == "input":
            continue
        needs = {_need(problem, reader, layouts) for reader in problem.readers[v]} or {"samples"}
        if "whole" in needs:
            gathered.append(problem.gather_seconds(v))
        elif needs != {layouts[v]}:
            exchanged.append(problem.exchange_seconds(v))
    return ShardedCosts(*map(math.fsum, (compute, reduced, gathered, exchanged, held)))


def place_sharded(problem: ShardedProblem) -> Sharded:
    """The layouts whose step is shortest, proved by a flow as large. Where it makes no difference, ops are by samples.

    Floats are fractions of powers of two, so prices become whole numbers without rounding, and the flow is exact.
    """
    started = time.monotonic()
    _check_prices(problem)
    arcs = _arcs(problem)
    whole = max((arc.seconds.as_integer_ratio()[1] for arc in arcs if arc.seconds < math.inf), default=1)
    network: nx.DiGraph[Node] = nx.DiGraph()
    network.add_nodes_from((SAMPLES, FEATURES))
    for arc in arcs:
        if arc.seconds > 0:
            price = int(Fraction(arc.seconds) * whole) if arc.seconds < math.inf else math.inf
            network.add_edge(arc.source, arc.target, capacity=price)
    # of all minimum cuts, networkx gives the one with the smallest sink side
    flow, (_, by_features) = nx.minimum_cut(network, SAMPLES, FEATURES)
    layouts: tuple[Layout, ...] = tuple(
        "features" if ("op", v) in by_features else "samples" for v in range(len(problem.ops))
    )
    costs = evaluate_layouts(problem, layouts)
    value, bound = costs.step_seconds, float(Fraction(int(flow), whole))
    if abs(value - bound) > PROVED * value:
        raise InternalError("layouts do not cost what the cut says", [f"{value!r} s and {bound!r} s"])
    method = f"minimum s–t cut of {len(network)} nodes and {network.number_of_edges()} arcs"
    return Sharded(layouts, costs, value, method, time.monotonic() - started)


def _check_prices(problem: ShardedProblem) -> None:
    problems = [
        f"{op.id}: {op.activation_bytes:g} bytes of output, {op.parameter_bytes:g} of parameters"
        for v, op in enumerate(problem.ops)
        if not math.isfinite(problem.gather_seconds(v) + problem.reduce_seconds(v))
    ]
    if problems:
        raise GraphError(
            f"at {problem.bytes_per_second:g} B/s sending takes longer than numbers can say",
            problems[:5],
            ["give a larger --bandwidth, or correct the file"],
        )


def _arcs(problem: ShardedProblem) -> list[_Arc]:
    """Every price as arcs; ``i → j`` is cut, and paid, where i is by samples and j by features."""
    arcs = []
    for v, op in enumerate(problem.ops):
        by_features = problem.compute_seconds(v, "features") if problem.can_split(v) else math.inf
        by_samples = problem.compute_seconds(v, "samples") + problem.reduce_seconds(v)
        arcs += [_Arc(SAMPLES, ("op", v), by_features), _Arc(("op", v), FEATURES, by_samples)]
        if op.kind != "input":
            arcs += _output_arcs(problem, v)
    return arcs


def _output_arcs(problem: ShardedProblem, u: int) -> list[_Arc]:
    """What u's readers make it cost. The loss, where there are none, needs samples."""
    exchange, gather = problem.exchange_seconds(u), problem.gather_seconds(u)
    readers = problem.readers[u]
    by_neurons = [v for v in readers if problem.ops[v].kind == "neurons"]
    some, whole, every = ("some", u), ("whole", u), ("every", u)
    arcs = [_Arc(some, ("op", v), math.inf) for v in (u, *readers)]  # if any is by features, so is ``some``
    if by_neurons:
        arcs += [_Arc(whole, ("op", v), math.inf) for v in by_neurons]
        return [*arcs, _Arc(SAMPLES, some, exchange), _Arc(SAMPLES, whole, gather - exchange)]
    if not readers:
        return [*arcs, _Arc(SAMPLES, some, exchange)]
    arcs += [_Arc(("op", v), every, math.inf) for v in (u, *readers)]  # if any is by samples, so is ``every``
    return [*arcs, _Arc(every, some, exchange)]


def _need(problem: ShardedProblem, reader: int, layouts: Sequence[Layout]) -> str:
    if layouts[reader] == "features" and problem.ops[reader].kind == "neurons":
        return "whole"
    return layouts[reader]


def _ways(op: ShardedOp) -> int:
    return 2 if op.has_gradient else 1
