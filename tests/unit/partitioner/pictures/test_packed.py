"""The data of a page, packed: what the page's script makes of it is what it was, and takes fewer bytes."""

from __future__ import annotations

from partitioner.pictures.page import OF, RUNS, TEXTS, escaped_json, packed
from tests.support.made_reports import hostile_report, made_report
from tests.support.unpacked import unpacked


def test_what_is_packed_comes_back() -> None:
    waits = {f"0:{m}": f"waits for h of micro-batch {m} from rank 1" for m in range(20)}
    odd = {
        **waits,
        "1:0": "waits for # of micro-batch 3",
        "1:1": "of micro-batch 1 and micro-batch 2",
        "1:2": "",
    }
    stacks = [[7] * 300 + [9], list(range(300)), [0.5] * 3, [True] * 20]
    for data in (waits, odd, {"stacks": stacks}, made_report(8, 64, 64, 32), hostile_report()):
        assert unpacked(packed(data)) == data


def test_equal_numbers_and_texts_are_written_once() -> None:
    assert packed([7] * 9 + [9]) == {RUNS: [7, 9, 9, 1]}
    assert packed([[1, 2, 3]]) == [[1, 2, 3]]
    found = packed({f"0:{m}": f"waits for h of micro-batch {m} from rank 1" for m in range(64)})
    assert found[TEXTS] == ["waits for h of micro-batch # from rank 1"]
    assert found[OF]["0:63"] == [0, 63]


def test_a_page_of_64_stages_and_64_micro_batches_is_less_than_two_megabytes() -> None:
    report = made_report(64, 80, 64, 64)
    assert len(escaped_json(packed(report)).encode()) < 2e6
