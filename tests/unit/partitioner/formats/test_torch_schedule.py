"""A schedule's file by itself: a plan's written, others' told by their order, what hangs refused."""

from __future__ import annotations

import pytest

from partitioner.formats.parallelism import Parallelism
from partitioner.formats.schedule_csv import read_csv
from partitioner.formats.tools import tool_of
from partitioner.formats.torch_schedule import named, read, write
from partitioner.formats.torch_schedule import published_row as row
from runtime.schedules import SCHEDULES
from tests.support.decoder import decoder_plan


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)],
)
def test_orders_are_known_by_what_is_done(schedule: str, chunks: int) -> None:
    text = "\n".join(",".join(row(SCHEDULES[schedule], rank, 2 * chunks, 2, 6)) for rank in range(2))
    assert named(read_csv(text)) == schedule
    understood = read(text, 8)
    wanted = Parallelism(pipeline=2, chunks=chunks, data=4, microbatches=6, schedule=schedule)
    assert (understood.parallelism, understood.problems) == (wanted, ())
    assert tool_of(text, "own.csv") == "torch_schedule"


def test_what_is_written_is_read_as_the_same_order() -> None:
    p = Parallelism(pipeline=2, microbatches=4, schedule="zb-h2", layers=(4, 4))
    ((name, text),) = write(decoder_plan(p)).files.items()
    assert name == "zb-h2.csv"
    assert read(text, 2).parallelism == Parallelism(pipeline=2, microbatches=4, schedule="zb-h2")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", "2 devices are no multiple of its 3 ranks"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0\n", "3 stages on 2 ranks: no multiple"),
        ("0F0,0B0\n1F0\n", "backward of stage 1, micro-batch 0 is missing"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "torch refuses it: rank 0: 0B0 waits for 1B0 of rank 1"),
        (
            "0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            "it hangs: rank 0: 0B0 waits for the message of 0RECV_B0",
        ),
    ],
)
def test_broken_rules_are_told(text: str, problem: str) -> None:
    assert problem in " | ".join(read(text, 2).problems)


def test_orders_of_ones_own_and_waits_of_nccl_are_noted() -> None:
    text = "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    understood = read(text, 2)
    assert understood.parallelism.schedule == "1f1b"
    assert "on NCCL it may hang" in understood.notes[-1]
    assert read("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", 2).parallelism.schedule == "list"
