"""The free search beside layer-wise plans on unlike devices, and how it scales.

    python -m benchmarks.free_search --only unlike [--models unet,moe] [--clusters gpu-4,cpu-2] [--limit 20] [--verify]
    python -m benchmarks.free_search --only scaling [--kinds branchy] [--sizes 100,1000] [--plot docs/free-scaling.svg]

``unlike`` ends with 1 if a free plan is slower than the layer-wise one, or another claim of a plan does not hold.
Tables: free_unlike.py and free_scaling.py say what is in them; free_clusters.py has the devices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import free_scaling, free_unlike
from benchmarks.free_plot import write_plot


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("unlike", "scaling"), action="append")
    parser.add_argument("--models", default=",".join(free_unlike.MODELS))
    parser.add_argument("--clusters", default=",".join(free_unlike.CLUSTERS))
    parser.add_argument("--kinds", default=",".join(free_scaling.KINDS))
    parser.add_argument("--sizes", default=",".join(map(str, free_scaling.SIZES)))
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each plan's searches")
    parser.add_argument("--verify", action="store_true", help="run tiny variants of what free won in float64")
    parser.add_argument("--plot", type=Path, help="where to write the plot of the scaling")
    given = parser.parse_args(arguments)
    parts = given.only or ["unlike", "scaling"]
    code = 0
    if "unlike" in parts:
        code = free_unlike.run(given.models.split(","), given.clusters.split(","), given.limit, given.verify)
    if "scaling" in parts:
        sizes = [int(size) for size in given.sizes.split(",")]
        found = free_scaling.run(given.kinds.split(","), sizes, given.limit)
        if given.plot is not None:
            write_plot(found, given.plot)
    return code


if __name__ == "__main__":
    sys.exit(main())
