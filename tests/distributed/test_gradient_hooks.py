"""Hooks on parameters' gradients under a plan: what they do in a plain loop, to 1e-9, wherever the parameters live.

The plain loop is torch alone: the user's module with its hooks, one backward of the whole batch per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import ModelError, PartitionerError
from partitioner import Plan, Workload, partition
from passes.trace.trace import trace
from runtime.ranks.launch import WorkerPool
from tests.support.matrix import thinned

STEPS, BATCH, WIDTH = 3, 8, 8
SGD = {"lr": 0.1, "momentum": 0.9}


class Net(nn.Module):
    """Four layers; the last one is tied to the first where asked for."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.relu(self.second(torch.tanh(self.first(x))))))  # type: ignore[no-any-return]


def clip(gradient: Tensor) -> Tensor:
    """Clip by the norm of the whole gradient: neither linear nor element by element."""
    return gradient * (0.01 / gradient.norm()).clamp(max=1.0)


def halve(parameter: Tensor) -> None:
    """Halve the gradient and add some of the weight, after it was accumulated."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=0.01)


def workload(tied: bool = False) -> Workload:
    torch.manual_seed(0)
    model = Net(tied).double()
    mask = (torch.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) % 3 > 0).double()
    model.first.weight.register_hook(lambda gradient: gradient + 0.1 * model.first.weight.detach())
    model.first.weight.register_hook(clip)
    model.second.weight.register_hook(lambda gradient: gradient * mask)
    model.second.weight.register_post_accumulate_grad_hook(halve)
    model.second.bias.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model.norm.weight.register_hook(lambda gradient: gradient * 3.0)
    if not tied:
        model.last.weight.register_hook(clip)
        model.last.weight.register_hook(lambda gradient: gradient.sign())
    return Workload(model, torch.randn(BATCH, WIDTH, dtype=torch.float64), loss)


def loss(output: Tensor, batch: Any) -> Tensor:
    return (output - 1.0).square().mean()


def batch_of(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def plain_loop(tied: bool) -> dict[str, Tensor]:
    """Train the user's module as everybody does, without anything of this project."""
    made = workload(tied)
    optimizer = torch.optim.SGD(made.model.parameters(), **SGD)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch_of(step)
        loss(made.model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in made.model.state_dict().items()}


def train(plan_json: str, tied: bool) -> Mapping[str, Tensor]:
    """In a worker: the same steps under the plan."""
    plan = Plan.from_json(plan_json)
    with plan.deploy(workload(tied), optimizer=torch.optim.SGD, optimizer_kwargs=SGD) as engine:
        for step in range(STEPS):
            engine.train_step(batch_of(step))
        return engine.state_dict()


CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "layer": (2, False, {"strategy": "layer", "min_stages": 2, "microbatches": 4}),
    "layer, tied ends": (2, True, {"strategy": "layer", "pins": {"first": 0, "last": 1}, "microbatches": 2}),
    "zero-bubble": (2, False, {"strategy": "layer", "min_stages": 2, "microbatches": 4, "schedule": "zb-h1"}),
    "data": (2, False, {"strategy": "feature", "mesh": (2,), "pins": {"*": "data"}}),
    "zero1": (2, False, {"strategy": "feature", "mesh": (2,), "pins": {"*": "zero1"}}),
    "zero3": (2, False, {"strategy": "feature", "mesh": (2,), "pins": {"*": "zero3"}}),
    "columns": (
        2,
        False,
        {"strategy": "feature", "mesh": (2,), "pins": {"second.weight": "S0", "last.weight": "S1"}},
    ),
    "stages of shards, tied ends": (
        4,
        True,
        {"strategy": "hybrid", "fix": "pipeline=2 tensor=2", "microbatches": 2},
    ),
    "stages of zero 1": (
        4,
        False,
        {"strategy": "hybrid", "fix": "pipeline=2 data=2 zero=1", "microbatches": 2},
    ),
    "data and columns": (4, False, {"strategy": "feature", "mesh": (2, 2), "pins": {"*": "data column_row"}}),
    "tied, zero3": (
        2,
        True,
        {"strategy": "feature", "mesh": (2,), "pins": {"*": "zero3"}, "microbatches": 2},
    ),
    "free": (
        3,
        False,
        {"strategy": "free", "splits": {"first": (5, 3), "last": (4, 4)}, "microbatches": 2},
    ),
}


SHOWN = [
    "layer, tied ends",
    "zero-bubble",
    "zero1",
    "columns",
    "tied, zero3",
    "free",
    "stages of shards, tied ends",
]


@pytest.mark.parametrize("name", thinned(CASES, SHOWN))
def test_hooks_do_what_they_do_in_a_plain_loop(name: str, pool: WorkerPool) -> None:
    ranks, tied, options = CASES[name]
    plan = partition(
        workload(tied),
        ClusterSpec.local(ranks),
        optimizer_memory="momentum",
        **{"strategy": "layer", **options},
    )
    assert any("hooks on parameters' gradients" in note for note in plan.notes)
    expected = plain_loop(tied)
    found = pool.run(train, plan.model_dump_json(), tied, world_size=plan.world_size)[0]
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-9)


def test_verify_compares_what_hooks_are_given(pool: WorkerPool) -> None:
    plan = partition(workload(), ClusterSpec.local(2), microbatches=2, min_stages=2)
    report = plan.verify(workload(), pool=pool)
    report.raise_if_different()
    assert any("left out on both sides" in note for note in report.notes)


class Doubling(Net):
    """A net that doubles a gradient on its way, by a hook that no graph holds."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        h.register_hook(lambda gradient: gradient * 2)
        return h


def refused(plan_json: str) -> str:
    """In a worker: what ``deploy`` says of a model whose hooks a plan has no place for."""
    made = Workload(Doubling(tied=False).double(), batch_of(0), loss)
    try:
        Plan.from_json(plan_json).deploy(made, timeout_seconds=20.0).close()
    except PartitionerError as error:
        return str(error)
    return "deployed"


def test_deploy_refuses_on_every_rank_what_a_plan_without_values_could_not_tell(pool: WorkerPool) -> None:
    model = Doubling(tied=False).double().to("meta")
    plan = partition(Workload(model, batch_of(0), loss), ClusterSpec.local(2), min_stages=2)
    assert any(note.startswith("hooks on gradients are not run") for note in plan.notes)
    for said in pool.run(refused, plan.model_dump_json(), world_size=2):
        assert "hooks change gradients inside Doubling" in said
        assert "a hook on a tensor, registered in test_gradient_hooks.py" in said


def without_gradients(plan_json: str) -> list[str]:
    """In a worker: the parameters that have a gradient after hooks ran on a step that reached none of them."""
    with Plan.from_json(plan_json).deploy(workload()) as engine:
        engine.zero_grad()
        engine._hooks.run()
        return [name for name, parameter in engine.parameters.items() if parameter.grad is not None]


def test_no_gradient_stays_none_where_ranks_hold_blocks(pool: WorkerPool) -> None:
    """Zeros instead would let the optimizer decay and move what the step did not reach."""
    plan = partition(workload(), ClusterSpec.local(2), **{"strategy": "layer", **CASES["zero1"][2]})
    assert pool.run(without_gradients, plan.model_dump_json(), world_size=2) == [[], []]


def test_a_hook_that_reads_another_parameter_is_refused() -> None:
    model = Net(tied=False)
    model.second.weight.register_hook(lambda gradient: gradient + model.first.weight.detach())
    with pytest.raises(
        ModelError, match=r"test_gradient_hooks.py:\d+: a hook of second.weight reads model.first.weight"
    ):
        trace(model, torch.randn(BATCH, WIDTH), loss_fn=loss)


def test_the_hooks_of_the_test_matter() -> None:
    """Without them, a plain loop ends elsewhere: a plan that forgot one of them would be found."""
    made = workload()
    expected = plain_loop(tied=False)
    for parameter in made.model.parameters():
        for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if table is not None:
                table.clear()
    optimizer = torch.optim.SGD(made.model.parameters(), **SGD)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch_of(step)
        loss(made.model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    hooked = ("first.weight", "second.weight", "second.bias", "norm.weight", "last.weight")
    state = made.model.state_dict()
    assert all(float((state[name] - expected[name]).norm()) > 1e-4 for name in hooked)
