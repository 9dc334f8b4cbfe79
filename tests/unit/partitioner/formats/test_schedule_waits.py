"""The messages that torch adds to a schedule, and who waits for whom: tests/distributed runs such schedules."""

from __future__ import annotations

import pytest

from partitioner.formats.schedule_csv import read_csv
from partitioner.formats.schedule_waits import Waits, waits_of, with_messages
from tests.unit.partitioner.formats.test_schedule_csv import TORCHS, made_by_torch


def text_of(rows: object) -> str:
    assert isinstance(rows, dict)
    return "".join(
        ",".join("" if cell is None else str(cell) for cell in row) + "\n" for _, row in sorted(rows.items())
    )


@pytest.mark.parametrize("name", [name for name, count in TORCHS.items() if count > 1])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [2, 3])
def test_messages_are_added_as_torch_does(name: str, ranks: int, rounds: int) -> None:
    made = made_by_torch(name, ranks, rounds * ranks)
    lowered, refused = with_messages(read_csv(text_of(made.pipeline_order)))
    assert lowered == read_csv(text_of(made.pipeline_order_with_comms))
    assert refused == ()
    assert waits_of(lowered) == Waits()


WAITS = {
    "0F0,0B0\n1F0,1B0\n": Waits(),
    "0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n": Waits(),  # each message by its own time: 1F0 waits for the second
    "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n": Waits(
        refused=("rank 0: 0B0 waits for 1B0 of rank 1", "rank 1: 1F1 waits for 0F1 of rank 0")
    ),
    "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n": Waits(fails=("rank 0: 0B0 comes before 0RECV_B0",)),
    "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_B0,1B0\n": Waits(fails=("rank 1: 1SEND_B0 comes before 1B0",)),
    "0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n": Waits(
        hangs=(
            "rank 0: 0B0 waits for the message of 0RECV_B0 from rank 1",
            "rank 1: 1F0 waits for the message of 1RECV_F0 from rank 0",
        )
    ),
    "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n": Waits(
        hangs=("rank 0: 0B0 waits for the message of 0RECV_B0 from rank 1, which never sends it",)
    ),
    "0F0,0SEND_F0,0SEND_F1,0F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n": Waits(
        fails=("rank 0: 0SEND_F1 comes before 0F1",)
    ),
    "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n": Waits(
        hangs_on_nccl=(
            "rank 1: 1SEND_B0 (its other side is on rank 0) is queued behind 1RECV_F1",
            "rank 0: 0SEND_F1 (its other side is on rank 1) is queued behind 0RECV_B0",
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", WAITS)
def test_waits(text: str) -> None:
    schedule = read_csv(text)
    assert schedule.problems() == ()
    assert waits_of(schedule) == WAITS[text]
