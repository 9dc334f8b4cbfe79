"""Tensors of which ranks hold blocks, as ``torch.distributed.checkpoint`` plans them.

    model/up.weight (8, 4)     rank 0 hands in (4, 4) at (0, 0)     rank 1 hands in (4, 4) at (4, 0)

A rank may hand in several blocks of one tensor, by names of its own (``Part.of``).

DCP knows blocks that lie anywhere in a tensor (``ChunkStorageMetadata``): it checks that together they are the whole of it,
and finds, for a block that somebody asks for, those stored ones that it is cut from. A DTensor's placements say less
than ``runtime.mesh.sharding`` does, so ranks hand in plain tensors, with their places beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from cost_models.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """The place of a tensor in the whole that it is a block of. ``shape``: the whole's; ``of``: its name, if another."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    of: str = ""


Parts = Mapping[str, Part]
"""Places of tensors that are not the whole of what their name stands for, by name."""


class PartsSavePlanner(DefaultSavePlanner):
    """The planner of what each rank writes, where some tensors are parts."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._written: Mapping[MetadataIndex, object] = {}

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank has to write."""
        items = {name: self._item(name, tensor) for name, tensor in self.state_dict.items()}
        self._written = {item.index: self.state_dict[name] for name, item in items.items()}
        self.plan = SavePlan(list(items.values()))
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to write at ``index``; tensors that a rank hands in have names of their own."""
        found = self._written[index]
        assert isinstance(found, Tensor)
        return found

    def _item(self, name: str, tensor: Tensor) -> WriteItem:
        part = self._parts.get(name)
        chunk = _chunk(tensor, part)
        return WriteItem(
            MetadataIndex(_stored_name(name, part), chunk.offsets),
            WriteItemType.TENSOR if part is None else WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk,
                TensorProperties.create_from_tensor(tensor),
                tensor.size() if part is None else torch.Size(part.shape),
            ),
        )


class PartsLoadPlanner(DefaultLoadPlanner):
    """The planner of what each rank reads, where some tensors are parts, now or when they were saved."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank has to read. Raises CheckpointError where the checkpoint does not have it so."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        problems = []
        for name, tensor in self.state_dict.items():
            part = self._parts.get(name)
            source = _stored_name(name, part)
            stored = self.metadata.state_dict_metadata.get(source)
            shape = tuple(tensor.shape) if part is None else part.shape
            if not isinstance(stored, TensorStorageMetadata):
                problems.append(f"{source} is not in it")
            elif tuple(stored.size) != shape:
                problems.append(f"{source} is {tuple(stored.size)} there, {shape} here")
            else:
                found = create_read_items_for_chunk_list(source, stored, [_chunk(tensor, part)])
                items += [replace(i, dest_index=replace(i.dest_index, fqn=name)) for i in found]
        if problems:
            raise CheckpointError("the checkpoint does not have what is asked for", problems[:20])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to read into."""
        found = self.state_dict[index.fqn]
        assert isinstance(found, Tensor)
        return found


def _stored_name(name: str, part: Part | None) -> str:
    return name if part is None else part.of or name


def _chunk(tensor: Tensor, part: Part | None) -> ChunkStorageMetadata:
    offsets = (0,) * tensor.dim() if part is None else part.offsets
    return ChunkStorageMetadata(torch.Size(offsets), tensor.size())
