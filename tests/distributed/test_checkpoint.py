"""``engine.save`` and ``engine.load``: an interrupted and resumed run is the uninterrupted one, and nothing else loads."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import CheckpointError, PartitionerError, RankFailureError
from partitioner import Plan, Workload, partition
from partitioner.engine.engine import Engine
from partitioner.models.as_graph import as_graph
from passes.graph.graph import OpGraph
from runtime.checkpoint import directory as checkpoint_directory
from runtime.checkpoint import safetensors as checkpoint_files
from runtime.ranks.launch import WorkerPool
from tests.support.matrix import thinned

STEPS, SAVED_AFTER = 5, 3


class Net(nn.Module):
    """Tied, frozen and unused parameters, written buffers (one is in no state dict), dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.unused = nn.Dropout(dropout), nn.Linear(2, 2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(self.drop(self.norm(self.embed(tokens))))
        self.mean.mul_(0.5).add_(hidden.detach().mean(0))
        return self.head(torch.relu(self.second(self.drop(hidden - self.mean))))


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["tokens"])


def batch(step: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(step))}


def workload(dropout: float, seed: int = 0) -> Workload:
    torch.manual_seed(seed)
    return Workload(Net(dropout).double(), batch(0), loss_fn, "net")


@cache
def graph_of(dropout: float) -> OpGraph:
    """Traced once in every process."""
    return as_graph(workload(dropout))


def planned(world_size: int, dropout: float) -> str:
    stages = {1: (0, 0, 0, 0), 2: (0, 0, 1, 1), 3: (0, 1, 1, 2), 4: (0, 1, 2, 3)}[world_size]
    pins = dict(zip(("embed", "first", "second", "head"), stages, strict=True))
    cluster = ClusterSpec.local(world_size)
    return partition(
        graph_of(dropout), cluster, batch_size=8, microbatches=2, pins=pins, strategy="layer"
    ).model_dump_json()


@pytest.fixture(scope="module")
def plans() -> dict[tuple[int, float], str]:
    return {(n, p): planned(n, p) for n, p in ((1, 0.0), (2, 0.0), (3, 0.0), (4, 0.0), (2, 0.5))}


def groups(pairs: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    decayed = [p for name, p in pairs if name.endswith("weight")]
    others = [p for name, p in pairs if not name.endswith("weight")]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.05, betas=(0.8, 0.95)
    )


def deploy(plan_json: str, dropout: float, seed: int = 0, make: Any = groups) -> Engine:
    plan = Plan.from_json(plan_json)
    made, graph = workload(dropout, seed), graph_of(dropout)
    return plan.deploy(made, graph=graph, optimizer=make, seed=7, timeout_seconds=20.0)


def schedule(engine: Engine) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, STEPS)


def draws() -> list[float]:
    return [float(torch.rand(())), random.gauss(0, 1), float(np.random.normal())]


Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor], list[float]]


def go_on(engine: Engine, scheduler: Any, steps: range) -> Result:
    """(losses, state dict, the other state this rank has, what the script draws)."""
    losses = []
    for step in steps:
        losses.append(float(engine.train_step(batch(step), max_grad_norm=0.5)))
        scheduler.step()
    others = {name: buffer.clone() for name, buffer in engine.buffers.items()}
    return losses, engine.state_dict(), others, draws()


def uninterrupted(plan_json: str, dropout: float, folder: str) -> Result:
    """All steps, with a checkpoint on the way that is written while training goes on."""
    with deploy(plan_json, dropout) as engine:
        scheduler = schedule(engine)
        rank = dist.get_rank()
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        draws()
        losses = go_on(engine, scheduler, range(SAVED_AFTER))[0]
        extra = {"scheduler": scheduler.state_dict(), "position": (SAVED_AFTER, torch.arange(3))}
        pending = engine.save(folder, extra, asynchronous=True)
        result = go_on(engine, scheduler, range(SAVED_AFTER, STEPS))
        assert pending.wait().is_dir()
        return (losses + result[0], *result[1:])


def resumed(plan_json: str, dropout: float, folder: str) -> Result:
    with deploy(plan_json, dropout, seed=99) as engine:
        scheduler = schedule(engine)
        extra = engine.load(folder)
        scheduler.load_state_dict(extra["scheduler"])
        position, tensor = extra["position"]
        assert (position, tensor.tolist(), engine.step) == (SAVED_AFTER, [0, 1, 2], SAVED_AFTER)
        assert engine.optimizer.param_groups[0]["betas"] == (0.8, 0.95)
        assert engine.optimizer.param_groups[1]["lr"] == scheduler.get_last_lr()[1] < 0.05
        return go_on(engine, scheduler, range(position, STEPS))


def test_the_same_plan_goes_on_bit_for_bit(plans: Any, pool: WorkerPool, tmp_path: Path) -> None:
    """With dropout, and while the checkpoint was written during further steps."""
    arguments = (plans[2, 0.5], 0.5, str(tmp_path))
    whole = pool.run(uninterrupted, *arguments, world_size=2, timeout_seconds=120.0)
    again = pool.run(resumed, *arguments, world_size=2, timeout_seconds=120.0)
    for (losses, state, buffers, drawn), (more, state2, buffers2, drawn2) in zip(whole, again, strict=True):
        assert losses[SAVED_AFTER:] == more
        assert state.keys() == state2.keys()
        assert all(torch.equal(state[name], state2[name]) for name in state)
        assert all(torch.equal(buffers[name], buffers2[name]) for name in buffers)
        assert drawn == drawn2, "the script's own random numbers go on"
    assert len(set(whole[0][0])) == STEPS


def test_any_number_of_ranks_goes_on(plans: Any, pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(uninterrupted, plans[3, 0.0], 0.0, str(tmp_path), world_size=3, timeout_seconds=120.0)
    losses, state, _, drawn = whole[0]
    mean = next(buffers["mean"] for _, _, buffers, _ in whole if "mean" in buffers)
    for world_size in (1, 2, 3, 4):
        arguments = (plans[world_size, 0.0], 0.0, str(tmp_path))
        again = pool.run(resumed, *arguments, world_size=world_size, timeout_seconds=120.0)
        assert again[0][0] == pytest.approx(losses[SAVED_AFTER:], rel=1e-9)
        for name, tensor in state.items():
            assert torch.allclose(again[0][1][name], tensor, rtol=1e-9, atol=1e-11), (world_size, name)
        found = next(buffers["mean"] for _, _, buffers, _ in again if "mean" in buffers)
        assert torch.allclose(found, mean, rtol=1e-9, atol=1e-11)
        assert (again[0][3] == drawn) is (world_size == 3)


# ------------------------------------------------------------------------------------------ refusals


def refused(said: str, function: Callable[[], Any]) -> PartitionerError:
    with pytest.raises(PartitionerError, match=f"(?s){said}") as caught:
        function()
    return caught.value


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's record, on rank 0, between barriers."""
    dist.barrier()
    if dist.get_rank() == 0:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
    dist.barrier()


def limit_file_size(limit_bytes: int) -> None:
    """As a full disk: writing beyond fails with an OSError."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))


def refusals_of_save(plan_json: str, folder: str) -> None:
    root, rank = Path(folder), dist.get_rank()
    with deploy(plan_json, 0.0) as engine:
        engine.train_step(batch(0))
        refused("there is no such directory", lambda: engine.load(root / "nowhere"))
        for extra in ({"a": [1, {"b": print}]}, {"a": [1, {"b": lambda: 0}]}):
            error = refused("extra cannot be stored", lambda extra=extra: engine.save(root, extra))
            assert "extra/a/1/b is a builtins." in str(error), "rank 0's, on every rank"
        assert not list(root.glob("step-*"))
        (root / f"file{rank}").touch()
        refused("cannot write to .*Not a directory", lambda: engine.save(root / "file0" / "below"))
        refused("keep 0", lambda: engine.save(root, keep=0))

        first = engine.save(root, keep=2).wait()
        engine.train_step(batch(1))
        for asynchronous in (False, True):
            if rank == 1:
                limit_file_size(2000)
            try:
                error = refused(
                    "cannot write .*rank-00001.safetensors.*.*too large",
                    lambda a=asynchronous: engine.save(root, asynchronous=a).wait(),
                )
            finally:
                limit_file_size(resource.RLIM_INFINITY)
            assert isinstance(error, CheckpointError)
            assert "rank 1" in str(error)
            dist.barrier()
            assert [p.name for p in root.glob("step-*")] == [first.name]
            assert (root / "latest").read_text().strip() == first.name
        saved = [engine.save(root, {"number": n}, keep=2).wait() for n in range(3)]
        dist.barrier()
        assert {p.name for p in root.glob("step-*")} == {p.name for p in saved[1:]}
        assert engine.load(root) == {"number": 2}
        assert engine.load(saved[1]) == {"number": 1}
        # An asynchronous save that fails and that nobody waits for is heard of at the next one.
        if rank == 1:
            limit_file_size(2000)
        lost = engine.save(root, asynchronous=True)
        while not lost.done():
            pass
        limit_file_size(resource.RLIM_INFINITY)
        refused("rank-00001", lambda: engine.save(root))
        engine.save(root)
        # So is one of which a single rank does not know how it ended, by all of them.
        for after in (lambda: engine.save(root), engine.state_dict, lambda: engine.load(root)):
            lost = engine.save(root, asynchronous=True)
            while not lost.done():
                pass
            if rank == 1:
                lost._error = RankFailureError("a rank failed or hangs", ["no news of rank 0"])
            error = refused("no news of rank 0.*met by rank 1", after)
            assert isinstance(error, RankFailureError)
        engine.save(root)


def test_saving_fails_on_all_ranks_and_leaves_what_was(plans: Any, pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(refusals_of_save, plans[2, 0.0], str(tmp_path), world_size=2, timeout_seconds=120.0)


def one_group(pairs: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in pairs])


def moved(pairs: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    optimizer = groups(pairs)
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))
    return optimizer


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def refusals_of_load(plan_json: str, folder: str) -> None:
    root, rank = Path(folder), dist.get_rank()
    with deploy(plan_json, 0.0) as engine:
        engine.train_step(batch(0))
        path = engine.save(root).wait()
    record = path / "checkpoint.json"
    text = record.read_text()
    with deploy(plan_json, 0.0) as engine:

        def rename(data: dict[str, Any]) -> None:
            data["tensors"]["model/other.weight"] = data["tensors"].pop("model/second.weight")
            data["tensors"]["model/first.weight"]["shape"] = [8, 9]

        def outside(data: dict[str, Any]) -> None:
            data["tensors"]["model/second.weight"]["pieces"][0]["file"] = "../other.safetensors"

        for change, said in (
            (
                rename,
                r"first.weight is \(8, 9\) there.*1 missing: second.weight.*not in the model: other",
            ),
            (outside, "checkpoint.json is damaged"),
            (lambda data: data.pop("step"), "it lacks step"),
            (lambda data: data.update(version=2), "its version is 2, this reads 1"),
            (lambda data: data.update(optimizer=None), "has no optimizer state"),
        ):
            edit(record, change)
            refused(said, lambda: engine.load(root))
            dist.barrier()
            record.write_text(text)
            dist.barrier()
        if rank == 0:
            record.write_text(text[:-100])
        dist.barrier()
        refused("checkpoint.json is damaged", lambda: engine.load(root))
        dist.barrier()
        record.write_text(text)
        dist.barrier()
        file = path / "rank-00001.safetensors"
        data = file.read_bytes()
        for damage, said in (
            (lambda: flip(file, len(data) - 3), "the checksum of .* is 0x"),
            (lambda: file.write_bytes(data[:-8]), "it is cut off"),
            (file.unlink, "cannot be read: No such file"),
        ):
            dist.barrier()
            if rank == 0:
                damage()
            dist.barrier()
            refused(said, lambda: engine.load(root))
            dist.barrier()
            if rank == 0:
                file.write_bytes(data)
        dist.barrier()
        engine.load(root)
    for make, said in (
        (torch.optim.SGD, "saved by torch.optim.adamw.AdamW, this is torch.optim.sgd.SGD"),
        (one_group, "it has 2 parameter groups, the optimizer 1"),
        (moved, "embed.weight was in group 0, it is in group 1"),
    ):
        with deploy(plan_json, 0.0, make=make) as engine:
            refused(said, lambda: engine.load(root))


def test_what_is_damaged_or_of_something_else_is_refused(
    plans: Any, pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(refusals_of_load, plans[2, 0.0], str(tmp_path), world_size=2, timeout_seconds=120.0)


# ------------------------------------------------------------------------------------------ crashes


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(plan_json: str, folder: str, where: str, asynchronous: bool) -> None:
    with deploy(plan_json, 0.0) as engine:
        engine.train_step(batch(0))
        engine.save(folder, "first")
        engine.train_step(batch(1))
        rank = dist.get_rank()
        if where == "tensors" and rank == 1:
            checkpoint_files._plain = die  # the file is open, and has its header
        if where == "latest" and rank == 0:
            write = checkpoint_directory._write

            def dying(path: Path, text: str) -> None:
                if path.name == "latest":
                    die()
                write(path, text)

            checkpoint_directory._write = dying
        engine.save(folder, "second", asynchronous=asynchronous).wait()


def loaded(plan_json: str, folder: str) -> tuple[Any, int, list[str]]:
    with deploy(plan_json, 0.0, seed=5) as engine:
        extra, step = engine.load(folder), engine.step
        engine.save(folder, "third")
        dist.barrier()
        return extra, step, sorted(p.name for p in Path(folder).glob("step-*"))


@pytest.mark.parametrize(
    ("where", "asynchronous"), thinned([("tensors", True), ("latest", False)], [("latest", False)])
)
def test_a_kill_while_saving_leaves_the_checkpoint_before(
    where: str, asynchronous: bool, plans: Any, pool: WorkerPool, tmp_path: Path
) -> None:
    arguments = (plans[2, 0.0], str(tmp_path), where, asynchronous)
    outcomes = pool.run_each(killed_while_saving, *arguments, world_size=2, timeout_seconds=60.0)
    killed, other = (1, 0) if where == "tensors" else (0, 1)
    assert "exit code -9" in outcomes[killed][1]
    assert "a rank failed or hangs while saving" in outcomes[other][1]
    extra, step, left = pool.run(loaded, *arguments[:2], world_size=2, timeout_seconds=60.0)[0]
    assert (extra, step) == ("first", 1)
    assert len(left) == 1, "what the crash left is gone after the next save"
