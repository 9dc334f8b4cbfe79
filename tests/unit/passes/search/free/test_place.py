"""The free search on small hand-made graphs, with a plain simulation: starts, pins, memory, objectives, certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.lower.candidate import Candidate, anywhere
from passes.lower.job import Job
from passes.search.free.judge import ListJudge
from passes.search.free.place import place_free
from passes.search.free.request import FreeRequest
from passes.search.infeasible import overflow_bytes
from passes.search.judge import Judge, Simulated
from passes.search.outcome import Outcome
from tests.support.random_graphs import random_model
from tests.unit.passes.search.layer.toys import ToyCosts, toy_graph


def cluster_of(speeds: Sequence[float], memory: str = "1GiB") -> ClusterSpec:
    """CPU workers of these rates in MFLOP/s (a linear op of one sample takes 3 µs at 1), on fast links."""
    nodes = [
        {
            "name": f"n{i}",
            "host": f"10.0.0.{i + 1}",
            "count": 1,
            "device": {
                "name": f"d{i}",
                "kind": "cpu",
                "memory": memory,
                "memory_bandwidth": "10TB/s",
                "flops": {"float32": 1e6 * speed},
                "launch_overhead": "0us",
            },
            "links": {"default": {"bandwidth": "1TB/s", "latency": "1ns", "duplex": "full"}},
        }
        for i, speed in enumerate(speeds)
    ]
    network = {"bandwidth": "1TB/s", "latency": "1ns", "per": "device", "duplex": "full"}
    return ClusterSpec.from_dict({"version": 1, "name": "toys", "nodes": nodes, "network": network})


class ToyJudge(Judge):
    """The busiest device's seconds, plus ``crossing_seconds`` per edge that crosses; ``op_bytes`` per op held."""

    costs: ToyCosts  # type: ignore[assignment]

    def __init__(
        self,
        graph: OpGraph,
        costs: ToyCosts,
        cluster: ClusterSpec,
        job: Job,
        crossing_seconds: float,
        op_bytes: int,
    ) -> None:
        super().__init__(graph, costs, cluster, job)  # type: ignore[arg-type]
        self.crossing_seconds, self.op_bytes = crossing_seconds, op_bytes

    @property
    def seen(self) -> list[Candidate]:
        return [simulated.candidate for simulated in self.tried]

    def measure(self, candidate: Candidate) -> Simulated:
        m, rank_of = candidate.microbatches, candidate.rank_of
        busy, held = [0.0] * self.cluster.world_size, [0] * self.cluster.world_size
        for rank, device in enumerate(self.cluster.devices):
            each = 3 * np.asarray(self.costs.seconds(self.job.batch_size // m, device).forward)
            mine = [i for i, name in enumerate(self.costs.ops) if rank_of.get(name) == rank]
            busy[rank] = m * float(each[mine].sum())
            held[rank] = len(mine) * self.op_bytes
        crossing = sum(
            rank_of[node.name] != rank_of[user.name]
            for node in self.graph.ops
            for user in node.users
            if node.name in rank_of and user.name in rank_of
        )
        seconds = max(busy) + m * crossing * self.crossing_seconds
        return Simulated(candidate, seconds, held, overflow_bytes(held, self.cluster.devices))


def place(
    graph: OpGraph,
    speeds: Sequence[float] = (1.0, 1.0),
    *,
    starts: Sequence[Candidate] = (),
    memory: str = "1GiB",
    op_bytes: int = 0,
    crossing_seconds: float = 1e-8,
    **request: Any,
) -> tuple[Outcome, ToyJudge]:
    costs, cluster, job = ToyCosts(graph), cluster_of(speeds, memory), Job(8)
    wanted = FreeRequest(job, **{"microbatches": 4, "time_limit_seconds": 2.0, **request})
    judge = ToyJudge(graph, costs, cluster, job, crossing_seconds, op_bytes)
    result = place_free(graph, costs, cluster, wanted, judge, starts)  # type: ignore[arg-type]
    return result, judge


def linears(rank_of: Mapping[str, int]) -> list[int]:
    return [rank for name, rank in rank_of.items() if name.startswith("linear")]


def everything_on(graph: OpGraph, rank: int, microbatches: int = 4, world: int = 2) -> Candidate:
    recomputed = recomputed_ops(graph)
    rank_of = {node.name: rank for node in graph.ops if node.name not in recomputed}
    return anywhere(rank_of, world, microbatches)


def test_two_towers_lie_on_two_devices() -> None:
    result, judge = place(toy_graph(3, towers=2))
    ranks = linears(result.best.candidate.rank_of)
    assert sorted([len(set(ranks[:3])), len(set(ranks[3:]))]) == [1, 1]
    assert ranks[0] != ranks[3]
    assert result.certificate.gap < 0.05
    assert result.certificate.bound_seconds > 0
    assert result.judge is judge
    fitting = [tried for tried in judge.tried if tried.fits]
    assert min(tried.step_seconds for tried in fitting) == result.best.step_seconds
    assert any(tried is result.best for tried in judge.tried)
    others = [other.step_seconds for other in result.runner_ups]
    assert others == sorted(others)


def test_a_device_three_times_as_fast_gets_three_times_as_much() -> None:
    result, _ = place(toy_graph(2, towers=4), (3.0, 1.0))
    ranks = linears(result.best.candidate.rank_of)
    assert (ranks.count(0), ranks.count(1)) == (6, 2)
    certificate = result.certificate
    assert certificate.objective_seconds >= certificate.bound_seconds
    assert result.best.step_seconds >= certificate.whole_ops_bound_seconds * (1 - 1e-9)


def test_where_messages_cost_more_than_they_save_one_device_is_enough() -> None:
    result, _ = place(toy_graph(3, towers=2), crossing_seconds=1e6)
    assert len(set(result.best.candidate.rank_of.values())) == 1


def test_it_is_never_worse_than_a_start_and_simulates_it_as_it_is() -> None:
    graph = toy_graph(4)
    start = everything_on(graph, 1)
    result, judge = place(graph, starts=[start], time_limit_seconds=0.2)
    assert judge.seen[0] is start
    given = next(tried for tried in judge.tried if tried.candidate is start)
    assert result.best.step_seconds <= given.step_seconds


def test_every_op_without_a_rank_is_one_that_is_recomputed() -> None:
    graph = toy_graph(3, towers=2)
    result, _ = place(graph, (1.0, 2.0, 3.0))
    assert set(result.best.candidate.rank_of) == {n.name for n in graph.ops} - recomputed_ops(graph)


def test_pins_hold_in_every_candidate() -> None:
    graph = toy_graph(3, towers=2)
    pins = {"towers.0.layers.1": 1, "towers.1": 0, "linear_default_1": 1}
    _, judge = place(graph, pins=pins, starts=[everything_on(graph, 0)])
    assert judge.seen
    for candidate in judge.seen:
        assert candidate.rank_of["linear_default_1"] == 1, "tower 0, block 1"
        assert {candidate.rank_of[f"linear_default_{i}"] for i in (3, 4, 5)} == {0}


def test_pins_may_go_back_and_forth_between_devices() -> None:
    graph = toy_graph(3)
    pins = {"towers.0.layers.0": 1, "towers.0.layers.1": 0, "towers.0.layers.2": 1}
    result, _ = place(graph, pins=pins)
    assert linears(result.best.candidate.rank_of) == [1, 0, 1]


def test_all_pinned_is_one_candidate_per_number_of_micro_batches() -> None:
    result, judge = place(toy_graph(3), pins={"*": 1})
    assert len(judge.seen) == 1
    assert set(result.best.candidate.rank_of.values()) == {1}


def test_wrong_pins_are_refused_all_at_once() -> None:
    with pytest.raises(UsageError, match=r"'a' is pinned to rank 2; the cluster has ranks 0 to 1") as error:
        place(toy_graph(2), pins={"a": 2, "b": -1})
    assert "'b' is pinned to rank -1" in str(error.value)
    with pytest.raises(UsageError, match="matches no module path and no op"):
        place(toy_graph(2), pins={"nothing": 0})
    with pytest.raises(UsageError, match=r"\(rank 0\) and 'towers\.0\.\*' \(rank 1\)"):
        place(toy_graph(2), pins={"towers": 0, "towers.0.*": 1})


def test_a_weight_that_two_modules_read_may_lie_apart() -> None:
    graph = toy_graph(4, tied=True)
    result, _ = place(graph, pins={"towers.0.layers.0": 0, "towers.0.layers.3": 1})
    assert linears(result.best.candidate.rank_of)[::3] == [0, 1]


def test_what_overflows_is_searched_again_with_less_memory() -> None:
    """100 MiB per op that the search knows nothing of: at most ten of the 17 ops on one device."""
    graph = toy_graph(8)
    result, judge = place(graph, op_bytes=100 << 20, starts=[everything_on(graph, 0)])
    assert max(result.best.peak_bytes) <= 1 << 30
    assert any(max(tried.peak_bytes) > 1 << 30 for tried in judge.tried)
    assert len(judge.seen) > 2


def test_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match=r"no free placement of toy") as error:
        place(toy_graph(8), op_bytes=300 << 20, time_limit_seconds=1.0)
    assert "rank 0 (d0) needs " in str(error.value)
    assert ", has 1.00 GiB: " in str(error.value)
    assert " short (" in str(error.value)
    assert "devices with more memory" in str(error.value)


def test_latency_is_one_batch_at_a_time() -> None:
    result, judge = place(toy_graph(3, towers=2), objective="latency", microbatches="auto")
    assert {candidate.microbatches for candidate in judge.seen} == {1}
    assert result.certificate.objective.startswith("makespan")
    ranks = linears(result.best.candidate.rank_of)
    assert ranks[0] != ranks[3], "towers beside each other"


def test_the_number_of_micro_batches_is_chosen() -> None:
    """A chain on two devices: they work beside each other on several micro-batches only."""
    result, _ = place(toy_graph(4), microbatches="auto")
    assert result.best.candidate.microbatches in (2, 4, 8)


def test_the_same_request_has_the_same_answer() -> None:
    first, _ = place(toy_graph(2, towers=3), (2.0, 1.0), time_limit_seconds=20.0)
    again, _ = place(toy_graph(2, towers=3), (2.0, 1.0), time_limit_seconds=20.0)
    assert first.best.candidate.rank_of == again.best.candidate.rank_of
    assert first.certificate.bound_seconds == again.certificate.bound_seconds


def test_one_device_is_no_search() -> None:
    result, judge = place(toy_graph(3), (1.0,))
    assert len(judge.seen) == 1
    assert result.certificate.gap == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("seed", [3, 11, 58])
def test_random_models_carried_through(seed: int) -> None:
    """Real programs, simulated: what is promised about every answer, micro-batches of unlike sizes included."""
    graph = random_model(seed, ops=12).graph
    cluster = ClusterSpec.parse("A100-40GB:3") if seed % 2 else ClusterSpec.local(2, memory="1GiB")
    costs, job = costs_of(graph, cluster), Job(7)
    request = FreeRequest(job, microbatches=3, time_limit_seconds=0.5, split=False)
    judge = ListJudge(graph, costs, cluster, job)
    start = everything_on(graph, 0, microbatches=3, world=cluster.world_size)
    result = place_free(graph, costs, cluster, request, judge, [start])
    certificate = result.certificate
    assert result.best.step_seconds <= judge.measure(start).step_seconds
    assert certificate.bound_seconds <= certificate.objective_seconds
    assert judge.tried
    for tried in judge.tried:
        assert tried.step_seconds >= certificate.whole_ops_bound_seconds * (1 - 1e-9)
        assert set(tried.candidate.rank_of) == set(start.rank_of)
