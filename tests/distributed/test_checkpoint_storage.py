"""Tensors of which every rank has a block: stored, cut anew, gathered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from cost_models.errors import CheckpointError, InternalError
from runtime.checkpoint.directory import begin, commit, read
from runtime.checkpoint.storage import (
    BlockPlace,
    IndexEntry,
    StoredBlock,
    merged_index,
    read_tensors,
    stored_pieces,
    write_tensors,
)
from runtime.mesh.sharding import Block
from runtime.ranks.launch import WorkerPool
from runtime.ranks.side_group import SideGroup
from runtime.state import gather as gather_state
from runtime.state.gather import HeldPiece, StateEntry
from runtime.state.rank_state import RankState

SHAPE = (5, 7)
ROWS, COLUMNS, WHOLE = (
    [Block((0, 0), (2, 7)), Block((2, 0), (2, 7)), Block((4, 0), (1, 7)), Block((5, 0), (0, 7))],
    [Block((0, 0), (5, 2)), Block((0, 2), (5, 2)), Block((0, 4), (5, 2)), Block((0, 6), (5, 1))],
    [Block((0, 0), SHAPE)] * 4,
)
"""The blocks of four ranks: 2, 2, 1 and 0 rows; 2, 2, 2 and 1 columns; the whole on each."""
CUTS = {"0": ROWS, "1": COLUMNS, "2": WHOLE}


def value(number: int) -> torch.Tensor:
    return torch.arange(10.0 * number, 10.0 * number + 35).view(SHAPE)


def stored_and_cut_anew(folder: str) -> None:
    """Every way of cutting is stored, and read in each."""
    side, rank = SideGroup(), dist.get_rank()
    path = side.from_first("saving", lambda: begin(Path(folder), 3))
    whole = BlockPlace.whole
    tensors = {
        name: (blocks[rank].of(value(int(name))), BlockPlace(name, blocks[rank].offsets, SHAPE))
        for name, blocks in CUTS.items()
    }
    tensors["plain"] = torch.tensor(7, dtype=torch.int64), whole("plain", ())
    if rank == 3:  # two blocks of one tensor, by names of its own
        for name, block in {"upper": Block((0, 0), (4, 7)), "lower": Block((4, 0), (1, 7))}.items():
            tensors[name] = block.of(value(3)), BlockPlace("3", block.offsets, SHAPE)
    record = {"model": "", "step": 3, "world_size": 4, "optimizer": None, "loss_scale": {}, "extra": None}
    written = side.to_first("saving", write_tensors(path, rank, tensors))
    assert len(written) == (4 if rank == 0 else 0)
    side.from_first("saving", lambda: commit(path, record, merged_index(written), 1))

    checkpoint = read(path)
    stored = checkpoint.path, checkpoint.index
    for blocks in CUTS.values():
        block = blocks[rank]
        asked = {n: (torch.zeros(block.shape), BlockPlace(n, block.offsets, SHAPE)) for n in "0123"}
        read_tensors(*stored, asked)
        for name, (tensor, _) in asked.items():
            assert torch.equal(tensor, block.of(value(int(name)))), (name, block)
    first, number = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    read_tensors(*stored, {"0": (first, whole("0", SHAPE)), "n": (number, whole("plain", ()))})
    assert torch.equal(first, value(0).double())
    assert int(number) == 7
    for name, pieces in zip("012", stored_pieces(*stored, [(n, WHOLE[0]) for n in "012"]), strict=True):
        target = torch.zeros(SHAPE)
        pieces.read_into(target)
        for first, second in ((0, 0), (1, 2), (2, 3)):
            part = torch.zeros(3, 4)
            pieces.read_block(part, (first, second))
            assert torch.equal(part, value(int(name))[first : first + 3, second : second + 4])
        assert torch.equal(target, value(int(name)))
    for name, shape, said in (("4", SHAPE, "4 is not in it"), ("0", (5, 8), "there, .5, 8. here")):
        with pytest.raises(CheckpointError, match=said):
            read_tensors(*stored, {name: (torch.zeros(shape), whole(name, shape))})
    less = {**checkpoint.index, "1": replace(checkpoint.index["1"], pieces=checkpoint.index["1"].pieces[1:])}
    with pytest.raises(CheckpointError, match="10 elements of 1 are in none of its files"):
        read_tensors(path, less, {"1": (torch.zeros(SHAPE), whole("1", SHAPE))})
    side.close()


def test_blocks_are_stored_once_and_cut_anew(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(stored_and_cut_anew, str(tmp_path), world_size=4, timeout_seconds=60.0)
    (path,) = tmp_path.glob("step-*")
    pieces = json.loads((path / "checkpoint.json").read_text())["tensors"]
    assert [piece["shape"] for piece in pieces["0"]["pieces"]] == [[2, 7], [2, 7], [1, 7], [0, 7]]
    assert [piece["shape"] for piece in pieces["3"]["pieces"]] == [[4, 7], [1, 7]]
    assert len(pieces["2"]["pieces"]) == len(pieces["plain"]["pieces"]) == 1, "several have it, one counts"
    names = {name for file in path.glob("*.safetensors") for name in load_file(file)}
    assert {"1@0,0", "1@0,2", "1@0,4", "1@0,6", "plain"} <= names


def test_blocks_that_are_not_all_of_a_tensor_are_no_checkpoint() -> None:
    block = StoredBlock("rank-00000.safetensors", "w", (0, 0), (4, 7), 0)
    with pytest.raises(InternalError, match="28 of its 35 elements"):
        merged_index([{"w": [IndexEntry(torch.float32, SHAPE, (block,))]}])


def gathered_from_blocks() -> bool:
    """Columns of one parameter on three ranks; ``pieces_of`` is all that must know."""
    rank, side = dist.get_rank(), SideGroup()
    bounds = [0, 3, 4, 7]

    def pieces_of(state: RankState, name: str, shape: tuple[int, ...]) -> tuple[HeldPiece, ...]:
        return tuple(
            HeldPiece(r, name, Block((0, bounds[r]), (5, bounds[r + 1] - bounds[r])))
            for r in state.holders[name]
        )

    own = nn.Parameter(value(0)[:, bounds[rank] : bounds[rank + 1]].clone())
    state = RankState(rank, {"w": own}, {"w": own}, {}, {"w": (0, 1, 2)})
    original, gather_state.pieces_of = gather_state.pieces_of, pieces_of
    try:
        entries = {key: StateEntry(key, "w", (5, 7), torch.float64) for key in ("w", "tied")}
        found = gather_state.gather_state(("tied", "w"), entries, {}, state, side)
    finally:
        gather_state.pieces_of = original
        side.close()
    if rank:
        return found == {}
    assert list(found) == ["tied", "w"]
    return found["w"] is found["tied"] and torch.equal(found["w"], value(0).double())


def test_a_state_dict_is_put_together_from_blocks(pool: WorkerPool) -> None:
    assert pool.run(gathered_from_blocks, world_size=3, timeout_seconds=60.0) == [True] * 3
