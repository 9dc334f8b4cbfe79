"""Schedules that end and that hang, told beforehand and run by torch on Gloo: messages moved, left out, mixed up."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import _defer_recv_ops

from benchmarks.torch_schedules import cases, compared
from partitioner.formats.schedule_csv import read_csv
from partitioner.formats.schedule_waits import waits_of
from runtime.ranks.launch import WorkerPool
from tests.unit.partitioner.formats.test_schedule_csv import made_by_torch


def test_what_is_told_of_schedules_happens(pool: WorkerPool, tmp_path: Path) -> None:
    made = cases(1, {"ends": 12, "hangs": 2})
    assert compared(pool, tmp_path, made) == {("ends", "ends"): 12, ("hangs", "hangs"): 2}


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_late_receives_of_torchs_own(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    """torch 2.13 mixes up the messages of ZBVZeroBubble where it posts receives late (defer_pp_recv)."""
    made = made_by_torch(name, 2, 4)
    late = _defer_recv_ops(made.pipeline_order_with_comms, made.stage_index_to_group_rank.__getitem__)
    schedule = read_csv("".join(",".join(map(str, row)) + "\n" for _, row in sorted(late.items())))
    (pair,) = compared(pool, tmp_path, [schedule])
    assert pair in {("ends", "ends"), ("mixed", "wrong")}
    assert pair[0] == "ends" or name == "ZBVZeroBubble"


def test_messages_taken_for_others_give_wrong_numbers(pool: WorkerPool, tmp_path: Path) -> None:
    """torch does not see it: what two ranks send each other has no names."""
    swapped = read_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    assert waits_of(swapped).fails == (
        "rank 1: 1RECV_F1 takes what rank 0 sends with 0SEND_F0, its next: wrong numbers",
        "rank 1: 1RECV_F0 takes what rank 0 sends with 0SEND_F1, its next: wrong numbers",
    )
    assert compared(pool, tmp_path, [swapped]) == {("mixed", "wrong"): 1}
