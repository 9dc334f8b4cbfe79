"""The storage behind ``torch.distributed.checkpoint``: one safetensors file per rank, and an index that is JSON.

DCP plans (the writer of a tensor that several ranks hold, the pieces of files that make up what a rank asks for, errors
of one rank raised on all); this file stores. DCP's own file formats keep their index, and everything that is no
tensor, as pickles, which run code when they are read; its Hugging Face format keeps a whole file in memory while it
writes. A tensor in the index:

    "model/h.0.weight": {"dtype": "F32", "shape": [8, 4], "pieces": [
        {"file": "rank-00000.safetensors", "key": "model/h.0.weight", "offsets": [0, 0], "shape": [8, 4], "crc32": 1}]}
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cost_models.errors import CheckpointError, InternalError
from runtime.checkpoint.safetensors import DTYPE_NAMES, DTYPES, StoredTensor, read_header, write_file
from runtime.mesh.sharding import Block


@dataclass(frozen=True)
class Piece:
    """A stored block of a tensor: the whole of it, or the part that starts at ``offsets``."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class IndexEntry:
    """A tensor of a checkpoint, and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def to_json(self) -> dict[str, Any]:
        pieces = [vars(piece) for piece in self.pieces]
        return {"dtype": DTYPE_NAMES[self.dtype], "shape": self.shape, "pieces": pieces}

    @classmethod
    def from_json(cls, data: Any) -> IndexEntry:
        """Read an entry; raise KeyError, TypeError or ValueError if ``data`` is none."""
        pieces = tuple(
            Piece(
                _file_name(piece["file"]),
                str(piece["key"]),
                tuple(map(int, piece["offsets"])),
                tuple(map(int, piece["shape"])),
                int(piece["crc32"]),
            )
            for piece in data["pieces"]
        )
        return cls(DTYPES[data["dtype"]], tuple(map(int, data["shape"])), pieces)


def _file_name(name: Any) -> str:
    """Return ``name`` if it names a file beside the index: an index must not send the reader elsewhere."""
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return name


Index = Mapping[str, IndexEntry]


class _AsPlanned:
    """The parts of DCP's storage that have nothing to do: plans stay as they are, nothing is kept from call to call."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(checkpoint_id)


class TensorWriter(_AsPlanned, StorageWriter):
    """The writer of this rank's tensors into ``directory``; ``finish(index)`` runs on the coordinator after all ranks."""

    def __init__(self, directory: Path, rank: int, finish: Callable[[dict[str, IndexEntry]], None]) -> None:
        self._directory, self._rank, self._finish = directory, rank, finish

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to set up."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = [(item, _tensor_data(item)) for item in plan.items]
        items.sort(key=lambda pair: -pair[1].properties.dtype.itemsize)
        future: Future[list[WriteResult]] = Future()
        if not items:
            future.set_result([])
            return future
        specs = [(_key(item, data), data.properties.dtype, tuple(data.chunk.sizes)) for item, data in items]
        file = f"rank-{self._rank:05}.safetensors"
        path = self._directory / file
        try:
            checksums = write_file(path, specs, (_resolved(planner, item) for item, _ in items))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}", [error.strerror or str(error)]) from error
        results = [
            WriteResult(
                item.index,
                item.tensor_storage_size() or 0,
                Piece(file, key, tuple(data.chunk.offsets), shape, checksum),
            )
            for (item, data), (key, _, shape), checksum in zip(items, specs, checksums, strict=True)
        ]
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces: dict[str, list[Piece]] = {}
        for result in (result for rank in results for result in rank):
            pieces.setdefault(result.index.fqn, []).append(result.storage_data)
        index = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                raise InternalError(f"{name} is no tensor: only tensors go through DCP")
            index[name] = IndexEntry(stored.properties.dtype, tuple(stored.size), tuple(pieces[name]))
        self._finish(index)


class TensorReader(_AsPlanned, StorageReader):
    """The reader of pieces of a checkpoint in ``directory`` into given tensors, which may have other dtypes."""

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory, self._index = directory, index
        self._pieces = {
            MetadataIndex(name, piece.offsets): piece
            for name, entry in index.items()
            for piece in entry.pieces
        }

    def read_metadata(self) -> Metadata:  # type: ignore[override, unused-ignore]  # no rank-local metadata
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(entry.dtype),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for p in entry.pieces],
                )
                for name, entry in self._index.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: there is nothing to set up."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        located = locate(
            self._directory,
            ((self._pieces[i.storage_index], self._index[i.storage_index.fqn].dtype) for i in plan.items),
        )
        for item, stored in zip(plan.items, located, strict=True):
            target = planner.resolve_tensor(item).detach()
            block = Block(tuple(item.storage_offsets), tuple(item.lengths))
            _read_piece(stored, self._pieces[item.storage_index], block, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def locate(directory: Path, wanted: Iterable[tuple[Piece, torch.dtype]]) -> list[StoredTensor]:
    """Return the place of each wanted piece. Raises CheckpointError naming what files lack, or hold in another form."""
    headers: dict[str, Mapping[str, StoredTensor]] = {}
    found: list[StoredTensor] = []
    problems: list[str] = []
    for piece, dtype in wanted:
        if piece.file not in headers:
            headers[piece.file] = read_header(directory / piece.file)
        stored = headers[piece.file].get(piece.key)
        if stored is None:
            problems.append(f"{piece.key} is not in {piece.file}")
        elif (stored.shape, stored.dtype) != (piece.shape, dtype):
            problems.append(f"{piece.key} is {stored.dtype} {stored.shape} in {piece.file}")
        else:
            found.append(stored)
    if problems:
        raise CheckpointError(f"{directory} is damaged", problems[:20], ["load an earlier checkpoint"])
    return found


@dataclass(frozen=True)
class StoredPieces:
    """A whole tensor of a checkpoint, to be read outside DCP."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[Piece, StoredTensor], ...]

    def read_into(self, target: Tensor) -> None:
        """Fill ``target``, which has this shape."""
        self.read_block(target, (0,) * len(self.shape))

    def read_block(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Fill ``target`` with the block of its shape that starts at ``offsets``."""
        asked = Block(tuple(offsets), tuple(target.shape))
        for piece, stored in self.pieces:
            shared = asked.shared_with(Block(piece.offsets, piece.shape))
            if shared is not None:
                _read_piece(stored, piece, shared.within(piece.offsets), shared.within(offsets).of(target))

    def checksum(self) -> int:
        """Return a number that is equal for equal contents in equal pieces."""
        return hash(tuple((piece.offsets, piece.crc32) for piece, _ in self.pieces))


def stored_pieces(directory: Path, index: Index, names: Iterable[str]) -> dict[str, StoredPieces]:
    """Return the tensors called ``names``, by name."""
    wanted = [(name, piece) for name in names for piece in index[name].pieces]
    located = locate(directory, ((piece, index[name].dtype) for name, piece in wanted))
    pieces: dict[str, list[tuple[Piece, StoredTensor]]] = {}
    for (name, piece), stored in zip(wanted, located, strict=True):
        pieces.setdefault(name, []).append((piece, stored))
    return {
        name: StoredPieces(index[name].dtype, index[name].shape, tuple(found))
        for name, found in pieces.items()
    }


def _tensor_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise InternalError(f"{item.index.fqn} is no tensor: only tensors go through DCP")
    return item.tensor_data


def _resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    value = planner.resolve_data(item)
    assert isinstance(value, Tensor)
    return value


def _key(item: WriteItem, data: TensorWriteData) -> str:
    """Return a tensor's name in its file. A rank may hold several pieces of one tensor."""
    if tuple(data.chunk.sizes) == tuple(data.size):
        return str(item.index.fqn)
    return f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def _read_piece(stored: StoredTensor, piece: Piece, block: Block, target: Tensor) -> None:
    """Read a block of a stored piece into ``target``; the checksum of a whole piece is checked."""
    if block.shape != piece.shape:
        stored.read_block(target, block.offsets)
        return
    checksum = stored.read_into(target)
    if checksum != piece.crc32:
        raise CheckpointError(
            f"{stored.path} is damaged",
            [f"the checksum of {stored.name} is {checksum:#010x}, it was saved with {piece.crc32:#010x}"],
            ["load an earlier checkpoint"],
        )
