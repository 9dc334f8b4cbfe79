"""The bound on every plan: a slice of ``benchmarks.bound_check``, its closed forms, and what a broken bound ends in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.bound_check import Tally, check_instance
from benchmarks.bound_models import CLUSTERS
from cost_models.errors import InternalError
from passes.costs.costs import costs_of
from passes.lower.job import Job
from passes.search.any_plan import any_plan_bound
from passes.search.certificate import Certificate
from passes.trace.trace import trace
from tests.support.matrix import thinned


@pytest.mark.parametrize("number", thinned([0, 1, 2], [1]))
def test_no_strategy_simulates_below_it(number: int) -> None:
    tally = Tally()
    check_instance(3, number, tally, seconds=0.1)
    assert not tally.broken
    assert tally.plans >= 2
    assert tally.least_work >= 1 - 1e-12


def test_products_are_shared_by_all_devices() -> None:
    """One linear layer of 64 → 64 on four equal devices without launches: FLOPs and the optimizer over rates."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return output.sum()

    graph = trace(Layer(), torch.zeros(4, 64), loss_fn=loss)
    cluster = CLUSTERS["cpu-3-no-launches"]()
    bound = any_plan_bound(graph, costs_of(graph, cluster), cluster, Job(12, optimizer="sgd"))
    forward, weight = 2 * 12 * 64 * 64 / 20e9, 2 * 12 * 64 * 64 / 20e9
    optimizer = 3 * 64 * 64 * 4 / 100e6
    summed = 12 * 64 * 4 / 100e6
    assert (forward + weight + optimizer) / 3 <= bound <= (forward + weight + optimizer + 3 * summed) / 3


def test_a_plan_below_its_bound_is_an_internal_error() -> None:
    certificate = Certificate(
        objective="step", objective_seconds=1.0, bound_seconds=1.0, gap=0.0, space="all", method="none",
        solver_status="optimal", search_seconds=0.0, simulated_lower_bound_seconds=0.5, whole_ops_bound_seconds=0.9,
    )  # fmt: skip
    certificate.refuse_broken_bounds(0.8, whole_ops=False)
    with pytest.raises(InternalError, match=r"0\.8 s.*plan of whole ops.*0\.9 s"):
        certificate.refuse_broken_bounds(0.8, whole_ops=True)
    with pytest.raises(InternalError, match=r"0\.4 s.*any plan.*0\.5 s"):
        certificate.refuse_broken_bounds(0.4, whole_ops=False)
