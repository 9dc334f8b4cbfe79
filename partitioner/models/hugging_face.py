"""Hugging Face models from a config alone: built offline, with a batch that fits them.

config.json ─► model class (its "architectures" entry) ─► model, on meta or with seeded random weights
            └► what it reads (token ids, pixels, log-mel frames), what its labels look like ─► example batch
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_models.errors import ModelError, UsageError
from partitioner.models.workload import Workload
from passes.copies.float64 import default_dtype

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
DEFAULT_SEQ = 512
LABEL_KINDS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")


def transformers_module(wanted_by: str) -> Any:
    """Import the ``transformers`` package. Raises a ModelError that says how to get it."""
    if find_spec("transformers") is None:
        raise ModelError(
            f"{wanted_by} needs the package transformers, which is not installed",
            suggestions=["pip install 'partitioner[hf]'", "file.py:factory with a model of your own"],
        )
    import transformers

    return transformers


def parse_dtype(text: str) -> torch.dtype:
    """Read the name of a data type: "bf16" or "bfloat16" -> torch.bfloat16."""
    name = text.removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError(f"unknown dtype {text!r}", suggestions=[f"one of {' '.join(_DTYPES)}"])
    return _DTYPES[name]


def from_config_file(path: Path, seq: int = 0, dtype: str = "", batch: int = 2) -> Workload:
    """Build the model of a ``config.json``, without weights. ``seq`` 0: 512, or the model's longest if shorter."""
    transformers = transformers_module(f"hf:{path}")
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}", [str(error)], ["hf:PATH/config.json"]) from error
    kind = fields.pop("model_type", None) if isinstance(fields, dict) else None
    if kind is None:
        raise UsageError(f"{file} is no Hugging Face config", ["it has no model_type"])
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
    except ValueError as error:
        raise ModelError(f"{file} has a model_type that transformers does not know", [f"{kind!r}"]) from error
    name = (fields.get("architectures") or [None])[0]
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise ModelError(
            f"{file} does not say which model class it is for",
            [f"architectures is {fields.get('architectures')!r}"],
            ['add "architectures": ["LlamaForCausalLM"] (the class to build) to it'],
        )
    stored = str(getattr(config, "dtype", None) or "float32")
    built = build(model_class, config, parse_dtype(dtype or stored), on_meta=True)
    return Workload(built, example_batch(built, seq, batch), name=file.resolve().parent.name)


def build(model_class: Any, config: Any, dtype: torch.dtype, *, on_meta: bool, seed: int = 0) -> Any:
    """Build the model with random weights from ``seed``, or without any.

    Parameters are made in ``dtype``; tables that the model computes in 32 bits on purpose (rotary) stay so.
    """
    with default_dtype(dtype), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.device("meta" if on_meta else "cpu"):
            return model_class(config)


# --------------------------------------------------------------------------------------------------
# Example batches


def example_batch(model: Any, seq: int = 0, batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Make a batch of ``batch`` samples that the model turns into a loss.

    ``input_ids`` (batch, seq), ``pixel_values`` (batch, channels, height, width) or ``input_features``
    (batch, mel bins, frames), depending on the model's main input; the labels depend on its class.
    """
    config = model.config
    numbers = torch.Generator().manual_seed(seed)
    main = model.main_input_name
    text = getattr(config, "get_text_config", lambda: config)()
    longest = _first(text, "max_position_embeddings", "n_positions", "max_target_positions") or DEFAULT_SEQ
    seq = seq or min(DEFAULT_SEQ, longest)
    vocabulary = getattr(text, "vocab_size", 0)
    if main == "input_ids":
        inputs = torch.randint(vocabulary, (batch, seq), generator=numbers)
    elif main == "pixel_values":
        size = _first(config, "image_size") or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        inputs = torch.randn(batch, channels, height, width, generator=numbers, dtype=model.dtype)
    elif main == "input_features":
        frames = 2 * config.max_source_positions  # the encoder's convolution halves them
        inputs = torch.randn(batch, config.num_mel_bins, frames, generator=numbers, dtype=model.dtype)
    else:
        raise ModelError(
            f"no example batch is known for {type(model).__name__}",
            [f"its main input is {main!r}"],
            ["file.py:factory that returns Workload(model, example_inputs)"],
        )
    return {main: inputs, "labels": _labels(model, vocabulary, (batch, seq), numbers)}


def _labels(model: Any, vocabulary: int, shape: tuple[int, int], numbers: torch.Generator) -> Tensor:
    name = type(model).__name__
    if name.endswith(LABEL_KINDS):
        labels = torch.randint(vocabulary, shape, generator=numbers)
        labels[-1, : shape[1] // 4] = -100  # as a batch has them: a prompt, or padding, is not learned
        return labels
    if name.endswith("ForTokenClassification"):
        return torch.randint(model.config.num_labels, shape, generator=numbers)
    if name.endswith("Classification"):
        return torch.randint(model.config.num_labels, shape[:1], generator=numbers)
    raise ModelError(
        f"no labels are known for {name}",
        [f"known are classes that end in {', '.join(LABEL_KINDS)} or Classification"],
        [
            "name such a class under architectures in config.json",
            "file.py:factory with its own batch and loss",
        ],
    )


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
