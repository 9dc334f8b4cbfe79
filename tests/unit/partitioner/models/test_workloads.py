"""MODEL on the command line: files, modules, configs, bundled names, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from cost_models.errors import ModelError, UsageError
from partitioner.models import hugging_face as hf_models
from partitioner.models.bundled import NAMES, bundled
from partitioner.models.load import load_workload, parse_settings
from partitioner.models.workload import Workload

FACTORY = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from partitioner.models.workload import Workload

@dataclass
class Width:
    value: int

def mlp(width: int = 4, bias: bool = True, scale: float = 1.0, label: str = "x", batch: int = 2, depth: int | None = None):
    return Workload(torch.nn.Linear(width, 2, bias=bias), torch.randn(batch, width) * scale, name=label)

def wrong():
    return torch.nn.Linear(2, 2)

def broken():
    raise RuntimeError("out of luck")

def needs(width: int):
    return mlp(width)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_models.py"
    path.write_text(FACTORY)
    return path


def test_a_factory_in_a_file(file: Path) -> None:
    workload = load_workload(
        f"{file}:mlp", settings={"width": "7", "bias": "no", "scale": "1e-3", "label": "5"}
    )
    assert workload.model.in_features == 7
    assert workload.model.bias is None
    assert workload.name == "5"
    assert load_workload(f"{file}:mlp", batch=5).example_inputs.shape == (5, 4)


def test_a_factory_in_a_module() -> None:
    workload = load_workload("examples.unet:unet", settings={"channels": "4", "depth": "2", "size": "16"})
    assert isinstance(workload, Workload)
    assert workload.loss_fn is not None


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("{file}:mpl", {}, "mlp"),
        ("{file}:torch_", {}, "has no function"),
        ("nowhere.py:f", {}, "there is no file"),
        ("no.such.module:f", {}, "cannot load"),
        ("gtp2", {}, "gpt2"),
        ("{file}:mlp", {"widht": "3"}, "width (int)"),
        ("{file}:mlp", {"width": "wide"}, "expected int"),
        ("{file}:mlp", {"bias": "maybe"}, "expected bool"),
        ("{file}:needs", {}, "width has no default"),
        ("gpt2", {"size": "huge"}, "'full' or 'tiny'"),
        ("hf:/nowhere/config.json", {}, "cannot read"),
    ],
)
def test_wrong_names_and_settings_are_usage_errors(
    file: Path, text: str, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_workload(text.format(file=file), settings=settings)
    assert message in str(caught.value)


def test_every_wrong_setting_is_listed(file: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_workload(f"{file}:mlp", settings={"width": "wide", "depht": "3"}, seq=128)
    assert len(caught.value.because) == 3


def test_a_size_given_twice() -> None:
    with pytest.raises(UsageError, match="seq is given twice"):
        load_workload("gpt2", settings={"seq": "8"}, seq=16)


@pytest.mark.parametrize(("name", "message"), [("wrong", "not a Workload"), ("broken", "out of luck")])
def test_factories_that_fail_are_model_errors(file: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_workload(f"{file}:{name}")


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("import torch\n1 / 0\n")
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        load_workload(f"{path}:f")


def test_settings_follow_annotations_or_defaults() -> None:
    def factory(a: int | None = None, b: Literal["x", "y"] = "x", c=2.0, d=False, e: float | str = 0.0):  # type: ignore[no-untyped-def]
        return None

    found = parse_settings(factory, {"a": "3", "b": "y", "c": "1", "d": "true", "e": "auto"})
    assert found == {"a": 3, "b": "y", "c": 1.0, "d": True, "e": "auto"}
    assert isinstance(found["c"], float)


@pytest.mark.parametrize("name", NAMES)
def test_tiny_bundled_models_give_a_loss_in_double_precision(name: str) -> None:
    workload = bundled(name, size="tiny", dtype="float64", batch=3)
    assert not any(p.is_meta for p in workload.model.parameters())
    assert sum(p.numel() for p in workload.model.parameters()) < 300_000
    loss = workload.model(**workload.example_inputs).loss
    assert all(p.dtype == torch.float64 for p in workload.model.parameters())
    assert bool(loss.isfinite())
    loss.backward()
    again = bundled(name, size="tiny", dtype="float64", batch=3)
    assert all(
        torch.equal(a, b) for a, b in zip(again.model.parameters(), workload.model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-1b", 1.236e9),
        ("llama-8b", 8.03e9),
        ("llama-70b", 70.55e9),
        ("llama-405b", 405.85e9),
        ("mixtral", 46.7e9),
    ],
)
def test_big_models_are_on_meta_with_the_published_sizes(name: str, parameters: float) -> None:
    workload = bundled(name, seq=128)
    assert all(p.is_meta for p in workload.model.parameters())
    assert all(p.dtype == torch.bfloat16 for p in workload.model.parameters())
    count = sum(p.numel() for p in workload.model.parameters())
    assert count == pytest.approx(parameters, rel=0.002)
    assert workload.example_inputs["input_ids"].shape == (2, 128)


def test_settings_of_bundled_models() -> None:
    workload = load_workload("bert", settings={"size": "tiny", "layers": "1"}, seq=12, dtype="bf16")
    assert len(workload.model.bert.encoder.layer) == 1
    assert workload.model.dtype == torch.bfloat16
    assert workload.example_inputs["labels"].shape == (2, 12)
    with pytest.raises(UsageError, match="layers"):
        load_workload("resnet50", settings={"size": "tiny", "layers": "3"})
    with pytest.raises(UsageError, match="unknown dtype"):
        load_workload("bert", settings={"size": "tiny"}, dtype="int7")


def test_a_hugging_face_config_without_weights(tmp_path: Path) -> None:
    config = bundled("llama-1b", size="tiny").model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    path = tmp_path / "my-llama" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    workload = load_workload(f"hf:{path}", seq=9, dtype="bfloat16")
    assert workload.name == "my-llama"
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in workload.model.parameters())
    assert workload.example_inputs["input_ids"].shape == (2, 9)
    assert load_workload(f"hf:{path.parent}").example_inputs["input_ids"].shape == (2, 64)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, UsageError),
        ({"model_type": "nonsense"}, ModelError),
        ({"model_type": "llama"}, ModelError),
        ({"model_type": "llama", "architectures": ["LlamaModel"], "num_hidden_layers": 1}, ModelError),
    ],
)
def test_unusable_configs(tmp_path: Path, fields: dict[str, object], error: type[Exception]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(error):
        load_workload(f"hf:{path}")


@pytest.mark.parametrize("name", ["set_seed", "LlamaConfig", "nothing", 3])
def test_a_config_names_a_model_class_and_nothing_else(tmp_path: Path, name: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "architectures": [name]}))
    with pytest.raises(ModelError, match="does not say which model class"):
        load_workload(f"hf:{path}")


def test_without_transformers_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_models, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        load_workload("gpt2")
    assert "pip install" in caught.value.suggestions[0]


FILE = """import torch
from torch import nn
from partitioner import Workload


class Own(nn.Linear):
    pass


def factory():
    return Workload(Own(2, 2), torch.zeros(4, 2), lambda output, batch: output.sum())
"""


def test_a_file_is_imported_by_its_own_name(tmp_path: Path) -> None:
    """Other processes find its classes by that name; a name that another module has is left to it."""
    free, taken = tmp_path / "a_file_of_this_test.py", tmp_path / "json.py"
    for file in (free, taken):
        file.write_text(FILE)
    assert type(load_workload(f"{free}:factory").model).__module__ == "a_file_of_this_test"
    assert type(load_workload(f"{free}:factory").model).__module__ == "a_file_of_this_test"
    assert type(load_workload(f"{taken}:factory").model).__module__ == "partitioner_workload_json"
    other = tmp_path / "elsewhere" / free.name
    other.parent.mkdir()
    other.write_text(FILE)
    assert type(load_workload(f"{other}:factory").model).__module__ == f"partitioner_workload_{free.stem}"
