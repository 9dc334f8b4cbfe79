"""``engine.dataloader``: one order on every rank, loaded only where it is read, resumed with the next batch."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from partitioner import Plan, partition
from partitioner.batches.part_batch import AbsentBatch
from partitioner.engine.engine import Engine
from runtime.ranks.launch import WorkerPool
from tests.distributed import engine_model as net

SAMPLES = 18
"""Two full batches and a short one of 2."""


class Rows:
    """A table as ``datasets`` has it: rows are dictionaries of numbers and lists, several rows at once."""

    def __init__(self, samples: int = SAMPLES, *, noisy: bool = False) -> None:
        self.samples, self.noisy = samples, noisy
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.loaded += indices
        return [row(index, drawn() if self.noisy else 0) for index in indices]


def row(index: int, noise: int = 0) -> dict[str, Any]:
    words = [(index * 3 + place + noise) % net.WORDS for place in range(net.LENGTH)]
    return {"tokens": words, "label": (index * 5 + noise) % net.WORDS, "id": index}


def drawn() -> int:
    """A number of every generator that datasets use."""
    return int(torch.randint(0, 100, ())) + random.randrange(100) + int(np.random.randint(0, 100))


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(self.samples):
            yield row(index, drawn())


def flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain(*lists))


def batch_of(ids: list[int]) -> dict[str, Tensor]:
    rows = [row(index) for index in ids]
    return {
        "tokens": torch.tensor([r["tokens"] for r in rows]),
        "label": torch.tensor([r["label"] for r in rows]),
    }


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


def with_engine(plan_json: str, check: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """In a worker: ``check`` on an engine."""
    given = {"optimizer": net.groups_by_name, "timeout_seconds": 20.0, **options}
    with Plan.from_json(plan_json).deploy(net.workload(), graph=net.graph(), **given) as engine:
        return check(engine, *arguments)


# ----------------------------------------------------------------------------------- training with it


def train_two_epochs(engine: Engine) -> dict[str, Any]:
    rows = Rows()
    loader = engine.dataloader(rows, shuffle=True, seed=3)
    result: dict[str, Any] = {"losses": [], "ids": [], "kinds": set(), "tokens": [], "length": len(loader)}
    for _ in range(2):
        for batch in loader:
            result["losses"].append(engine.train_step(batch).item())
            assert engine.last_step is not None
            result["tokens"].append(engine.last_step.tokens)
            result["kinds"].add(type(batch).__name__)
            result["ids"].append(batch.samples if isinstance(batch, AbsentBatch) else batch["id"].tolist())
    result["loaded"] = len(rows.loaded)
    result["place"] = (engine.data_rank, engine.data_world)
    result["epoch"] = loader.epoch
    return result


def test_training_with_it_equals_training_the_whole_model(plan_json: str, pool: WorkerPool) -> None:
    first, middle, last = pool.run(
        with_engine, plan_json, train_two_epochs, world_size=3, timeout_seconds=90.0
    )
    assert [result["kinds"] for result in (first, middle, last)] == [{"dict"}, {"AbsentBatch"}, {"dict"}]
    assert first["ids"] == last["ids"]
    assert middle["ids"] == [8, 8, 2, 8, 8, 2]
    one, two = flat(first["ids"][:3]), flat(first["ids"][3:])
    assert sorted(one) == sorted(two) == list(range(SAMPLES))
    assert one != two
    assert one != list(range(SAMPLES))
    assert [result["loaded"] for result in (first, middle, last)] == [36, 0, 36]
    whole = net.model()
    optimizer = net.groups_by_name([(n, p) for n, p in whole.named_parameters() if p.requires_grad])
    losses = []
    for ids in first["ids"]:
        optimizer.zero_grad()
        loss, _ = net.loss_fn(whole(batch_of(ids)["tokens"]), batch_of(ids))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    for result in (first, middle, last):
        assert result["losses"] == pytest.approx(losses, rel=1e-10)
        assert result["tokens"] == [8 * net.LENGTH, 8 * net.LENGTH, 2 * net.LENGTH] * 2, (
            "also where none is read"
        )
        assert (result["place"], result["length"], result["epoch"]) == ((0, 1), 3, 2)


# ----------------------------------------------------------------------------------- resuming


def interrupted(engine: Engine, folder: str, resumed: bool) -> list[Any]:
    """Two epochs of noisy rows, saved after the fifth batch; or what comes after it, from what was saved."""
    random.seed(dist.get_rank())  # ranks differ in everything that must not matter
    torch.manual_seed(dist.get_rank())
    loader = engine.dataloader(Rows(noisy=True), shuffle=True, seed=1)
    if resumed:
        loader.load_state_dict(engine.load(folder)["loader"])
    seen: list[Any] = []
    for epoch in range(loader.epoch, 2):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = engine.train_step(batch).item()
            label = None if isinstance(batch, AbsentBatch) else batch["label"].tolist()
            seen.append((loss, label))
            if engine.step == 5 and not resumed:
                engine.save(folder, extra={"loader": loader.state_dict()})
    seen.append({name: p.detach().clone() for name, p in engine.parameters.items()})
    return seen


def test_a_resumed_run_goes_on_with_the_next_batch_bit_for_bit(
    plan_json: str, pool: WorkerPool, tmp_path: Any
) -> None:
    def run(resumed: bool) -> list[Any]:
        return pool.run(
            with_engine,
            plan_json,
            interrupted,
            str(tmp_path),
            resumed,
            world_size=3,
            timeout_seconds=90.0,
        )

    whole, rest = run(False), run(True)
    for before, after in zip(whole, rest, strict=True):
        assert (len(before), len(after)) == (6 + 1, 1 + 1)
        assert before[5:-1] == after[:-1]
        assert all(torch.equal(tensor, after[-1][name]) for name, tensor in before[-1].items())
    labels = [[label for _, label in result[:-1]] for result in whole]
    assert labels[0] == labels[2]
    assert labels[1] == [None] * 6
    plain = [row(index)["label"] for index in range(SAMPLES)]
    assert sorted(flat(labels[0][:3])) != sorted(plain), "the noise is there"


# ----------------------------------------------------------------------------------- streams and refusals


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (UsageError, TypeError, AttributeError) as error:
        return str(error)
    return ""


def streams(engine: Engine) -> dict[str, Any]:
    rank = dist.get_rank()
    loader = engine.dataloader(Stream(11), batch_size=4, seed=7)
    labels = [batch["label"].tolist() for batch in loader]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 2})
    rest = [batch["label"].tolist() for batch in loader]
    uneven = engine.dataloader(Stream(9 if rank == 1 else 8), batch_size=4)
    return {
        "labels": labels,
        "rest": rest,
        "length": refusal(lambda: len(loader)),
        "uneven": refusal(lambda: list(uneven)),
    }


def choices(engine: Engine) -> dict[str, Any]:
    rank = dist.get_rank()
    rows: Any = Rows()
    weighted = WeightedRandomSampler([1.0] * 5 + [0.0] * 13, 6)
    torch.manual_seed(rank)
    by_weight = engine.dataloader(rows, sampler=weighted, batch_size=3, everywhere=True)
    drop = engine.dataloader(Rows() if rank != 1 else None, drop_last=True)
    absent = next(iter(drop))
    loop = iter(by_weight)
    next(loop)
    list(by_weight)
    make = engine.dataloader
    return {
        "weighted": [batch["id"].tolist() for batch in by_weight],
        "dropped": len(drop),
        "absent": refusal(lambda: absent["tokens"]) if rank == 1 else "",
        "items": refusal(lambda: absent.items()) if rank == 1 else "",
        "two loops": refusal(lambda: next(loop)),
        "lengths": refusal(lambda: make(Rows(17 + rank))),
        "none": refusal(lambda: make(None)),
        "seeds": refusal(lambda: make(rows, seed=rank)),
        "distributed": refusal(lambda: make(rows, sampler=DistributedSampler(rows))),
        "one rank": refusal(lambda: make(rows, sampler=weighted, shuffle=rank == 2)),
        "size": refusal(lambda: make(rows, batch_size=0)),
        "generator": refusal(lambda: make(rows, generator=torch.Generator())),
        "state": refusal(lambda: make(rows, seed=1).load_state_dict(drop.state_dict())),
        "kinds": refusal(lambda: make(Stream(3) if rank == 0 else rows)),
    }


def test_streams_are_read_everywhere_and_end_together(plan_json: str, pool: WorkerPool) -> None:
    results = pool.run(with_engine, plan_json, streams, world_size=3, timeout_seconds=60.0)
    for result in results:
        assert result["labels"] == results[0]["labels"]
        assert [len(labels) for labels in result["labels"]] == [4, 4, 3]
        assert result["rest"] == result["labels"][2:]
        assert "no length" in result["length"]
        assert "the dataset has more batches on some ranks than on others" in result["uneven"]
        assert "rank 0 has no batch 2\n" in result["uneven"]
        assert "rank 1 has a batch 2\n" in result["uneven"]


def test_what_would_load_different_batches_is_refused_on_every_rank(plan_json: str, pool: WorkerPool) -> None:
    results = pool.run(with_engine, plan_json, choices, world_size=3, timeout_seconds=60.0)
    expected = {
        "two loops": "another loop over this data loader has begun",
        "lengths": "samples: 17 on rank 0, 18 on rank 1, 19 on rank 2",
        "none": "rank 0 was given no dataset, and its part of the model reads inputs",
        "seeds": "seed: 0 on rank 0, 1 on rank 1, 2 on rank 2",
        "distributed": "a DistributedSampler gives each rank other samples",
        "one rank": "sampler= and shuffle=True are two orders",
        "size": "batch_size is 0, expected 1 or more",
        "generator": "generator is not taken",
        "state": "seed was 0, now 1",
        "kinds": "kind: iterable on rank 0, by index on rank 1, by index on rank 2",
    }
    for rank, result in enumerate(results):
        for name, text in expected.items():
            assert text in result[name], (rank, name, result[name])
        assert result["weighted"] == results[0]["weighted"]
        assert {index for ids in result["weighted"] for index in ids} <= set(range(5))
        assert result["dropped"] == 2
    assert "this rank did not load the batch, so it has no 'tokens'" in results[1]["absent"]
    assert "everywhere=True" in results[1]["items"]


# ----------------------------------------------------------------------------------- comparing batches


def shuffled_alone(engine: Engine) -> list[Any]:
    """Each rank shuffles by itself: what a loader that knows nothing of ranks does."""
    rank = dist.get_rank()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(rank))
    data = {name: tensor[order] for name, tensor in net.batch().items()}
    said = [refusal(lambda: engine.train_step(data))]
    mine = {"tokens": net.batch()["tokens"]} if rank < 2 else {"label": data["label"]}
    said.append(
        refusal(lambda: engine.train_step(mine))
    )  # nothing to compare: each leaf is on ranks that agree
    said.append(refusal(lambda: engine.train_step(data)))  # the third batch is not compared any more
    return [*said, engine.step]


def test_batches_that_differ_between_ranks_are_named(plan_json: str, pool: WorkerPool) -> None:
    results = pool.run(with_engine, plan_json, shuffled_alone, world_size=3, timeout_seconds=60.0)
    for first, second, third, step in results:
        assert "ranks were given different batches" in first
        assert "tokens: one on rank 0; another on rank 1; another on rank 2" in first
        assert (second, third, step) == ("", "", 2)
    (unchecked, *_), *_ = pool.run(
        with_no_check, plan_json, shuffled_alone, world_size=3, timeout_seconds=60.0
    )
    assert unchecked == ""


def with_no_check(plan_json: str, check: Callable[..., Any]) -> Any:
    return with_engine(plan_json, check, check_batches=0)


# ----------------------------------------------------------------------------------- a dataset that fails


class Torn(Rows):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        raise OSError("the file is torn")


def reads_torn(engine: Engine) -> None:
    loader = engine.dataloader(Torn() if dist.get_rank() == 2 else Rows())
    for batch in loader:
        engine.train_step(batch)


def test_what_loading_raises_on_one_rank_is_told_to_the_others(plan_json: str, pool: WorkerPool) -> None:
    outcomes = pool.run_each(with_little_time, plan_json, reads_torn, world_size=3, timeout_seconds=30.0)
    assert [ok for ok, _ in outcomes] == [False] * 3
    *others, culprit = (text for _, text in outcomes)
    assert culprit.rstrip().endswith("OSError: the file is torn")
    for text in others:
        assert "rank 2 failed or hangs" in text
        assert "rank 2 reported: OSError: the file is torn" in text
    # Nothing is still under way: a process group waits for its works where it is collected, a minute here.
    pool.run(gc.collect, world_size=2, timeout_seconds=20.0)


def with_little_time(plan_json: str, check: Callable[..., Any]) -> Any:
    return with_engine(plan_json, check, timeout_seconds=3.0)
