"""Parameters that ranks hold in parts, in an optimizer that was made with the whole ones.

made     [fc1.weight (100, 32)     fc1.bias (100,)]      the model's own names and shapes, for whoever chooses groups
rank 0   [fc1.weight#0 (60, 32)    fc1.bias#0 (60,)]
rank 1   [fc1.weight#1 (40, 32)    fc1.bias#1 (40,)]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cost_models.errors import UsageError
from partitioner.engine.optimizer_memory import FOREIGN_ERRORS, options_of
from runtime.state.rank_state import RankState


def put_parts(optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: RankState) -> dict[int, str]:
    """Put every part into the group, and the place, of the parameter that it is of; stand-ins for other ranks' parts.

    ``names``: those of the parameters that the optimizer was made with, by id. Returns the names of the parts, by id.
    """
    found: dict[int, str] = {}
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = []
        called: list[str] = []
        for parameter in group["params"]:
            name = names[id(parameter)]
            held = state.names_of(name)
            called += held
            if held == (name,):
                parameters.append(parameter)
                continue
            has_state = bool(optimizer.state.pop(parameter, None))
            for part in held:
                own = state.parameters.get(part)
                if own is None:
                    own = stand_in(state.parts[part].block.shape, parameter.dtype)
                elif has_state:
                    optimizer.state[own] = _first_state(type(optimizer), group, own)
                found[id(own)] = part
                parameters.append(own)
        group["params"] = parameters
        if "param_names" in group:
            group["param_names"] = called
    return found


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Make a parameter without memory."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def _first_state(cls: Any, group: Mapping[str, Any], part: nn.Parameter) -> Any:
    """Return the state that an optimizer which makes it at once (Adagrad) would have made for ``part``."""
    try:
        return cls([part], **options_of(cls, group)).state[part]
    except FOREIGN_ERRORS as error:
        raise UsageError(
            f"{cls.__name__} cannot train parts of parameters",
            because=[f"it has state before its first step, and cannot be made for a part alone: {error}"],
            suggestions=["one that makes its state in its first step, such as torch.optim.AdamW"],
        ) from error
