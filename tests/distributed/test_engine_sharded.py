"""Engines of plans that shard: training, clipping, state, checkpoints and precision equal the unpartitioned model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from partitioner import Plan, Precision, Workload, deploy, partition
from partitioner.batches.batch_check import digest
from partitioner.engine.callbacks import Callback
from partitioner.engine.engine import Engine
from partitioner.models.as_graph import as_graph
from partitioner.models.bundled import bundled
from passes.graph.graph import OpGraph
from runtime.mesh.sharding import Block
from runtime.ranks.launch import WorkerPool

WORDS, WIDTH, LENGTH, SAMPLES, MICROBATCHES = 12, 8, 4, 8, 2


class Net(nn.Module):
    """ids (b, 4) -> logits (b, 4, 12). Tied, frozen and unused parameters, a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.drop, self.spare = nn.Dropout(dropout), nn.Linear(4, 4)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.wte(ids)
        inner = self.drop(self.down(F.gelu(self.up(self.norm(hidden)))))
        return self.head(hidden + inner * self.gate * self.scale.to(inner.dtype))


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    labels = batch["labels"]
    loss = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100)
    valid = (labels != -100).to(output.dtype)
    return loss, {"size": (output.square().mean(-1) * valid).sum() / valid.sum()}


def model(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Net:
    made = Net(dropout)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(drawn * 0.5)
    return made.to(dtype)


def batch(samples: int = SAMPLES, seed: int = 0) -> dict[str, Tensor]:
    """Labels are ignored unevenly."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        name: torch.randint(0, WORDS, (samples, LENGTH), generator=generator) for name in ("ids", "labels")
    }
    made["labels"][0, :3] = -100
    made["labels"][-1, 1] = -100
    return made


def workload(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Workload:
    return Workload(model(dropout, dtype), batch(), loss_fn, "net")


PLACED: dict[str, tuple[tuple[int, ...], str]] = {
    "batch": ((2,), "data"),
    "column row": ((2,), "column_row"),
    "vocabulary": ((2,), "vocabulary"),
    "zero 1": ((2,), "zero1"),
    "zero 3": ((2,), "zero3"),
    "batch, column row": ((2, 2), "data column_row"),
    "zero 1, column row": ((2, 2), "zero1 column_row"),
    "zero 3, vocabulary": ((2, 2), "zero3 vocabulary"),
    "zero 1, zero 1": ((2, 2), "zero1 zero1"),
}
"""Mesh, and the pattern on each of its axes."""
SEARCHED = {"searched on 2": 2, "searched on 4": 4}
FIXED = {
    "stages of columns": "pipeline=2 tensor=2 borders=up",
    "stages of replicas": "pipeline=2 data=2 zero=0 borders=down",
    "stages of zero 1": "pipeline=2 data=2 zero=1 borders=up",
    "stages of zero 3": "pipeline=2 data=2 zero=3 borders=up",
    "one, then three": "groups=1,3 borders=up",
    "two, one, one": "groups=2,1,1 borders=up,head",
    "one, two, one": "groups=1,2,1 borders=up,head",
}
"""Pipelines on four ranks: what is fixed of them."""


def planned(graph: OpGraph, name: str, **options: Any) -> Plan:
    size = {"batch_size": SAMPLES, "microbatches": MICROBATCHES, "time_limit_seconds": 30.0, **options}
    if name in FIXED:
        return partition(graph, ClusterSpec.local(4), strategy="hybrid", fix=FIXED[name], **size)
    if name in SEARCHED:
        return partition(graph, ClusterSpec.local(SEARCHED[name]), strategy="feature", **size)
    if name == "free":
        return partition(graph, ClusterSpec.local(2), strategy="free", **size)
    if name == "layers":
        pins = {"wte": 0, "up": 0, "down": 1, "head": 1}
        return partition(graph, ClusterSpec.local(2), pins=pins, **{"strategy": "layer", **size})
    mesh, patterns = PLACED[name]
    cluster = ClusterSpec.local(math.prod(mesh))
    return partition(graph, cluster, strategy="feature", mesh=mesh, pins={"*": patterns}, **size)


class Plans(dict[str, str]):
    """As JSON, by name; of one trace, and made when one is asked for."""

    def __missing__(self, name: str) -> str:
        self[name] = planned(graph_of(0.0), name).model_dump_json()
        return self[name]


@pytest.fixture(scope="module")
def plans() -> Plans:
    return Plans()


_graphs: dict[float, OpGraph] = {}


def graph_of(dropout: float) -> OpGraph:
    """In a worker: the trace, made once."""
    if dropout not in _graphs:
        _graphs[dropout] = as_graph(workload(dropout))
    return _graphs[dropout]


def deployed(plan_json: str, dropout: float = 0.0, **options: Any) -> Engine:
    """In a worker."""
    plan, made = Plan.from_json(plan_json), workload(dropout)
    return plan.deploy(made, graph=graph_of(dropout), timeout_seconds=20.0, **options)


ON_TWO = (*(name for name, (mesh, _) in PLACED.items() if len(mesh) == 1), "searched on 2")
ON_FOUR = (*(name for name, (mesh, _) in PLACED.items() if len(mesh) == 2), "searched on 4", *FIXED)
SHOWN = ("zero 1, column row", "zero 3, vocabulary", "searched on 4", "stages of zero 3", "one, two, one")
"""Shards of every kind, along one axis and along two; stages of several devices beside stages of one."""


# ----------------------------------------------------------------------------------- training


def groups_by_name(named: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    matrices = [p for name, p in named if name.endswith("weight")]
    others = [p for name, p in named if not name.endswith("weight")]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 0.02}],
        lr=0.05,
    )


def momentum(named: list[tuple[str, nn.Parameter]]) -> torch.optim.SGD:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Course:
    """A training run: samples of each batch, how it is clipped."""

    make: Callable[..., torch.optim.Optimizer]
    sizes: tuple[int, ...]
    max_norm: float
    norm_type: float


COURSES = (Course(groups_by_name, (8, 8, 4, 8), 0.3, 2.0), Course(momentum, (8, 4, 8), 0.05, math.inf))


@dataclass
class Outcome:
    """What a run shows."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    """Names of the parameters here."""
    without_gradient: set[str] = field(default_factory=set)
    state: dict[str, Tensor] = field(default_factory=dict)
    """Whole on rank 0, and unpartitioned."""


def eager(course: Course) -> Outcome:
    net, outcome = model(), Outcome()
    optimizer = course.make([(n, p) for n, p in net.named_parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for seed, samples in enumerate(course.sizes):
        data = batch(samples, seed)
        optimizer.zero_grad()
        loss, metrics = loss_fn(net(data["ids"]), data)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), course.max_norm, norm_type=course.norm_type)
        optimizer.step()
        schedule.step()
        outcome.losses.append(loss.item())
        outcome.norms.append(norm.item())
        outcome.metrics.append(metrics["size"].item())
        outcome.rates.append(optimizer.param_groups[0]["lr"])
    outcome.held = {n for n, _ in net.named_parameters()}
    outcome.without_gradient = {n for n, p in net.named_parameters() if p.grad is None}
    outcome.state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    return outcome


def follow(engine: Engine, course: Course) -> Outcome:
    """In a worker: whole steps where clipping is by the 2-norm, in parts elsewhere."""
    outcome = Outcome()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 5)
    for seed, samples in enumerate(course.sizes):
        data = batch(samples, seed)
        if course.norm_type == 2.0:
            engine.train_step(data, max_grad_norm=course.max_norm)
        else:
            engine.forward_backward(data)
            engine.clip_grad_norm_(course.max_norm, norm_type=course.norm_type)
            engine.optimizer.step()
        schedule.step()
        info = engine.last_step
        assert info is not None
        assert info.grad_norm is not None
        assert (info.samples, info.tokens, info.step) == (samples, samples * LENGTH, seed + 1)
        outcome.losses.append(info.loss.item())
        outcome.norms.append(info.grad_norm.item())
        outcome.metrics.append(info.metrics["size"].item())
        outcome.rates.append(engine.optimizer.param_groups[0]["lr"])
    outcome.held = set(engine.parameters)
    outcome.without_gradient = {n for n, p in engine.parameters.items() if p.grad is None}
    outcome.state = engine.state_dict()
    return outcome


def follow_all(plans: Mapping[str, str], courses: tuple[Course, ...]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for name, text in plans.items():
        for course in courses:
            with deployed(text, optimizer=course.make) as engine:
                found.setdefault(name, []).append(follow(engine, course))
    return found


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("ranks", "courses", "names"),
    [
        pytest.param(2, COURSES, ON_TWO, id="2 ranks", marks=pytest.mark.matrix),
        pytest.param(4, COURSES[:1], SHOWN, id="4 ranks"),
        pytest.param(4, COURSES[:1], ON_FOUR, id="4 ranks, all", marks=pytest.mark.matrix),
        pytest.param(4, COURSES[1:], ("stages of columns", "one, then three"), id="pipelines, maximum norm"),
        pytest.param(4, COURSES[1:], FIXED, id="all pipelines, maximum norm", marks=pytest.mark.matrix),
    ],
)
def test_training_equals_the_whole_model(
    plans: Plans, ranks: int, courses: tuple[Course, ...], names: Iterable[str], pool: WorkerPool
) -> None:
    expected = [eager(course) for course in courses]
    chosen = {name: plans[name] for name in names}
    results = pool.run(follow_all, chosen, courses, world_size=ranks, timeout_seconds=200.0)
    for rank, found in enumerate(results):
        for name in found:
            for mine, first, whole in zip(found[name], results[0][name], expected, strict=True):
                assert mine.losses == pytest.approx(whole.losses, rel=1e-10), name
                assert mine.norms == pytest.approx(whole.norms, rel=1e-10), name
                assert mine.metrics == pytest.approx(whole.metrics, rel=1e-10), name
                assert mine.rates == whole.rates
                assert (mine.losses, mine.norms, mine.metrics) == (first.losses, first.norms, first.metrics)
                assert mine.without_gradient == whole.without_gradient & mine.held
                assert {"gate", "spare.weight", "spare.bias"} == whole.without_gradient
                assert mine.state.keys() == (whole.state.keys() if rank == 0 else set())
                for key, tensor in mine.state.items():
                    assert close(tensor, whole.state[key]), (name, key)


# ----------------------------------------------------------------------------------- checkpoints


STEPS, SAVED_AFTER = 4, 2
SAVED = {2: ("zero 3", "layers"), 4: ("zero 1, column row", "stages of zero 1")}
Names = Mapping[int, tuple[str, ...]]
LOADED: Names = {
    2: ("zero 1", "zero 3", "column row", "layers", "free"),
    4: ("zero 1, column row", "zero 3, vocabulary", "zero 1, zero 1", "stages of zero 1", "one, then three"),
}
Blocks = dict[tuple[str, str], list[tuple[Block | None, Tensor]]]


def go_on(engine: Engine, steps: range) -> tuple[list[float], dict[str, Tensor]]:
    losses = [float(engine.train_step(batch(SAMPLES, step), max_grad_norm=0.5)) for step in steps]
    return losses, engine.state_dict()


def held(engine: Engine) -> Blocks:
    """In a worker: its blocks of all parameters, and of the state that the optimizer keeps for each."""
    found: Blocks = {}
    for name, parameter in engine.parameters.items():
        sharding, part = engine.state.shardings.get(name), engine.state.parts.get(name)
        whole, block = name if part is None else part.whole, None if part is None else part.block
        if sharding is not None:
            block = sharding.owner_block(graph_of(0.0).parameters[name].shape, engine.rank)
        state = engine.optimizer.state.get(parameter, {})
        for key, value in {"": parameter, **state}.items():
            own = block if value.shape == parameter.shape else None
            found.setdefault((whole, key), []).append((own, value.detach().clone()))
    return found


def put_together(ranks: list[Blocks]) -> dict[tuple[str, str], Tensor]:
    """The whole tensors; copies are equal bit for bit."""
    shapes, wholes = {n: p.shape for n, p in model().named_parameters()}, {}
    for of_rank in ranks:
        for (name, key), blocks in of_rank.items():
            for block, value in blocks:
                shape = value.shape if block is None else shapes[name]
                whole = wholes.setdefault((name, key), torch.full(shape, math.nan, dtype=value.dtype))
                place = whole if block is None else block.of(whole)
                assert bool((place.isnan() | (place == value)).all()), (name, key)
                place.copy_(value)
    assert not any(bool(whole.isnan().any()) for whole in wholes.values())
    return wholes


def save_all(plans: Mapping[str, str], folder: Path, dropout: float = 0.0) -> dict[str, Any]:
    """In a worker: a checkpoint of each plan's run, and how it goes on."""
    found = {}
    for name, text in plans.items():
        with deployed(text, dropout, optimizer=groups_by_name) as engine:
            go_on(engine, range(SAVED_AFTER))
            engine.save(folder / name, {"from": name}, asynchronous=True)
            saved = held(engine)
            found[name] = (*go_on(engine, range(SAVED_AFTER, STEPS)), saved)
    return found


def load_all(
    plans: Mapping[str, str], folder: Path, saved: tuple[str, ...], dropout: float = 0.0
) -> dict[tuple[str, str], Any]:
    """In a worker: every plan goes on from every checkpoint."""
    found = {}
    for name, text in plans.items():
        other = Workload(Net(dropout).double(), batch(), loss_fn, "net")
        other.model.load_state_dict({n: torch.ones_like(t) for n, t in other.model.state_dict().items()})
        plan, options = Plan.from_json(text), {"optimizer": groups_by_name, "timeout_seconds": 20.0}
        with plan.deploy(other, graph=graph_of(dropout), **options) as engine:
            for source in saved:
                assert engine.load(folder / source) == {"from": source}
                assert engine.step == SAVED_AFTER
                loaded = held(engine)
                found[source, name] = (*go_on(engine, range(SAVED_AFTER, STEPS)), loaded)
    return found


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        pytest.param(
            {2: ("zero 3",), 4: ("stages of zero 1",)},
            {2: ("zero 3", "column row", "free"), 4: ("zero 1, zero 1", "stages of zero 1")},
            id="some",
        ),
        pytest.param(SAVED, LOADED, id="all", marks=pytest.mark.matrix),
    ],
)
def test_checkpoints_go_on_under_other_plans(
    saving: Names, loading: Names, plans: Plans, pool: WorkerPool, tmp_path: Path
) -> None:
    """Parameters and the optimizer's state bit for bit, whoever saved and whoever loads them."""
    runs: dict[str, Any] = {}
    saved: dict[str, dict[tuple[str, str], Tensor]] = {}
    for ranks, names in saving.items():
        chosen = {name: plans[name] for name in names}
        results = pool.run(save_all, chosen, tmp_path, world_size=ranks, timeout_seconds=200.0)
        runs |= results[0]
        saved |= {name: put_together([found[name][2] for found in results]) for name in names}
    sources = tuple(runs)
    for ranks, names in loading.items():
        chosen = {name: plans[name] for name in names}
        results = pool.run(load_all, chosen, tmp_path, sources, world_size=ranks, timeout_seconds=200.0)
        for (source, name), (losses, state, _) in results[0].items():
            expected, whole, _ = runs[source]
            loaded = put_together([found[source, name][2] for found in results])
            assert loaded.keys() == saved[source].keys(), (source, name)
            assert all(torch.equal(loaded[key], saved[source][key]) for key in loaded), (source, name)
            assert losses == pytest.approx(expected, rel=1e-9), (source, name)
            assert all(close(state[key], whole[key]) for key in whole), (source, name)
            if source == name:
                assert losses == expected
                assert all(torch.equal(state[key], whole[key]) for key in whole)


# ----------------------------------------------------------------------------------- dropout


def gpt2() -> Workload:
    """Dropout of 0.1 in embeddings, attention and after each product; all samples alike."""
    made = bundled("gpt2", size="tiny", dtype="float64", layers=1, seq=8, batch=SAMPLES)
    alike = {name: leaf[:1].repeat(SAMPLES, 1) for name, leaf in made.example_inputs.items()}
    return replace(made, example_inputs=alike)


def watched(engine: Engine) -> list[Any]:
    """What this rank computes of each step's loss, as steps run."""
    run, parts = engine.executor.run_step, []

    def noted(*arguments: Any, **given: Any) -> Any:
        parts.append(run(*arguments, **given))
        return parts[-1]

    engine.executor.run_step = noted  # type: ignore[method-assign]
    return parts


def dropped(plans: Mapping[str, str]) -> dict[str, list[Any]]:
    """In a worker, for seeds 3, 3, 4: losses, this rank's part of the first, and its tensors."""
    made, found = gpt2(), {}
    graph = as_graph(made)
    for name, text in plans.items():
        for seed in (3, 3, 4):
            options = {"graph": graph, "seed": seed, "timeout_seconds": 20.0, "learning_rate": 1e-2}
            with Plan.from_json(text).deploy(made, **options) as engine:
                parts, state = watched(engine), engine.state
                losses = [float(engine.train_step(made.example_inputs)) for _ in range(3)]
                parted = {key: own.leaf_part(state.rank) for key, own in state.shardings.items()}
                held = {key: (parted.get(key), digest(state.leaves[key])) for key in state.parameters}
                loss = parts[0].loss
                found.setdefault(name, []).append((losses, None if loss is None else float(loss), held))
    return found


def test_ranks_drop_alike_what_all_compute_and_shards_by_themselves(pool: WorkerPool) -> None:
    cluster, made = ClusterSpec.local(2), gpt2()
    graph, options = as_graph(made), {"strategy": "feature", "mesh": (2,), "microbatches": 1}
    plans = {
        name: partition(
            graph, cluster, batch_size=SAMPLES, pins={"*": name}, **{"strategy": "layer", **options}
        ).model_dump_json()
        for name in ("column_row", "data")
    }
    one, other = pool.run(dropped, plans, world_size=2, timeout_seconds=200.0)
    for name in plans:
        (first, part, held), again, unlike_seed = one[name]
        assert len(set(first)) == 3
        assert first == again[0] == other[name][0][0]
        assert not set(first) & set(unlike_seed[0])
        copies = [key for key, (block, _) in held.items() if block == other[name][0][2][key][0]]
        assert copies
        for key in copies:
            assert held[key] == other[name][0][2][key], "replicas stay equal, bit for bit"
        if name == "column_row":
            assert len(copies) < len(held), "some are sharded"
        else:
            assert part != pytest.approx(other[name][0][1], rel=1e-6), "equal samples, other masks"


@pytest.mark.matrix
def test_stages_of_shards_and_replicas_drop_as_single_stages_do(pool: WorkerPool) -> None:
    """Shards of a stage drop what all of them compute alike, its replicas each by themselves; a seed repeats both."""
    cluster, made = ClusterSpec.local(4), gpt2()
    graph, options = as_graph(made), {"strategy": "hybrid", "microbatches": 2, "batch_size": SAMPLES}
    plans = {
        degree: partition(
            graph, cluster, fix=f"pipeline=2 {degree}=2", **{"strategy": "layer", **options}
        ).model_dump_json()
        for degree in ("tensor", "data")
    }
    results = pool.run(dropped, plans, world_size=4, timeout_seconds=200.0)
    for name in plans:
        (first, _, _), again, unlike_seed = results[0][name]
        assert len(set(first)) == 3
        assert all(found[name][0][0] == again[0] == first for found in results)
        assert not set(first) & set(unlike_seed[0])
        for mine, peer in ((0, 1), (2, 3)):
            (_, part, held), (_, other_part, other_held) = results[mine][name][0], results[peer][name][0]
            copies = [key for key, (block, _) in held.items() if block == other_held[key][0]]
            assert copies
            for key in copies:
                assert held[key] == other_held[key], "copies stay equal, bit for bit"
            if mine == 2 and name == "data":
                assert part != pytest.approx(other_part, rel=1e-6), "equal samples, other masks"


# ----------------------------------------------------------------------------------- precision


def precise(plans: Mapping[str, str]) -> dict[str, Any]:
    """In a worker: losses, the state, and the types and shapes of leaves and owners."""
    found: dict[str, Any] = {}
    graphs: dict[Precision, OpGraph] = {}
    for name, text in plans.items():
        plan, made = Plan.from_json(text), workload(dtype=torch.float32)
        graph = graphs.setdefault(plan.precision, as_graph(made, precision=plan.precision))
        with plan.deploy(made, graph=graph, optimizer=groups_by_name, timeout_seconds=20.0) as engine:
            losses = [float(engine.train_step(batch(SAMPLES, step))) for step in range(STEPS)]
            leaf, owner = engine.state.leaves["up.weight"].detach(), engine.parameters["up.weight"].detach()
            part = engine.state.shardings["up.weight"].part(leaf, engine.rank)
            assert torch.equal(part, owner.to(leaf.dtype)), "published"
            types = (leaf.dtype, owner.dtype, tuple(leaf.shape), tuple(owner.shape))
            found[name] = losses, engine.state_dict(), types
            scale = engine.precision.loss_scale
            if scale is not None:
                scale.scale = 2.0**40
                before = owner.clone()
                engine.train_step(batch(), max_grad_norm=1.0)
                info = engine.last_step
                assert info is not None
                assert info.skipped
                assert torch.equal(before, engine.parameters["up.weight"])
    return found


@pytest.mark.matrix
def test_masters_are_sharded_as_their_leaves_are(pool: WorkerPool) -> None:
    made, texts = workload(dtype=torch.float32), {}
    mixed, half = Precision(compute=torch.bfloat16), Precision(compute=torch.float16, loss_scale="dynamic")
    for precision, names in ((mixed, ("batch", "zero 1", "zero 3")), (half, ("zero 1",))):
        graph = as_graph(made, precision=precision)
        for name in names:
            key = name if precision is mixed else f"float16, {name}"
            texts[key] = planned(graph, name, precision=precision).model_dump_json()
    results = pool.run(precise, texts, world_size=2, timeout_seconds=200.0)[0]
    whole, state, _ = results["batch"]
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    assert results["batch"][2] == (bf16, f32, (16, WIDTH), (16, WIDTH))
    assert results["zero 1"][2] == (bf16, f32, (16, WIDTH), (8, WIDTH))
    assert results["zero 3"][2] == (bf16, f32, (8, WIDTH), (8, WIDTH))
    assert results["float16, zero 1"][2] == (f16, f32, (16, WIDTH), (8, WIDTH))
    assert results["zero 1"][0] == whole
    assert all(torch.equal(results["zero 1"][1][name], tensor) for name, tensor in state.items())
    plain = model(dtype=torch.float32)
    optimizer = groups_by_name([(n, p) for n, p in plain.named_parameters() if p.requires_grad])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(plain(batch(SAMPLES, step)["ids"]), batch(SAMPLES, step))[0]
        loss.backward()
        optimizer.step()
        for name, (losses, _, _) in results.items():
            assert losses[step] == pytest.approx(loss.item(), rel=5e-3), name


def overflown(text: str) -> tuple[bool, bool, float]:
    """In a worker: a step whose loss scale is too large. Was it dropped, are parameters as before, the scale after it."""
    plan, made = Plan.from_json(text), workload(dtype=torch.float32)
    with plan.deploy(made, optimizer=groups_by_name, timeout_seconds=20.0) as engine:
        scale = engine.precision.loss_scale
        assert scale is not None
        engine.train_step(batch())
        scale.scale = 2.0**40
        before = {name: own.detach().clone() for name, own in engine.parameters.items()}
        engine.train_step(batch(seed=1), max_grad_norm=1.0)
        info = engine.last_step
        assert info is not None
        same = all(torch.equal(own, before[name]) for name, own in engine.parameters.items())
        return info.skipped, same, scale.scale


def test_all_stages_drop_a_step_that_overflows(pool: WorkerPool) -> None:
    half = Precision(compute=torch.float16, loss_scale="dynamic")
    graph = as_graph(workload(dtype=torch.float32), precision=half)
    text = planned(graph, "one, then three", precision=half).model_dump_json()
    for result in pool.run(overflown, text, world_size=4, timeout_seconds=200.0):
        assert result == (True, True, 2.0**39)


# ----------------------------------------------------------------------------------- around training


class Recorder(Callback):
    """A callback."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, engine: Engine, info: Any) -> None:
        self.losses.append(float(info.loss))


def watched_and_compiled(plans: Mapping[str, str]) -> dict[str, Any]:
    """In a worker: losses of profiled and of compiled steps."""
    found: dict[str, Any] = {}
    for name, text in plans.items():
        with deployed(text, optimizer=groups_by_name, compile={"backend": "eager"}) as engine:
            compiled = go_on(engine, range(3))[0]
        recorder = Recorder()
        with deployed(text, optimizer=groups_by_name, callbacks=[recorder]) as engine:
            profile = engine.profile([batch(SAMPLES, step) for step in range(3)], max_grad_norm=0.5)
            assert "rank" in str(profile)
        found[name] = recorder.losses, compiled
    return found


def around(plans: Mapping[str, str], whole: str) -> dict[str, Any]:
    """In a worker: steps that are watched and compiled; what is refused; a plan made on the spot."""
    found = watched_and_compiled(plans)
    refused = {
        "adafactor": lambda: deployed(plans["zero 3"], optimizer=torch.optim.Adafactor),
        "seeds": lambda: deployed(plans["zero 3"], seed=dist.get_rank()),
        "copies": lambda: unlike(plans["zero 1"]),
    }
    for name, call in refused.items():
        try:
            call()
        except UsageError as error:
            found[name] = str(error)
    with deployed(whole, optimizer=torch.optim.Adafactor) as engine:
        engine.train_step(batch())
    options = {"strategy": "feature", "batch_size": SAMPLES, "microbatches": MICROBATCHES}
    run = {"optimizer": groups_by_name, "timeout_seconds": 20.0, "pins": {"*": "zero3"}}
    with deploy(workload(), ClusterSpec.local(2), **options, **run) as engine:
        found["on the spot"] = go_on(engine, range(3))[0], engine.plan.strategy
    return found


def unlike(text: str) -> Engine:
    """Models that every rank has seeded for itself."""
    torch.manual_seed(dist.get_rank())
    other = Workload(Net().double(), batch(), loss_fn, "net")
    return Plan.from_json(text).deploy(other, graph=graph_of(0.0), timeout_seconds=20.0)


def plain_losses() -> list[float]:
    """Of the whole model, clipped."""
    net = model()
    optimizer = groups_by_name([(n, p) for n, p in net.named_parameters() if p.requires_grad])
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_fn(net(batch(SAMPLES, step)["ids"]), batch(SAMPLES, step))[0]
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())
    return expected


def test_pipelines_are_watched_and_compiled(plans: Plans, pool: WorkerPool) -> None:
    chosen = {name: plans[name] for name in ("stages of zero 3", "one, then three")}
    for result in pool.run(watched_and_compiled, chosen, world_size=4, timeout_seconds=200.0):
        for name in chosen:
            assert result[name] == (pytest.approx(plain_losses(), rel=1e-10),) * 2, name


def test_what_is_around_training(plans: Plans, pool: WorkerPool) -> None:
    chosen, expected = {name: plans[name] for name in ("zero 1", "zero 3", "column row")}, plain_losses()
    for result in pool.run(around, chosen, plans["batch"], world_size=2, timeout_seconds=200.0):
        for name in chosen:
            plain, compiled = result[name]
            assert plain == pytest.approx(expected, rel=1e-10), name
            assert compiled == pytest.approx(expected, rel=1e-10), name
        assert result["on the spot"] == (pytest.approx(expected, rel=1e-10), "feature")
        assert "Adafactor cannot train parts of parameters" in result["adafactor"]
        assert "deploy(seed=): rank 0 has other values than rank 1" in result["seeds"]
        assert "up.weight, stored: rank 0 has other values than rank 1" in result["copies"]
