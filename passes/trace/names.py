"""Names: one canonical name per parameter and buffer, and a table of the other names of tied ones.

The canonical name is the first one in the model's own order, which is the one that
``model.named_parameters()`` lists. Checkpoints keep the model's names, so none is ever renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from passes.graph.graph import StateSpec
from passes.trace.shared_storage import SharedStorage, shared_storage
from runtime.state.state_view import StateView


@dataclass(frozen=True)
class StateNames:
    """The model's state by canonical name; ``aliases`` maps every other name to its canonical one.

    Buffers that are views of other state are in ``shared`` alone, by each of their names.
    """

    parameters: Mapping[str, StateSpec]
    buffers: Mapping[str, StateSpec]
    aliases: Mapping[str, str]
    shared: SharedStorage = field(default_factory=SharedStorage)

    @property
    def views(self) -> Mapping[str, StateView]:
        """The buffers that have no memory of their own, by name."""
        return {name: found.view for name, found in self.shared.views.items() if found.view is not None}

    def canonical(self, name: str) -> str:
        return self.aliases.get(name, name)


def state_names(model: nn.Module) -> StateNames:
    """List names and shapes of all parameters and buffers; two names of one tensor object are aliases.

    Raises ModelError for parameters that share memory without being one.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    parameters: dict[str, StateSpec] = {}
    keep = own_dtype_parameters(model)
    buffers: dict[str, StateSpec] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
        else:
            parameters[name] = StateSpec(
                name,
                tuple(parameter.shape),
                parameter.dtype,
                parameter.requires_grad,
                keeps_dtype=id(parameter) in keep,
            )
    not_saved = _non_persistent(model)
    shared = shared_storage(model, not_saved)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in shared.views:
            continue
        if first.setdefault(id(buffer), name) != name:
            aliases[name] = first[id(buffer)]
        else:
            saved = name not in not_saved
            buffers[name] = StateSpec(name, tuple(buffer.shape), buffer.dtype, False, persistent=saved)
    return StateNames(parameters, buffers, aliases, shared)


def own_dtype_parameters(model: nn.Module) -> frozenset[int]:
    """Return the ``id``s of parameters that no precision casts: a batch norm's, which must fit its statistics."""
    return frozenset(
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for parameter in module._parameters.values()
        if parameter is not None
    )


def _non_persistent(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def frozen_modules(model: nn.Module) -> frozenset[str]:
    """Return the paths of modules that have parameters and train none of them."""
    return frozenset(
        path
        for path, module in model.named_modules()
        if any(True for _ in module.parameters()) and not any(p.requires_grad for p in module.parameters())
    )
