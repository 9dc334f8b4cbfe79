"""What a process does with memory that it frees."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
import torch
from cost_models.host import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(2**20) for _ in range(16)]
    del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returned = min(faults() for _ in range(3))
keep_freed_memory()
print(returned, min(faults() for _ in range(3)))
"""


def test_freed_memory_is_kept_and_costs_no_page_faults_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    returned, kept = map(int, done.stdout.split())
    # 16 tensors of 4 MiB are 16,384 pages of 4 KiB; fewer where huge pages stand in for them.
    assert returned > 0
    assert kept < returned / 4
