"""The tensors that one rank holds of the model, and the ranks that hold each tensor.

    leaves       what the segments' graphs read: parameters, buffers and lifted constants, by canonical name
    parameters   what the optimizer updates and a checkpoint stores; the leaf itself unless the precision differs
    holders      for every parameter and buffer of the model, wherever it lives: the ranks that hold it

Where an op was split into blocks, ranks hold parts of its tensors, each a tensor of its own, on one rank or more:

    the model                    what ranks hold, a linear layer's neurons split 60/40
    fc1.weight   [100, 32]       fc1.weight#0 [60, 32]   fc1.weight#1 [40, 32]

Graphs, programs and ranks know the parts only; whatever leaves this process (state dicts, checkpoints, reports) has the
model's own names and shapes. Everything here is by the parts' names then; ``names_of`` and ``whole_of`` lead from the
model's names to them and back.

A tensor's first holder speaks for it where it may count once only: in a gradient norm, in a state dict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from runtime.mesh.sharding import Block, Sharding


@dataclass(frozen=True)
class TensorPart:
    """A part of the model's tensor ``whole``: ``block`` of it. The parts of a tensor are disjoint and leave nothing out."""

    whole: str
    block: Block


def part_name(whole: str, number: int) -> str:
    """Return the name of the ``number``-th part of a tensor."""
    return f"{whole}#{number}"


def names_of_parts(parts: Mapping[str, TensorPart]) -> dict[str, tuple[str, ...]]:
    """Return the parts of every tensor that is held in parts, by its own name."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, part in parts.items():
        found[part.whole].append(name)
    return {whole: tuple(names) for whole, names in found.items()}


@dataclass(frozen=True)
class RankState:
    """The tensors of rank ``rank``, by the model's own (canonical) names."""

    rank: int
    leaves: Mapping[str, Tensor]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    holders: Mapping[str, tuple[int, ...]]
    """Ranks that hold each tensor, ascending; every name of the model, in the model's own order."""
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    """Shardings of tensors that ranks hold blocks of: ``leaves`` has the stored, ``parameters`` the trained block."""
    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    """Every part that some rank holds instead of a tensor of the model, by its name."""
    elsewhere: Mapping[str, Sharding] = field(default_factory=dict)
    """Shardings of the tensors of other stages, whose blocks only other ranks hold."""

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names of what ranks hold of the model's tensor called ``name``: its parts, or itself."""
        return self._names_of_parts.get(name, (name,))

    def whole_of(self, name: str) -> str:
        """Return the model's own name of what ranks hold as ``name``."""
        return self.parts[name].whole if name in self.parts else name

    def own(self, name: str) -> Tensor:
        """Return what the optimizer updates of ``name`` on this rank, or the buffer that it is."""
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def own_block(self, name: str, shape: tuple[int, ...]) -> Block:
        """Return the block that ``own(name)`` is of the model's tensor, which has ``shape``: all of it, or a part."""
        if name in self.parts:
            return self.parts[name].block
        if name in self.shardings:
            return self.shardings[name].owner_block(shape, self.rank)
        return Block((0,) * len(shape), shape)

    @cached_property
    def _names_of_parts(self) -> Mapping[str, tuple[str, ...]]:
        return names_of_parts(self.parts)

    def is_first_holder(self, name: str) -> bool:
        """Tell whether this rank speaks for the tensor called ``name``, or for the block that it has of it."""
        if name in self.shardings:
            return self.shardings[name].speaks(self.rank)
        return self.holders[name][0] == self.rank

    def spoken_for(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters this rank speaks for: over all ranks, each parameter of the model once."""
        return ((name, p) for name, p in self.parameters.items() if self.is_first_holder(name))
