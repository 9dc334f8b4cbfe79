"""Pipelines of sharded stages, on real processes: the smoke subset of ``make verify-all``, and what verify must see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

from benchmarks.hybrid_matrix import CASES, SMOKE, Found, make_plan, verify_from_file
from partitioner.record.rebuild import plan_programs, plan_segments
from partitioner.verify.verify import verify_plan
from runtime.mesh.sharding import Block
from runtime.program.early import early_sums
from runtime.ranks.launch import WorkerPool
from runtime.segment.code import Interface
from tests.distributed.planted import nothing, plant
from tests.support.matrix import thinned
from tests.support.traced_models import loaded


@pytest.mark.parametrize(
    ("model", "fix", "schedule"),
    thinned(SMOKE, [case for case in SMOKE if case[0] == "gpt2"]),
)
def test_a_real_model_computes_what_it_computed(
    model: str, fix: str, schedule: str, pool: WorkerPool
) -> None:
    assert (fix, schedule) in CASES
    workload, graph = loaded(model)
    report = verify_from_file(make_plan(graph, fix, schedule), workload, graph, pool)
    report.raise_if_different()
    assert report.compared["gradient"] > 10


def test_first_stages_sum_while_their_last_backward_runs(pool: WorkerPool) -> None:
    workload, graph = loaded("gpt2")
    plan = make_plan(graph, "pipeline=2 data=2 zero=1", "1f1b")
    programs, segments = plan_programs(plan), plan_segments(plan)
    early = [early_sums(program.instructions, segments)[1] for program in programs]
    assert early[0]
    assert [bool(own) for own in early] == [True, True, False, False]
    verify_plan(plan, workload, pool=pool, graph=graph).raise_if_different()


def everybody_gets_the_first_rows() -> Any:
    """A rank that sends a value in pieces cuts all of them from its beginning."""
    cut = Interface.piece

    def piece(self: Interface, local_shape: Sequence[int], rank: int, peer: int) -> Block:
        found = cut(self, local_shape, rank, peer)
        return Block((0,) * len(found.shape), found.shape) if len(self.own.ranks) == 1 else found

    return mock.patch.object(Interface, "piece", piece)


@pytest.mark.parametrize("fault", [nothing, everybody_gets_the_first_rows])
def test_a_piece_of_other_samples_is_seen(fault: Callable[[], Any], mended: WorkerPool) -> None:
    workload, graph = loaded("gpt2")
    plan = make_plan(graph, "groups=1,3 tensor=1", "1f1b")
    assert [len(stage.devices) for stage in plan.stages] == [1, 3]
    mended.run(plant, fault)
    report = verify_plan(plan, workload, pool=mended, graph=graph)
    assert report.passed == (fault is nothing)
    if fault is not nothing:
        assert "loss" in {difference.kind for difference in report.differences}
        assert "(stage 1 on rank 1" in str(report.first_difference)


def test_a_fault_is_what_a_user_could_not_have_known() -> None:
    found = [
        Found("gpt2", "groups=1,3 @ 1f1b", outcome, "")
        for outcome in ("passed", "refused", "differs", "raised")
    ]
    assert [each.fault for each in found] == [False, False, True, True]
