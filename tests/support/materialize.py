"""All values of a model's state at once, where a test wants them by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from passes.trace.init_state import values_of


def materialize(names: Iterable[str], **sources: Any) -> dict[str, Tensor]:
    """``values_of`` all at once."""
    return dict(values_of(names, **sources))
