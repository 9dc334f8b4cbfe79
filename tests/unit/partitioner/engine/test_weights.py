"""``weights=``: what is found, what is refused and with which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cost_models.errors import CheckpointError, ModelError
from cost_models.precision import Precision
from partitioner.engine.weights import INDEX, SINGLE, StateKeys, weights_of
from tests.support.materialize import materialize


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]


def stored() -> dict[str, Tensor]:
    """What ``save_pretrained`` would write: every tensor once."""
    torch.manual_seed(0)
    state = {n: t for n, t in Net().state_dict().items() if isinstance(t, Tensor)}
    del state["head.weight"]
    return {name: torch.randn(t.shape) if t.is_floating_point() else t + 7 for name, t in state.items()}


def load(source: Path, model: nn.Module | None = None, **precision: torch.dtype) -> dict[str, Tensor]:
    model = Net() if model is None else model
    keys = StateKeys.of(model, Precision(**precision))
    names = sorted({entry.name for entry in keys.entries.values()} | {"table"})
    return materialize(names, model=model, weights=weights_of(source, keys, model))


def check(found: dict[str, Tensor]) -> None:
    for name, value in stored().items():
        assert torch.equal(found[name], value), name
    assert torch.equal(found["table"], torch.arange(3.0))


def sharded(folder: Path) -> dict[str, str]:
    """As Hugging Face shards: two files and an index."""
    names = sorted(stored())
    parts = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, held in parts.items():
        save_file({name: stored()[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_a_file_a_directory_and_an_index(tmp_path: Path) -> None:
    save_file(stored(), tmp_path / SINGLE)
    check(load(tmp_path / SINGLE))
    check(load(tmp_path))
    (tmp_path / SINGLE).unlink()
    sharded(tmp_path)
    check(load(tmp_path))


def test_a_tied_name_under_any_alias(tmp_path: Path) -> None:
    renamed = {("head.weight" if n == "embed.weight" else n): t for n, t in stored().items()}
    save_file(renamed, tmp_path / "f.safetensors")
    check(load(tmp_path / "f.safetensors"))
    both = {**stored(), "head.weight": stored()["embed.weight"].clone()}
    save_file(both, tmp_path / "f.safetensors")
    check(load(tmp_path / "f.safetensors"))
    save_file({**both, "head.weight": torch.zeros(5, 4)}, tmp_path / "f.safetensors")
    with pytest.raises(
        ModelError, match=r"embed.weight is tied in the model, and stored with different values"
    ):
        load(tmp_path / "f.safetensors")


def test_other_floating_types_are_converted(tmp_path: Path) -> None:
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in stored().items()}
    save_file(half, tmp_path / "f.safetensors")
    found = load(tmp_path / "f.safetensors")
    assert found["embed.weight"].dtype == torch.float32
    assert torch.equal(found["embed.weight"], half["embed.weight"].float())


def test_everything_that_differs_is_named(tmp_path: Path) -> None:
    changed = stored()
    del changed["norm.bias"]
    changed |= {"other": torch.ones(2), "norm.weight": torch.ones(3)}
    changed["norm.num_batches_tracked"] = torch.tensor(1.5)
    save_file(changed, tmp_path / "f.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "f.safetensors")
    text = str(caught.value)
    assert "norm.weight is (3,) there, (4,) in the model" in text
    assert "norm.num_batches_tracked is torch.float32 there, torch.int64 in the model" in text
    assert "1 missing: norm.bias" in text
    assert "1 not in the model: other" in text


@pytest.mark.parametrize(
    ("rename", "said"), [("base.{}", "have the prefix 'base.'"), (None, "lack the prefix 'net.'")]
)
def test_a_prefix_is_recognized(rename: str | None, said: str, tmp_path: Path) -> None:
    names = {name: rename.format(name) if rename else name for name in stored()}
    save_file({names[name]: t for name, t in stored().items()}, tmp_path / "f.safetensors")
    model: nn.Module = Net()
    if rename is None:
        model = nn.Sequential()
        model.add_module("net", Net())
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path / "f.safetensors", model)


def test_a_buffer_that_the_model_derives_is_left_to_it(tmp_path: Path) -> None:
    save_file({**stored(), "table": torch.zeros(3)}, tmp_path / "f.safetensors")
    check(load(tmp_path / "f.safetensors"))


def test_incomplete_and_strange_indices(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    first = "model-00001-of-00002.safetensors"
    data = (tmp_path / first).read_bytes()
    (tmp_path / first).write_bytes(data[:-3])
    with pytest.raises(CheckpointError, match="it is cut off"):
        load(tmp_path)
    (tmp_path / first).unlink()
    with pytest.raises(CheckpointError, match=f"{first} is not there"):
        load(tmp_path)
    (tmp_path / first).write_bytes(data)
    for content, said in (
        ({"weight_map": {**weight_map, "more": first}}, f"more is not in {first}"),
        ({"weight_map": {"w": "../secret.safetensors"}}, "names files elsewhere"),
        ({"weight_map": [1]}, "cannot be read"),
        ({"weight_map": {"w": 3}}, "cannot be read"),
        ({}, "cannot be read"),
    ):
        (tmp_path / INDEX).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path)


def test_pickles_and_nothing_are_refused(tmp_path: Path) -> None:
    torch.save(stored(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"(?s)it is a pickle.*save_pretrained"):
        load(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"(?s)it has pytorch_model.bin.*save_pretrained"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "nowhere")
    (tmp_path / "odd.safetensors").write_bytes((tmp_path / "pytorch_model.bin").read_bytes())
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load(tmp_path / "odd.safetensors")


def test_keys_are_those_of_the_state_dict() -> None:
    model = Net()
    keys = StateKeys.of(model, Precision())
    assert list(keys.order) == list(model.state_dict())
    assert keys.others == {"_extra_state": {"version": 3}}
    assert keys.entries["head.weight"].name == "embed.weight"
    assert keys.not_saved == {"table"}
    assert keys.entries["norm.num_batches_tracked"].dtype == torch.int64
    halved = StateKeys.of(model, Precision(parameters=torch.bfloat16, master=torch.float32))
    assert halved.entries["embed.weight"].dtype == torch.bfloat16
    assert halved.entries["norm.weight"].dtype == torch.float32, "a batch norm keeps its type"
