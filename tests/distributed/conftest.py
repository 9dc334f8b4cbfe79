"""One pool of local workers for all tests, and a warm start for every other: importing torch costs seconds a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.ranks.launch import WorkerPool
from tests.distributed.planted import nothing, plant
from tests.support.warm_start import warm_start


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Workers are forked from a process that has imported everything."""
    with warm_start():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers


@pytest.fixture
def mended(pool: WorkerPool) -> Iterator[WorkerPool]:
    """Workers that are without planted faults again afterwards."""
    yield pool
    pool.run(plant, nothing)
