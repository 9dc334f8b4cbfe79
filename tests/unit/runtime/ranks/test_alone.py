"""Without a process group in sight: in this thread or in all, whatever code imported by name, and nowhere else."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import is_initialized

from runtime.ranks.alone import _CONTEXTS, NoGroupError, alone


@pytest.mark.usefixtures("two_ranks")
def test_it_is_hidden_inside_and_there_again_afterwards() -> None:
    with alone() as asked:
        assert not is_initialized()
        with alone():
            assert dist.group.WORLD is None
        assert not dist.is_initialized()
    assert [Path(file).name for file, _ in asked] == ["test_alone.py"] * 3
    assert dist.is_initialized()
    assert dist.get_world_size() == 2


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("threads", [False, True])
def test_other_threads_see_it_unless_all_are_meant(threads: bool) -> None:
    with ThreadPoolExecutor(1) as other, alone(threads=threads):
        assert other.submit(dist.is_initialized).result() is not threads


@pytest.mark.usefixtures("two_ranks")
def test_what_communicates_all_the_same_names_its_line() -> None:
    own = dist.new_group([0])
    for talk in (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_gather([torch.ones(2)], torch.ones(2), group=own),
        dist.get_rank,
    ):
        with alone(), pytest.raises(ValueError, match="talks to other ranks itself") as caught:
            talk()
        assert isinstance(caught.value, NoGroupError)
        assert caught.value.because[0].startswith("test_alone.py:")
    dist.all_reduce(torch.ones(2))


def test_a_process_that_is_forked_meanwhile_sees_its_own_group() -> None:
    reading, writing = os.pipe()
    with alone(threads=True):
        child = os.fork()
        if child == 0:
            os.write(writing, str(len(_CONTEXTS)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert len(_CONTEXTS) == 1
    assert os.read(reading, 8) == b"0"
