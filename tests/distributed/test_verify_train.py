"""``verify(train=True)``: the engine trains as a plain loop does, and one-line faults that only the engine has are found.

Faults are planted in the workers, by the source that makes the workload there; the parent's own code stays right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError, VerificationError
from cost_models.precision import Precision
from partitioner import Plan, Workload, partition
from partitioner.engine.checkpoints import Checkpoints
from partitioner.models.as_graph import as_graph
from partitioner.verify.train import verify_training
from passes.graph.graph import OpGraph
from runtime.checkpoint.optimizer import NamedOptimizer
from runtime.ranks.launch import WorkerPool
from runtime.state.rank_state import RankState
from tests.distributed import engine_model as net
from tests.distributed.planted import plant
from tests.distributed.sharded_models import Conv, Gpt, conv_batch, gpt_batch


def gpt() -> Workload:
    torch.manual_seed(0)
    return Workload(Gpt().float(), gpt_batch(2), name="gpt")


class Dropping(nn.Module):
    """A dropout that runs on shards in a form of its own, as long as it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(F.dropout(self.up(x), 0.5, self.training)).square().mean()
        return loss


def dropping() -> Workload:
    torch.manual_seed(0)
    return Workload(Dropping(), {"x": torch.randn(4, 8)}, name="dropping")


def conv() -> Workload:
    torch.manual_seed(0)
    return Workload(Conv().double(), conv_batch(2), name="conv")


def planned(workload: Workload | OpGraph, ranks: int, **options: Any) -> Plan:
    return partition(
        workload, ClusterSpec.local(ranks), batch_size=8, microbatches=2, **{"strategy": "layer", **options}
    )


def hybrid(fix: str, **options: Any) -> dict[str, Any]:
    return {"strategy": "hybrid", "fix": fix, **options}


def feature(pattern: str, **options: Any) -> dict[str, Any]:
    return {"strategy": "feature", "mesh": (2,), "pins": {"*": pattern}, **options}


@cache
def traced(precision: Precision) -> OpGraph:
    """The trace of ``gpt()``."""
    return as_graph(gpt(), precision=precision)


MIXED = Precision(compute=torch.bfloat16)
MASTER = Precision(parameters=torch.bfloat16, master=torch.float32)


@pytest.mark.parametrize(
    ("make", "ranks", "options"),
    [
        (net.workload, 3, {"schedule": "1f1b", "pins": net.PINS}),
        pytest.param(gpt, 2, {"min_stages": 2, "precision": MIXED}, marks=pytest.mark.matrix),
        pytest.param(gpt, 2, feature("column_row"), marks=pytest.mark.matrix),
        pytest.param(gpt, 2, feature("zero1", precision=MASTER), marks=pytest.mark.matrix),
        pytest.param(gpt, 2, feature("zero3"), marks=pytest.mark.matrix),
        (conv, 2, feature("data", optimizer_memory="momentum")),
        (dropping, 2, feature("column_row")),
        (gpt, 4, hybrid("groups=1,3", precision=MIXED)),
        pytest.param(gpt, 4, hybrid("pipeline=2 data=2 zero=3"), marks=pytest.mark.matrix),
        pytest.param(gpt, 3, {"strategy": "free"}, marks=pytest.mark.matrix),
        pytest.param(gpt, 1, {}, marks=pytest.mark.matrix),
    ],
    ids=[
        "layer",
        "layer-bf16",
        "feature",
        "zero1-master",
        "zero3",
        "batch-norm",
        "dropout",
        "hybrid-bf16",
        "hybrid-zero3",
        "free",
        "one-device",
    ],
)
def test_a_plan_trains_as_a_plain_loop_does(
    make: Callable[[], Workload], ranks: int, options: dict[str, Any], pool: WorkerPool
) -> None:
    torch.manual_seed(0)
    workload = make()
    report = planned(workload, ranks, **options).verify(workload, train=True, pool=pool)
    report.raise_if_different()
    assert report.first_difference is None
    assert report.other_placed is not None
    assert report.compared["parameter"] > 10
    assert (
        report.compared["placement"] == ranks or workload.name == "gpt"
    )  # a free plan may leave devices idle
    assert report.compared["samples"] > report.steps


# ----------------------------------------------------------------------------------- hooks on parameters


def decayed(weight: Tensor, gradient: Tensor) -> Tensor:
    """Clip the gradient by its norm, and add some of the weight: neither linear nor without what is trained."""
    return gradient * (0.01 / gradient.norm()).clamp(max=1.0) + 0.1 * weight.detach()


def hooked() -> Workload:
    workload = dropping()
    weight = workload.model.get_parameter("down.weight")
    weight.register_hook(partial(decayed, weight))  # type: ignore[no-untyped-call]
    return workload


def no_hooks() -> Any:
    """The engine runs no hooks."""
    from partitioner.engine.gradient_hooks import GradientHooks

    return mock.patch.object(GradientHooks, "run", return_value=None)


def test_hooks_run_on_both_sides_or_a_note_says_that_they_do_not(mended: WorkerPool) -> None:
    plan = planned(hooked(), 2, min_stages=2)
    report = plan.verify(hooked(), train=True, pool=mended)
    report.raise_if_different()
    assert not any("left out" in note for note in report.notes)
    mended.run(plant, no_hooks)
    report = plan.verify(hooked(), train=True, pool=mended)
    assert report.first_difference is not None
    assert "gradient norm on rank 0" in report.first_difference
    unnamed = hooked()
    unnamed.model.get_parameter("up.weight").register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    report = plan.verify(unnamed, train=True, pool=mended)
    report.raise_if_different()
    assert any("hooks on parameters are left out of this comparison" in note for note in report.notes)


# ----------------------------------------------------------------------------------- planted faults


def norm_counts_copies_twice() -> Any:
    """The norm of gradients counts every holder's parameter."""
    return mock.patch.object(RankState, "spoken_for", lambda self: self.parameters.items())


def parts_are_all_the_first() -> Any:
    """The loader gives the first part of a batch to every rank."""
    from partitioner.batches.part_batch import DataPlace

    spans = DataPlace.spans
    return mock.patch.object(DataPlace, "spans", lambda self, count: spans(replace(self, rank=0), count))


def blocks_change_places() -> Any:
    """Blocks are written to, and read from, each other's places."""
    places = Checkpoints._places

    def swapped(self: Checkpoints, names: Any) -> Any:
        found = {}
        for name, place in places(self, names).items():
            sizes = zip(place.offsets, place.shape, self._own(name).shape, strict=True)
            other = [0 if offset or size == own else own for offset, size, own in sizes]
            found[name] = replace(place, offsets=tuple(other))
        return found

    return mock.patch.object(Checkpoints, "_places", swapped)


def moments_are_mixed_up() -> Any:
    """What an optimizer's state is loaded into is taken for another."""
    restore = NamedOptimizer.restore

    def mixed(self: NamedOptimizer, *arguments: Any) -> None:
        restore(self, *arguments)
        for state in self.optimizer.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]

    return mock.patch.object(NamedOptimizer, "restore", mixed)


def sums_are_of_16_bits() -> Any:
    """Gradients of 16-bit leaves are summed in 16 bits."""
    precision_of = Precision.of

    def narrow(self: Precision, *arguments: Any, **options: Any) -> Any:
        types = precision_of(self, *arguments, **options)
        return replace(types, gradient=types.leaf)

    return mock.patch.object(Precision, "of", narrow)


def devices_are_played_in_reverse() -> Any:
    """Rank 0 plays the plan's last device."""
    from runtime.program.relabel import RankMap

    return mock.patch(
        "partitioner.deployment.agree.ranks_in_order", lambda plan: RankMap(plan.used_devices[::-1])
    )


def schedulers_begin_anew() -> Any:
    """A scheduler's state is not restored."""
    kind = torch.optim.lr_scheduler.CosineAnnealingLR
    return mock.patch.object(kind, "load_state_dict", return_value=None)


@dataclass(frozen=True)
class Faulty:
    """The source of a workload, which plants a fault in the process where it is made."""

    workload: Workload
    fault: Callable[[], Any]

    def __call__(self) -> Workload:
        plant(self.fault)
        return self.workload


@pytest.mark.parametrize(
    ("fault", "options", "said"),
    [
        (norm_counts_copies_twice, feature("column_row"), "float64, step 1, gradient norm on rank 0: it is"),
        pytest.param(
            parts_are_all_the_first,
            feature("data"),
            "of the batch's 4 samples 2 are missing, 2 were given twice",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            blocks_change_places,
            feature("column_row"),
            "float64, resumed under a plan for one device, after loading, step 2, parameter wte.weight",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            moments_are_mixed_up,
            feature("zero1"),
            "float64, resumed, after loading, step 2, saved state wte.weight.exp_avg on rank 0",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            sums_are_of_16_bits,
            {"min_stages": 2, "precision": MIXED},
            "in compute=bfloat16, step 1, gradient wte.weight on rank 0: it is summed in torch.bfloat16",
            marks=pytest.mark.matrix,
        ),
        (devices_are_played_in_reverse, {"min_stages": 2}, "float64, step 0, placement on rank 0"),
        pytest.param(
            schedulers_begin_anew,
            {"min_stages": 2},
            "float64, resumed, step 4, learning rates on rank 0",
            marks=pytest.mark.matrix,
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_is_the_first_difference(
    fault: Callable[[], Any], options: dict[str, Any], said: str, mended: WorkerPool
) -> None:
    workload = gpt()
    graph = traced(options.get("precision", Precision()))
    plan = planned(graph, 2, **options)
    report = verify_training(plan, workload, pool=mended, graph=graph, source=Faulty(workload, fault))
    assert report.first_difference is not None
    assert said in report.first_difference
    assert f"first difference: {report.first_difference}" in " ".join(str(report).split())
    assert report.to_dict()["passed"] is False
    with pytest.raises(VerificationError, match="other than plain training"):
        report.raise_if_different()


# ----------------------------------------------------------------------------------- refusals


def test_what_cannot_be_trained_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = gpt()
    plan = planned(workload, 1)
    unnamed = replace(workload, loss_fn=lambda output, batch: output)
    with pytest.raises(UsageError, match="cannot be sent to them"):
        plan.verify(unnamed, train=True)
    with pytest.raises(UsageError, match="without example inputs"):
        Plan.from_json(plan.model_dump_json()).verify(workload.model, train=True)
    with torch.device("meta"):
        bare = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="without weights"):
        plan.verify(Workload(bare, workload.example_inputs), train=True)
    monkeypatch.setattr("partitioner.verify.train.free_memory_bytes", lambda: 2**20)
    with pytest.raises(UsageError, match="cannot train gpt on this machine"):
        plan.verify(workload, train=True)
