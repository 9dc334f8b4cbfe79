"""An optimizer's state by the names of the parameters, so that it fits whoever holds them later.

torch numbers parameters in the order of the groups, which depends on what a rank holds. A record:

    {"class": "torch.optim.adamw.AdamW",
     "groups": [{"options": {"lr": 0.1, …}, "names": ["embed.weight", …]}],
     "state": {"embed.weight": {"step": {"$tensor": "optimizer/embed.weight/step"}, …}}}

Names are the model's own. Ranks may hold a parameter in parts, each by a name of its own and with a state of its own:
tensors of the part's shape are then parts of the tensor in the record, and everything else is alike in all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.errors import CheckpointError
from runtime.checkpoint.storage import BlockPlace, PlacedTensors, StoredIndex
from runtime.checkpoint.tree import decode, encode, tensor_names

_KEPT_OF_GROUP = ("params", "param_names")


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer, this rank's parameters by their names here, and their places in the model's own parameters."""

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    places: Mapping[str, BlockPlace]

    @cached_property
    def _groups(self) -> list[list[str]]:
        """The names of the parameters of each group, in the group's order."""
        name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        return [[name_of[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]

    @property
    def _class_name(self) -> str:
        """The name of the optimizer's class in a checkpoint."""
        kind = type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _own_key(self, tensor: str, name: str) -> str:
        """Return a rank's name of its tensor of the state of its parameter ``name``: parts share the tensor's name."""
        return tensor if self.places[name].name == name else f"{tensor} of {name}"

    def record(self, written: Sequence[str]) -> tuple[dict[str, Any], dict[str, tuple[Tensor, BlockPlace]]]:
        """Return this rank's share of the record, with the state of the parameters ``written``, and its tensors.

        State of a part's own shape is a part of what the whole parameter would have.
        """
        groups = []
        for number, (group, names) in enumerate(zip(self.optimizer.param_groups, self._groups, strict=True)):
            options = {key: value for key, value in group.items() if key not in _KEPT_OF_GROUP}
            # A learning rate may be a tensor. It goes into the record: every rank needs it.
            data, _ = encode(options, f"optimizer group {number}", write_out=True)
            groups.append({"options": data, "names": list(dict.fromkeys(self.places[n].name for n in names))})
        states: dict[str, Any] = {}
        tensors: dict[str, tuple[Tensor, BlockPlace]] = {}
        for name in written:
            state, place = self.optimizer.state.get(self.parameters[name]), self.places[name]
            if state is None:
                continue
            states[place.name], found = encode(dict(state), f"optimizer/{place.name}")
            for key, tensor in found.items():
                if tensor.shape == self.parameters[name].shape:
                    tensors[self._own_key(key, name)] = tensor, replace(place, name=key)
                else:
                    tensors[key] = tensor, BlockPlace.whole(key, tensor.shape)
        return {"class": self._class_name, "groups": groups, "state": states}, tensors

    def refuse_other(self, record: Mapping[str, Any] | None) -> None:
        """Raise CheckpointError unless the record is of this class, with these parameters in the same groups."""
        if record is None:
            raise CheckpointError(
                "the checkpoint has no optimizer state", ["it was saved without an optimizer"]
            )
        problems = []
        if record["class"] != self._class_name:
            problems.append(f"it was saved by {record['class']}, this is {self._class_name}")
        if len(record["groups"]) != len(self._groups):
            problems.append(
                f"it has {len(record['groups'])} parameter groups, the optimizer {len(self._groups)}"
            )
        saved = {name: number for number, group in enumerate(record["groups"]) for name in group["names"]}
        now = {name: number for number, names in enumerate(self._groups) for name in names}
        moved = [
            f"{whole} was in {_group(saved.get(whole))}, it is in {_group(now.get(name))}"
            for name in self.parameters
            for whole in [self.places[name].name]
            if saved.get(whole) != now.get(name)
        ]
        if not problems:
            problems += moved[:20]
        if problems:
            raise CheckpointError(
                "the optimizer state is of another optimizer",
                problems,
                ["deploy with the optimizer and the parameter groups that the checkpoint was saved with"],
            )

    def targets(self, record: Mapping[str, Any], index: StoredIndex) -> PlacedTensors:
        """Return tensors to load this rank's optimizer state into, by its own names.

        They are on the devices they will live on. If the optimizer has such a tensor already it is the target: a state
        of its size is not held twice.
        """
        targets: dict[str, tuple[Tensor, BlockPlace]] = {}
        for name in (name for names in self._groups for name in names):
            parameter, place = self.parameters[name], self.places[name]
            _, present = encode(dict(self.optimizer.state.get(parameter, {})), f"optimizer/{place.name}")
            for tensor in tensor_names(record["state"].get(place.name)):
                entry, current = index[tensor], present.get(tensor)
                in_part = entry.shape == place.shape
                shape = tuple(parameter.shape) if in_part else entry.shape
                if current is None or (tuple(current.shape), current.dtype) != (shape, entry.dtype):
                    device = parameter.device if entry.shape else torch.device("cpu")
                    current = torch.empty(shape, dtype=entry.dtype, device=device)
                where = replace(place, name=tensor) if in_part else BlockPlace.whole(tensor, shape)
                targets[self._own_key(tensor, name)] = current, where
        return targets

    def restore(self, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Give the optimizer the state in ``tensors`` and the hyperparameters of the record."""
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        number = 0
        for saved, group, names in zip(
            record["groups"], self.optimizer.param_groups, self._groups, strict=True
        ):
            numbers = []
            for name in names:
                saved_state = record["state"].get(self.places[name].name)
                if saved_state is not None:
                    own = {t: tensors[self._own_key(t, name)] for t in tensor_names(saved_state)}
                    state[number] = decode(saved_state, own)
                numbers.append(number)
                number += 1
            kept = {"param_names": group["param_names"]} if "param_names" in group else {}
            groups.append({**decode(saved["options"], {}), **kept, "params": numbers})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def merged_record(records: Sequence[dict[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Join the ranks' shares in one record. ``order``: every name of the model."""
    position = {name: number for number, name in enumerate(order)}
    groups = []
    for number, group in enumerate(records[0]["groups"]):
        names = {name for record in records for name in record["groups"][number]["names"]}
        groups.append({"options": group["options"], "names": sorted(names, key=position.__getitem__)})
    state = {name: data for record in records for name, data in record["state"].items()}
    return {"class": records[0]["class"], "groups": groups, "state": state}


def _group(number: int | None) -> str:
    return "no group" if number is None else f"group {number}"
