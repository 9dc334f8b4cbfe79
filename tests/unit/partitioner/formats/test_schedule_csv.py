"""Schedules as CSV files: torch's own are read as they stand, wrong ones are refused with line and cell."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs

from cost_models.errors import UsageError
from partitioner.formats.schedule_csv import Action, AtOnce, read_csv
from partitioner.formats.torchtitan import NAMED, named_order
from runtime.schedules import SCHEDULES

TORCHS = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""torch's schedules, and the stages that a rank runs."""
FORMS = {
    "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n": "compute_only",
    "0F0,,0I0,0W0\n,1F0,1B0,\n": "compute_only",  # idle cells; a whole backward beside one in halves
    "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0\n": "compute_comms",
    "0F0,0F1,3F0,(3F1;3B0)OVERLAP_F_B,0B0,3B1,0B1\n1F0, 2F0 ,1F1,2F1,2B0,1B0,2B1,1B1\n\n": "compute_only",
    "0F0,0B0\r\n1F0,1B0\r\n": "compute_only",
}


@pytest.mark.parametrize("text", FORMS)
def test_forms(text: str) -> None:
    schedule = read_csv(text)
    assert schedule.form == FORMS[text]
    assert schedule.problems() == ()
    assert read_csv(str(schedule)) == schedule


def test_cells_are_stages_kinds_and_microbatches() -> None:
    (row,) = read_csv("10SEND_F3,2UNSHARD,(0F1;1B0)OVERLAP_F_B").rows
    together = AtOnce((Action(0, "F", 1), Action(1, "B", 0)))
    assert row == (Action(10, "SEND_F", 3), Action(2, "UNSHARD"), together)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0F0,0X0\n", "line 1, cell 2: '0X0' is no action"),
        ("0F0\n1F0,,F1\n", "line 2, cell 3: 'F1' is no action"),
        ("0F0 0B0\n", "line 1, cell 1: '0F0 0B0' is no action"),
        ("0F0,0B\n", "line 1, cell 2: '0B' lacks its micro-batch"),
        ("0F0,0UNSHARD1\n", "line 1, cell 2: '0UNSHARD1' has a micro-batch"),
        ("-1F0\n", "line 1, cell 1: '-1F0' is no action"),
        ("0F-1\n", "line 1, cell 1"),
        ("0F٣\n", "line 1, cell 1"),
        ("(0F1;1SEND_F0)OVERLAP_F_B\n", "line 1, cell 1: 1SEND_F0 is no compute"),
        ("(0F1;)OVERLAP_F_B\n", "line 1, cell 1: '' is no action"),
        ("(0F1;1B0)\n", "line 1, cell 1"),
        ('0F0,"0B0\n', "it is no CSV file"),
        ("\n,,\n", "no action is there"),
        ("0F0;0B0\n" * 20, "and 12 more cells"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=re.escape(place)):
        read_csv(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is on several ranks: 0, 1"),
        ("0F0,0B0\n\n1F0,1B0\n", "rank 1 without an action"),
        ("0F0,0F0,0B0\n", "0F0 is there 2 times"),
        ("0F1,0B1\n", "0F0 is missing"),
        ("0F0,0B0\n1F0\n", "backward of stage 1, micro-batch 0 is missing"),
        ("0F0,0I0\n", "0W0 is missing: the other half is there"),
        ("0F0,0B0,0I0,0W0\n", "is there whole and in halves"),
        ("0B0,0F0\n", "0B0 comes before 0F0"),
        ("0F0,0W0,0I0\n", "0W0 comes before 0I0"),
        ("999999F999999\n", "1 forward of 1000000 stages × 1000000 micro-batches"),
    ],
)
def test_broken_rules_are_told(text: str, problem: str) -> None:
    assert problem in " | ".join(read_csv(text).problems())


def made_by_torch(name: str, ranks: int, microbatches: int) -> Any:
    """torch's schedule of that name, of stages that are none."""
    count = TORCHS[name]
    fields = {
        "group_size": ranks,
        "group_rank": 0,
        "num_stages": ranks * count,
        "submod": None,
        "is_last": False,
    }
    stages = [SimpleNamespace(**fields) for _ in range(count)]
    made: Any = theirs.get_schedule_class(name)
    return made(stages if count > 1 else stages[0], n_microbatches=microbatches)


@pytest.mark.parametrize("name", [name for name, count in TORCHS.items() if count > 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_files_of_torchs_own_schedules(name: str, ranks: int) -> None:
    made = made_by_torch(name, ranks, 2 * ranks)
    for order, form in (
        (made.pipeline_order, "compute_only"),
        (made.pipeline_order_with_comms, "compute_comms"),
    ):
        text = "".join(",".join("" if a is None else str(a) for a in row) + "\n" for row in order.values())
        schedule = read_csv(text)
        assert (schedule.form, schedule.problems()) == (form, ())
        assert [len(row) for row in schedule.rows] == [
            sum(a is not None for a in row) for row in order.values()
        ]
        assert (schedule.stages, schedule.microbatches) == (2 * ranks, 2 * ranks)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7, 8, 9])
def test_named_orders_are_torchs(name: str, ranks: int, microbatches: int) -> None:
    """Where torch refuses the micro-batches a file is written; where it does not, both do the same in the same order."""
    schedule, count = SCHEDULES[name], TORCHS[NAMED[name]]
    try:
        made = made_by_torch(NAMED[name], ranks, microbatches)
    except ValueError:
        assert not named_order(name, ranks, microbatches)
        return
    assert named_order(name, ranks, microbatches)
    order = made.pipeline_order if count > 1 else made._get_pipeline_order()
    told = [[str(a) for a in order[rank] if a is not None and a.is_compute_op] for rank in range(ranks)]
    own = [
        [
            f"{schedule.stages_at(rank, ranks * count, ranks)[chunk]}{kind}{microbatch}"
            for kind, chunk, microbatch in steps
        ]
        for rank in range(ranks)
        for steps in [schedule.steps(rank, ranks, count, microbatches)]
    ]
    if name == "1f1b":  # torch 2.13 tells of its last rank F1 … Fm instead of F0 … Fm-1; it runs the latter
        told, own = told[:-1], own[:-1]
    assert own == told


def test_mutated_files_are_read_or_refused_with_their_place() -> None:
    drawn = random.Random(43)
    made = made_by_torch("DualPipeV", 2, 4).pipeline_order_with_comms
    text = "".join(",".join(map(str, row)) + "\n" for row in made.values())
    refused = []
    for _ in range(100):
        letters = list(text)
        for _ in range(drawn.randint(1, 4)):
            at = drawn.randrange(len(letters))
            letters[at : at + drawn.randint(0, 2)] = drawn.choice(
                ["", ",", "\n", "0", '"', "F", "I", " ", "(", ";", "\x00", "é", "9" * 9]
            )
        try:
            schedule = read_csv("".join(letters))
        except UsageError as error:
            refused.append(str(error))
        else:
            assert read_csv(str(schedule)).problems() == schedule.problems()
    assert 20 < len(refused) < 100
    assert all(re.search(r"line \d+, cell \d+: |no CSV file", text) for text in refused)
