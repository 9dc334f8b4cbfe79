"""For every test: no calibration of this machine, no stored plans, golden texts, who runs what beside whom.

``golden("plan_small", text)`` compares with ``tests/golden/plan_small.txt``. A difference is a change of behaviour:
look at it, then accept it with ``pytest --update-golden``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from benchmarks.faults import stay_forkable
from tests.support.garbage import RARELY

stay_forkable()  # before a test plans anything, be it while it is imported
os.environ["PARTITIONER_CALIBRATION"] = "none"
os.environ["PARTITIONER_CACHE"] = "none"

FOLDER = Path(__file__).parent / "golden"
settings.register_profile("one case per idea", max_examples=25)
settings.register_profile("all cases", max_examples=100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from what the code says"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draw more examples where the matrix is run too."""
    settings.load_profile("one case per idea" if config.option.markexpr == "not matrix" else "all cases")


OWN_PROCESSES = ("failures", "failures_between_groups", "launch", "weights_memory")
"""Files of tests/distributed that do without the pool of workers: they start processes of their own."""


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's: without it, or without -n, tests run one after another
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``--dist loadfile``: a file stays on one worker, and so does everything that shares a pool of workers.

    Several pools would cost more, by starting and importing, than they would gain: each test keeps both cores busy.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    apart = {f"tests/distributed/test_{name}.py" for name in OWN_PROCESSES}

    class OnePool(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "the pool" if file.startswith("tests/distributed/") and file not in apart else file

    return OnePool(config, log)


def pytest_collection_finish() -> None:
    """Take what importing made out of garbage collections: walking a million objects takes half a second each."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """For each file: collections and searches for referrers look at what its tests made, not at what is there by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fixed_spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For golden texts with intervals: spreads that stay when the real ones are fitted anew."""
    from cost_models import room
    from cost_models.intervals import KINDS, RATES, Spread
    from partitioner.record import data

    step = {
        (kind, rates): Spread(0.05, 0.1, 5, 0 if kind == "pipeline" else 12, 3)
        for kind in KINDS
        for rates in RATES
    }
    monkeypatch.setattr(data, "STEP_SECONDS", step)
    monkeypatch.setattr(
        room, "PEAK_BYTES", {"cuda": Spread(0.02, 0.05, 8, 10, 2), "cpu": Spread(0.0, 0.06, 10, 33, 9)}
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with its golden file, or write the file with ``--update-golden``."""

    def check(name: str, text: str) -> None:
        file = FOLDER / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            FOLDER.mkdir(exist_ok=True)
            file.write_text(text + "\n")
            return
        assert file.exists(), f"{file} is missing: run pytest --update-golden and read it"
        assert text + "\n" == file.read_text()

    return check


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group of two ranks, of which this process is the first; nothing is ever sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
