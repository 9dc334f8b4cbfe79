"""``plan.deploy``: training on real processes equals training the unpartitioned model, wherever the weights come from."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from partitioner.models import as_graph
from runtime.ranks.launch import WorkerError, WorkerPool
from tests.support.edited import edited

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(torch.relu(self.middle(self.embed(tokens)))) * self.scale)


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["tokens"].flatten())


def init(module: nn.Module) -> None:
    """Every parameter a fixed function of its shape, so that all ways of loading can be compared."""
    for parameter in module.parameters(recurse=False):
        parameter.data = torch.linspace(-0.5, 0.5, parameter.numel(), dtype=parameter.dtype).reshape(
            parameter.shape
        )


def batch() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 11, (7, 5), generator=torch.Generator().manual_seed(0))}


def workload(device: str = "cpu") -> Workload:
    with torch.device(device):
        model = Net().double()
    if device != "meta":
        model.apply(init)
    return Workload(model, batch(), loss_fn, "net")


def train(plan_json: str, source: str) -> tuple[list[float], dict[str, Tensor]]:
    plan = Plan.from_json(plan_json)
    options = {
        "model": {},
        "state_dict": {"state_dict": {n: t.detach() for n, t in workload().model.state_dict().items()}},
        "init_fn": {"init_fn": init},
    }[source]
    made = workload("cpu" if source == "model" else "meta")
    if source != "model":
        made.model.scale = torch.ones((), dtype=torch.float64)
    kwargs = {"optimizer": torch.optim.AdamW, "optimizer_kwargs": {"lr": 1e-2}}
    with plan.deploy(made, timeout_seconds=20.0, **kwargs, **options) as engine:
        losses = [float(engine.train_step(batch())) for _ in range(STEPS)]
        return losses, {name: p.detach() for name, p in engine.parameters.items()}


def expected() -> tuple[list[float], dict[str, Tensor]]:
    model = workload().model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for piece in torch.tensor_split(batch()["tokens"], 3):
            loss = loss_fn(model(piece), {"tokens": piece}) * piece.shape[0] / 7
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def plan() -> Plan:
    pins = {"embed": 0, "middle": 1, "head": 2}
    cluster = ClusterSpec.local(3)
    return partition(
        workload(), cluster, batch_size=7, microbatches=3, schedule="1f1b", pins=pins, strategy="layer"
    )


@pytest.mark.parametrize("source", ["model", "state_dict", "init_fn"])
def test_training_equals_the_unpartitioned_model(source: str, plan: Plan, pool: WorkerPool) -> None:
    results = pool.run(train, plan.model_dump_json(), source, world_size=3, timeout_seconds=120.0)
    losses, parameters = expected()
    held: set[str] = set()
    for rank_losses, rank_parameters in results:
        assert rank_losses == pytest.approx(losses, rel=1e-12), "the loss is known on every rank"
        held |= set(rank_parameters)
        for name, tensor in rank_parameters.items():
            assert torch.allclose(tensor, parameters[name], rtol=1e-10, atol=1e-12), name
    assert held == set(parameters)
    assert set(results[1][1]) == {"middle.weight", "middle.bias"}, "a rank holds its own parameters only"


def train_from_own_seed(plan_json: str) -> None:
    made = workload()
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(float(torch.distributed.get_rank() == 2))
    with Plan.from_json(plan_json).deploy(made, timeout_seconds=20.0):
        pass


def test_copies_of_a_tied_parameter_that_start_apart_are_refused(plan: Plan, pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="3 of 3 local workers failed") as caught:
        pool.run(train_from_own_seed, plan.model_dump_json(), world_size=3, timeout_seconds=60.0)
    assert str(caught.value).count("embed.weight: rank 0 has other values than rank 2") == 3
    assert "middle.weight" not in str(caught.value), "what one rank holds may be anything"


def test_another_world_size_is_refused(plan: Plan, pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="it is made for 3 ranks, 2 are running"):
        pool.run(train, plan.model_dump_json(), "model", world_size=2, timeout_seconds=60.0)


def test_a_larger_batch_is_refused(plan: Plan, pool: WorkerPool) -> None:
    another = plan.model_copy(update={"batch_size": 5})
    with pytest.raises(WorkerError, match="it has 7 samples, the plan is made for 5 a step"):
        pool.run(train, another.model_dump_json(), "model", world_size=3, timeout_seconds=60.0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        h = self.a(x) * scale
        return self.b(h if mask is None else h * mask)


def step_with(plan_json: str, changes: Mapping[str, object]) -> float:
    torch.manual_seed(0)
    made = scaled()
    with Plan.from_json(plan_json).deploy(made, timeout_seconds=20.0) as engine:
        return float(engine.train_step({**made.example_inputs, **changes}))


def scaled() -> Workload:
    return Workload(Scaled(), {"x": torch.ones(4, 6), "scale": 3.0}, lambda output, _: (output**2).mean())


def test_numbers_that_the_trace_baked_in_may_not_change_unnoticed(pool: WorkerPool) -> None:
    plan = partition(scaled(), ClusterSpec.local(2), batch_size=4, microbatches=2, pins={"a": 0, "b": 1})
    text = plan.model_dump_json()
    pool.run(step_with, text, {"note": "for nobody"}, world_size=2, timeout_seconds=60.0)
    for changes, said in (
        ({"scale": 2.0}, "scale is 2.0, traced with 3.0"),
        ({"mask": torch.ones(6)}, "mask is a tensor or not given, traced with None"),
        ({"x": torch.ones(4, 5)}, r"x has the shape \(4, 5\), expected \(any, 6\)"),
    ):
        with pytest.raises(WorkerError, match=said):
            pool.run(step_with, text, changes, world_size=2, timeout_seconds=60.0)


def step_with_open_lengths(plan_json: str, dynamic_dims: Mapping[str, list[int]] | None) -> float:
    options = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.0}, "dynamic_dims": dynamic_dims}
    with Plan.from_json(plan_json).deploy(workload(), timeout_seconds=20.0, **options) as engine:
        return float(engine.train_step({"tokens": batch()["tokens"][:, :4]}))


def test_a_plan_with_open_lengths_is_verified_and_deployed_with_them(pool: WorkerPool) -> None:
    opened = {"tokens": [1]}
    plan = partition(
        workload(),
        ClusterSpec.local(2),
        batch_size=7,
        microbatches=2,
        pins={"embed": 0, "head": 1},
        dynamic_dims=opened,
    )
    assert plan.verify(workload(), dynamic_dims=opened, pool=pool).passed
    shorter = {"tokens": batch()["tokens"][:, :4]}
    expected_loss = loss_fn(workload().model(shorter["tokens"]), shorter).item()
    text = plan.model_dump_json()
    losses = pool.run(step_with_open_lengths, text, opened, world_size=2, timeout_seconds=60.0)
    assert losses == pytest.approx([expected_loss] * 2, rel=1e-12)
    with pytest.raises(WorkerError, match="differs from the plan's"):
        pool.run(step_with_open_lengths, text, None, world_size=2, timeout_seconds=60.0)


def draw(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def drawn(plan_json: str, seed: int) -> Tensor:
    made = workload("meta")
    made.model.scale = torch.ones((), dtype=torch.float64)
    with Plan.from_json(plan_json).deploy(made, init_fn=draw, seed=seed, timeout_seconds=20.0) as engine:
        return engine.parameters["middle.weight"].detach()


def test_the_seed_decides_what_init_fn_draws(pool: WorkerPool) -> None:
    text = partition(workload(), ClusterSpec.local(1), batch_size=7, strategy="layer").model_dump_json()
    first, again, other = (
        pool.run(drawn, text, seed, world_size=1, timeout_seconds=60.0)[0] for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).all()


def train_own_plan(plans: list[str]) -> None:
    train(plans[torch.distributed.get_rank()], "model")


def test_ranks_with_different_plans_are_refused(plan: Plan, pool: WorkerPool) -> None:
    other = edited(plan, schedule="gpipe")
    plans = [plan.model_dump_json(), plan.model_dump_json(), other.model_dump_json()]
    with pytest.raises(WorkerError, match="the plan of rank 2 is not that of rank 0"):
        pool.run(train_own_plan, plans, world_size=3, timeout_seconds=60.0)


def made_and_trained_here(source: str) -> tuple[list[float], int]:
    """In a worker: (losses, traces) of a plan made in this process and deployed with the model alone."""
    made, traces = workload(), []
    model = made.model if source == "same" else workload().model
    given = {"example_inputs": made.example_inputs, "loss_fn": loss_fn}
    with pytest.MonkeyPatch.context() as patch:
        traced = as_graph.trace_graph
        patch.setattr(
            as_graph, "trace_graph", lambda *args, **options: traces.append(1) or traced(*args, **options)
        )
        plan = partition(made.model, ClusterSpec.local(2), min_stages=2, **{"strategy": "layer", **given})
        with plan.deploy(model, optimizer=torch.optim.SGD, timeout_seconds=20.0) as engine:
            return [float(engine.train_step(batch())) for _ in range(2)], len(traces)


def test_a_plan_made_here_is_deployed_with_the_model_alone(pool: WorkerPool) -> None:
    for source, traces in (("same", 1), ("another", 2)):
        for losses, count in pool.run(made_and_trained_here, source, world_size=2, timeout_seconds=90.0):
            assert losses[1] < losses[0]
            assert count == traces
