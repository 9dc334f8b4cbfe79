"""One pool of local workers for all tests: importing torch costs seconds a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.ranks.launch import WorkerPool
from tests.distributed.planted import nothing, plant


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers


@pytest.fixture
def mended(pool: WorkerPool) -> Iterator[WorkerPool]:
    """Workers that are without planted faults again afterwards."""
    yield pool
    pool.run(plant, nothing)
