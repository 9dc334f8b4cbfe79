"""Neurons split into blocks on two ranks: whatever enters or leaves is the model's own, by name, shape and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from partitioner import Plan, Workload, partition
from partitioner.engine.engine import Engine
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from passes.lower.placed_graph import PlacedGraph
from runtime.ranks.launch import WorkerPool
from runtime.segment.code import SegmentCode
from tests.support.batch_norms import count_batches
from tests.support.split_model import (
    MICROBATCHES,
    SAMPLES,
    batch,
    loss_fn,
    model,
    split_plan,
    traced,
    workload,
)

EVEN = (5, 5)
MAX_NORM = 0.3


@pytest.fixture(scope="module")
def plans() -> dict[str, str]:
    made = workload()
    layers = partition(
        traced(made),
        ClusterSpec.local(2),
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        pins={"fc1": 0, "head": 1},
    )
    return {
        "split": split_plan(made),
        "even": split_plan(made, EVEN, (1, 0)),
        "layers": layers.model_dump_json(),
    }


def groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """By name and by dimensions, as people do: parts must not show in either."""
    shapes = {name: tuple(p.shape) for name, p in named}
    assert shapes == {name: tuple(p.shape) for name, p in model().named_parameters()}
    by_name = dict(named)
    decayed = [p for p in by_name.values() if p.dim() > 1]
    plain = [p for name, p in named if name.endswith("bias") or name.startswith("norm")]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}], lr=0.05
    )


@cache
def graph() -> OpGraph:
    """Traced once in every process."""
    return traced(workload())


def deploy(plan_json: str, seed: int = 0, **options: Any) -> Engine:
    options = {"optimizer": groups, "timeout_seconds": 20.0, **options}
    return Plan.from_json(plan_json).deploy(workload(seed), graph=graph(), **options)


@dataclass
class Course:
    """What training shows, on rank 0 or unpartitioned."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def eager(steps: range) -> Course:
    """The steps of the unpartitioned model, micro-batch by micro-batch: batch norm sees these."""
    net, found = model(), Course()
    optimizer = groups(list(net.named_parameters()))
    for step in steps:
        data = batch(seed=step)
        optimizer.zero_grad()
        pieces = [
            dict(zip(data, each, strict=True))
            for each in zip(*(t.split(4) for t in data.values()), strict=True)
        ]
        losses = [loss_fn(net(piece["x"]), piece) / MICROBATCHES for piece in pieces]
        sum(losses[1:], losses[0]).backward()
        found.norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
        optimizer.step()
        found.losses.append(float(sum(losses[1:], losses[0]).detach()))
    count_batches(net, len(steps))
    found.state = dict(net.state_dict())
    return found


def steps(engine: Engine, numbers: range) -> Course:
    found = Course()
    for step in numbers:
        found.losses.append(float(engine.train_step(batch(seed=step), max_grad_norm=MAX_NORM)))
        assert engine.last_step is not None
        norm = engine.last_step.grad_norm
        assert norm is not None
        found.norms.append(float(norm))
    found.state = engine.state_dict()
    return found


def assert_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-12), name


# ------------------------------------------------------------------------------------------ training


def trained(plan_json: str) -> tuple[dict[str, Tensor], Course, list[Any], list[list[str]]]:
    with deploy(plan_json) as engine:
        before = engine.state_dict()
        found = steps(engine, range(3))
        evaluations: list[Any] = []
        for samples in (SAMPLES, 5):
            data = batch(samples, seed=9)
            output = engine.eval_step(data, gather="rank0")
            evaluations.append((output.loss, output.outputs, engine.forward({"x": data["x"]})))
        names = {id(p): name for name, p in engine.parameters.items()}
        return (
            before,
            found,
            evaluations,
            [[names[id(p)] for p in group["params"]] for group in engine.optimizer.param_groups],
        )


def test_training_and_evaluation_are_the_unsplit_models(plans: Any, pool: WorkerPool) -> None:
    (before, found, evaluations, first), (empty, other, others, second) = pool.run(
        trained, plans["split"], world_size=2
    )
    assert (empty, other.state) == ({}, {})
    assert first == [
        ["fc1.weight#0", "fc1.weight#2", "fc2.weight#0", "fc2.weight#2"],
        ["norm.weight#0", "norm.weight#2", "norm.bias#0", "norm.bias#2", "fc2.bias"],
    ]
    assert second == [
        ["fc1.weight#1", "fc2.weight#1", "head.weight"],
        ["norm.weight#1", "norm.bias#1", "head.bias"],
    ]
    assert all(torch.equal(before[name], tensor) for name, tensor in model().state_dict().items())
    expected = eager(range(3))
    assert expected.norms[0] > MAX_NORM, "it clips"
    assert found.losses == other.losses == pytest.approx(expected.losses, rel=1e-10)
    assert found.norms == other.norms == pytest.approx(expected.norms, rel=1e-10)
    assert_alike(found.state, expected.state)
    net = model()
    net.load_state_dict(found.state)
    net.eval()
    for samples, (loss, outputs, forward), (its_loss, *_) in zip(
        (SAMPLES, 5), evaluations, others, strict=True
    ):
        data = batch(samples, seed=9)
        output = net(data["x"]).detach()
        assert float(loss) == float(its_loss) == pytest.approx(loss_fn(output, data).item(), rel=1e-12)
        assert torch.allclose(next(iter(outputs.values())), output, rtol=1e-12)
        assert torch.allclose(next(iter(forward.values())), output, rtol=1e-12)


# ------------------------------------------------------------------------------------------ checkpoints


def saved(plan_json: str, folder: str) -> Course:
    with deploy(plan_json) as engine:
        found = steps(engine, range(2))
        engine.save(folder)
        return found


def resumed(plan_json: str, folder: str) -> tuple[dict[str, Tensor], Course]:
    """Other values first: all must come from the checkpoint."""
    with deploy(plan_json, seed=1) as engine:
        engine.load(folder)
        assert engine.step == 2
        loaded = engine.state_dict()
        return loaded, steps(engine, range(2, 4))


def weighted(plan_json: str, folder: str) -> dict[str, Tensor]:
    with deploy(plan_json, seed=1, weights=folder) as engine:
        return engine.state_dict()


@pytest.mark.parametrize(
    ("before", "after"),
    [("split", "layers"), ("layers", "split"), ("split", "even")],
)
def test_a_checkpoint_fits_every_plan(
    before: str, after: str, plans: Any, pool: WorkerPool, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    found, _ = pool.run(saved, plans[before], folder, world_size=2)
    (index,) = tmp_path.glob("*/checkpoint.json")
    assert "#" not in index.read_text(), "stored by the model's own names"
    (loaded, more), _ = pool.run(resumed, plans[after], folder, world_size=2)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in found.state.items())
    expected = eager(range(4))
    assert more.losses == pytest.approx(expected.losses[2:], rel=1e-10)
    assert more.norms == pytest.approx(expected.norms[2:], rel=1e-10)
    assert_alike(more.state, expected.state)
    if after == "even":
        read, _ = pool.run(weighted, plans[after], folder, world_size=2)
        assert all(torch.equal(read[name], tensor) for name, tensor in found.state.items())


# ------------------------------------------------------------------------------------------ tied parts


class Twice(nn.Module):
    """``fc`` is read twice, its first half on rank 0, then on rank 1: both ranks hold both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.frozen, self.out = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc(x)) + torch.tanh(self.fc(2 * x))
        output: Tensor = self.out(torch.tanh(self.frozen(hidden)))
        return output


def twice() -> Workload:
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64)
    return Workload(Twice().double(), x, lambda output, _: output.square().mean(), "twice")


def trained_twice(plan_json: str, folder: str) -> tuple[list[float], dict[str, Tensor], Mapping[str, Any]]:
    options = {"optimizer": torch.optim.AdamW, "optimizer_kwargs": {"lr": 0.1}, "timeout_seconds": 20.0}
    x, numbers = twice().example_inputs, []
    for seed in (0, 1):  # the second engine starts with other values, and loads
        made = twice()
        if seed:
            for parameter in made.model.parameters():
                nn.init.ones_(parameter)
        with Plan.from_json(plan_json).deploy(made, **options) as engine:
            if seed:
                engine.load(folder)
            for _ in range(2):
                numbers.append(float(engine.train_step(x, max_grad_norm=0.05)))
                assert engine.last_step is not None
                numbers.append(float(engine.last_step.grad_norm or 0.0))
            engine.save(folder, asynchronous=True).wait()
            state, holders = engine.state_dict(), engine.state.holders
    return numbers, state, holders


def test_parts_that_two_ranks_hold_are_summed_once_and_stored_once(pool: WorkerPool, tmp_path: Path) -> None:
    made = twice()
    plan = partition(
        made,
        ClusterSpec.local(2),
        microbatches=2,
        strategy="free",
        splits={"linear": (4, 2), "linear_1": (4, 2), "linear_2": (1, 4)},
        pins={"linear_b0": 0, "linear_b1": 1, "linear_1_b0": 1, "linear_1_b1": 0, "out": 1},
    )
    verify_plan(plan, made, pool=pool).raise_if_different()
    (numbers, state, holders), _ = pool.run(
        trained_twice, plan.model_dump_json(), str(tmp_path), world_size=2
    )
    assert holders["fc.weight#0"] == holders["fc.weight#1"] == (0, 1)
    net, expected = made.model, []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = net(made.example_inputs).square().mean()
        loss.backward()
        expected += [loss.item(), float(nn.utils.clip_grad_norm_(net.parameters(), 0.05))]
        optimizer.step()
    assert numbers == pytest.approx(expected, rel=1e-10)
    assert_alike(state, net.state_dict())


# ------------------------------------------------------------------------------------------ verification


def test_verify_compares_whole_tensors_and_names_the_block_that_differs(
    plans: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, made = Plan.from_json(plans["split"]), workload()
    report = verify_plan(plan, made, pool=pool)
    report.raise_if_different()
    net = model()
    assert report.compared["parameter"] == len(list(net.parameters()))
    assert report.compared["buffer"] == len(list(net.buffers()))

    lowered = PlacedGraph.lowered

    def wrong(placed: PlacedGraph) -> dict[int, SegmentCode]:
        codes = lowered(placed)
        for code in codes.values():
            for node in code.module.graph.nodes:
                if node.op == "call_function" and node.name == "tanh_b1":
                    node.target = torch.ops.aten.sigmoid.default
            code.module.recompile()
        return codes

    monkeypatch.setattr(PlacedGraph, "lowered", wrong)
    first = verify_plan(plan, made, pool=pool).first_difference
    assert first is not None
    assert first.startswith("tanh_b1 (stage ")
    assert "on rank 1, micro-batch 0" in first


# ------------------------------------------------------------------------------------------ what is refused


def refused(plan_json: str) -> str:
    with pytest.raises(UsageError) as caught:
        deploy(plan_json, optimizer=torch.optim.Adafactor)
    return str(caught.value)


def test_an_optimizer_of_whole_matrices_is_refused(plans: Any, pool: WorkerPool) -> None:
    for text in pool.run(refused, plans["split"], world_size=2):
        assert "Adafactor cannot train parts of parameters" in text
        assert "fc1.weight, norm.weight, norm.bias, fc2.weight" in text
        assert "#" not in text
