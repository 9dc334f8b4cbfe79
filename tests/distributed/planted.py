"""Faults planted in workers: the parent's own code stays right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

PLANTED = ExitStack()
"""The fault that is planted in this worker."""


def nothing() -> Any:
    """No fault."""
    return ExitStack()


def plant(fault: Callable[[], Any]) -> None:
    """In a worker: plant ``fault`` instead of the one before."""
    PLANTED.close()
    PLANTED.enter_context(fault())
