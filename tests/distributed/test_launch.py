"""Joining the processes that torchrun started; local workers and the script that starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cost_models.errors import UsageError
from runtime.ranks.launch import WorkerError, WorkerPool, init_distributed, spawn_local


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


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text, encoding="utf-8")
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_a_script_without_a_guard_can_start_workers(tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "plain.py",
        "import operator\n"
        "from runtime.ranks.launch import WorkerPool\n"
        "print('script runs')\n"
        "with WorkerPool(2) as pool:\n"
        "    print(pool.run(operator.add, 2, 3))\n"
        "print(__spec__, __file__)\n",
    )
    assert done.stdout.splitlines() == ["script runs", "[5, 5]", f"None {tmp_path / 'plain.py'}"], done.stderr


GUARDED = """
import operator
from runtime.ranks.launch import WorkerPool

class Pair:
    def __init__(self, a, b): self.a, self.b = a, b

def total(pair): return pair.a + pair.b

if __name__ == "__main__":
    with WorkerPool(1) as pool:
        print(pool.run(operator.add, 2, 3), pool.run(total, Pair(3, 4)), pool.run(operator.add, 5, 6))
"""


def test_functions_of_the_script_itself_run_after_others(tmp_path: Path) -> None:
    done = run_script(tmp_path / "guarded.py", GUARDED)
    assert done.stdout == "[5] [7] [11]\n", done.stderr


def test_a_missing_guard_is_named_where_it_is_needed(tmp_path: Path) -> None:
    text = GUARDED.replace('if __name__ == "__main__":', "if True:")
    done = run_script(tmp_path / "unguarded.py", text)
    assert done.returncode == 1
    assert 'does the script start its work under `if __name__ == "__main__":`?' in done.stderr


class Unreadable:
    """Pickles well; reading it back fails."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse_to_be_read, ()


def refuse_to_be_read() -> None:
    raise ValueError("this cannot be read back")


def test_a_task_that_cannot_be_read_says_why_and_the_pool_goes_on() -> None:
    with WorkerPool(2, group_timeout_seconds=30) as pool:
        with pytest.raises(WorkerError, match="this cannot be read back"):
            pool.run(str, Unreadable(), timeout_seconds=60)
        assert pool.run(str, 7, timeout_seconds=60) == ["7", "7"]


def test_spawn_local_returns_by_rank() -> None:
    assert spawn_local(2, os.getenv, "OMP_NUM_THREADS", threads=1) == ["1", "1"]
