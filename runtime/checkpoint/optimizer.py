"""An optimizer's state by the names of the parameters, so that it fits whoever holds them later.

torch numbers parameters in the order of the groups, which depends on what a rank holds. A record:

    {"class": "torch.optim.adamw.AdamW",
     "groups": [{"options": {"lr": 0.1, …}, "names": ["embed.weight", …]}],
     "state": {"embed.weight": {"step": {"$tensor": "optimizer/embed.weight/step"}, …}}}

Names are the model's own. Ranks may hold a parameter in parts (``BlockPlace.of``), each with a state of its own: tensors of
the part's shape are then parts of the tensor in the record, and everything else is alike in all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.errors import CheckpointError
from runtime.checkpoint.storage import BlockPlace, BlockPlaces, StoredIndex
from runtime.checkpoint.tree import decode, encode, tensor_names, written_out

_KEPT_OF_GROUP = ("params", "param_names")


def optimizer_record(
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    written: Sequence[str],
    parts: BlockPlaces,
) -> tuple[dict[str, Any] | None, dict[str, Tensor], dict[str, BlockPlace]]:
    """Return this rank's share of the record, with the state of the parameters ``written``, its tensors, and their parts.

    ``parts``: those of all parameters here. State of a part's own shape is a part of what the whole parameter would have.
    """
    if optimizer is None:
        return None, {}, {}
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in _KEPT_OF_GROUP}
        data, tensors = encode(options, f"optimizer group {number}")
        # A learning rate may be a tensor. It goes into the record: every rank needs it.
        data = written_out(data, tensors)
        names = [_whole(name_of[id(p)], parts) for p in group["params"]]
        groups.append({"options": data, "names": list(dict.fromkeys(names))})
    states: dict[str, Any] = {}
    tensors = {}
    placed: dict[str, BlockPlace] = {}
    for name in written:
        state = optimizer.state.get(parameters[name])
        if state is not None:
            whole, own = _whole(name, parts), parameters[name].shape
            states[whole], found = encode(dict(state), f"optimizer/{whole}")
            for key, tensor in found.items():
                if name in parts and tensor.shape == own:
                    placed[_own_key(key, name, parts)] = replace(parts[name], of=key)
                    key = _own_key(key, name, parts)
                tensors[key] = tensor
    return {"class": class_name(optimizer), "groups": groups, "state": states}, tensors, placed


def merged_record(records: Sequence[dict[str, Any] | None], order: Sequence[str]) -> dict[str, Any] | None:
    """Join the ranks' parts in one record. ``order``: every name of the model."""
    present = [record for record in records if record is not None]
    if not present:
        return None
    position = {name: number for number, name in enumerate(order)}
    groups = []
    for number, group in enumerate(present[0]["groups"]):
        names = {name for record in present for name in record["groups"][number]["names"]}
        groups.append({"options": group["options"], "names": sorted(names, key=position.__getitem__)})
    state = {name: data for record in present for name, data in record["state"].items()}
    return {"class": present[0]["class"], "groups": groups, "state": state}


def refuse_other_optimizer(
    record: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    parts: BlockPlaces,
) -> None:
    """Raise CheckpointError unless the record is of this class, with these parameters in the same groups."""
    if optimizer is None:
        return
    if record is None:
        raise CheckpointError("the checkpoint has no optimizer state", ["it was saved without an optimizer"])
    problems = []
    if record["class"] != class_name(optimizer):
        problems.append(f"it was saved by {record['class']}, this is {class_name(optimizer)}")
    if len(record["groups"]) != len(optimizer.param_groups):
        problems.append(
            f"it has {len(record['groups'])} parameter groups, the optimizer {len(optimizer.param_groups)}"
        )
    saved = {name: number for number, group in enumerate(record["groups"]) for name in group["names"]}
    now = groups_of(optimizer, parameters)
    moved = [
        f"{_whole(name, parts)} was in {_group(saved.get(_whole(name, parts)))}, it is in {_group(now.get(name))}"
        for name in parameters
        if saved.get(_whole(name, parts)) != now.get(name)
    ]
    if not problems:
        problems += moved[:20]
    if problems:
        raise CheckpointError(
            "the optimizer state is of another optimizer",
            problems,
            ["deploy with the optimizer and the parameter groups that the checkpoint was saved with"],
        )


def groups_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the number of each own parameter's group."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    return {name_of[id(p)]: number for number, g in enumerate(optimizer.param_groups) for p in g["params"]}


def state_targets(
    record: Mapping[str, Any],
    index: StoredIndex,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    parts: BlockPlaces,
) -> tuple[dict[str, Tensor], dict[str, BlockPlace]]:
    """Return tensors to load this rank's optimizer state into, by name in the checkpoint, and those that are parts.

    They are on the devices they will live on. If the optimizer has such a tensor already it is the target: a state of
    its size is not held twice. ``parts``: those of the parameters.
    """
    targets: dict[str, Tensor] = {}
    placed: dict[str, BlockPlace] = {}
    for name in groups_of(optimizer, parameters):
        whole = _whole(name, parts)
        _, present = encode(dict(optimizer.state.get(parameters[name], {})), f"optimizer/{whole}")
        for tensor in tensor_names(record["state"].get(whole)):
            entry, current, shape = index[tensor], present.get(tensor), index[tensor].shape
            key = _own_key(tensor, name, parts)
            if name in parts and shape == parts[name].shape:
                placed[key], shape = replace(parts[name], of=tensor), tuple(parameters[name].shape)
            elif key != tensor:
                placed[key] = BlockPlace((0,) * len(shape), shape, of=tensor)
            device = parameters[name].device if shape else torch.device("cpu")
            fits = current is not None and (tuple(current.shape), current.dtype) == (shape, entry.dtype)
            targets[key] = (
                current
                if fits and current is not None
                else torch.empty(shape, dtype=entry.dtype, device=device)
            )
    return targets, placed


def restore_optimizer(
    record: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    parts: BlockPlaces,
) -> None:
    """Give the optimizer the state in ``tensors`` and the hyperparameters of the record."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    number = 0
    for saved, group in zip(record["groups"], optimizer.param_groups, strict=True):
        numbers = []
        for parameter in group["params"]:
            name = name_of[id(parameter)]
            saved_state = record["state"].get(_whole(name, parts))
            if saved_state is not None:
                own = {tensor: tensors[_own_key(tensor, name, parts)] for tensor in tensor_names(saved_state)}
                state[number] = decode(saved_state, own)
            numbers.append(number)
            number += 1
        kept = {"param_names": group["param_names"]} if "param_names" in group else {}
        groups.append({**decode(saved["options"], {}), **kept, "params": numbers})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class in a checkpoint."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _whole(name: str, parts: BlockPlaces) -> str:
    """Return the model's own name of the parameter that a rank has as ``name``."""
    return parts[name].of or name if name in parts else name


def _own_key(tensor: str, name: str, parts: BlockPlaces) -> str:
    """Return a rank's name of its tensor of the state of its parameter ``name``: parts share the tensor's name."""
    return tensor if _whole(name, parts) == name else f"{tensor} of {name}"


def _group(number: int | None) -> str:
    return "no group" if number is None else f"group {number}"
