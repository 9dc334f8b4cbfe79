"""The safetensors file format, read lazily and written as a stream, without mapping files into memory.

    8 bytes      length of the header, little endian
    header       JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {…}}
    data         the tensors' numbers, one after another; offsets count from here

(https://huggingface.co/docs/safetensors). A mapped file's pages count as the process's memory for as long as they
are resident, which doubles the peak of loading; here bytes go from the file straight into the tensor's own memory.
Another dtype or a device goes through a buffer of ``CHUNK_BYTES``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_models.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,  # ours: the format has no name for it
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

CHUNK_BYTES = 2**20
_SHORT_RUN_BYTES = 4096
"""Bytes below which pieces of rows are not sought one by one."""
_HEADER_LIMIT_BYTES = 100 * 10**6
_DAMAGED = ["copy or download the file again", "load an earlier checkpoint"]


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in its file. ``begin``: byte offset from the start of the file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, target: Tensor, first_row: int = 0) -> int:
        """Fill ``target`` (of this shape; fewer rows: those from ``first_row`` on) from the file.

        Returns the CRC-32 of the bytes that were read.
        """
        row_bytes = self.size_bytes // self.shape[0] if self.shape and self.shape[0] else 0
        with torch.no_grad(), FileIO(self.path) as file:
            file.seek(self.begin + first_row * row_bytes)
            return self._read(file, target.detach())

    def read_block(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Fill ``target`` with the block of its shape that starts at ``offsets``, reading hardly more than that.

        (4, 6), block (2, 3) at (1, 3)      . . . . . .      two runs of three: each is read by itself, or, where runs
                                            . . . x x x      are short, with the rest of their rows through a buffer
                                            . . . x x x
                                            . . . . . .
        """
        sizes = tuple(target.shape)
        if sizes[1:] == self.shape[1:]:
            self.read_into(target, offsets[0] if offsets else 0)
            return
        if not (target.is_contiguous() and target.device.type == "cpu"):
            block = torch.empty(sizes, dtype=self.dtype)
            self.read_block(block, offsets)
            target.detach().copy_(block)
            return
        inner = max(dim for dim, size in enumerate(sizes) if size != self.shape[dim])
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(sizes))]
        start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        short = math.prod(sizes[inner:]) * self.dtype.itemsize < _SHORT_RUN_BYTES
        outer = inner - 1 if short else inner
        with torch.no_grad(), FileIO(self.path) as file:
            for index in itertools.product(*map(range, sizes[:outer])):
                begin = start + sum(i * stride for i, stride in zip(index, strides, strict=False))
                if short:
                    self._read_short_runs(
                        file, begin - offsets[inner] * strides[inner], target[index], offsets[inner]
                    )
                else:
                    file.seek(self.begin + begin * self.dtype.itemsize)
                    self._read(file, target[index].detach())

    def _read_short_runs(self, file: FileIO, begin: int, target: Tensor, offset: int) -> None:
        """Read the elements from ``offset`` on of each of the rows that start at element ``begin``; many rows at once."""
        rest = target.shape[2:]
        width = self.shape[len(self.shape) - len(rest) - 1]
        row = width * math.prod(rest)
        rows = min(len(target), max(1, CHUNK_BYTES // (row * self.dtype.itemsize)))
        buffer = torch.empty((rows, width, *rest), dtype=self.dtype)
        file.seek(self.begin + begin * self.dtype.itemsize)
        for first in range(0, len(target), rows):
            piece = buffer[: len(target) - first]
            _read_checked(file, _bytes_of(piece), self)
            target[first : first + rows].copy_(piece.narrow(1, offset, target.shape[1]))

    def _read(self, file: FileIO, target: Tensor) -> int:
        if target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous():
            return _read_checked(file, _bytes_of(target), self)
        return self._read_through_buffer(file, target)

    def checksum(self) -> int:
        """Return the CRC-32 of the stored bytes."""
        checksum, left = 0, self.size_bytes
        buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
        with FileIO(self.path) as file:
            file.seek(self.begin)
            while left:
                checksum = _read_checked(file, buffer[: min(CHUNK_BYTES, left)], self, checksum)
                left -= min(CHUNK_BYTES, left)
        return checksum

    def _read_through_buffer(self, file: FileIO, target: Tensor) -> int:
        whole = (
            target
            if target.is_contiguous()
            else torch.empty(target.shape, dtype=target.dtype, device=target.device)
        )
        flat = whole.view(-1)
        elements = max(1, CHUNK_BYTES // self.dtype.itemsize)
        buffer = torch.empty(min(elements, flat.numel()), dtype=self.dtype)
        checksum = 0
        for start in range(0, flat.numel(), elements):
            piece = buffer[: min(elements, flat.numel() - start)]
            checksum = _read_checked(file, _bytes_of(piece), self, checksum)
            flat[start : start + piece.numel()].copy_(piece)
        if whole is not target:
            target.copy_(whole)
        return checksum


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, by name. Raises CheckpointError if the file is not what it claims to be."""
    try:
        size = path.stat().st_size
        with FileIO(path) as file:
            header, data_start = _header(file, path, size)
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror or error}") from error
    found: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        problem = _entry_problem(entry)
        if problem:
            problems.append(f"{name}: {problem}")
            continue
        begin, end = entry["data_offsets"]
        if data_start + end > size:
            problems.append(
                f"{name} should end at byte {data_start + end:,}, the file has {size:,}: it is cut off"
            )
        found[name] = StoredTensor(
            path, name, DTYPES[entry["dtype"]], tuple(entry["shape"]), data_start + begin
        )
    if problems:
        raise CheckpointError(f"{path} is damaged", problems[:20], _DAMAGED)
    return found


def write_file(
    path: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], values: Iterable[Tensor]
) -> list[int]:
    """Write ``values`` one by one (each may be made when it is asked for), and make them safe on the disk.

    Returns the CRC-32 of each tensor's bytes. The data of a tensor start at a multiple of its element's size.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Wide elements first keeps every tensor aligned without gaps, which the format forbids.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i][1].itemsize)
    if order != list(range(len(tensors))):
        raise ValueError("tensors must be ordered by falling size of their elements")
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksums = []
    with FileIO(path, "x") as file:
        _write_all(file, struct.pack("<Q", len(text)))
        _write_all(file, text)
        for (name, dtype, shape), value in zip(tensors, values, strict=True):
            if value.dtype != dtype or tuple(value.shape) != shape:
                raise ValueError(
                    f"{name} is {value.dtype} {tuple(value.shape)}, announced as {dtype} {shape}"
                )
            checksums.append(_write_checked(file, _bytes_of(_plain(value))))
        os.fsync(file.fileno())
    return checksums


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, contiguous, with nothing left to be conjugated or negated."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(b"")
    numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        written = file.write(view[: 2**30])
        view = view[written:]


def _write_checked(file: FileIO, data: memoryview) -> int:
    checksum = 0
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        checksum = zlib.crc32(piece, checksum)
        _write_all(file, piece)
    return checksum


def _read_checked(file: FileIO, into: memoryview, stored: StoredTensor, checksum: int = 0) -> int:
    for start in range(0, len(into), CHUNK_BYTES):
        piece = into[start : start + CHUNK_BYTES]
        _fill(file, piece, stored)
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _fill(file: FileIO, into: memoryview, stored: StoredTensor) -> None:
    while into:
        count = file.readinto(into)
        if not count:
            raise _damaged(stored.path, f"it ends within {stored.name}")
        into = into[count:]


def _header(file: FileIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(_HEADER_LIMIT_BYTES, size - 8):
        raise _damaged(path, f"it has {size:,} bytes, and its header would have {length:,}")
    text = bytearray(length)
    _fill(file, memoryview(text), StoredTensor(path, "the header", torch.uint8, (length,), 8))
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header, 8 + length


def _entry_problem(entry: Any) -> str | None:
    """Tell what is wrong with a tensor's entry in the header; None if nothing is."""
    if not isinstance(entry, dict) or not _are_counts(entry.get("shape")):
        return "has no shape"
    if not _are_counts(entry.get("data_offsets")) or len(entry["data_offsets"]) != 2:
        return "has no place in the file"
    if not isinstance(entry.get("dtype"), str) or entry["dtype"] not in DTYPES:
        return f"has the data type {entry.get('dtype')}, known are {', '.join(DTYPES)}"
    begin, end = entry["data_offsets"]
    expected = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
    return None if end - begin == expected else f"takes {end - begin:,} bytes, its shape {expected:,}"


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is no safetensors file, or it is damaged", [why], _DAMAGED)
