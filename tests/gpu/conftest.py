"""These tests need a GPU; without one they are not collected, so that a run never claims to have passed them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runtime.ranks.launch import WorkerPool

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as workers:
        yield workers
