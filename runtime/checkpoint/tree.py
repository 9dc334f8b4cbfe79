"""Nested plain data with tensors in it, as JSON beside a table of tensors: what a checkpoint keeps beside the model.

    {"lr": 0.1, "betas": (0.9, 0.95), "seen": tensor([3])}
        →  {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}, "seen": {"$tensor": "extra/seen"}},  {"extra/seen": tensor([3])}

Numbers come back exactly as they were. Anything else (a function, an object) is refused with its key path: reading it
back would need pickle, which runs what it reads.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cost_models.errors import CheckpointError
from runtime.checkpoint.safetensors import DTYPE_NAMES, DTYPES

_DICTS: Mapping[str, type[dict[Any, Any]]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}


def encode(value: Any, root: str) -> tuple[Any, dict[str, Tensor]]:
    """Return ``value`` as JSON data, and its tensors by name; names start with ``root``/.

    Raises CheckpointError naming every part that cannot be stored.
    """
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    data = _encode(value, root, tensors, problems, ())
    if problems:
        raise CheckpointError(
            f"{root} cannot be stored",
            problems[:20],
            [
                "give numbers, texts, None, lists, tuples, dictionaries of them, and tensors",
                "of an object, give its state_dict()",
            ],
        )
    return data, tensors


def decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what ``encode`` was given."""
    if isinstance(data, list):
        return [decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, content),) = data.items()
        if tag == "$tensor":
            return tensors[content]
        if tag == "$values":
            return torch.tensor(decode(content[1], tensors), dtype=DTYPES[content[0]])
        if tag == "$float":
            return float(content)
        if tag == "$complex":
            return complex(*(decode(part, tensors) for part in content))
        if tag == "$tuple":
            return tuple(decode(item, tensors) for item in content)
        if tag in _DICTS:
            return _DICTS[tag]({decode(k, tensors): decode(v, tensors) for k, v in content})
    return {key: decode(item, tensors) for key, item in data.items()}


def written_out(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return ``data`` with its (small) tensors as numbers, so that ``decode`` needs no table."""
    if isinstance(data, list):
        return [written_out(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1 and "$tensor" in data:
        value = tensors[data["$tensor"]]
        return {"$values": [DTYPE_NAMES[value.dtype], encode(value.tolist(), "values")[0]]}
    return {key: written_out(item, tensors) for key, item in data.items()}


def tensor_names(data: Any) -> list[str]:
    """Return the names of the tensors that ``decode`` needs."""
    if isinstance(data, list):
        return [name for item in data for name in tensor_names(item)]
    if not isinstance(data, dict):
        return []
    if len(data) == 1 and "$tensor" in data:
        return [data["$tensor"]]
    return [name for item in data.values() for name in tensor_names(item)]


def _encode(
    value: Any, path: str, tensors: dict[str, Tensor], problems: list[str], within: tuple[int, ...]
) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, complex):
        return {"$complex": [_encode(x, path, tensors, problems, within) for x in (value.real, value.imag)]}
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, tensors, problems)
    if id(value) in within:
        problems.append(f"{path} contains itself")
        return None
    within = (*within, id(value))
    if type(value) in (list, tuple, torch.Size):
        items = [_encode(x, f"{path}/{i}", tensors, problems, within) for i, x in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    tag = next((tag for tag, kind in _DICTS.items() if type(value) is kind), None)
    if tag is None:
        problems.append(f"{path} is a {type(value).__module__}.{type(value).__qualname__}")
        return None
    for key in value:
        if not isinstance(key, str | int | float | bool | None):
            problems.append(f"{path} has a key that is a {type(key).__qualname__}")
    plain = tag == "$dict" and all(type(key) is str and not key.startswith("$") for key in value)
    pairs = [(k, _encode(v, f"{path}/{k}", tensors, problems, within)) for k, v in value.items()]
    return (
        dict(pairs) if plain else {tag: [[_encode(k, path, tensors, problems, within), v] for k, v in pairs]}
    )


def _encode_tensor(value: Tensor, path: str, tensors: dict[str, Tensor], problems: list[str]) -> Any:
    if value.is_meta or value.layout != torch.strided or value.dtype not in DTYPE_NAMES:
        problems.append(f"{path} is a {value.dtype} tensor ({value.layout}, on {value.device})")
        return None
    name = path
    while name in tensors:  # the keys 1 and "1" of one dictionary
        name += "'"
    tensors[name] = value.detach()
    return {"$tensor": name}
