"""The program of a rank: which instructions there are, and how they print.

A compile ends in one ``Program`` per rank. The simulator, the checker and the executor all read these same
instruction lists, so what was predicted and proved is what runs. No torch here.

Words
    segment      a piece of the model that a rank runs as one call; segments form a DAG
    microbatch   0-based index of a slice of the batch
    value        a tensor that crosses from one segment to another
    message      one tensor sent once: (value, microbatch, activation or gradient, source rank, target rank)
    queue        the communicator that carries a message; operations on one queue run one after another

Text form (the notation of the field's pipeline tools: ``<segment><action><microbatch>``)
    2F0          forward of segment 2, micro-batch 0
    2B0          whole backward            2I0  input gradients only      2W0  weight gradients only
    >h.3:0@1     send value h.3 of micro-batch 0 to rank 1         >d(h.3):0@0  send its gradient to rank 0
    <h.3:0@0     receive value h.3 of micro-batch 0 from rank 0    <d(h.3):0@1  receive its gradient
    +wte@0,3     sum the gradients of tied parameter wte over ranks 0 and 3
    +/wte@0,3    the same, each rank keeping its part of the sum
    step         optimizer step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

Letter: TypeAlias = Literal["F", "B", "I", "W"]
"""Forward, whole backward, input half of a backward, weight half of one."""


@dataclass(frozen=True, slots=True)
class _OfMicrobatch:
    letter: ClassVar[Letter]

    segment: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.segment}{self.letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Forward(_OfMicrobatch):
    """Run the segment's graph on one micro-batch."""

    letter = "F"


@dataclass(frozen=True, slots=True)
class Backward(_OfMicrobatch):
    """Run the segment's whole backward: input and weight gradients."""

    letter = "B"


@dataclass(frozen=True, slots=True)
class BackwardInput(_OfMicrobatch):
    """The half of backward that upstream waits for: gradients of the segment's inputs."""

    letter = "I"


@dataclass(frozen=True, slots=True)
class BackwardWeight(_OfMicrobatch):
    """The half of backward that nobody waits for: gradients of the segment's parameters."""

    letter = "W"


Compute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight


class Message(NamedTuple):
    """One tensor on its way once. Equal on both sides: this is what a send and its receive match by.

    A tuple, because programs have as many as computes and everything that reads them looks messages up.
    """

    value: str
    microbatch: int
    gradient: bool
    source: int
    target: int

    @property
    def label(self) -> str:
        name = f"d({self.value})" if self.gradient else self.value
        return f"{name}:{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending asynchronously; the buffer is kept alive until the send completes."""

    message: Message
    queue: str

    def __str__(self) -> str:
        return f">{self.message.label}@{self.message.target}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive asynchronously; the compute that needs the value waits for it."""

    message: Message
    queue: str

    def __str__(self) -> str:
        return f"<{self.message.label}@{self.message.source}"


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Sum the gradients of parameters held by several ranks (tied across stages, or sharded ones). A collective.

    ``scattered``: each rank keeps its part of the sums only (reduce-scatter).
    """

    parameters: tuple[str, ...]
    ranks: tuple[int, ...]
    queue: str
    scattered: bool = False

    def __str__(self) -> str:
        sign = "+/" if self.scattered else "+"
        return f"{sign}{','.join(self.parameters)}@{','.join(map(str, self.ranks))}"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Step the optimizer over the rank's parameters."""

    def __str__(self) -> str:
        return "step"


class TiedGroup(NamedTuple):
    """Parameters of whose gradients several ranks make a part each; the parts are summed before the optimizer steps."""

    parameters: tuple[str, ...]
    ranks: tuple[int, ...]
    scattered: bool = False
    """True if each rank keeps its part of the sums only."""


Communication: TypeAlias = Send | Recv | ReduceGradients
Instruction: TypeAlias = Compute | Communication | OptimizerStep


@dataclass(frozen=True)
class Program:
    """The instructions of one rank in one training step, in order."""

    rank: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}: " + " ".join(map(str, self.instructions))


def pair_queue(a: int, b: int) -> str:
    """Return the queue of an unordered pair of ranks: both directions share it, as NCCL's communicators do."""
    return f"p2p:{min(a, b)}-{max(a, b)}"


def group_queue(ranks: Sequence[int]) -> str:
    """Return the queue of collectives among ``ranks``."""
    return "group:" + "-".join(map(str, sorted(ranks)))


# --------------------------------------------------------------------------------------------------
# The DAG of segments, with costs but without tensors: what a schedule is made for.


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """Costs of one segment per micro-batch on the device that runs it."""

    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    saved_bytes: int = 0
    """Bytes held from the forward until the backward (or the weight half of it) of the same micro-batch."""
    weight_saved_bytes: int = 0
    """The part of ``saved_bytes``, plus output gradients kept for it, that a deferred weight half still holds."""
    transient_bytes: int = 0
    """Bytes held on top while the backward (or its input half) runs, at most: gradients of activations, what lies between
    them, and activations that it computes again."""
    first_transient_bytes: int = 0
    """The same of a step's first backward, with the gradients of parameters that it makes."""
    gradient_bytes: int = 0
    """The gradients of parameters that the first backward makes; until then the state is so much less."""

    @property
    def backward_seconds(self) -> float:
        return self.backward_input_seconds + self.backward_weight_seconds


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication inside of a segment, by groups of its ranks at once: each rank sends ``sent_bytes`` to the next one of
    its group, round in a ring.

    Bytes are those of a (full) micro-batch. Its seconds are part of the segment's.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    sent_bytes: float
    backward: bool
    seconds: float = 0.0
    """Seconds of all groups beside each other; 0 where nobody knows."""
    axis: str = ""
    """The axis of the segment's mesh that the ranks of a group lie along; several taken together are joined by +."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the model. ``ranks`` is its device group (one rank in a layer-wise plan), which runs it together."""

    index: int
    ranks: tuple[int, ...]
    cost: SegmentCost
    has_backward: bool = True
    collectives: tuple[Collective, ...] = ()

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def shared(self) -> bool:
        """True if ranks compute it together, with collectives inside as far as anybody knows."""
        return len(self.ranks) > 1 or bool(self.collectives)


class PieceBytes(NamedTuple):
    """The bytes of a value that one rank sends to another, per (full) micro-batch, where groups of ranks share it."""

    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that at least one other segment consumes.

    ``size_bytes`` is per (full) micro-batch. ``needs_grad`` says statically whether each consumer owes the
    producer a gradient; exactly those values get a gradient message.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    size_bytes: int
    """Bytes that a rank of the producer's group has: of the whole value, if it is the only one."""
    needs_grad: bool
    pieces: tuple[PieceBytes, ...] = ()
    """Parts that ranks send to other groups, where their own or the other one has several ranks."""
    gradient_pieces: tuple[PieceBytes, ...] = ()
    """Parts of its gradient that these send back."""


@dataclass(frozen=True)
class SegmentGraph:
    """The DAG of segments. ``segments[i].index == i`` and indices are a topological order."""

    segments: tuple[Segment, ...]
    values: tuple[Value, ...]
    world_size: int

    def of_rank(self, rank: int) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if rank in s.ranks)


ComputeOrder: TypeAlias = tuple[tuple[Compute, ...], ...]
"""Compute instructions of each rank, in order: what a schedule returns."""


TransferSeconds: TypeAlias = Callable[[int, int, int], float]
"""Function from (source rank, target rank, bytes) to the seconds of the transfer alone on its links."""
