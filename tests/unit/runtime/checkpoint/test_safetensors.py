"""Our reader and writer against the safetensors package, and against files that lie."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cost_models.errors import CheckpointError
from runtime.checkpoint import safetensors as safetensors_file
from runtime.checkpoint.safetensors import DTYPES, StoredTensor, read_header, write_file
from runtime.mesh.sharding import Block


def tensors() -> dict[str, torch.Tensor]:
    """One of each type, with odd shapes, in the order of falling element sizes."""
    made = {
        name: torch.arange(6).reshape(3, 2).to(dtype)
        for name, dtype in DTYPES.items()
        if name not in ("C128", "U16", "U32", "U64")
    }
    made |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(15.0).view(3, 5).T,
    }
    return dict(sorted(made.items(), key=lambda item: -item[1].itemsize))


def write(path: Path, made: dict[str, torch.Tensor]) -> list[int]:
    return write_file(path, [(n, t.dtype, tuple(t.shape)) for n, t in made.items()], iter(made.values()))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    checksums = write(tmp_path / "f", tensors())
    theirs, headers = load_file(tmp_path / "f"), read_header(tmp_path / "f")
    for (name, tensor), checksum in zip(tensors().items(), checksums, strict=True):
        assert (theirs[name].dtype, theirs[name].shape) == (tensor.dtype, tensor.shape)
        assert as_bytes(theirs[name]) == as_bytes(tensor)
        assert headers[name].checksum() == checksum == zlib.crc32(as_bytes(tensor))


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    made = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(made, tmp_path / "f")
    for name, stored in read_header(tmp_path / "f").items():
        target = torch.empty(stored.shape, dtype=stored.dtype)
        assert stored.read_into(target) == stored.checksum()
        assert as_bytes(target) == as_bytes(made[name])


@pytest.mark.parametrize("chunk_bytes", [4, 7, 64])
def test_other_types_strides_and_rows(
    tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", chunk_bytes)
    value = torch.randn(5, 3, dtype=torch.float32)
    write(tmp_path / "f", {"v": value})
    stored = read_header(tmp_path / "f")["v"]
    half = torch.empty(5, 3, dtype=torch.bfloat16)
    assert stored.read_into(half) == stored.checksum()
    assert torch.equal(half, value.bfloat16())
    turned = torch.empty(3, 5).T
    stored.read_into(turned)
    assert torch.equal(turned, value)
    column = torch.zeros(5, 4)
    stored.read_into(column[:, :3])
    assert torch.equal(column[:, :3], value)
    assert not column[:, 3].any()
    rows = torch.empty(2, 3)
    stored.read_into(rows, first_row=2)
    assert torch.equal(rows, value[2:4])


@pytest.mark.parametrize("short_bytes", [0, 10**6])
@pytest.mark.parametrize("chunk_bytes", [16, 2**20])
def test_blocks(tmp_path: Path, short_bytes: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of tensors of four ranks, runs sought one by one or read with the rest of their rows."""
    monkeypatch.setattr(safetensors_file, "_SHORT_RUN_BYTES", short_bytes)
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", chunk_bytes)
    made = {
        "0": torch.tensor(5.0),
        "1": torch.arange(4.0),
        "2": torch.randn(4, 6),
        "3": torch.randn(2, 4, 3),
        "4": torch.randn(2, 2, 2, 4),
    }
    write(tmp_path / "f", made)
    for name, stored in read_header(tmp_path / "f").items():
        value = made[name]
        halves = [[(0, n), (0, n // 2), (n // 2, n - n // 2)] for n in value.shape]
        for picked in itertools.product(*halves):
            block = Block(tuple(start for start, _ in picked), tuple(length for _, length in picked))
            for dtype in (torch.float32, torch.float64):
                target = torch.full(block.shape, torch.nan, dtype=dtype)
                stored.read_block(target, block.offsets)
                assert torch.equal(target, block.of(value).to(dtype)), (name, picked)
    turned = torch.empty(2, 4).T
    read_header(tmp_path / "f")["2"].read_block(turned, (0, 3))
    assert torch.equal(turned, made["2"][:, 3:5])


def test_a_block_reads_hardly_more_than_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "f", {"v": torch.randn(8, 4096)})
    read: list[int] = []
    fill = safetensors_file._fill

    def counted(file: FileIO, into: memoryview, stored: StoredTensor) -> None:
        read.append(len(into))
        fill(file, into, stored)

    stored = read_header(tmp_path / "f")["v"]
    monkeypatch.setattr(safetensors_file, "_fill", counted)
    stored.read_block(torch.empty(8, 2048), (0, 2048))
    assert sum(read) == 8 * 2048 * 4


def test_conjugated_numbers_are_stored_as_they_are_read(tmp_path: Path) -> None:
    value = torch.randn(3, dtype=torch.complex128).conj()
    write(tmp_path / "f", {"v": value})
    target = torch.empty(3, dtype=torch.complex128)
    read_header(tmp_path / "f")["v"].read_into(target)
    assert torch.equal(target, value.resolve_conj())


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LIES = {
    "empty": (b"", "0 bytes"),
    "short": (b"abc", "3 bytes"),
    "long header": (raw({}, length=2**40), "its header would have"),
    "no json": (raw(b"{,}"), "not JSON"),
    "deep": (raw(b"[" * 100_000), "not JSON"),
    "list": (raw([1]), "not a JSON object"),
    "cut": (raw({"w": GOOD}, b"1234"), "w should end at byte"),
    "sizes": (raw({"w": {**GOOD, "shape": [3]}}, bytes(8)), "takes 8 bytes, its shape 12"),
    "negative": (raw({"w": {**GOOD, "shape": [-2]}}, bytes(8)), "has no shape"),
    "bool": (raw({"w": {**GOOD, "shape": [True]}}, bytes(8)), "has no shape"),
    "offsets": (raw({"w": {**GOOD, "data_offsets": [8]}}, bytes(8)), "no place"),
    "backwards": (raw({"w": {**GOOD, "data_offsets": [8, 0]}}, bytes(8)), "takes -8 bytes"),
    "type": (raw({"w": {**GOOD, "dtype": "F4"}}, bytes(8)), "data type F4"),
    "unhashable type": (raw({"w": {**GOOD, "dtype": []}}, bytes(8)), "data type"),
    "entry": (raw({"w": 3}), "has no shape"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    content, said = LIES[lie]
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read_header(tmp_path / "f")


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    write(tmp_path / "f", {"v": torch.ones(100)})
    stored = read_header(tmp_path / "f")["v"]
    with (tmp_path / "f").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(CheckpointError, match="it ends within v"):
        stored.read_into(torch.empty(100))


def test_what_was_announced_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="announced as"):
        write_file(tmp_path / "f", [("v", torch.float32, (2,))], [torch.ones(3)])
    with pytest.raises(FileExistsError):
        write(tmp_path / "f", {"v": torch.ones(2)})
