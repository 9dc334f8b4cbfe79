"""A plan made in this process knows what it was made with, and nothing of that is in its file."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from partitioner.models.workload import MadeWith
from passes.trace.trace import trace


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).square().mean()


def batch() -> dict[str, Tensor]:
    return {"input": torch.ones(4, 3), "y": torch.zeros(4, 2)}


def made() -> tuple[nn.Module, dict[str, Tensor], Plan]:
    model, example = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), batch()
    return (
        model,
        example,
        partition(model, ClusterSpec.local(1), example_inputs=example, loss_fn=loss_fn, strategy="layer"),
    )


def test_what_was_given_is_not_replaced() -> None:
    model, example, plan = made()
    full = plan._made_with.completed(model, {"seed": 1})
    assert full.pop("graph").fingerprint == plan.model.fingerprint
    assert full == {"seed": 1, "example_inputs": example, "loss_fn": loss_fn}
    other = batch()
    assert plan._made_with.completed(model, {"example_inputs": other}) == {
        "example_inputs": other,
        "loss_fn": loss_fn,
    }
    workload = Workload(model, other, lambda output, _: output.sum())
    assert plan._made_with.completed(workload, {}) == {}, "a workload brings its own"
    assert "graph" in plan._made_with.completed(Workload(model, example, loss_fn), {})
    assert "graph" not in plan._made_with.completed(copy.deepcopy(model), {}), "another model"


def test_a_model_that_changed_since_is_traced_again() -> None:
    for change in (
        lambda m: m[0].bias.requires_grad_(False),
        lambda m: m.eval(),
        lambda m: m.double(),
        lambda m: setattr(m[1], "bias", None),
        lambda m: setattr(m[1], "weight", nn.Parameter(torch.ones(2, 5))),
    ):
        model, _, plan = made()
        assert "graph" in plan._made_with.completed(model, {})
        change(model)
        assert "graph" not in plan._made_with.completed(model, {})


def test_it_stays_in_the_process_and_out_of_comparisons() -> None:
    model, example, plan = made()
    loaded = Plan.from_json(plan.model_dump_json())
    assert plan == loaded
    for elsewhere in (loaded, copy.deepcopy(plan)):
        assert elsewhere == plan
        assert elsewhere._made_with.completed(model, {}) == {}
    from_trace = partition(trace(model, example, loss_fn=loss_fn), ClusterSpec.local(1), strategy="layer")
    assert from_trace._made_with.completed(model, {}) == {}
    assert '"made_with"' not in plan.model_dump_json()
    assert "made_with=" not in repr(plan)
    assert MadeWith().graph is None


def test_verify_needs_no_more_than_the_model() -> None:
    model, _, plan = made()
    assert plan.verify(model).passed
