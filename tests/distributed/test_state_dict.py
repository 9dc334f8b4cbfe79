"""``engine.state_dict()`` is ``model.state_dict()``, and ``weights=`` is its way back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from cost_models.cluster import ClusterSpec
from cost_models.precision import Precision
from partitioner import Plan, Workload, partition
from partitioner.models.as_graph import as_graph
from runtime.ranks.launch import WorkerError, WorkerPool
from tests.support.batch_norms import count_batches


class Net(nn.Module):
    """Tied, frozen and unused parameters; buffers of every kind; an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.BatchNorm1d(8)
        self.middle, self.unused = nn.Linear(8, 8), nn.Linear(2, 2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.middle.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.register_buffer("shift", torch.zeros(8))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]

    def forward(self, tokens: Tensor) -> Tensor:
        dtype = self.middle.weight.dtype
        hidden = self.norm(self.embed(tokens) + self.shift.to(dtype)).to(dtype)
        return self.head(torch.relu(self.middle(hidden)) * self.scale.to(dtype))


def loss_fn(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["tokens"])


def batch() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(0))}


def workload(dtype: torch.dtype = torch.float64) -> Workload:
    torch.manual_seed(0)
    return Workload(Net().to(dtype), batch(), loss_fn, "net")


def planned(world_size: int, made: Workload, **options: Any) -> str:
    pins = {"embed": 0, "middle": world_size // 2, "head": world_size - 1}
    cluster = ClusterSpec.local(world_size)
    options = {"microbatches": 2, "batch_size": 8, "pins": pins, **options}
    return partition(made, cluster, **{"strategy": "layer", **options}).model_dump_json()


def trained(plan_json: str, dtype: torch.dtype, options: dict[str, Any]) -> list[dict[str, Any]]:
    with Plan.from_json(plan_json).deploy(workload(dtype), timeout_seconds=20.0, **options) as engine:
        before = engine.state_dict()
        engine.train_step(batch())
        return [before, engine.state_dict()]


def expected() -> Net:
    model = workload().model
    assert isinstance(model, Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for piece in batch()["tokens"].split(4):
        (loss_fn(model(piece), {"tokens": piece}) / 2).backward()
    optimizer.step()
    count_batches(model, 1)
    return model


def test_keys_order_and_values_are_the_models(pool: WorkerPool) -> None:
    options = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}
    (before, after), *others = pool.run(trained, planned(3, workload()), torch.float64, options, world_size=3)
    assert others == [[{}, {}]] * 2
    start, end = workload().model.state_dict(), expected().state_dict()
    for found, model in ((before, start), (after, end)):
        assert list(found) == list(model)
        assert found["_extra_state"] == {"version": 3}
        assert found["head.weight"] is found["embed.weight"]
        for name, tensor in model.items():
            if isinstance(tensor, Tensor):
                assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
                assert torch.allclose(found[name], tensor, rtol=1e-12, atol=1e-14), name
    assert all(torch.equal(before[n], t) for n, t in start.items() if isinstance(t, Tensor))
    Net().double().load_state_dict(after, strict=True)


def resumed(plan_json: str, dtype: torch.dtype, folder: str) -> dict[str, Any]:
    """Two steps, saved, two more; then the latter again from the checkpoint. What must agree is compared here."""
    options = {"optimizer": torch.optim.AdamW, "optimizer_kwargs": {"lr": 1e-3}, "timeout_seconds": 20.0}
    plan = Plan.from_json(plan_json)
    runs = []
    for goes_on in (False, True):
        with plan.deploy(workload(dtype), **options) as engine:
            if goes_on:
                engine.load(folder)
            else:
                engine.train_step(batch())
                engine.train_step(batch())
                engine.save(folder)
            leaves = {n: t.detach().clone() for n, t in engine.state.leaves.items()}
            losses = [float(engine.train_step(batch())) for _ in range(2)]
            owners = {n: t.detach().clone() for n, t in engine.parameters.items()}
            runs.append((losses, engine.precision.state_dict(), leaves, owners, engine.state_dict()))
    first, second = runs
    assert first[:2] == second[:2]
    for one, other in zip(first[2:], second[2:], strict=True):
        for name, tensor in one.items():
            assert not isinstance(tensor, Tensor) or torch.equal(tensor, other[name]), name
    wide = [p.dtype for n, p in first[3].items() if n in ("embed.weight", "middle.weight")]
    assert wide == [torch.float32] * len(wide) != []
    return first[4]


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.bfloat16, Precision(master=torch.float32)),
        (torch.float32, Precision(compute=torch.float16, loss_scale="dynamic")),
    ],
    ids=["masters", "float16"],
)
def test_owners_that_are_not_leaves(
    dtype: torch.dtype, precision: Precision, pool: WorkerPool, tmp_path: Path
) -> None:
    """Checkpoints keep owners, so a run goes on bit for bit; the state dict has the model's types."""
    text = planned(2, workload(dtype), precision=precision)
    found = pool.run(resumed, text, dtype, str(tmp_path), world_size=2, timeout_seconds=60.0)[0]
    model = workload(dtype).model.state_dict()
    assert {n: t.dtype for n, t in found.items() if isinstance(t, Tensor)} == {
        n: t.dtype for n, t in model.items() if isinstance(t, Tensor)
    }
    assert not torch.equal(found["middle.weight"], model["middle.weight"])


def hf_model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config)


def hf_workload(device: str = "cpu") -> Workload:
    with torch.device(device):
        model = hf_model()
    ids = torch.randint(0, 37, (4, 8), generator=torch.Generator().manual_seed(0))
    return Workload(model, {"input_ids": ids, "labels": ids.clone()}, None, "gpt2")


def saved_and_loaded(plan_json: str, folder: str) -> dict[str, Any] | None:
    plan = Plan.from_json(plan_json)
    made = hf_workload()
    graph = as_graph(made)
    with plan.deploy(made, graph=graph, timeout_seconds=20.0) as engine:
        engine.train_step(made.example_inputs)
        state = engine.state_dict()
        if state:
            hf_model().save_pretrained(f"{folder}/one", state_dict=dict(state))  # it empties it
            hf_model().save_pretrained(f"{folder}/many", state_dict=dict(state), max_shard_size="8KB")
        engine.save(f"{folder}/checkpoint")
    for source in ("one", "many", "checkpoint"):
        given: dict[str, Any] = {"weights": f"{folder}/{source}", "timeout_seconds": 20.0}
        if source != "one":  # which is without a graph, as from a user who has no weights to trace
            given["graph"] = graph
        with plan.deploy(hf_workload("meta"), **given) as engine:
            again = engine.state_dict()
            assert again.keys() == state.keys()
            assert all(torch.equal(again[name], state[name]) for name in state), source
    return state or None


def test_save_pretrained_and_weights_round_trip(pool: WorkerPool, tmp_path: Path) -> None:
    plan = partition(hf_workload(), ClusterSpec.local(2), batch_size=4, microbatches=2, strategy="layer")
    state = pool.run(saved_and_loaded, plan.model_dump_json(), str(tmp_path), world_size=2)[0]
    assert "transformer.wte.weight" in load_file(tmp_path / "one" / "model.safetensors")
    assert (
        len(json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]) > 10
    )
    for source in ("one", "many"):
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / source).state_dict()
        assert list(loaded) == list(state)
        assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_weights_of_another_model_end_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    save_file({"middle.weight": torch.ones(8, 8), "other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WorkerError, match=r"1 not in the model: other") as caught:
        pool.run(trained, planned(2, workload()), torch.float64, {"weights": str(tmp_path)}, world_size=2)
    assert "10 missing: shift, embed.weight, norm.weight" in str(caught.value)
    assert len(caught.value.errors) == 2
