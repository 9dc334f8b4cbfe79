"""Local workers that are there at once: forked from a process that has imported torch and exported a model.

A worker that starts cold needs four to eight seconds of processor time before its first step; the tests start some fifty.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from runtime.ranks import launch

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def warm_start() -> Iterator[None]:
    """Let every pool made meanwhile have workers that are forked; how users' are started is left to test_launch.py."""
    context = multiprocessing.get_context("forkserver")
    if context.get_start_method() == "forkserver":  # benchmarks.faults forks them from its own process
        context.set_forkserver_preload(["tests.support.preloaded"])
        with contextlib.chdir(ROOT):  # where ``tests`` can be imported
            forkserver.ensure_running()
    with mock.patch.object(launch, "multiprocessing", SimpleNamespace(get_context=lambda method: context)):
        yield
