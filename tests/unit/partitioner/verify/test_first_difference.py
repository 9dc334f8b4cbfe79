"""Notes of shards are put together stage by stage: each stage by its own mesh, whatever others have."""

from __future__ import annotations

import math

from cost_models.cluster import ClusterSpec
from partitioner.verify.first_difference import noted_copies
from tests.support.made_plans import made_hybrid_plan

PLAN = made_hybrid_plan(ClusterSpec.parse("A100-40GB:7"), ({"outer": 2, "inner": 2}, {"all": 2}, {}))


def test_every_stage_has_copies_of_its_own() -> None:
    """op0 and op4 are split by samples along the outer axis and by features along the inner one; op8 is on one device."""
    per_rank = [{"op0": [(1.0, 3.0)]}] * 4 + [{"op4": [(1.0, 3.0)]}] * 2 + [{"op8": [(1.0, 3.0)]}]
    notes = noted_copies(PLAN, per_rank)
    assert list(notes("op0")) == [("0+1+2+3", [(4.0, 6.0)])]
    assert list(notes("op4")) == [("4+5", [(2.0, math.sqrt(18.0))])]
    assert dict(notes("op8"))["6"] == [(1.0, 3.0)]
    assert all(not found for rank, found in notes("op8") if rank != "6")


def test_what_every_stage_computes_for_itself_is_noted_by_rank() -> None:
    per_rank = [{"arange": [(float(rank), 1.0)]} for rank in range(7)]
    found = dict(noted_copies(PLAN, per_rank)("arange"))
    assert found == {str(rank): [(float(rank), 1.0)] for rank in range(7)}
