"""Tensors of which every rank has a block: stored, cut anew, gathered."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from runtime.checkpoint.directory import begin, commit, read
from runtime.checkpoint.storage import TensorReader, TensorWriter, stored_pieces
from runtime.ranks.launch import WorkerPool
from runtime.ranks.side_group import SideGroup
from runtime.state import gather as gather_state
from runtime.state.gather import HeldPiece, StateEntry
from runtime.state.rank_state import RankState

PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate()]


def value(number: int) -> torch.Tensor:
    return torch.arange(10.0 * number, 10.0 * number + 35).view(5, 7)


def stored_and_cut_anew(folder: str) -> None:
    """5 × 7 over 4 ranks: blocks of 2, 2, 1 and 0 rows, or of 2, 2, 2 and 1 columns."""
    side, rank = SideGroup(), dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    path = side.from_first("saving", lambda: begin(Path(folder), 3))
    tensors: dict[str, torch.Tensor] = {
        str(n): distribute_tensor(value(n), mesh, [how]) for n, how in enumerate(PLACEMENTS)
    }
    tensors["plain"] = torch.tensor(7, dtype=torch.int64)
    record = {"model": "", "step": 3, "world_size": 4, "optimizer": None, "loss_scale": {}, "extra": None}
    writer = TensorWriter(path, rank, lambda index: commit(path, record, index, 1))
    dcp.save(tensors, storage_writer=writer, process_group=side.group)

    checkpoint = read(path)
    for how in PLACEMENTS:
        asked: dict[str, torch.Tensor] = {
            str(n): distribute_tensor(torch.zeros(5, 7), mesh, [how]) for n in range(len(PLACEMENTS))
        }
        reader = TensorReader(checkpoint.path, checkpoint.index)
        dcp.load(asked, storage_reader=reader, process_group=side.group)
        for name, tensor in asked.items():
            assert isinstance(tensor, DTensor)
            assert torch.equal(tensor.full_tensor(), value(int(name))), (name, how)
    plain = {"0": torch.zeros(5, 7, dtype=torch.float64), "plain": torch.zeros((), dtype=torch.int64)}
    dcp.load(plain, storage_reader=TensorReader(checkpoint.path, checkpoint.index), process_group=side.group)
    assert torch.equal(plain["0"], value(0).double())
    assert int(plain["plain"]) == 7
    for name, stored in stored_pieces(checkpoint.path, checkpoint.index, ["0", "1", "2"]).items():
        target = torch.zeros(5, 7)
        stored.read_into(target)
        for first, second in ((0, 0), (1, 2), (2, 3)):
            block = torch.zeros(3, 4)
            stored.read_block(block, (first, second))
            assert torch.equal(block, value(int(name))[first : first + 3, second : second + 4])
        assert torch.equal(target, value(int(name)))
    side.close()


def test_blocks_are_stored_once_and_cut_anew(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(stored_and_cut_anew, str(tmp_path), world_size=4, timeout_seconds=60.0)
    (path,) = tmp_path.glob("step-*")
    pieces = json.loads((path / "checkpoint.json").read_text())["tensors"]
    assert [piece["shape"] for piece in pieces["0"]["pieces"]] == [[2, 7], [2, 7], [1, 7], [0, 7]]
    assert len(pieces["2"]["pieces"]) == len(pieces["plain"]["pieces"]) == 1, "several have it, one writes it"
    names = {name for file in path.glob("*.safetensors") for name in load_file(file)}
    assert {"1@0,0", "1@0,2", "1@0,4", "1@0,6", "plain"} <= names


def gathered_from_blocks() -> bool:
    """Columns of one parameter on three ranks; ``pieces_of`` is all that must know."""
    rank, side = dist.get_rank(), SideGroup()
    bounds = [0, 3, 4, 7]

    def pieces_of(state: RankState, name: str, shape: tuple[int, ...]) -> tuple[HeldPiece, ...]:
        return tuple(
            HeldPiece(r, name, (0, bounds[r]), (5, bounds[r + 1] - bounds[r])) for r in state.holders[name]
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
