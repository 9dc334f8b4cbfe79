"""The largest batch, or sequence, that fits: it fits by the simulation, and the next one does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, ModelError, UsageError
from partitioner import Plan, Workload, fit, partition
from partitioner.planning.best import best_in_room
from partitioner.planning.largest import Largest, largest_batch, largest_sequence
from partitioner.planning.options import PlanOptions
from partitioner.record.rebuild import simulate_plan
from passes.costs.costs import costs_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.search.judge import Judge
from passes.search.layer.request import LayerRequest
from passes.search.request import Request
from passes.search.strategies import search
from passes.trace.trace import trace


class Net(nn.Module):
    """Many more activations than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def traced(tokens: int) -> OpGraph:
    return trace(Net(), torch.randn(2, tokens, 16), loss_fn=squares)


GRAPH = traced(64)


def fitted(graph: OpGraph = GRAPH, devices: int = 1, memory: str = "1MiB", **options: Any) -> Largest[Plan]:
    """On workers with so little memory that few hundred samples fit."""
    limits = {name: options.pop(name) for name in ("most", "step") if name in options}
    wanted = PlanOptions(**{"strategy": "layer", "microbatches": 1, "recompute": "none", **options})
    return largest_batch(Plan, graph, ClusterSpec.local(devices, memory=memory), wanted, **limits)


def fits(samples: int, devices: int, **options: Any) -> bool:
    wanted = {"strategy": "layer", "microbatches": 1, "recompute": "none", **options}
    try:
        plan = partition(GRAPH, ClusterSpec.local(devices, memory="1MiB"), batch_size=samples, **wanted)
    except (InfeasibleError, UsageError):
        return False
    return not plan.is_too_risky


@pytest.mark.parametrize(
    ("devices", "options"),
    [(1, {}), (2, {"microbatches": 3}), (3, {"strategy": "hybrid"}), (2, {"recompute": "auto"})],
    ids=["alone", "pipeline", "data parallel", "recompute"],
)
def test_the_next_does_not_fit(devices: int, options: dict[str, Any]) -> None:
    found = fitted(devices=devices, **options)
    assert found.plan is not None
    assert found.plan.batch_size == found.size
    peaks, rooms = (
        simulate_plan(found.plan).peak_bytes,
        found.plan.room_bytes,
    )  # planning anew may find another
    assert all(peak <= room for peak, room in zip(peaks, rooms, strict=True))
    assert not fits(found.size + 1, devices, **options)


def test_fit_returns_a_row_for_each_cluster() -> None:
    cluster = ClusterSpec.local(1, memory="1MiB")
    options: dict[str, Any] = {"strategy": "layer", "recompute": "none", "loss_fn": squares}
    row, again = fit(Net(), [cluster] * 2, example_inputs=torch.randn(2, 64, 16), **options)
    assert row.plan is not None
    assert row.plan.batch_size == again.plan.batch_size == fitted().size == row.beyond - 1
    (longest,) = fit(
        lambda tokens: Workload(Net(), torch.randn(2, tokens, 16), squares),
        cluster, largest="sequence", step=64, batch_size=1, **{**options, "loss_fn": None},
    )  # fmt: skip
    assert longest.tokens == 64 * fitted().size
    with pytest.raises(UsageError, match="there is no option batch"):
        fit(Net(), cluster, batch=3)
    with pytest.raises(UsageError, match="from tokens to a Workload"):
        fit(GRAPH, cluster, largest="sequence")


def test_one_sample_more_overflows_in_the_simulation() -> None:
    found, cluster = fitted(), ClusterSpec.local(1, memory="1MiB")
    assert found.plan is not None
    costs, job = costs_of(GRAPH, cluster), found.plan.job
    judge = Judge(GRAPH, costs, cluster, job)
    best = search(LayerRequest(job, microbatches=1), judge).best
    larger = Judge(GRAPH, costs, cluster, replace(job, batch_size=found.size + 1))
    assert best.fits
    assert not larger.measure(best.candidate).fits


def test_no_cut_holds_the_next() -> None:
    """Every cut of the model is simulated with one sample more, and the whole model on one device."""
    found, cluster = fitted(devices=2), ClusterSpec.local(2, memory="1MiB")
    assert found.plan is not None
    job = found.plan.job
    names = [op.name for op in GRAPH.ops]
    halves = [{name: int(at >= cut) for at, name in enumerate(names)} for cut in range(1, len(names))]

    def fitting(samples: int) -> list[Candidate]:
        judge = Judge(GRAPH, costs_of(GRAPH, cluster), cluster, replace(job, batch_size=samples))
        whole = Candidate(dict.fromkeys(names, 0), ((0,),), 1, "1f1b")
        every = [whole, *(Candidate(half, ((0,), (1,)), 1, "1f1b") for half in halves)]
        return [candidate for candidate in every if judge.measure(candidate).fits]

    assert fitting(found.size)
    assert not fitting(found.size + 1)


def test_what_no_search_finds_again_is_planned_as_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    size = fitted(devices=2).size

    def only_known(kind: type[Plan], graph: OpGraph, cluster: ClusterSpec, requests: list[Request]) -> Plan:
        if requests[0].known is None:
            raise InfeasibleError("nothing is found")
        return best_in_room(kind, graph, cluster, requests)

    monkeypatch.setattr("partitioner.planning.largest.best_in_room", only_known)
    plan = fitted(devices=2).plan
    assert plan is not None
    assert (plan.batch_size, plan.is_too_risky) == (size, False)
    assert plan.certificate.method == "nothing was searched"


def test_devices_share_a_batch_and_hold_more() -> None:
    alone, together = fitted(), fitted(devices=4, strategy="hybrid")
    assert together.size > 3 * alone.size


def test_no_more_is_looked_for_than_was_asked() -> None:
    assert (fitted(most=7).size, fitted(most=7).beyond) == (7, None)
    assert (fitted(devices=4, strategy="hybrid", most=6).size, fitted().beyond) == (6, fitted().size + 1)
    assert fitted(step=50).size == fitted().size // 50 * 50


def test_where_nothing_fits_it_says_why() -> None:
    wide = trace(nn.Sequential(nn.Linear(512, 512)), torch.randn(2, 512), loss_fn=squares)
    found = fitted(wide)
    assert (found.size, found.plan) == (0, None)
    assert "short" in "".join(found.why)


def test_options_that_hold_for_no_size_are_refused() -> None:
    with pytest.raises(UsageError, match="pin"):
        fitted(pins={"no such layer": 0})


def test_the_longest_sequence_is_traced_for_itself() -> None:
    """A sample of n · 10 tokens is as large as n samples of 10; this model has positions for 1,500."""

    def positioned(tokens: int) -> OpGraph:
        if tokens > 1500:
            raise ModelError("too long")
        return traced(tokens)

    def longest(memory: str) -> int:
        options = PlanOptions(batch_size=1, strategy="layer", recompute="none")
        cluster = ClusterSpec.local(1, memory=memory)
        return largest_sequence(Plan, positioned, cluster, options, step=10).size

    assert longest("1MiB") == 10 * fitted(traced(10)).size
    assert longest("4MiB") == 1500
