"""Predicted beside published: training runs with tensor, sequence and pipeline parallelism, ZeRO and recomputation.

    python -m benchmarks.parallel_runs --runs parallel_runs.csv [--only GLOB] [--source ID] [--kind TP] [--trust AB]
                                       [--sample N] [--part 1/2] [--stored-only] [--rows] [--held-out]

Each row is planned as its source ran it, by one ``fix`` line (``benchmarks.parallel_sources``). Errors are those of the
simulated step, and of the memory that the source published, over the published, less one. A prediction is stored under what
it depends on, the row's plan and all code of the four floors (``STORE``), so another run predicts only what has changed.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from benchmarks.parallel_models import Decoder, decoder
from benchmarks.parallel_rows import GIB, AsRun, NotExpressibleError, ParallelRow, kinds_of, read_rows
from benchmarks.parallel_sources import as_run
from benchmarks.published import NOT_FITTED, spread
from cost_models.errors import PartitionerError
from cost_models.room import FILLS
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from passes.graph.graph import OpGraph

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("cost_models", "runtime", "passes", "partitioner")
STORE = ROOT / "build/parallel_runs.jsonl"
KINDS = ("data parallel", "TP", "PP", "TPxPP", "ZeRO", "recompute", "interleaved")
FITTED_ON = ("mosaic", "nanotron-grid")
"""Sources on other runs of which something was fitted: a stack's efficiencies, the time of a host."""
HELD_OUT = "held out: "
"""Begins the id of a stored prediction without what was fitted on the run's source."""
LEAST_MFU_PERCENT = 10.0
"""Of the grid's rows, which are one iteration each, those below are times of a cluster in trouble (``PARALLEL.md``)."""


@dataclass(frozen=True)
class Predicted:
    """The prediction of one row. Bytes are of the first, the last and the fullest device.

    ``peaks``: tensors. ``allocators``: what torch reserves beyond them; of predictions from before plans had it, nothing.
    ``communicators``, and ``context_bytes`` of each device: what the driver counts beside both.
    """

    id: str
    key: str
    step_seconds: float = 0.0
    peaks: tuple[float, float, float] = (0.0, 0.0, 0.0)
    allocators: tuple[float, float, float] = (0.0, 0.0, 0.0)
    communicators: tuple[float, float, float] = (0.0, 0.0, 0.0)
    context_bytes: float = 0.0
    kind: str = ""
    rates: str = ""
    refused: str = ""
    planning_seconds: float = 0.0


@dataclass(frozen=True)
class Compared:
    """A row beside its prediction. Errors are None where nothing was published that is worth scoring."""

    row: ParallelRow
    run: AsRun
    predicted: Predicted

    @property
    def step_seconds(self) -> float:
        """The prediction, or what its framework's host takes, if longer."""
        return max(self.predicted.step_seconds, self.run.host_seconds)

    @property
    def step_error(self) -> float | None:
        return self.step_seconds / float(self.row["step_seconds"]) - 1.0 if scores_step(self.row) else None

    @property
    def peak_bytes(self) -> float:
        """The predicted memory that was published: of the device it is of, with what the number counts beside tensors."""
        place = ("first", "last", "fullest").index(self.run.place)
        peak = self.predicted.peaks[place] + self.run.held_bytes
        if self.run.counts != "allocated":
            peak += self.predicted.allocators[place]
        if self.run.counts == "driver":
            peak += self.predicted.communicators[place] + self.run.context_bytes
        return peak

    @property
    def memory_error(self) -> float | None:
        return (
            self.peak_bytes / (float(self.row["peak_memory_gib"]) * GIB) - 1.0
            if scores_memory(self.row)
            else None
        )


def scores_step(row: ParallelRow) -> bool:
    """Tell whether a row's step time is worth comparing."""
    slow = row["source_id"] == "nanotron-grid" and float(row["mfu_pct"]) < LEAST_MFU_PERCENT
    return bool(row["step_seconds"]) and row["trust"] in "AB" and not slow


def scores_memory(row: ParallelRow) -> bool:
    """Tell whether a row's memory is worth comparing: that of the grid is right in slow iterations too."""
    return bool(row["peak_memory_gib"]) and (row["trust"] in "AB" or row["source_id"] == "nanotron-grid")


# --------------------------------------------------------------------------------------------------
# Predictions


@cache
def _code() -> str:
    """Return a fingerprint of all code that a prediction may depend on."""
    files = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    files.append(ROOT / "benchmarks/parallel_models.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def key_of(run: AsRun) -> str:
    """Return what a prediction depends on, in short."""
    return hashlib.sha256(f"{replace(run, host_seconds=0.0)!r} {_code()}".encode()).hexdigest()[:16]


def held_out_run(run: AsRun) -> AsRun:
    """Return the run without what was fitted on other runs of its source."""
    return (
        replace(run, host_seconds=0.0)
        if run.host_seconds
        else replace(run, efficiency=NOT_FITTED[run.device])
    )


@lru_cache(maxsize=2)
def _traced(shape: Decoder, precision: object) -> OpGraph:
    return as_graph(decoder(shape), precision=precision)  # type: ignore[arg-type]


def planned(run: AsRun) -> Plan:
    """Plan a row as it was run. Raises PartitionerError where it is refused."""
    return partition(
        _traced(run.shape, run.precision),
        run.cluster(),
        strategy="hybrid",
        fix=run.fix,
        batch_size=run.batch,
        schedule=run.schedule,
        optimizer_memory=run.optimizer,
        check="off",
        risk=FILLS,  # it ran, so it fitted
    )


def predicted(row: ParallelRow, run: AsRun) -> Predicted:
    """Predict one row."""
    since = time.perf_counter()
    try:
        plan = planned(run)
    except PartitionerError as error:
        return Predicted(row["id"], key_of(run), refused="; ".join([error.what, *error.because])[:300])
    parts = [plan.prediction.memory_parts(rank) for rank in range(plan.world_size)]
    three = parts[0], parts[-1], max(parts, key=lambda part: part["tensors"])
    intervals = plan.intervals
    return Predicted(
        row["id"],
        key_of(run),
        plan.prediction.step_seconds,
        tuple(float(part["tensors"]) for part in three),  # type: ignore[arg-type]
        tuple(float(part.get("allocator", 0)) for part in three),  # type: ignore[arg-type]
        tuple(float(part.get("communicators", 0)) for part in three),  # type: ignore[arg-type]
        float(parts[0].get("context", 0)),
        intervals.kind,
        intervals.origin.rates or "",
        planning_seconds=time.perf_counter() - since,
    )


def stored(path: Path = STORE) -> dict[str, Predicted]:
    """Read the predictions that are stored, by row; the last of each counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = (Predicted(**json.loads(line)) for line in lines)
    return {made.id: made for made in found}


def store(made: Predicted, path: Path = STORE) -> None:
    """Add a prediction."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(made)) + "\n")


def compared(
    rows: Sequence[ParallelRow], *, stored_only: bool = False, held_out: bool = False, path: Path = STORE
) -> Iterator[Compared | tuple[ParallelRow, str]]:
    """Yield each row beside its prediction, or with the reason why it cannot be planned.

    ``stored_only``: predictions of earlier code are taken as they are, and rows without one left out. ``held_out``: only
    rows of ``FITTED_ON``, and without that.
    """
    known, expressed = stored(path), []
    for row in rows:
        if held_out and row["source_id"] not in FITTED_ON:
            continue
        try:
            run = as_run(row)
        except NotExpressibleError as reason:
            yield row, str(reason)
            continue
        expressed.append((row, held_out_run(run) if held_out else run))
    for row, run in sorted(expressed, key=lambda pair: repr(pair[1].shape)):
        name = HELD_OUT * bool(run.efficiency) + row["id"]
        made = known.get(name)
        if not stored_only and (made is None or made.key != key_of(run)):
            made = replace(predicted(row, run), id=name)
            store(made, path)
        if made is not None and made.refused:
            yield row, f"refused: {made.refused}"
        elif made is not None:
            yield Compared(row, run, made)


# --------------------------------------------------------------------------------------------------
# Written


def report(found: Sequence[Compared | tuple[ParallelRow, str]], rows: bool) -> Iterator[str]:
    """Yield the table of rows, if asked for, and the summaries."""
    done = [item for item in found if isinstance(item, Compared)]
    for item in done if rows else ():
        yield line(item)
    groups: dict[str, list[Compared]] = defaultdict(list)
    for item in done:
        for name in (
            "all",
            f"source {item.row['source_id']}",
            *(f"kind {kind}" for kind in kinds_of(item.row)),
        ):
            groups[name].append(item)
    for what, error in (("step", "step_error"), ("memory", "memory_error")):
        for name, members in sorted(groups.items()):
            errors = [e for member in members if (e := getattr(member, error)) is not None]
            if errors:
                yield f"{what:6} {name:24} {spread(errors)}"
    reasons = Counter(item[1] for item in found if not isinstance(item, Compared))
    for reason, count in reasons.most_common():
        yield f"{count:5} not compared: {reason}"
    seconds = [item.predicted.planning_seconds for item in done]
    yield f"{len(done)} predicted, planning median {statistics.median(seconds or [0.0]):.1f} s"


def line(item: Compared) -> str:
    """Write one row."""
    row = item.row
    step = "" if item.step_error is None else f"{float(row['step_seconds']):9.3f} {item.step_error:+7.1%}"
    memory = (
        "" if item.memory_error is None else f"{float(row['peak_memory_gib']):6.1f} {item.memory_error:+7.1%}"
    )
    return f"{row['id']:44} {item.step_seconds:9.3f} s {step:18} {item.peak_bytes / GIB:6.1f} GiB {memory}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="the CSV file of runs")
    parser.add_argument("--only", default="*", help="glob over the rows' ids")
    parser.add_argument("--source", default="*", help="glob over their sources")
    parser.add_argument("--kind", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--trust", default="ABC", help="letters of trust")
    parser.add_argument("--sample", type=int, help="about so many rows, evenly taken")
    parser.add_argument("--part", default="1/1", help="K/N: every Nth row, for N processes")
    parser.add_argument(
        "--stored-only", action="store_true", help="predict nothing: what is stored, by whatever code"
    )
    parser.add_argument(
        "--held-out", action="store_true", help="rows whose source was fitted on, predicted without that"
    )
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args(arguments)
    rows = [
        row
        for row in read_rows(options.runs)
        if fnmatch.fnmatch(row["id"], options.only)
        and fnmatch.fnmatch(row["source_id"], options.source)
        and row["trust"] in options.trust
        and (options.kind is None or options.kind in kinds_of(row))
        and (scores_step(row) or scores_memory(row))
    ]
    if options.sample:
        rows = rows[:: max(1, len(rows) // options.sample)]
    part, parts = map(int, options.part.split("/"))
    found = []
    for item in compared(rows[part - 1 :: parts], stored_only=options.stored_only, held_out=options.held_out):
        found.append(item)
        if options.rows and isinstance(item, Compared):
            print(line(item), flush=True)
    print("\n".join(report(found, rows=False)))


if __name__ == "__main__":
    main()
