"""What one rank holds of the model, and who else holds it.

    leaves       what the segments' graphs read: parameters, buffers and lifted constants, by canonical name
    parameters   what the optimizer updates and a checkpoint stores; the leaf itself unless the precision differs
    holders      for every parameter and buffer of the model, wherever it lives: the ranks that hold it

A tensor's first holder speaks for it where it may count once only: in a gradient norm, in a state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from runtime.sharding import Sharding


@dataclass(frozen=True)
class RankState:
    """The tensors of rank ``rank``, by the model's own (canonical) names."""

    rank: int
    leaves: Mapping[str, Tensor]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    holders: Mapping[str, tuple[int, ...]]
    """Every name of the model, in the model's own order; ranks in ascending order."""
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    """Of tensors that ranks hold blocks of: ``leaves`` has what this rank stores, ``parameters`` what it trains."""

    def is_first_holder(self, name: str) -> bool:
        """Whether this rank speaks for the tensor called ``name``, or for the block that it has of it."""
        if name in self.shardings:
            return self.shardings[name].speaks(self.rank)
        return self.holders[name][0] == self.rank

    def spoken_for(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters this rank speaks for: over all ranks, each parameter of the model once."""
        return ((name, p) for name, p in self.parameters.items() if self.is_first_holder(name))
