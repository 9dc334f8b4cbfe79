"""Programs as flat lists of numbers: what the simulator's event loop runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cost_models.links import Path
from runtime.program.crossings import BundleKey
from runtime.program.early import early_sums
from runtime.program.program import (
    Backward,
    BackwardWeight,
    Forward,
    Message,
    OptimizerStep,
    Program,
    Recv,
    ReduceGradients,
    SegmentGraph,
    Send,
)
from runtime.program.timing import NODE_PLANE, compute_seconds
from runtime.simulate.fair_share import Links
from runtime.simulate.flows import Bundle, Flow, Load, loads_of, ring_path, sum_flow

SumReady = Callable[[ReduceGradients], tuple[int, float]]
"""Function from a sum to the segment that makes its gradients, and the share of its backward after which they are there."""

COMPUTE, SEND, RECV, REDUCE, STEP, TOGETHER = range(6)


class Operation(NamedTuple):
    """An instruction as numbers."""

    code: int
    target: int
    """Node of a compute, number of a message or of a reduction (or of a compute that several ranks run together)."""
    seconds: float
    """Seconds of a compute or step; the host's time to issue a send or receive. Reductions have a flow."""
    queue: int = -1
    """Queue of a send or receive, private to the rank."""


@dataclass(frozen=True)
class Overheads:
    """Host seconds that each instruction costs its rank beyond the work it names."""

    compute_seconds: float = 0.0
    send_seconds: float = 0.0
    receive_seconds: float = 0.0


def count_microbatches(programs: Sequence[Program]) -> int:
    """Return one more than the highest micro-batch that any compute names."""
    return 1 + max(
        (
            i.microbatch  # type: ignore[union-attr]  # what NODE_PLANE names has one
            for program in programs
            for i in program.instructions
            if type(i) in NODE_PLANE
        ),
        default=-1,
    )


def _key(message: Message) -> BundleKey:
    return message.value, message.gradient, message.source, message.target


@dataclass
class FlatPrograms:
    """Programs as flat lists: ``flatten`` fills them, the event loop runs them; places lead back from them."""

    programs: Sequence[Program]
    graph: SegmentGraph
    links: Links
    scale: Sequence[float]
    """Size of each micro-batch relative to a full one."""
    contention: float
    """Factor by which a rank's computes slow down while a transfer of that rank is under way."""
    bundles: Mapping[BundleKey, Bundle] = field(default_factory=dict)
    """The bundle that a message stands for, where ranks stand for their groups."""
    leaders: frozenset[int] | None = None
    """These ranks, who come to sums for their groups; None where every rank runs its own program."""
    operations: list[list[Operation]] = field(default_factory=list)
    messages: dict[Message, int] = field(default_factory=dict)
    message_bytes: list[float] = field(default_factory=list)
    message_paths: list[Path] = field(default_factory=list)
    message_weights: list[float] = field(default_factory=list)
    message_ranks: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) of each message."""
    message_consumers: list[int] = field(default_factory=list)
    """The node on the target that waits for the message; -1 if none does."""
    send_places: list[int] = field(default_factory=list)
    """Index of each message's send in its program."""
    receive_places: list[int] = field(default_factory=list)
    """Index of each message's receive in its program."""
    node_places: list[int] = field(default_factory=list)
    """Index of each node (see ``timing``), which is a compute, in the program of the first of its ranks."""
    reductions: dict[tuple[ReduceGradients, int], int] = field(default_factory=dict)
    together: dict[int, int] = field(default_factory=dict)
    """Number of each node that several ranks run together, among the reductions: it waits for its ranks as they do."""
    together_nodes: dict[int, int] = field(default_factory=dict)
    """The node of each of these numbers."""
    reduction_ranks: list[tuple[int, ...]] = field(default_factory=list)
    sum_flows: dict[int, Flow] = field(default_factory=dict)
    """The flow of each reduction that is a sum of gradients, by its number."""
    loads: list[Load] = field(default_factory=list)
    loads_of_rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Places among ``loads`` of those that a compute keeps up, by row: its node's number without its micro-batch."""
    early: dict[int, list[tuple[float, list[int]]]] = field(default_factory=dict)
    """The sums that start while a node, a last backward, runs: the share of it after which each may, and the numbers of the
    reductions that run at once then, in order."""
    early_sums: frozenset[int] = frozenset()
    """The numbers of all these."""
    comers: list[int] = field(default_factory=list)
    """Number of comers that start each reduction: its ranks, and the messages that a shared compute consumes."""
    queues: dict[tuple[int, str], int] = field(default_factory=dict)
    _paths: dict[tuple[int, int], Path] = field(default_factory=dict)
    _rings: dict[tuple[int, ...], Path] = field(default_factory=dict)

    def flatten(
        self,
        overheads: Overheads,
        optimizer_seconds: Sequence[float],
        reduce_seconds: Callable[[ReduceGradients], float],
        device_queues: bool,
        beside: Mapping[ReduceGradients, Sequence[ReduceGradients]] | None = None,
        ready: SumReady | None = None,
        whole: SegmentGraph | None = None,
    ) -> None:
        """Fill the lists. ``beside``: the sums of other members that a leader's stands for. ``ready``: when sums may start;
        ``whole``: the graph of all ranks, where those of ``graph`` stand for their groups."""
        graph, scale = self.graph, self.scale
        durations = compute_seconds(graph)
        stride = len(scale)
        plane_size = len(graph.segments) * stride
        self.node_places = [0] * (3 * plane_size)
        # Only a bundle says how many messages are started at once.
        starting_costs = overheads.send_seconds > 0.0 or overheads.receive_seconds > 0.0
        needed_by = {value.name: ((value.producer,), value.consumers) for value in graph.values}
        for rank, program in enumerate(self.programs):
            operations: list[Operation] = []
            awaited: dict[int, list[int]] = {}
            """Messages received here that each node consumes."""
            times_reduced: dict[ReduceGradients, int] = {}
            for index, i in enumerate(program.instructions):
                if isinstance(i, Send) or isinstance(i, Recv):  # noqa: SIM101 (a third faster)
                    number = self._message(i.message)
                    queue = self.queues.setdefault(
                        (rank, "device" if device_queues else i.queue), len(self.queues)
                    )
                    bundle = self.bundles.get(_key(i.message)) if starting_costs else None
                    if isinstance(i, Send):
                        self.send_places[number] = index
                        seconds = overheads.send_seconds * (bundle.sends if bundle else 1)
                        operations.append(Operation(SEND, number, seconds, queue))
                        continue
                    self.receive_places[number] = index
                    seconds = overheads.receive_seconds * (bundle.receives if bundle else 1)
                    operations.append(Operation(RECV, number, seconds, queue))
                    producer, consumers = needed_by[i.message.value]
                    first = plane_size * i.message.gradient + i.message.microbatch
                    for segment in producer if i.message.gradient else consumers:
                        awaited.setdefault(first + segment * stride, []).append(number)
                elif isinstance(i, ReduceGradients):
                    nth = times_reduced[i] = times_reduced.get(i, 0) + 1
                    present = i.ranks
                    if self.leaders is not None:
                        present = tuple(other for other in i.ranks if other in self.leaders)
                    number = self._collective(self.reductions, (i, nth), present)
                    operations.append(Operation(REDUCE, number, 0.0))
                elif isinstance(i, OptimizerStep):
                    operations.append(Operation(STEP, 0, optimizer_seconds[rank]))
                else:
                    kind = type(i)
                    node = plane_size * NODE_PLANE[kind] + i.segment * stride + i.microbatch
                    if (row := node // stride) not in self.loads_of_rows:
                        self.loads_of_rows[row] = self._loads(kind, i.segment, durations[kind][i.segment])
                    ranks = graph.segments[i.segment].ranks
                    if rank == ranks[0]:
                        self.node_places[node] = index
                    consumed = [n for n in awaited.get(node, ()) if self.message_consumers[n] < 0]
                    for number in consumed:
                        self.message_consumers[number] = node
                    seconds = durations[kind][i.segment] * scale[i.microbatch] + overheads.compute_seconds
                    if len(ranks) > 1:
                        meeting = self._collective(self.together, node, ranks)
                        self.comers[meeting] += len(consumed)
                        self.together_nodes[meeting] = node
                        operations.append(Operation(TOGETHER, meeting, seconds))
                    else:
                        operations.append(Operation(COMPUTE, node, seconds))
            self.operations.append(operations)
        self._add_sums(reduce_seconds, beside)
        if ready is not None:
            self._add_early(ready, whole or self.graph)

    def _add_sums(
        self,
        reduce_seconds: Callable[[ReduceGradients], float],
        beside: Mapping[ReduceGradients, Sequence[ReduceGradients]] | None,
    ) -> None:
        of_a_second: dict[tuple[tuple[int, ...], ...], Flow] = {}
        """Flow of a sum by its ranks, and those of the sums that run beside it."""
        alike: dict[tuple[str, ...], list[ReduceGradients]] = {}
        """Sums of the same gradients, which run at once: each on ranks of its own."""
        for own, _ in self.reductions:
            alike.setdefault(own.parameters, []).append(own)
        for (own, _), number in self.reductions.items():
            together = dict.fromkeys(alike[own.parameters] if beside is None else (own, *beside.get(own, ())))
            ranks = own.ranks, *(each.ranks for each in together)
            if ranks not in of_a_second:
                ring, *siblings = map(self.ring, ranks)
                of_a_second[ranks] = sum_flow(ring, siblings, self.links, led=beside is not None)
            flow = of_a_second[ranks]
            seconds = reduce_seconds(own) if beside is None else max(map(reduce_seconds, together))
            self.sum_flows[number] = flow._replace(size_bytes=seconds * flow.size_bytes)

    def _add_early(self, ready: SumReady, graph: SegmentGraph) -> None:
        """Note the sums that start while the last backward before them runs."""
        stride, plane_size = len(self.scale), len(self.graph.segments) * len(self.scale)
        found: dict[int, dict[tuple[str, ...], tuple[float, list[int]]]] = {}
        for program in self.programs:
            last, places = early_sums(program.instructions, graph)
            backward = program.instructions[last] if last >= 0 else None
            if not isinstance(backward, Backward):
                continue
            node = plane_size + backward.segment * stride + backward.microbatch
            for place in places:
                own = program.instructions[place]
                assert isinstance(own, ReduceGradients)
                segment, share = ready(own)
                if segment != backward.segment:
                    break
                _, numbers = found.setdefault(node, {}).setdefault(own.parameters, (share, []))
                if (number := self.reductions[own, 1]) not in numbers:
                    numbers.append(number)
        self.early = {node: list(sums.values()) for node, sums in found.items()}
        self.early_sums = frozenset(n for sums in self.early.values() for _, own in sums for n in own)

    def _loads(self, kind: type, segment: int, seconds: float) -> tuple[int, ...]:
        """Return the places among ``loads`` of those that a compute keeps up; weight halves communicate nothing."""
        if kind is BackwardWeight or seconds <= 0.0:
            return ()
        found = loads_of(self.graph.segments[segment], kind is not Forward, seconds, self.ring)
        first = len(self.loads)
        self.loads.extend(found)
        return tuple(range(first, len(self.loads)))

    def _collective(self, known: dict[Any, int], key: Any, ranks: tuple[int, ...]) -> int:
        """Return the index of the collective ``key`` of ``ranks``; a new one is registered."""
        if key not in known:
            known[key] = len(self.reduction_ranks)
            self.reduction_ranks.append(ranks)
            self.comers.append(len(ranks))
        return known[key]

    def _message(self, message: Message) -> int:
        number = self.messages.get(message)
        if number is None:
            number = self.messages[message] = len(self.messages)
            self.message_ranks.append((message.source, message.target))
            bundle = self.bundles.get(_key(message))
            self.message_paths.append(bundle.path if bundle else self.path(self.message_ranks[-1]))
            size_bytes = bundle.size_bytes if bundle else self._size_of(message)
            self.message_bytes.append(size_bytes * self.scale[message.microbatch])
            self.message_weights.append(float(bundle.weight) if bundle else 1.0)
            self.message_consumers.append(-1)
            self.send_places.append(0)
            self.receive_places.append(0)
        return number

    def ring(self, ranks: tuple[int, ...]) -> Path:
        """Return the ring through ``ranks``."""
        ring = self._rings.get(ranks)
        if ring is None:
            ring = self._rings[ranks] = ring_path(ranks, self.links)
        return ring

    def path(self, ends: tuple[int, int]) -> Path:
        """Return the way from rank to rank."""
        path = self._paths.get(ends)
        if path is None:
            path = self._paths[ends] = self.links.path(*ends)
        return path

    def _size_of(self, message: Message) -> int:
        if not self._pieces:
            return self._sizes[message.value]
        piece = (message.value, message.gradient, message.source, message.target)
        return self._pieces.get(piece, self._sizes[message.value])

    def __post_init__(self) -> None:
        self._sizes = {value.name: value.size_bytes for value in self.graph.values}
        self._pieces = {
            (value.name, gradient, piece.source, piece.target): piece.size_bytes
            for value in self.graph.values
            for gradient, pieces in ((False, value.pieces), (True, value.gradient_pieces))
            for piece in pieces
        }
