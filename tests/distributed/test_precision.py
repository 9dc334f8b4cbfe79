"""Training in another precision on real processes equals the eager loop that follows the same rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Precision, Workload, partition
from partitioner.engine.engine import Engine
from runtime.ranks.launch import WorkerPool
from runtime.segment.microbatch import microbatch_sizes
from tests.support.matrix import thinned

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
STEPS = 4
LEARNING_RATE = 2e-3
SCALED = "dynamic"
NOT_TRAINED = ("first.bias", "unread")

CASES = {
    "mixed": (F32, Precision(compute=BF16)),
    "bfloat16": (BF16, Precision()),
    "masters": (BF16, Precision(master=F32)),
    "float16": (F32, Precision(compute=F16, loss_scale=SCALED)),
    "float16 masters": (F16, Precision(master=F32, loss_scale=SCALED)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(11, 16), nn.Linear(16, 16)
        self.norm, self.second = nn.LayerNorm(16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.first.bias.requires_grad_(False)
        self.unread = nn.Parameter(torch.rand(5))
        self.register_buffer("gain", torch.full((16,), 1.5))

    def forward(self, tokens: Tensor, noise: Tensor) -> Tensor:
        h = self.embed(tokens) + noise
        h = torch.relu(self.first(h)) * self.gain.to(h.dtype)
        return self.head(self.norm(self.second(h)))


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output.float(), batch["target"])


def batch(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "tokens": torch.randint(0, 11, (6, 5), generator=generator),
        "noise": torch.rand(6, 5, 16, generator=generator),
        "target": torch.rand(6, 5, 11, generator=generator),
    }


def workload(own: torch.dtype, *, tied: bool = False) -> Workload:
    torch.manual_seed(0)
    model = Net()
    if tied:
        model.head.weight = model.embed.weight
    model.to(own)
    model.gain = model.gain.float()
    example = batch()
    if own != F32:
        example["noise"] = example["noise"].to(own)
    return Workload(model, example, loss_fn, "net")


def data_of(own: torch.dtype, precision: Precision, step: int) -> dict[str, Tensor]:
    data = batch(step)
    return data if own == F32 else {**data, "noise": data["noise"].to(own)}


def eager(case: str, microbatches: int, *, tied: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """The same rules in a plain loop: leaves, gradients summed in float32, owners, and a scale of 2**16."""
    own, precision = CASES[case]
    model = workload(own, tied=tied).model
    owners = {
        n: nn.Parameter(p.detach().to(precision.of(own, trains=n not in NOT_TRAINED).owner), p.requires_grad)
        for n, p in model.named_parameters()
    }
    trained = {n: p for n, p in owners.items() if n not in NOT_TRAINED}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.of(own).leaf)
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE)
    scale = 2.0**16 if precision.loss_scale else 1.0
    losses = []
    for step in range(STEPS):
        data = data_of(own, precision, step)
        sums = {n: torch.zeros(p.shape) for n, p in trained.items()}
        total, at = 0.0, 0
        for size in microbatch_sizes(6, microbatches):
            piece = {n: t[at : at + size] for n, t in data.items()}
            at += size
            model.zero_grad()
            loss = loss_fn(model(piece["tokens"], piece["noise"].to(precision.of(own).leaf)), piece)
            (loss * (size / 6 * scale)).backward()
            total += float(loss.detach().double()) * size / 6
            for name, parameter in model.named_parameters():
                if name in sums:
                    sums[name] += parameter.grad
        for name, owner in trained.items():
            owner.grad = (sums[name] / scale).to(owner.dtype)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(owners[name])
        losses.append(total)
    return losses, {name: owner.detach() for name, owner in owners.items()}


def bytes_held(engine: Engine) -> int:
    """Count every storage that lives all through a step, once: tensors of parameters, gradients, their state, the batch."""
    tensors = [*engine.state.leaves.values(), *engine.parameters.values()]
    tensors += [t.grad for t in tensors if t.grad is not None]
    tensors += [
        t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
    ]
    for _, shared in engine.executor._training._bound.values():
        tensors += [piece for pieces in shared.pieces.values() for piece in pieces]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def train(plan_json: str, case: str, tied: bool) -> dict[str, Any]:
    """Four steps; alternately by ``train_step`` and by its parts."""
    own, _ = CASES[case]
    plan = Plan.from_json(plan_json)
    options = {"optimizer": torch.optim.AdamW, "optimizer_kwargs": {"lr": LEARNING_RATE}}
    with plan.deploy(workload(own, tied=tied), timeout_seconds=20.0, **options) as engine:
        losses = []
        for step in range(STEPS):
            data = data_of(own, plan.precision, step)
            if step % 2:
                losses.append(float(engine.train_step(data)))
            else:
                losses.append(float(engine.forward_backward(data)))
                held = bytes_held(engine)
                engine.optimizer.step()
        leaves = {n: engine.state.leaves[n].detach() for n in engine.parameters}
        return {
            "losses": losses,
            "owners": {n: p.detach() for n, p in engine.parameters.items()},
            "published": all(
                torch.equal(leaves[n], p.detach().to(leaves[n].dtype)) for n, p in engine.parameters.items()
            ),
            "gradients": {n: p.grad.dtype for n, p in engine.parameters.items() if p.grad is not None},
            "bytes": held,
            "evaluated": (float(engine.eval_step(data).loss), float(engine.forward_backward(data))),
            "skipped": engine.last_step.skipped,
        }


def made_plan(
    case: str, devices: int, microbatches: int, schedule: str = "auto", *, tied: bool = False
) -> Plan:
    own, precision = CASES[case]
    pins = {"embed": 0, "head": devices - 1}
    return partition(
        workload(own, tied=tied),
        ClusterSpec.local(devices),
        batch_size=6,
        microbatches=microbatches,
        schedule=schedule,
        precision=precision,
        pins=pins,
        strategy="layer",
    )


@pytest.mark.parametrize("case", thinned(CASES, ["mixed", "float16 masters"]))
def test_one_rank_equals_the_eager_loop_bit_for_bit(case: str, pool: WorkerPool) -> None:
    plan = made_plan(case, 1, 1)
    assert Plan.from_json(plan.model_dump_json()).precision == CASES[case][1]
    (result,) = pool.run(train, plan.model_dump_json(), case, False, world_size=1, timeout_seconds=60.0)
    assert result["bytes"] == plan.state_bytes["0"]
    losses, owners = eager(case, 1)
    assert result["losses"] == losses
    assert set(result["owners"]) == set(owners)
    for name, owner in owners.items():
        assert result["owners"][name].dtype == owner.dtype
        assert torch.equal(result["owners"][name], owner), name
    assert result["published"]
    assert not result["skipped"]
    evaluated, trained = result["evaluated"]  # of the same weights, and there is no dropout
    assert evaluated == trained


@pytest.mark.parametrize(
    ("case", "schedule", "tied"),
    [
        ("mixed", "1f1b", True),
        pytest.param("bfloat16", "zb-h1", False, marks=pytest.mark.matrix),
        ("masters", "zb-h1", True),
        ("float16", "1f1b", False),
    ],
)
def test_two_ranks_equal_the_eager_loop(case: str, schedule: str, tied: bool, pool: WorkerPool) -> None:
    plan = made_plan(case, 2, 3, schedule, tied=tied)
    assert len(plan.stages) == 2
    results = pool.run(train, plan.model_dump_json(), case, tied, world_size=2, timeout_seconds=60.0)
    losses, owners = eager(case, 3, tied=tied)
    own, precision = CASES[case]
    held: set[str] = set()
    for rank, result in enumerate(results):
        assert result["bytes"] == plan.state_bytes[str(rank)]
        assert result["losses"] == pytest.approx(losses, rel=1e-2 if tied else 1e-6)
        assert result["published"]
        held |= set(result["owners"])
        for name, owner in result["owners"].items():
            assert owner.dtype == precision.of(own, trains=name not in NOT_TRAINED).owner
            difference = (owner.double() - owners[name].double()).norm() / owners[name].double().norm()
            assert float(difference) < (1e-2 if tied else 1e-6), (name, float(difference))
        wanted = precision.of(own).owner  # a step leaves gradients in the owners' type
        assert set(result["gradients"].values()) == {wanted}
    assert held == set(owners)


def overflow(plan_json: str, guilty: int) -> dict[str, Any]:
    """Three steps; in the second, rank ``guilty`` finds an infinite gradient."""
    plan = Plan.from_json(plan_json)
    options = {"optimizer": torch.optim.AdamW, "optimizer_kwargs": {"lr": LEARNING_RATE}}
    with plan.deploy(workload(F32), timeout_seconds=20.0, **options) as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
        run_step = engine.executor.run_step
        seen = []

        def with_overflow(*args: Any, **kwargs: Any) -> Any:
            sums = run_step(*args, **kwargs)
            if len(seen) == 1 and torch.distributed.get_rank() == guilty:
                leaf = next(t for t in engine.state.leaves.values() if t.grad is not None)
                leaf.grad.view(-1)[0] = math.inf
            return sums

        engine.executor.run_step = with_overflow
        for step in range(3):
            before = {n: p.detach().clone() for n, p in engine.parameters.items()}
            states = [float(s["step"]) for s in engine.optimizer.state.values()]
            engine.train_step(batch(step), max_grad_norm=1.0)
            scheduler.step()
            same = all(torch.equal(before[n], p.detach()) for n, p in engine.parameters.items())
            same = same and states == [float(s["step"]) for s in engine.optimizer.state.values()]
            assert math.isinf(engine.last_step.grad_norm) == engine.last_step.skipped
            seen.append((engine.last_step.skipped, same, engine.precision.gradient_scale))
        saved = engine.precision.state_dict()
        engine.precision.load_state_dict({"scale": 4.0, "good_steps": 3.0})
        assert engine.precision.gradient_scale == 4.0
        return {"seen": seen, "saved": saved, "rates": scheduler.get_last_lr()}


@pytest.mark.parametrize("guilty", thinned([0, 1], [1]))
def test_an_overflow_on_one_rank_skips_the_step_on_all(guilty: int, pool: WorkerPool) -> None:
    plan = made_plan("float16", 2, 2)
    results = pool.run(overflow, plan.model_dump_json(), guilty, world_size=2, timeout_seconds=60.0)
    for result in results:
        assert result["seen"] == [(False, False, 2.0**16), (True, True, 2.0**15), (False, False, 2.0**15)]
        assert result["saved"] == {"scale": 2.0**15, "good_steps": 1.0}
        assert result["rates"] == [LEARNING_RATE / 8]


def test_a_mixed_plan_is_verified_in_float64(pool: WorkerPool) -> None:
    plan = made_plan("mixed", 2, 3)
    report = plan.verify(workload(F32), pool=pool)
    assert report.passed, str(report)
    assert any("verified in float64" in note for note in report.notes)


def test_float16_without_a_loss_scale_is_refused() -> None:
    from cost_models.errors import UsageError

    with pytest.raises(UsageError, match="without a loss scale"):
        partition(
            workload(F32),
            ClusterSpec.local(1),
            batch_size=6,
            precision=Precision(compute=F16),
            strategy="layer",
        )


def masters_again(plan_json: str, folder: str) -> bool:
    """In a worker: whether masters come back from a checkpoint, given as ``weights=``, as they were."""
    own, _ = CASES["masters"]
    plan = Plan.from_json(plan_json)
    with plan.deploy(workload(own), timeout_seconds=20.0, optimizer=torch.optim.AdamW) as engine:
        engine.train_step(data_of(own, plan.precision, 0))
        engine.save(folder)
        before = {name: owner.detach().clone() for name, owner in engine.parameters.items()}
    assert any(not torch.equal(owner, owner.to(own).float()) for owner in before.values())
    with plan.deploy(workload(own), timeout_seconds=20.0, weights=folder) as engine:
        leaves = [engine.state.leaves[name] for name in before]
        assert [leaf.dtype for leaf in leaves] == [own] * len(leaves)
        assert all(torch.equal(x, y.to(own)) for x, y in zip(leaves, before.values(), strict=True))
        return all(torch.equal(engine.parameters[name], owner) for name, owner in before.items())


def test_masters_of_a_checkpoint_are_not_rounded(pool: WorkerPool, tmp_path: Path) -> None:
    text = made_plan("masters", 2, 2).model_dump_json()
    assert pool.run(masters_again, text, str(tmp_path), world_size=2, timeout_seconds=60.0) == [True, True]


# ------------------------------------------------------------------------------------------------------
# A loss in 16 bits, in micro-batches whose weights 16 bits do not hold


class Sixteen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones((), dtype=BF16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(x * self.first) * self.second).mean()


def sixteen() -> Workload:
    return Workload(Sixteen(), {"x": torch.ones(6, 4, dtype=BF16)}, None, "sixteen")


def gradients_of_sixteen(plan_json: str) -> list[float]:
    with Plan.from_json(plan_json).deploy(sixteen(), timeout_seconds=20.0) as engine:
        engine.forward_backward(sixteen().example_inputs)
        assert engine._loss_dtype == BF16
        return [float(p.grad) for p in engine.parameters.values()]


def test_weights_of_a_16_bit_loss_are_exact(pool: WorkerPool) -> None:
    text = partition(
        sixteen(), ClusterSpec.local(1), batch_size=6, microbatches=3, strategy="layer"
    ).model_dump_json()
    (gradients,) = pool.run(gradients_of_sixteen, text, world_size=1, timeout_seconds=60.0)
    # A third in bfloat16 is 0.33398: three of them would make 1.00195.
    assert gradients == pytest.approx([1.0, 1.0], rel=1e-6)
