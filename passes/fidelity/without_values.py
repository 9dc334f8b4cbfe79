"""Tensors of a trace that the user's code still remembers: a step meets them, and computes numbers without values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cost_models.errors import ModelError
from runtime.user_code import TORCH, caller, is_users

_COMPILER = os.path.join(TORCH, "_dynamo") + os.sep


class RefuseWithoutValues(TorchFunctionMode):
    """Within it, eager code that computes with a tensor of a trace is refused with its line."""

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self.model_name = model_name

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = next((value for value in tree_leaves((args, kwargs)) if isinstance(value, FakeTensor)), None)
        if found is not None and not _in_compiler():
            raise _remembered(self.model_name, found, caller())
        return func(*args, **(kwargs or {}))


def _in_compiler() -> bool:
    """Tell whether torch's compiler called: an op that compiles itself looks at its operands without values."""
    frame = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_COMPILER):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _remembered(model_name: str, tensor: Tensor, place: str) -> ModelError:
    return ModelError(
        f"code of {model_name} remembers a tensor of its trace, which has no values",
        [f"{place} computes with one of shape {tuple(tensor.shape)}, kept where it cannot be put back"],
        [
            "empty the cache that holds it, which the model itself cannot use either",
            "keep it on the module (self.cache = {}), in a dictionary of the same file, or by functools.lru_cache",
        ],
    )
