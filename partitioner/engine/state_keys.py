"""The keys of ``model.state_dict()``, and the tensor of the running plan that each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from cost_models.precision import Precision
from passes.trace.names import state_names
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
