"""Batches in parts: every rank loads the samples that it reads, and trains as on whole batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError, PlanError, UsageError
from partitioner import Plan, Workload, partition
from partitioner.batches.part_batch import PartBatch
from partitioner.batches.step import BatchCuts
from partitioner.models.as_graph import as_graph
from passes.graph.graph import OpGraph
from runtime.ranks.launch import WorkerPool
from tests.support.batch_norms import count_batches
from tests.support.matrix import thinned

WORDS, WIDTH, LENGTH, SAMPLES, MICROBATCHES = 12, 8, 4, 8, 2
ROWS = 22
"""Two full batches and one of 6."""


class Net(nn.Module):
    """tokens (b, 4) -> logits (b, 4, 12), with statistics of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(LENGTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.down(F.gelu(self.up(self.norm(self.embed(tokens)))))
        return logits


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Means over the labels that count, the loss weighted by class."""
    labels = batch["labels"].flatten()
    weight = torch.linspace(0.5, 2.0, WORDS, dtype=output.dtype)
    loss = F.cross_entropy(output.flatten(0, 1), labels, ignore_index=-100)
    weighted = F.cross_entropy(output.flatten(0, 1), labels, weight=weight, ignore_index=-100)
    valid = (labels != -100).to(output.dtype)
    right = (output.flatten(0, 1).argmax(-1) == labels) * valid
    return loss + weighted, {"hits": right.sum() / valid.sum()}


class Rows:
    """Samples 0 to 21; unlike numbers of labels count. Remembers what was asked of it."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.loaded.append(index)
        drawn = torch.Generator().manual_seed(index)
        tokens, labels = torch.randint(0, WORDS, (2, LENGTH), generator=drawn)
        labels[: index % (LENGTH + 1)] = -100
        return {"tokens": tokens, "labels": labels}


def model() -> Net:
    made = Net()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return made.double()


def collated(indices: Any) -> dict[str, Tensor]:
    rows = [Rows()[index] for index in indices]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def workload() -> Workload:
    return Workload(model(), collated(range(SAMPLES)), loss_fn, "net")


PLACED = {
    "by samples": ((2,), "data"),
    "by samples and columns": ((2, 2), "data column_row"),
    "by samples twice": ((2, 2), "zero1 data"),
    "columns and rows": ((2,), "column_row"),
}
FIXED = {"stages of replicas": ("pipeline=2 data=2", None), "one, then replicas": ("groups=1,2", "data")}
"""Two stages: what is fixed of them, and the layout of the last one's inputs."""


@functools.cache
def graph() -> OpGraph:
    """Made once in every process."""
    return as_graph(workload())


def made_plan(name: str) -> str:
    size: dict[str, Any] = {"batch_size": SAMPLES, "microbatches": MICROBATCHES}
    if name in FIXED:
        fix, pattern = FIXED[name]
        pins = {} if pattern is None else {"stage 1:*": pattern}
        cluster = ClusterSpec.local(4 if pattern is None else 3)
        given = {"fix": f"{fix} borders=up", "pins": pins, **size}
        return partition(graph(), cluster, strategy="hybrid", **given).model_dump_json()
    mesh, patterns = PLACED[name]
    return partition(
        graph(),
        ClusterSpec.local(math.prod(mesh)),
        strategy="feature",
        mesh=mesh,
        pins={"*": patterns},
        **size,
    ).model_dump_json()


OPTIONS: dict[str, Any] = {
    "optimizer": torch.optim.SGD,
    "optimizer_kwargs": {"lr": 0.1},
    "timeout_seconds": 30.0,
    "check_memory": False,
}


def run(plan_json: str, everywhere: bool) -> Any:
    """In a worker: an epoch of training and one of evaluation. What happened, and what was loaded."""
    rows, trained, evaluated, kinds = Rows(), [], [], set()
    with Plan.from_json(plan_json).deploy(workload(), graph=graph(), **OPTIONS) as engine:
        loader = engine.dataloader(
            rows, everywhere=everywhere, drop_last=engine.executor.batch_spec.multiple == 4
        )
        for batch in loader:
            kinds.add(type(batch).__name__)
            engine.train_step(batch)
            info = engine.last_step
            assert info is not None
            trained.append((float(info.loss), float(info.metrics["hits"]), info.samples, info.tokens))
        loaded = rows.loaded[:]
        for batch in engine.dataloader(rows, everywhere=everywhere, batch_size=10):
            found = engine.eval_step(batch, gather="all")
            evaluated.append(found)
        place = engine.data_rank, engine.data_world
        return trained, evaluated, kinds, loaded, place, engine.state_dict()


def reference(batches: list[range]) -> tuple[list[tuple[float, float, int, int]], nn.Module]:
    """The unpartitioned model: batch norm sees micro-batches, the loss is the whole batch's."""
    made, steps = model().train(), []
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for indices in batches:
        whole = collated(indices)
        pieces = torch.split(whole["tokens"], _sizes(len(indices)))
        output = torch.cat([made(piece) for piece in pieces])
        loss, metrics = loss_fn(output, whole)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps.append((float(loss.detach()), float(metrics["hits"]), len(indices), whole["tokens"].numel()))
    count_batches(made, len(batches))
    return steps, made


def _sizes(samples: int) -> list[int]:
    """6 samples, shared by two: 4 and 2."""
    return {8: [4, 4], 6: [4, 2]}[samples]


@pytest.mark.parametrize(
    "name",
    thinned(
        ["by samples", "by samples and columns", "by samples twice", "stages of replicas"],
        ["by samples and columns", "stages of replicas"],
    ),
)
def test_parts_train_as_whole_batches(pool: WorkerPool, name: str) -> None:
    """Also the inputs of a first stage and the labels of a last one."""
    text = made_plan(name)
    world = Plan.from_json(text).world_size
    four = name == "by samples twice"
    batches = [range(8), range(8, 16)] if four else [range(8), range(8, 16), range(16, 22)]
    steps, made = reference(batches)
    for everywhere in (False, True)[: 2 if world == 2 else 1]:
        results = pool.run(run, text, everywhere, world_size=world, timeout_seconds=120.0)
        for trained, evaluated, kinds, loaded, place, _ in results:
            for found, expected in zip(trained, steps, strict=True):
                assert found == pytest.approx(expected, rel=1e-12)
            assert kinds == ({"dict"} if everywhere else {"PartBatch"})
            assert place[1] == (4 if four else 2)
            if everywhere:
                assert loaded == [index for batch in batches for index in batch]
            check_evaluations(evaluated, made.eval())
        parts = {place[0]: loaded for _, _, _, loaded, place, _ in results}
        if not everywhere:
            assert sorted(index for part in parts.values() for index in part) == [
                i for b in batches for i in b
            ]
            assert parts[0][:4] == ([0, 4, 8, 12] if four else [0, 1, 4, 5])
        state = results[0][-1]
        for key, tensor in made.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-12, atol=1e-12)


def check_evaluations(evaluated: list[Any], made: nn.Module) -> None:
    """Of batches of 10, 10 and 2, larger than planned; 10 and 2 samples are no multiple of four."""
    for found, indices in zip(evaluated, (range(10), range(10, 20), range(20, 22)), strict=True):
        whole = collated(indices)
        with torch.no_grad():
            output = made(whole["tokens"])
            loss, metrics = loss_fn(output, whole)
        assert float(found.loss) == pytest.approx(float(loss), rel=1e-12)
        assert float(found.metrics["hits"]) == pytest.approx(float(metrics["hits"]), rel=1e-12)
        assert found.samples == len(indices)
        assert float(found.tokens) == pytest.approx(float((whole["labels"] != -100).sum()), rel=1e-12)
        torch.testing.assert_close(found.outputs["output"], output, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------
# What cannot be


def errors(plan_json: str) -> Any:
    """In a worker: what is refused, on every rank, and the engine goes on."""
    with Plan.from_json(plan_json).deploy(workload(), graph=graph(), **OPTIONS) as engine:
        texts = []
        (part, *_) = iter(engine.dataloader(Rows()))
        assert isinstance(part, PartBatch)
        for wrong in (
            lambda: part["tokens"],
            lambda: engine.train_step(collated(range(5))),
            lambda: engine.train_step(PartBatch(collated(range(3)), 8, part.place)),
            lambda: engine.train_step(
                PartBatch(collated(range(4)), 8, type(part.place)(0, 2, BatchCuts(8, 4, multiple=2)))
            ),
        ):
            texts.append(refusal(wrong))
        kinds = [type(batch).__name__ for batch in engine.dataloader(Rows(), batch_size=7)]
        return texts, kinds, (engine.data_rank, engine.data_world)


def refusal(call: Any) -> str:
    try:
        call()
    except (PlanError, UsageError) as error:
        return str(error)
    return ""


def test_what_cannot_be_shared_is_refused_or_loaded_whole(pool: WorkerPool) -> None:
    results = pool.run(errors, made_plan("by samples"), world_size=2, timeout_seconds=90.0)
    for rank, (texts, kinds, place) in enumerate(results):
        assert "batch.batch" in texts[0] or "attribute batch" in texts[0]
        assert "5 samples" in texts[1]
        assert "multiple of 2" in texts[1]
        assert "drop_last=True" in texts[1]
        assert "tokens has 3 samples" in texts[2]
        assert "loaded for another engine" in texts[3]
        assert kinds == ["dict", "dict", "dict", "dict"], "7 and 1 samples cannot be shared by two"
        assert place == (rank, 2)


def other_samples(plan_json: str) -> str:
    """In a worker: rank 1 was given other samples than rank 3, which reads the same part."""
    with Plan.from_json(plan_json).deploy(workload(), graph=graph(), **OPTIONS) as engine:
        (batch, *_) = iter(engine.dataloader(Rows()))
        if dist.get_rank() == 1:
            batch.batch["labels"][0, 0] += 1
        try:
            engine.train_step(batch)
        except PartitionerError as error:
            return str(error)
    return ""


def test_ranks_with_the_same_part_are_compared(pool: WorkerPool) -> None:
    text = made_plan("by samples and columns")
    for error in pool.run(other_samples, text, world_size=4, timeout_seconds=90.0):
        assert "ranks were given different batches" in error
        assert "labels of part 0: one on rank 0; another on rank 1" in error


def whole(plan_json: str) -> Any:
    with Plan.from_json(plan_json).deploy(workload(), graph=graph(), **OPTIONS) as engine:
        return [type(batch).__name__ for batch in engine.dataloader(Rows())], engine.data_world


def test_ranks_that_read_all_samples_load_them(pool: WorkerPool) -> None:
    text = made_plan("columns and rows")
    for kinds, world in pool.run(whole, text, world_size=2, timeout_seconds=90.0):
        assert kinds == ["dict"] * 3
        assert world == 1


def test_stages_with_unlike_parts_load_whole_batches(pool: WorkerPool) -> None:
    """Parts draw by themselves: a first stage that has all inputs would mask others than the last one's labels."""
    text = made_plan("one, then replicas")
    (stage,) = (stage.sharding for stage in Plan.from_json(text).stages[1:])
    assert stage is not None
    assert "labels" in stage.batch
    results = pool.run(run, text, False, world_size=3, timeout_seconds=90.0)
    steps, made = reference([range(8), range(8, 16), range(16, 22)])
    for trained, evaluated, kinds, loaded, place, _ in results:
        assert (kinds, place, loaded) == ({"dict"}, (0, 1), list(range(ROWS)))
        for found, expected in zip(trained, steps, strict=True):
            assert found == pytest.approx(expected, rel=1e-12)
        check_evaluations(evaluated, made.eval())
