"""The processor, memory and cores that this machine offers to local workers."""

from __future__ import annotations

import ctypes
import os
import platform
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


def processor_name() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt`` (malloc.h)."""


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc; the most that it holds is the same.

    glibc gives large blocks, and the top of its heap, back to the system. Every step then grows to its peak anew, and the
    system clears each page of it again: a fifth of the step of a small convolutional network on two processors.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_MMAP_THRESHOLD, 2**25)  # the most that glibc takes
