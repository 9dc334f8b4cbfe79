"""The keys of ``model.state_dict()``, and ``weights=``: the parameters from safetensors files, each rank reading its own.

    model.safetensors                      one file
    model.safetensors.index.json           beside the files it names: {"weight_map": {"h.0.weight": "model-1.safetensors"}}
    latest, or checkpoint.json             a checkpoint of ``engine.save``: its model part

Every rank compares names and shapes of the whole model with the files' headers before it reads anything. Pickled
files (.bin, .pt) are refused: reading them runs code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.errors import CheckpointError
from cost_models.precision import Precision
from cost_models.units import listed
from passes.trace.names import state_names
from runtime.checkpoint.directory import find, is_checkpoint, read
from runtime.checkpoint.safetensors import StoredTensor, read_header
from runtime.checkpoint.storage import StoredPieces, stored_pieces
from runtime.state.gather import StateEntry


@dataclass(frozen=True)
class StateKeys:
    """The keys of a model's state dict. ``order``: all of them, in the state dict's order."""

    order: tuple[str, ...]
    entries: Mapping[str, StateEntry]
    """Parameters and buffers, by key."""
    others: Mapping[str, Any]
    """Values that are neither (a module's extra state), by key: as they were in the model that was deployed."""
    not_saved: frozenset[str]
    """Buffers that the state dict leaves out (persistent=False), by every name."""
    strange: tuple[str, ...]
    """Tensors that a hook of the model makes for the state dict only: where they come from is not known."""

    @cached_property
    def first_key(self) -> Mapping[str, str]:
        """The first key of each tensor. Views have none: their values are their owners'."""
        first: dict[str, str] = {}
        for entry in self.entries.values():
            if entry.view is None:
                first.setdefault(entry.name, entry.key)
        return first

    @classmethod
    def of(cls, model: nn.Module, precision: Precision) -> StateKeys:
        """Read the keys off the model, which may be on the meta device."""
        names = state_names(model)
        canonical = {
            id(tensor): names.canonical(name)
            for source in (model.named_parameters, model.named_buffers)
            for name, tensor in source(remove_duplicate=False)
        }
        shapes = {name: spec.shape for name, spec in (*names.parameters.items(), *names.buffers.items())}
        entries: dict[str, StateEntry] = {}
        others: dict[str, Any] = {}
        strange = []
        found = model.state_dict(keep_vars=True)
        for key, value in found.items():
            if not isinstance(value, Tensor):
                others[key] = value
            elif id(value) not in canonical:
                strange.append(key)
            else:
                view = names.views.get(canonical[id(value)])
                name = canonical[id(value)] if view is None else view.owner
                spec = names.parameters.get(name)
                shape, dtype = shapes[name], value.dtype
                if spec is not None:
                    dtype = precision.of(spec.dtype, keeps_dtype=spec.keeps_dtype).stored
                entries[key] = StateEntry(key, name, shape, dtype, view)
        all_buffers = (name for name, _ in model.named_buffers(remove_duplicate=False))
        not_saved = frozenset(name for name in all_buffers if name not in found)
        return cls(tuple(found), entries, others, not_saved, tuple(strange))


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MODEL_PREFIX = "model/"
"""The beginning of the names of the model's tensors in a checkpoint."""

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = [
    "Hugging Face: AutoModel….from_pretrained(DIRECTORY).save_pretrained(NEW) writes safetensors",
    "else, where you trust the file: safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)",
]
_MOST = 20
"""The most names of one kind that are listed."""

Stored = StoredTensor | StoredPieces


def _open_weights(source: str | Path) -> dict[str, Stored]:
    """Find the tensors in ``source``, by the names they have there."""
    path = Path(source)
    if path.suffix in _PICKLED and path.is_file():
        raise CheckpointError(
            f"{path} is not read", ["it is a pickle, and reading a pickle runs what it says"], _CONVERT
        )
    if path.is_file():
        return dict(read_header(path))
    if not path.is_dir():
        raise CheckpointError(f"there are no weights at {path}", ["no such file or directory"])
    if is_checkpoint(path):
        checkpoint = read(find(path))
        model = {n.removeprefix(MODEL_PREFIX): n for n in checkpoint.index if n.startswith(MODEL_PREFIX)}
        asked = [(full, checkpoint.index[full].whole) for full in model.values()]
        return dict(zip(model, stored_pieces(checkpoint.path, checkpoint.index, asked), strict=True))
    if (path / INDEX).is_file():
        return _sharded(path)
    if (path / SINGLE).is_file():
        return dict(read_header(path / SINGLE))
    found = sorted(file.name for file in path.iterdir())
    pickled = any(name.endswith(_PICKLED) or ".bin." in name for name in found)
    raise CheckpointError(
        f"there are no weights in {path}",
        [
            f"it has neither {INDEX}, {SINGLE} nor a checkpoint",
            f"it has {', '.join(found[:10]) or 'no files'}",
        ],
        _CONVERT if pickled else ["name the file itself"],
    )


def _sharded(path: Path) -> dict[str, Stored]:
    """Read the index file, and check it against the files' own headers."""
    try:
        weight_map = json.loads((path / INDEX).read_bytes())["weight_map"]
        files = sorted(set(weight_map.values()))
        strange = [file for file in files if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path / INDEX} cannot be read", [f"{type(error).__name__}: {error}"]
        ) from error
    if strange:
        raise CheckpointError(f"{path / INDEX} names files elsewhere", strange[:_MOST])
    problems = [f"{file} is not there" for file in files if not (path / file).is_file()]
    found: dict[str, Stored] = {}
    if not problems:
        headers = {file: read_header(path / file) for file in files}
        problems = [
            f"{name} is not in {file}" for name, file in weight_map.items() if name not in headers[file]
        ]
        found = {name: headers[file][name] for name, file in weight_map.items() if name in headers[file]}
    if problems:
        raise CheckpointError(
            f"the weights in {path} are not whole", problems[:_MOST], ["copy or download them again"]
        )
    return found


def weights_of(source: str | Path, keys: StateKeys, model: nn.Module) -> dict[str, list[Stored]]:
    """Find the stored tensors of each canonical name; a tied one has one per name that it is stored under.

    Nothing but headers is read. Raises CheckpointError naming everything that is missing, unexpected, of another shape or
    not convertible.
    """
    matched: dict[str, list[Stored]] = {}
    problems: list[str] = []
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = []
    for name, tensor in _open_weights(source).items():
        entry = keys.entries.get(name)
        if entry is None:
            # A buffer that the model derives itself is left to the model.
            if name not in keys.not_saved and not any(re.search(pattern, name) for pattern in ignored):
                unexpected.append(name)
            continue
        if tensor.shape != entry.own_shape:
            problems.append(f"{name} is {tensor.shape} there, {entry.own_shape} in the model")
        elif not converts(tensor.dtype, entry.dtype):
            problems.append(f"{name} is {tensor.dtype} there, {entry.dtype} in the model")
        if entry.view is not None:
            if entry.name not in keys.first_key:
                problems.append(
                    f"{name} is a view of {entry.name}, which no state dict has (persistent=False)"
                )
        else:
            matched.setdefault(entry.name, []).append(tensor)
    missing = [key for name, key in keys.first_key.items() if name not in matched]
    problems = problems[:_MOST] + problem_of("missing", missing) + problem_of("not in the model", unexpected)
    if problems:
        raise CheckpointError(
            f"the weights in {source} are not those of {type(model).__name__}",
            problems,
            _prefix_hint(missing, unexpected)
            or [
                "deploy the model that the weights were saved from",
                "rename them, and give them as state_dict=",
            ],
        )
    return matched


def converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Tell whether numbers stay what they are, but for rounding."""
    if stored == wanted:
        return True
    if wanted.is_complex or stored.is_complex:
        return wanted.is_complex and stored.is_complex
    return stored.is_floating_point and wanted.is_floating_point


def problem_of(what: str, names: list[str]) -> list[str]:
    """Return the line that says how many ``names`` are ``what``, and which; none where there are none."""
    return [f"{len(names)} {what}: {listed(names, _MOST, count_rest=True)}"] if names else []


def _prefix_hint(missing: list[str], unexpected: list[str]) -> list[str]:
    """Advise what to do where all names differ by the same prefix, as those of a base model do."""
    for ours, theirs, change in ((missing, unexpected, "lack"), (unexpected, missing, "have")):
        if not ours or not theirs:
            continue
        longer = next((name for name in ours if name.endswith("." + theirs[0])), None)
        prefix = longer.removesuffix(theirs[0]) if longer else ""
        if prefix and all(f"{prefix}{name}" in ours for name in theirs):
            return [
                f"the stored names {change} the prefix {prefix!r}: rename them, and give them as state_dict=",
                "Hugging Face: AutoModelFor….from_pretrained(…).save_pretrained(NEW) writes the names of this model",
            ]
    return []
