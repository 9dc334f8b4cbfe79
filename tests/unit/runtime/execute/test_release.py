"""When a sent buffer is known to have been received."""

from __future__ import annotations

from runtime.execute.release import first_uses, releases
from runtime.program.program import (
    Backward,
    Forward,
    Message,
    Program,
    Recv,
    Segment,
    SegmentCost,
    SegmentGraph,
    Send,
    Value,
    pair_queue,
)

COST = SegmentCost(1.0, 1.0, 1.0)
GRAPH = SegmentGraph(
    (Segment(0, (0,), COST), Segment(1, (1,), COST)), (Value("h", 0, (1,), 8, needs_grad=True),), 2
)
Q = pair_queue(0, 1)


def h(microbatch: int) -> Message:
    return Message("h", microbatch, False, 0, 1)


def dh(microbatch: int) -> Message:
    return Message("h", microbatch, True, 1, 0)


ONE_F_ONE_B = (
    Program(
        0,
        (
            Forward(0, 0),  # 0
            Send(h(0), Q),  # 1
            Recv(dh(0), Q),  # 2
            Backward(0, 0),  # 3: d(h):0 was sent after h:0 was used
            Forward(0, 1),  # 4
            Send(h(1), Q),  # 5
            Recv(dh(1), Q),  # 6
            Backward(0, 1),  # 7
        ),
    ),
    Program(
        1,
        (
            Recv(h(0), Q),  # 0
            Forward(1, 0),  # 1
            Backward(1, 0),  # 2
            Send(dh(0), Q),  # 3
            Recv(h(1), Q),  # 4
            Forward(1, 1),  # 5: h:1 was sent after d(h):0 was used
            Backward(1, 1),  # 6
            Send(dh(1), Q),  # 7: nothing comes after it
        ),
    ),
)


def test_who_waits_for_a_message() -> None:
    assert first_uses(ONE_F_ONE_B[0], GRAPH) == {dh(0): 3, dh(1): 7}
    assert first_uses(ONE_F_ONE_B[1], GRAPH) == {h(0): 1, h(1): 5}


def test_releases_with_all_programs() -> None:
    assert releases(ONE_F_ONE_B[0], GRAPH, ONE_F_ONE_B) == {3: [1], 7: [5]}
    assert releases(ONE_F_ONE_B[1], GRAPH, ONE_F_ONE_B) == {5: [3]}


def test_a_message_sent_before_ours_was_used_proves_nothing() -> None:
    """The second activation leaves before the first gradient is used, so it does not prove it received."""
    programs = (
        Program(
            0,
            (
                Forward(0, 0),
                Send(h(0), Q),
                Forward(0, 1),
                Send(h(1), Q),
                Recv(dh(0), Q),
                Backward(0, 0),
                Recv(dh(1), Q),
                Backward(0, 1),
            ),
        ),
        Program(
            1,
            (
                Recv(h(0), Q),
                Forward(1, 0),
                Backward(1, 0),
                Send(dh(0), Q),
                Recv(h(1), Q),
                Forward(1, 1),
                Backward(1, 1),
                Send(dh(1), Q),
            ),
        ),
    )
    assert releases(programs[1], GRAPH, programs) == {}
    assert releases(programs[0], GRAPH, programs) == {5: [1], 7: [3]}
