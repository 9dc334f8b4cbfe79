"""Every command, option, public name, member and parameter of before is there today."""

from __future__ import annotations

from benchmarks.abilities import KNOWN, abilities


def test_nothing_that_users_can_call_is_gone() -> None:
    before, today = set(KNOWN.read_text(encoding="utf-8").splitlines()), set(abilities())
    assert {"plan --batch-size", "partition(strategy)", "Plan.verify(model)"} <= today
    assert before - today == set()
