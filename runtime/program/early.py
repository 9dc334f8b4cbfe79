"""The sums of gradients that may start while the last backward before them runs.

    program         … <d(h):3@1 0B3 +w9@0,1 +w5@0,1 +w0@0,1 step
    the ranks run   … 0B3 ──────────────────────► step        each sum as soon as its gradients are there, in this order
                        └ +w9 ─ +w5 ─ +w0 ─┘

Those directly behind it, over ranks that run this backward together: none of their messages is left to be issued then, and
only first stages end so. In others a rank sends a gradient after its last backward, perhaps for all of them, and they sum
while the stages before are at theirs.

Why no rank waits forever: take the backward and these sums as one instruction of these ranks. All of them have it at this
place of their programs, nobody else takes part in any of it, and all run one graph, so that they start its collectives and
these sums in one order. What waited for the backward, or for the sums, waits for both, and both wait for what the backward
did. So programs with that instruction have a circle of waits only if those that were proved have one, with any queues.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.program.program import Backward, Instruction, ReduceGradients, SegmentGraph


def early_sums(instructions: Sequence[Instruction], graph: SegmentGraph) -> tuple[int, list[int]]:
    """Return the positions of the last backward and of the sums that may start in it; (-1, []) if there are none."""
    first = next((p for p, i in enumerate(instructions) if isinstance(i, ReduceGradients)), 0)
    backward = instructions[first - 1] if first > 0 else None
    if not isinstance(backward, Backward):
        return -1, []
    together = set(graph.segments[backward.segment].ranks)
    if _sends_gradients(backward.segment, graph):
        return -1, []
    seen: set[str] = set()
    early: list[int] = []
    for position in range(first, len(instructions)):
        instruction = instructions[position]
        if not isinstance(instruction, ReduceGradients) or not together.issuperset(instruction.ranks):
            break
        if not seen.isdisjoint(instruction.parameters):
            break  # it continues an earlier sum, and would wait for it inside of backward
        seen.update(instruction.parameters)
        early.append(position)
    return (first - 1, early) if early else (-1, [])


def _sends_gradients(segment: int, graph: SegmentGraph) -> bool:
    """Tell whether a rank of ``segment`` sends gradients: then none sums early, since all of them have to do the same."""
    own = graph.segments[segment].ranks
    return any(
        v.needs_grad and segment in v.consumers and graph.segments[v.producer].ranks != own
        for v in graph.values
    )
