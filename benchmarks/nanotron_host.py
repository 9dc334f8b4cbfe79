"""What nanotron's host takes of a step on the Playbook's grid: a layer of a micro-batch needs so long, however small it is.

    python -m benchmarks.nanotron_host --runs parallel_runs.csv      the two numbers, and the table that they are read from

Over the grid's rows of few tokens a shard, the time of a layer (step over layers of a stage, times micro-batches and the
stages that fill and drain) does not depend on the model, from 1 to 80 billion parameters, nor on the tokens. Without a
pipeline its lowest decile is 4.5 ms for 2, 4 and 8 ranks of a tensor group; with one over several machines it grows by
2.5 ms with every rank. Why it grows with the ranks of a group is not known here; other sources do not show it.

    host seconds of a step = (A + B · ranks of a tensor group, where a pipeline goes over machines) · layers / stages
                             · (micro-batches + stages - 1)

Rows that ``docs/accuracy.md`` compares are left out of the fit.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.parallel_rows import PER_MACHINE, ParallelRow, microbatches, read_rows

A_SECONDS = 4.5e-3
B_SECONDS = 2.5e-3
"""As this command prints them, of two digits."""
FEW_TOKENS = 2048
"""Rows with at most so many tokens a shard are looked at: kernels of more take longer than the host on an H100."""
FULL_PIPELINE = 8
"""Rows of at least so many micro-batches: of fewer, summing gradients and the optimizer are a large part."""


def host_seconds(row: ParallelRow) -> float:
    """Return the seconds of a step below which nanotron's host does not get."""
    return (A_SECONDS + (B_SECONDS * int(row["tp"]) if over_machines(row) else 0.0)) * layer_times(row)


def over_machines(row: ParallelRow) -> bool:
    """Tell whether there is a pipeline, and more than one machine."""
    return int(row["pp"]) > 1 and int(row["gpus"]) > PER_MACHINE


def layer_times(row: ParallelRow) -> float:
    """Return how many layers of a micro-batch a stage computes one after the other, its bubbles with them."""
    stages = int(row["pp"])
    return int(row["layers"]) / stages * (microbatches(row) + stages - 1)


def deciles(rows: Iterable[ParallelRow]) -> dict[tuple[bool, int], tuple[int, float]]:
    """Return rows and the lowest decile of a layer's seconds, by (pipeline over machines, ranks of a tensor group)."""
    layers: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for row in rows:
        ranks = int(row["tp"])
        tokens = int(row["micro_batch"]) * int(row["sequence"]) / ranks
        if 1 < ranks <= PER_MACHINE and tokens <= FEW_TOKENS and microbatches(row) >= FULL_PIPELINE:
            layers[over_machines(row), ranks].append(float(row["step_seconds"]) / layer_times(row))
    return {key: (len(found), sorted(found)[len(found) // 10]) for key, found in sorted(layers.items())}


def fitted(found: Mapping[tuple[bool, int], tuple[int, float]]) -> tuple[float, float]:
    """Return A and B in seconds: medians over the sizes of tensor groups."""
    alone = statistics.median(least for (pipeline, _), (_, least) in found.items() if not pipeline)
    grown = [(least - alone) / ranks for (pipeline, ranks), (_, least) in found.items() if pipeline]
    return alone, statistics.median(grown)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the fit."""
    from benchmarks.accuracy import GRID, read_scores  # which imports this file's formula

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="the CSV file of runs")
    compared = {score.id for score in read_scores()[1]}
    rows = [
        row
        for row in read_rows(parser.parse_args(arguments).runs)
        if row["source_id"] == GRID and row["step_seconds"] and row["id"] not in compared
    ]
    found = deciles(rows)
    for (pipeline, ranks), (count, least) in found.items():
        words = "pipeline over machines" if pipeline else "without"
        print(
            f"{words:22} tensor groups of {ranks}: {count:4} rows, lowest decile {1e3 * least:5.1f} ms a layer"
        )
    print("A {:.2f} ms, B {:.2f} ms".format(*(1e3 * value for value in fitted(found))))


if __name__ == "__main__":
    main()
