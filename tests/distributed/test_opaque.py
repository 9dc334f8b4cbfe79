"""Opaque parts train as they do without a plan: in a pipeline, sharded, and freely placed, in float64 to 1e-9."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from runtime.ranks.launch import WorkerPool
from tests.distributed import opaque_models as models
from tests.support.matrix import thinned

WAYS: Mapping[str, Mapping[str, Any]] = {
    "layer": {"strategy": "layer", "min_stages": 2, "max_stages": 2},
    "feature": {"strategy": "feature"},
    "free": {"strategy": "free", "pins": {"first": 0, "part": 1, "last": 2}},
}
DEVICES = {"layer": 2, "feature": 2, "free": 3}


def planned(name: str, way: str, **more: Any) -> Plan:
    case = models.CASES[name]
    options = {**WAYS[way], "microbatches": 1 if case.coupled or way == "feature" else 2, **more}
    return partition(
        case.model(),
        ClusterSpec.local(DEVICES[way]),
        example_inputs=case.batch(),
        loss_fn=case.loss,
        batch_size=models.SAMPLES,
        optimizer_memory="momentum",
        **{"strategy": "layer", **options},
    )


def train(plan_json: str, name: str, compile: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: the same steps by the plan."""
    case = models.CASES[name]
    plan = Plan.from_json(plan_json)
    losses = []
    with plan.deploy(
        case.model(),
        example_inputs=case.batch(),
        loss_fn=case.loss,
        optimizer=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1, "momentum": 0.9},
        compile={"backend": "eager"} if compile else False,
    ) as engine:
        for seed in range(models.STEPS):
            losses.append(engine.train_step(case.batch(seed)).item())
        return losses, engine.state_dict()


SHOWN = [
    ("quantizer", "free"),
    ("reversal", "layer"),
    ("fused", "feature"),
    ("boolean", "layer"),
    ("cond", "layer"),
    ("python-if", "feature"),
    ("packed", "layer"),
    ("ctc", "feature"),
]
"""Every kind of part once, every strategy."""


@pytest.mark.parametrize(("name", "way"), thinned(itertools.product(models.CASES, WAYS), SHOWN))
def test_training_equals_the_plain_loop(name: str, way: str, pool: WorkerPool) -> None:
    plan = planned(name, way)
    assert any("opaque op" in note for note in plan.notes)
    compare(
        name, pool.run(train, plan.model_dump_json(), name, world_size=DEVICES[way], timeout_seconds=120.0)
    )


def compare(name: str, results: list[tuple[list[float], dict[str, Tensor]]]) -> None:
    expected_losses, expected = models.trained(name)
    for losses, state in results:
        assert losses == pytest.approx(expected_losses, rel=1e-9, abs=1e-12)
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)
    assert any(state.keys() == expected.keys() for _, state in results)


HOW: Mapping[str, Mapping[str, Any]] = {
    "recomputed": {"recompute": "full"},
    "backward-in-halves": {"schedule": "zb-h1"},
    "compiled": {},
}


@pytest.mark.parametrize(
    ("name", "how"),
    thinned(
        itertools.product(["fused", "boolean"], HOW),
        [("fused", "recomputed"), ("boolean", "backward-in-halves"), ("boolean", "compiled")],
    ),
)
def test_it_is_recomputed_deferred_and_compiled_around(name: str, how: str, pool: WorkerPool) -> None:
    plan = planned(name, "layer", **HOW[how]).model_dump_json()
    arguments = plan, name, how == "compiled"
    compare(name, pool.run(train, *arguments, world_size=2, timeout_seconds=120.0))


def resumed(plan_json: str, name: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: a step, a checkpoint, and the other steps by a new engine that begins there."""
    case, plan, losses = models.CASES[name], Plan.from_json(plan_json), []
    options: dict[str, Any] = {
        "example_inputs": case.batch(),
        "loss_fn": case.loss,
        "optimizer": torch.optim.SGD,
        "optimizer_kwargs": {"lr": 0.1, "momentum": 0.9},
    }
    with plan.deploy(case.model(), **options) as engine:
        losses.append(engine.train_step(case.batch(0)).item())
        engine.save(folder)
    with plan.deploy(case.model(), **options) as engine:
        engine.load(folder)
        losses += [engine.train_step(case.batch(seed)).item() for seed in range(1, models.STEPS)]
        return losses, engine.state_dict()


def test_a_checkpoint_holds_a_parts_parameters_buffers_and_momentum(pool: WorkerPool, tmp_path: Path) -> None:
    plan = planned("python-if", "layer").model_dump_json()
    arguments = plan, "python-if", str(tmp_path / "saved")
    compare("python-if", pool.run(resumed, *arguments, world_size=2, timeout_seconds=120.0))


def trained_with_noise(plan_json: str) -> dict[str, Tensor]:
    """In a worker: three steps of a model whose backward draws, by a rank whose generator is unlike any other's."""
    case = models.NOISY
    plan = Plan.from_json(plan_json)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}
    with plan.deploy(case.model(), example_inputs=case.batch(), loss_fn=case.loss, **options) as engine:
        torch.manual_seed(1000 + engine.rank)
        for seed in range(models.STEPS):
            engine.train_step(case.batch(seed))
        return {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}


def test_copies_stay_equal_where_backward_draws_random_numbers(pool: WorkerPool) -> None:
    case = models.NOISY
    plan = partition(
        case.model(),
        ClusterSpec.local(2),
        example_inputs=case.batch(),
        loss_fn=case.loss,
        batch_size=models.SAMPLES,
        strategy="feature",
        mesh=(2,),
        pins={"*": "R"},
    )
    first, second = pool.run(trained_with_noise, plan.model_dump_json(), world_size=2)
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])


@pytest.mark.parametrize("way", thinned(WAYS, ["layer", "feature"]))
def test_verify_runs_the_users_own_code_in_float64(way: str, pool: WorkerPool) -> None:
    case = models.CASES["fused"]
    plan = planned("fused", way)
    report = plan.verify(case.model(), example_inputs=case.batch(), loss_fn=case.loss, pool=pool)
    assert report.passed, str(report)


@pytest.mark.parametrize("recompute", thinned(["none", "full"], ["full"]))
def test_a_model_that_asks_for_gradients_itself_is_split_by_samples(recompute: Any, pool: WorkerPool) -> None:
    """Recomputed, its own gradients are computed again: a training run shows it."""
    g = torch.Generator().manual_seed(0)
    shapes = {"positions": (8, 5, 3), "energy": (8,), "force": (8, 5, 3)}
    batch = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    torch.manual_seed(0)
    model, given = models.Forces(), {"example_inputs": batch, "loss_fn": models.force_loss}
    plan = partition(
        model, ClusterSpec.local(2), **given, batch_size=8, strategy="feature", mesh=(2,), pins={"*": "data"},
        recompute=recompute,
    )  # fmt: skip
    assert any("S0" in text for text in str(plan).splitlines() if "opaque" in text), str(plan)
    report = plan.verify(model, **given, pool=pool, train=recompute == "full")
    assert report.passed, str(report)


SHARDED: Mapping[str, Mapping[str, Any]] = {
    "zero3": {"mesh": (2,), "pins": {"*": "zero3"}},
    "2x2": {"mesh": (2, 2), "pins": {"*": "data column_row"}},
}


@pytest.mark.parametrize("how", SHARDED)
def test_a_part_with_a_norm_is_whole_among_sharded_parameters(how: str, pool: WorkerPool) -> None:
    case = models.CASES["python-if"]
    options = {"example_inputs": case.batch(), "loss_fn": case.loss}
    plan = partition(
        case.model(),
        ClusterSpec.local(4 if how == "2x2" else 2),
        batch_size=models.SAMPLES,
        strategy="feature",
        microbatches=1,
        **SHARDED[how],
        **options,
    )
    report = plan.verify(case.model(), pool=pool, **options)
    assert report.passed, str(report)
