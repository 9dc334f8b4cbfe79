"""Joining the processes that torchrun started."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cost_models.errors import UsageError
from runtime.launch import WorkerPool, init_distributed


def test_outside_torchrun_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="torchrun --nproc-per-node"):
        init_distributed("cpu")


def join_twice() -> tuple[str, int, bool]:
    """In a worker that is initialized already: the same group comes back."""
    group = init_distributed(torch.device("cpu"))
    return dist.get_backend(group), dist.get_world_size(), group is dist.group.WORLD


def join_from_the_environment(port: int) -> tuple[str, int]:
    """In a worker, as torchrun would: by the environment only."""
    import os

    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    init_distributed("cpu")
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_backend(), int(total)


def test_joins_or_reuses_a_group() -> None:
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free
    with WorkerPool(2, group_timeout_seconds=30) as pool:
        assert pool.run(join_twice, timeout_seconds=60) == [("gloo", 2, True)] * 2
        assert pool.run(join_from_the_environment, port, timeout_seconds=60) == [("gloo", 2)] * 2
