"""Training with the engine equals training the unpartitioned model: clipping, groups, schedules, short batches, metrics."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError, RankFailureError
from partitioner import Plan, Workload, partition, trace
from partitioner.engine.engine import Engine
from runtime.ranks.launch import WorkerPool
from tests.distributed import engine_model as net
from tests.distributed.engine_model import Course, Outcome

TWO_NORM = Course((8, 8, 5, 3, 1), max_norm=0.3)
"""Full batches, one of fewer samples than planned, two of fewer samples than micro-batches."""
MAXIMUM = Course((8, 6, 2), max_norm=0.05, norm_type=math.inf)
THREE_NORM = Course((8, 7), max_norm=100.0, norm_type=3.0)
UNCLIPPED = Course((8, 4, 3), max_norm=None)


def follow(plan_json: str, course: Course) -> Outcome:
    """In a worker: the course, whole steps where clipping is by the 2-norm, in parts elsewhere."""
    outcome = Outcome()
    plan = Plan.from_json(plan_json)
    with plan.deploy(
        net.workload(), graph=net.graph(), optimizer=net.groups_by_name, timeout_seconds=20.0
    ) as engine:
        schedule = net.annealing(engine.optimizer)
        for seed, samples in enumerate(course.sizes):
            data = net.batch(samples, seed)
            if course.norm_type == 2.0:
                loss = engine.train_step(data, max_grad_norm=course.max_norm)
            else:
                engine.zero_grad()
                loss = engine.forward_backward(data)
                norm = engine.clip_grad_norm_(course.max_norm, norm_type=course.norm_type)
                engine.optimizer.step()
                assert engine.last_step.grad_norm is norm
            schedule.step()
            info = engine.last_step
            assert loss is info.loss
            assert (loss.shape, loss.requires_grad) == ((), False)
            assert (info.samples, info.tokens, info.step) == (samples, samples * net.LENGTH, seed + 1)
            assert info.seconds > 0.0
            outcome.losses.append(loss.item())
            outcome.norms.append(None if info.grad_norm is None else info.grad_norm.item())
            outcome.metrics.append({name: metric.item() for name, metric in info.metrics.items()})
            outcome.rates.append([group["lr"] for group in engine.optimizer.param_groups])
        assert engine.step == len(course.sizes)
        outcome.groups = [len(group["params"]) for group in engine.optimizer.param_groups]
        outcome.parameters = {name: p.detach() for name, p in engine.parameters.items()}
        outcome.gradients = {name: p.grad for name, p in engine.parameters.items()}
        in_groups = net.names_of(engine.optimizer, engine.parameters.items())
        assert engine.parameters.keys() - {"gate"} == {name for group in in_groups for name in group}
    return outcome


@pytest.fixture(scope="module")
def plan_json() -> str:
    plan = partition(
        net.workload(),
        ClusterSpec.local(3),
        batch_size=net.SAMPLES,
        microbatches=net.MICROBATCHES,
        schedule="1f1b",
        pins=net.PINS,
        strategy="layer",
    )
    return plan.model_dump_json()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("course", [TWO_NORM, MAXIMUM, THREE_NORM, UNCLIPPED], ids=str)
def test_a_course_equals_training_the_whole_model(plan_json: str, course: Course, pool: WorkerPool) -> None:
    results = pool.run(follow, plan_json, course, world_size=3, timeout_seconds=120.0)
    whole = net.eager(course)
    assert_equal(results, whole)
    counts = [sum(group) for group in zip(*(r.groups for r in results), strict=True)]
    tied = 1  # embed.weight, on two ranks
    assert counts == [whole.groups[0] + tied, *whole.groups[1:]]
    assert all(0 in result.groups for result in results), "every rank has an empty group"


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v", "list"])
def test_short_batches_run_under_every_schedule(schedule: str, pool: WorkerPool) -> None:
    two_stages_a_rank = schedule in ("interleaved", "zb-v")
    pins = {"embed": 0, "middle": 1, "norm": 2, "head": 3} if two_stages_a_rank else net.PINS
    ranks = 2 if two_stages_a_rank else 3
    plan = partition(
        net.workload(),
        ClusterSpec.local(ranks),
        batch_size=net.SAMPLES,
        microbatches=net.MICROBATCHES,
        schedule=schedule,
        pins=pins,
        strategy="layer",
    )
    assert plan.schedule == schedule
    course = Course((8, 6, 3, 2, 1, 8), max_norm=0.5)
    results = pool.run(follow, plan.model_dump_json(), course, world_size=ranks, timeout_seconds=120.0)
    assert_equal(results, net.eager(course))


def assert_equal(results: list[Outcome], whole: Outcome) -> None:
    """Every rank's numbers are the whole model's, and all of its parameters are somewhere."""
    held: set[str] = set()
    for result in results:
        assert result.losses == pytest.approx(whole.losses, rel=1e-10)
        assert result.losses == results[0].losses, "bit for bit the same loss on every rank"
        assert result.norms == results[0].norms
        assert result.norms == [None if n is None else pytest.approx(n, rel=1e-10) for n in whole.norms]
        assert result.metrics == [pytest.approx(metrics, rel=1e-10) for metrics in whole.metrics]
        assert result.rates == whole.rates, "schedules run on ranks with empty groups too"
        for name, tensor in result.parameters.items():
            assert close(tensor, whole.parameters[name]), name
            expected, gradient = whole.gradients[name], result.gradients[name]
            assert (gradient is None) == (expected is None), name
            assert gradient is None or close(gradient, expected), name
        held |= set(result.parameters)
    assert held == set(whole.parameters)


# ----------------------------------------------------------------------------------- gradients and refusals


def try_all(plan_json: str, *checks: Callable[[Engine], Any]) -> list[Any]:
    """In a worker: each check's result on one engine, or its error's text."""
    found: list[Any] = []
    with Plan.from_json(plan_json).deploy(net.workload(), graph=net.graph(), timeout_seconds=20.0) as engine:
        for check in checks:
            try:
                found.append(check(engine))
            except PartitionerError as error:
                found.append(str(error))
    return found


def gradients(engine: Engine) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in engine.parameters.items() if p.grad is not None}


def replaces_gradients(engine: Engine) -> bool:
    engine.forward_backward(net.batch(seed=1))
    once = gradients(engine)
    engine.forward_backward(net.batch(seed=1))
    same = all(torch.equal(once[name], gradient) for name, gradient in gradients(engine).items())
    assert engine.last_step.grad_norm is None
    engine.zero_grad()
    return same and bool(once) and not gradients(engine)


def under_autocast(engine: Engine) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.train_step(net.batch())


def under_no_grad(engine: Engine) -> None:
    with torch.no_grad():
        engine.forward_backward(net.batch())


def under_inference_mode(engine: Engine) -> None:
    with torch.inference_mode():
        engine.train_step(net.batch())


def too_large(engine: Engine) -> None:
    engine.train_step(net.batch(9))


def empty(engine: Engine) -> None:
    engine.train_step(net.batch(0))


def nonfinite(engine: Engine) -> str:
    engine.forward_backward(net.batch())
    for parameter in engine.parameters.values():
        if parameter.grad is not None and dist.get_rank() == 1:
            parameter.grad.fill_(math.inf)
    try:
        engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)
    return ""


def odd_norm(engine: Engine) -> None:
    engine.clip_grad_norm_(1.0, norm_type=0.0)


def without_unread_leaves(engine: Engine) -> float:
    """Rank 0 reads the tokens, rank 2 the labels, rank 1 neither; a rank still counts samples."""
    data, rank = net.batch(), dist.get_rank()
    data.pop("tokens" if rank == 2 else "label")
    return engine.train_step(data).item()


def test_what_is_refused_says_why_and_changes_nothing(plan_json: str, pool: WorkerPool) -> None:
    refused = {
        under_autocast: "engine.train_step was called under torch.autocast",
        under_no_grad: "engine.forward_backward was called under torch.no_grad",
        under_inference_mode: "engine.train_step was called under torch.inference_mode",
        too_large: "it has 9 samples, the plan is made for 8 a step, and memory for more was not planned",
        empty: "it has 0 samples, and a step needs 1",
        odd_norm: "cannot clip by a 0-norm",
    }
    checks = (*refused, replaces_gradients, nonfinite, without_unread_leaves)
    results = pool.run(try_all, plan_json, *checks, world_size=3, timeout_seconds=120.0)
    whole = net.loss_fn(net.model()(net.batch()["tokens"]), net.batch())[0].item()
    for result in results:
        for said, text in zip(result, refused.values(), strict=False):
            assert text in said
        replaced, norm_error, loss = result[len(refused) :]
        assert replaced
        assert "is non-finite, so it cannot be clipped" in norm_error
        assert loss == pytest.approx(whole, rel=1e-12)


# ----------------------------------------------------------------------------------- optimizers


class Plain(torch.optim.Optimizer):
    """An optimizer of a user's own, which keeps four copies of each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["kept"] = [torch.zeros(4, *parameter.shape, dtype=parameter.dtype)]
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


def of_strangers(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters())


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
    "fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "rate as tensor": (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "own": (Plain, {}),
    "strangers": (of_strangers, {}),
    "lbfgs": (torch.optim.LBFGS, {}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
}


def deploy_with(plan_json: str, optimizers: list[str]) -> list[Any]:
    """In a worker: the loss of a second step, or the refusal, for each optimizer."""
    found: list[Any] = []
    plan, made = Plan.from_json(plan_json), net.workload()
    graph = trace(made.model, made.example_inputs, loss_fn=made.loss_fn, name=made.name)
    for name in optimizers:
        make, options = OPTIMIZERS[name]
        try:
            with plan.deploy(
                made, graph=graph, optimizer=make, optimizer_kwargs=options, timeout_seconds=20.0
            ) as engine:
                engine.train_step(net.batch())
                found.append(engine.train_step(net.batch()).item())
        except PartitionerError as error:
            found.append(str(error))
    return found


def second_loss(name: str) -> float:
    make, options = OPTIMIZERS[name]
    whole = net.model()
    optimizer = make([p for p in whole.parameters() if p.requires_grad], **options)
    for _ in range(2):
        optimizer.zero_grad()
        loss, _ = net.loss_fn(whole(net.batch()["tokens"]), net.batch())
        loss.backward()
        optimizer.step()
    return loss.item()


def test_optimizers_that_fit_the_plan_train_and_heavier_ones_are_refused(
    plan_json: str, pool: WorkerPool
) -> None:
    fit = ["adamw", "fused", "rate as tensor", "adagrad", "rmsprop"]
    refused = {
        "amsgrad": "AdamW keeps more state than the plan has memory for",
        "own": "Plain with these options keeps 4 bytes for each byte of a parameter, optimizer_memory='adamw' is 2",
        "strangers": "2 of its parameters are not among those it was given",
        "lbfgs": "LBFGS cannot train a partitioned model",
    }
    results = pool.run(deploy_with, plan_json, [*fit, *refused], world_size=3, timeout_seconds=120.0)
    for result in results:
        assert result[: len(fit)] == pytest.approx([second_loss(name) for name in fit], rel=1e-10)
        for said, text in zip(result[len(fit) :], refused.values(), strict=True):
            assert text in said
    assert "optimizer_memory='adamw' is 2" in results[0][len(fit)], "the same refusal on every rank"
    assert len({result[len(fit)] for result in results}) == 1
    sgd = Plan.from_json(plan_json).model_copy(update={"optimizer_memory": "sgd"})
    said = pool.run(deploy_with, sgd.model_dump_json(), ["adamw", "rmsprop"], world_size=3)
    assert all("plan again with optimizer_memory='adam" in text for result in said for text in result)
    held_bytes = 8 * (net.WORDS * net.WIDTH + net.WORDS + 2 * net.WIDTH)  # of head and norm, float64
    assert f"({2 * held_bytes:,} bytes) of state, 0 B planned" in said[0][0]


# ----------------------------------------------------------------------------------- dropout and failures


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(self.a(x), 0.5)).square().mean()


def dropped() -> Workload:
    return Workload(Dropped().double(), {"x": torch.ones(6, 6, dtype=torch.float64)}, None, "dropped")


def losses_from(plan_json: str, first: int) -> list[float]:
    """In a worker: losses of three steps with numbers from ``first``, an evaluation between them."""
    torch.manual_seed(0)
    made = dropped()
    with Plan.from_json(plan_json).deploy(made, learning_rate=0.0, timeout_seconds=20.0) as engine:
        engine.step = first
        assert re.fullmatch(
            rf"Engine\(dropped, rank {engine.rank} of 2, \S+, step {first}, 2 parameters on cpu\)",
            repr(engine),
        )
        losses = []
        for _ in range(3):
            losses.append(engine.train_step(made.example_inputs).item())
            engine.eval_step(made.example_inputs)
        assert engine.step == first + 3
    return losses


def test_a_restored_step_draws_the_same_dropout_and_evaluating_draws_nothing(pool: WorkerPool) -> None:
    plan = partition(dropped(), ClusterSpec.local(2), batch_size=6, microbatches=2, pins={"a": 0, "b": 1})
    text = plan.model_dump_json()
    from_start = pool.run(losses_from, text, 0, world_size=2, timeout_seconds=60.0)[0]
    resumed = pool.run(losses_from, text, 2, world_size=2, timeout_seconds=60.0)[0]
    assert len(set(from_start)) == 3
    assert resumed[0] == from_start[2]
    assert resumed[1] not in from_start


LIMIT_SECONDS = 3.0


def hang(*arguments: object) -> NoReturn:
    """Give no answer for longer than the others wait."""
    time.sleep(LIMIT_SECONDS * 1.5)
    raise TimeoutError("hung")


def fail_before_sharing(plan_json: str, culprit: int, how: str) -> tuple[str, float]:
    """In a worker: ``culprit`` hangs when its part of the third step is done, or is given no tokens in it."""
    with Plan.from_json(plan_json).deploy(
        net.workload(), graph=net.graph(), timeout_seconds=LIMIT_SECONDS
    ) as engine:
        for _ in range(2):
            engine.train_step(net.batch())
        data = net.batch()
        if dist.get_rank() == culprit:
            if how == "raises":
                engine.train_step({"label": data["label"]})
            engine.executor.collectives.all_reduce = hang  # type: ignore[assignment]
        started = time.monotonic()
        try:
            engine.train_step(data)
        except RankFailureError as error:
            return str(error), time.monotonic() - started
    return "", 0.0


@pytest.mark.parametrize(
    ("how", "culprit", "said"),
    [
        ("hangs", 1, "got no answer for `the loss`"),
        pytest.param(
            "raises",
            0,
            "rank 0 reported: UsageError: error[usage]: the batch lacks inputs",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_rank_that_fails_around_its_run_is_named_with_its_reason(
    plan_json: str, how: str, culprit: int, said: str, pool: WorkerPool
) -> None:
    pool.run(dist.get_rank, world_size=3)
    outcomes = pool.run_each(fail_before_sharing, plan_json, culprit, how, world_size=3, timeout_seconds=30.0)
    for rank, (ok, outcome) in enumerate(outcomes):
        if rank == culprit:
            assert not ok
            continue
        assert ok, outcome
        text, seconds = outcome
        assert f"rank {culprit} failed or hangs: rank {rank}" in text
        assert said in text
        assert seconds < LIMIT_SECONDS * 1.25
