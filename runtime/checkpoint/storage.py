"""The tensors of a checkpoint: one safetensors file per rank, and an index that is JSON.

Ranks may hold blocks of a tensor, and several of them the same one. Each hands in what it has, with its place in the whole
beside it; who loads, on any number of ranks, gets each block that it asks for out of those that were stored.

    model/up.weight (8, 4)     rank 0 hands in (4, 4) at (0, 0)     rank 1 hands in (4, 4) at (4, 0)

``torch.distributed.checkpoint`` would keep its index, and everything that is no tensor, as pickles, which run code when
they are read; its Hugging Face format keeps a whole file in memory while it writes. A tensor in the index:

    "model/h.0.weight": {"dtype": "F32", "shape": [8, 4], "pieces": [
        {"file": "rank-00000.safetensors", "key": "model/h.0.weight", "offsets": [0, 0], "shape": [8, 4], "crc32": 1}]}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_models.errors import CheckpointError, InternalError
from runtime.checkpoint.safetensors import DTYPE_NAMES, DTYPES, StoredTensor, read_header, write_file
from runtime.mesh.sharding import Block


@dataclass(frozen=True)
class BlockPlace:
    """The place of a rank's tensor in the tensor ``name`` of a checkpoint, of ``shape``: the block from ``offsets`` on."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> BlockPlace:
        """Return the place of all of a tensor."""
        return cls(name, (0,) * len(shape), tuple(shape))


PlacedTensors = Mapping[str, tuple[Tensor, BlockPlace]]
"""Tensors that a rank hands in, or asks for, and their places, by names of its own: several may be of one tensor."""


@dataclass(frozen=True)
class StoredBlock:
    """A stored block of a tensor: the whole of it, or the part that starts at ``offsets``."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class IndexEntry:
    """A tensor of a checkpoint, and the blocks that it was stored in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredBlock, ...]

    @property
    def whole(self) -> Block:
        """All of the tensor."""
        return Block((0,) * len(self.shape), self.shape)

    def to_json(self) -> dict[str, Any]:
        pieces = [vars(piece) for piece in self.pieces]
        return {"dtype": DTYPE_NAMES[self.dtype], "shape": self.shape, "pieces": pieces}

    @classmethod
    def from_json(cls, data: Any) -> IndexEntry:
        pieces = tuple(
            StoredBlock(
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


StoredIndex = Mapping[str, IndexEntry]


# --------------------------------------------------------------------------------------------------
# Writing


def write_tensors(directory: Path, rank: int, tensors: PlacedTensors) -> dict[str, list[IndexEntry]]:
    """Write what ``rank`` hands in to a file of its own, and return the index of it: an entry for each block."""
    placed = sorted(tensors.values(), key=lambda pair: -pair[0].itemsize)
    if not placed:
        return {}
    specs = [(_key(place, tensor), tensor.dtype, tuple(tensor.shape)) for tensor, place in placed]
    file = f"rank-{rank:05}.safetensors"
    try:
        checksums = write_file(directory / file, specs, (tensor for tensor, _ in placed))
    except OSError as error:
        raise CheckpointError(f"cannot write {directory / file}", [error.strerror or str(error)]) from error
    index: dict[str, list[IndexEntry]] = {}
    for (key, dtype, shape), (_, place), crc32 in zip(specs, placed, checksums, strict=True):
        block = StoredBlock(file, key, place.offsets, shape, crc32)
        index.setdefault(place.name, []).append(IndexEntry(dtype, place.shape, (block,)))
    return index


def _key(place: BlockPlace, tensor: Tensor) -> str:
    """Return a tensor's name in its file."""
    is_whole = tuple(tensor.shape) == place.shape
    return place.name if is_whole else f"{place.name}@{','.join(map(str, place.offsets))}"


def merged_index(of_ranks: Iterable[Mapping[str, Sequence[IndexEntry]]]) -> dict[str, IndexEntry]:
    """Join what ranks wrote. Of equal blocks the first counts; together they must be all of the tensor."""
    entries: dict[str, list[IndexEntry]] = {}
    for of_rank in of_ranks:
        for name, written in of_rank.items():
            entries.setdefault(name, []).extend(written)
    index = {}
    for name, parts in entries.items():
        blocks = {piece.offsets: piece for part in reversed(parts) for piece in part.pieces}
        pieces = tuple(sorted(blocks.values(), key=lambda piece: piece.offsets))
        index[name] = IndexEntry(parts[0].dtype, parts[0].shape, pieces)
        stored, size = sum(math.prod(piece.shape) for piece in pieces), math.prod(parts[0].shape)
        if stored != size or len({(part.dtype, part.shape) for part in parts}) > 1:
            raise InternalError(f"save {name}", [f"ranks have {stored} of its {size} elements", str(parts)])
    return index


# --------------------------------------------------------------------------------------------------
# Reading


def read_tensors(directory: Path, index: StoredIndex, targets: PlacedTensors) -> None:
    """Fill ``targets``, which may have other dtypes. Raises CheckpointError where the checkpoint does not have them."""
    problems = []
    for _, place in targets.values():
        if place.name not in index:
            problems.append(f"{place.name} is not in it")
        elif index[place.name].shape != place.shape:
            problems.append(f"{place.name} is {index[place.name].shape} there, {place.shape} here")
    if problems:
        raise CheckpointError("the checkpoint does not have what is asked for", problems[:20])
    asked = [(place.name, Block(place.offsets, tuple(t.shape))) for t, place in targets.values()]
    for stored, (target, place) in zip(stored_pieces(directory, index, asked), targets.values(), strict=True):
        stored.read_block(target.detach(), place.offsets)


@dataclass(frozen=True)
class StoredPieces:
    """The tensor ``name`` of a checkpoint, as far as it was asked for: its blocks, and the places of these in files."""

    directory: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[StoredBlock, StoredTensor], ...]

    def read_into(self, target: Tensor) -> None:
        """Fill ``target``, which has this shape."""
        self.read_block(target, (0,) * len(self.shape))

    def read_block(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Fill ``target`` with the block of its shape that starts at ``offsets``."""
        asked = Block(tuple(offsets), tuple(target.shape))
        missing = target.numel()
        for piece, stored in self.pieces:
            shared = asked.shared_with(Block(piece.offsets, piece.shape))
            if shared is not None:
                _read_piece(stored, piece, shared.within(piece.offsets), shared.within(offsets).of(target))
                missing -= math.prod(shared.shape)
        if missing:
            raise _damaged(self.directory, [f"{missing} elements of {self.name} are in none of its files"])

    def checksum(self) -> int:
        """Return a number that is equal for equal contents in equal pieces."""
        return hash(tuple((piece.offsets, piece.crc32) for piece, _ in self.pieces))


def stored_pieces(
    directory: Path, index: StoredIndex, asked: Iterable[tuple[str, Block]]
) -> list[StoredPieces]:
    """Find the blocks of tensors that were ``asked`` for, by name and block; headers of other files are not read.

    Raises CheckpointError naming what files lack, or hold in another form.
    """
    headers: dict[str, Mapping[str, StoredTensor]] = {}
    found: list[StoredPieces] = []
    problems: list[str] = []
    for name, block in asked:
        entry = index[name]
        located = []
        for piece in entry.pieces:
            if block.shared_with(Block(piece.offsets, piece.shape)) is None:
                continue
            if piece.file not in headers:
                headers[piece.file] = read_header(directory / piece.file)
            stored = headers[piece.file].get(piece.key)
            if stored is None:
                problems.append(f"{piece.key} is not in {piece.file}")
            elif (stored.shape, stored.dtype) != (piece.shape, entry.dtype):
                problems.append(f"{piece.key} is {stored.dtype} {stored.shape} in {piece.file}")
            else:
                located.append((piece, stored))
        found.append(StoredPieces(directory, name, entry.dtype, entry.shape, tuple(located)))
    if problems:
        raise _damaged(directory, problems[:20])
    return found


def _read_piece(stored: StoredTensor, piece: StoredBlock, block: Block, target: Tensor) -> None:
    """Read a block of a stored piece into ``target``; the checksum of a whole piece is checked."""
    if block.shape != piece.shape:
        stored.read_block(target, block.offsets)
        return
    checksum = stored.read_into(target)
    if checksum != piece.crc32:
        text = f"the checksum of {stored.name} is {checksum:#010x}, it was saved with {piece.crc32:#010x}"
        raise _damaged(stored.path, [text])


def _damaged(path: Path, because: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{path} is damaged", because, ["load an earlier checkpoint"])
