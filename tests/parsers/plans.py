"""The plans that go to every tool and come back: degrees of a small GPT-2 on eight devices."""

from __future__ import annotations

PLANS = [
    ("data=8 microbatch=1 recompute=none", "auto"),
    ("data=8 microbatch=4 recompute=full", "auto"),
    ("data=8 zero=1 microbatch=1 recompute=none", "auto"),
    ("data=8 zero=1 microbatch=2 recompute=full", "auto"),
    ("data=8 zero=3 microbatch=1 recompute=none", "auto"),
    ("data=8 zero=3 microbatch=2 recompute=full", "auto"),
    ("tensor=2 data=4 microbatch=1 recompute=none", "auto"),
    ("tensor=4 data=2 zero=1 microbatch=2 recompute=none", "auto"),
    ("sequence=2 data=4 microbatch=1 recompute=none", "auto"),
    ("sequence=4 data=2 zero=1 microbatch=1 recompute=full", "auto"),
    ("pipeline=2 data=4 microbatch=1 recompute=none", "1f1b"),
    ("pipeline=2 data=4 zero=1 microbatch=2 recompute=full", "1f1b"),
    ("pipeline=4 data=2 zero=1 microbatch=1 recompute=none", "1f1b"),
    ("pipeline=8 tensor=1 microbatch=1 recompute=none", "1f1b"),
    ("pipeline=2 tensor=2 data=2 microbatch=1 recompute=none", "1f1b"),
    ("pipeline=2 sequence=2 data=2 zero=1 microbatch=2 recompute=none", "1f1b"),
    ("pipeline=4 sequence=2 data=1 microbatch=1 recompute=full", "1f1b"),
    ("pipeline=2 interleave=2 data=4 microbatch=1 recompute=none", "interleaved"),
    ("pipeline=2 interleave=3 sequence=2 data=2 microbatch=1 recompute=none", "interleaved"),
    ("pipeline=2 interleave=2 tensor=4 microbatch=2 recompute=full", "interleaved"),
]
"""What is fixed, and the schedule."""
