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


def encode(value: Any, root: str, *, write_out: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return ``value`` as JSON data, and its tensors by name; names start with ``root``/.

    ``write_out``: its (small) tensors stand in the data as numbers, so that ``decode`` needs no table. Raises
    CheckpointError naming every part that cannot be stored.
    """
    encoder = _Encoder(write_out)
    data = encoder.data(value, root)
    if encoder.problems:
        raise CheckpointError(
            f"{root} cannot be stored",
            encoder.problems[:20],
            [
                "give numbers, texts, None, lists, tuples, dictionaries of them, and tensors",
                "of an object, give its state_dict()",
            ],
        )
    return data, encoder.tensors


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


def tensor_names(data: Any) -> list[str]:
    """Return the names of the tensors that ``decode`` needs."""
    if isinstance(data, list):
        return [name for item in data for name in tensor_names(item)]
    if not isinstance(data, dict):
        return []
    if len(data) == 1 and "$tensor" in data:
        return [data["$tensor"]]
    return [name for item in data.values() for name in tensor_names(item)]


class _Encoder:
    """One value on its way to data: the tensors that were met, and what cannot be stored."""

    def __init__(self, write_out: bool) -> None:
        self._write_out = write_out
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []

    def data(self, value: Any, path: str, within: tuple[int, ...] = ()) -> Any:
        """Return ``value`` as JSON data. ``within``: the containers that it is in, by ``id``."""
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, complex):
            return {"$complex": [self.data(part, path) for part in (value.real, value.imag)]}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if id(value) in within:
            self.problems.append(f"{path} contains itself")
            return None
        within = (*within, id(value))
        if type(value) in (list, tuple, torch.Size):
            items = [self.data(item, f"{path}/{i}", within) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        tag = next((tag for tag, kind in _DICTS.items() if type(value) is kind), None)
        if tag is None:
            self.problems.append(f"{path} is a {type(value).__module__}.{type(value).__qualname__}")
            return None
        for key in value:
            if not isinstance(key, str | int | float | bool | None):
                self.problems.append(f"{path} has a key that is a {type(key).__qualname__}")
        pairs = [(key, self.data(item, f"{path}/{key}", within)) for key, item in value.items()]
        if tag == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)
        return {tag: [[self.data(key, path, within), item] for key, item in pairs]}

    def _tensor(self, value: Tensor, path: str) -> Any:
        if value.is_meta or value.layout != torch.strided or value.dtype not in DTYPE_NAMES:
            self.problems.append(f"{path} is a {value.dtype} tensor ({value.layout}, on {value.device})")
            return None
        if self._write_out:
            return {"$values": [DTYPE_NAMES[value.dtype], self.data(value.tolist(), path)]}
        name = path
        while name in self.tensors:  # the keys 1 and "1" of one dictionary
            name += "'"
        self.tensors[name] = value.detach()
        return {"$tensor": name}
