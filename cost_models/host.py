"""Memory and cores that this machine offers to local workers."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1
)


def memory_bytes() -> int:
    """Return the main memory, or the part of it that the container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in _CGROUP_LIMITS if path.is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])


def core_count() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
