"""The moments at which a sent buffer may be freed without waiting.

A send completes when the peer has received it, and Gloo cannot be asked whether it has. But a later message
from that peer may prove it: sent after the peer had used ours. The send is then waited on (it is complete,
so this costs nothing) and its buffer freed. What nothing proves is freed at the end of the step.

    rank 0:  0F0  >h:0@1  0F1  >h:1@1  <d(h):0@1  0B0*
    rank 1:  <h:0@0  1F0  1B0  >d(h):0@0  …          * h:0 arrived before d(h):0 left: freed here
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.program.program import (
    Backward,
    BackwardInput,
    Forward,
    Message,
    Program,
    Recv,
    SegmentGraph,
    Send,
)


def first_uses(program: Program, graph: SegmentGraph) -> dict[Message, int]:
    """Return, for each message that the rank receives, the position of the compute instruction that waits for it.

    An activation is waited for by the first forward that reads it, a gradient by the backward of the
    value's producer.
    """
    values = {value.name: value for value in graph.values}
    forwards: dict[tuple[int, int], int] = {}
    backwards: dict[tuple[int, int], int] = {}
    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Forward):
            forwards[instruction.segment, instruction.microbatch] = position
        elif isinstance(instruction, Backward | BackwardInput):
            backwards[instruction.segment, instruction.microbatch] = position
    uses: dict[Message, int] = {}
    for instruction in program.instructions:
        if not isinstance(instruction, Recv):
            continue
        message = instruction.message
        value = values[message.value]
        readers: tuple[int, ...]
        if message.gradient:
            readers, table = (value.producer,), backwards
        else:
            readers, table = value.consumers, forwards
        positions = [table[s, message.microbatch] for s in readers if (s, message.microbatch) in table]
        if positions:
            uses[message] = min(positions)
    return uses


def releases(program: Program, graph: SegmentGraph, programs: Sequence[Program]) -> dict[int, list[int]]:
    """Return, by position of a compute instruction, the positions of sends that are complete once its waits are over.

    ``programs``: those of all ranks.
    """
    uses = first_uses(program, graph)
    released: dict[int, list[int]] = {}
    proofs = {peer.rank: _earliest_proofs(peer, program.rank, uses) for peer in programs}
    peer_uses = {peer.rank: first_uses(peer, graph) for peer in programs}
    for position, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Send):
            continue
        message = instruction.message
        use = peer_uses[message.target].get(message)
        proof = None if use is None else proofs[message.target][use]
        if proof is not None and proof > position:
            released.setdefault(proof, []).append(position)
    return released


def _earliest_proofs(peer: Program, rank: int, uses: Mapping[Message, int]) -> list[int | None]:
    """Return, for each position of the peer's program, where ``rank`` first waits for what the peer sends from there on."""
    earliest: int | None = None
    result: list[int | None] = []
    for instruction in reversed(peer.instructions):
        if isinstance(instruction, Send) and instruction.message.target == rank:
            use = uses.get(instruction.message)
            if use is not None and (earliest is None or use < earliest):
                earliest = use
        result.append(earliest)
    return result[::-1]
