"""docs/accuracy.md: predictions beside published runs with tensor, sequence and pipeline parallelism, ZeRO, recomputation.

    python -m benchmarks.accuracy --runs parallel_runs.csv      the page, and what it is made of, from stored predictions
    python -m benchmarks.accuracy                               the page alone, from benchmarks/data/parallel_scores.csv

Predictions are those that ``benchmarks.parallel_runs`` has stored, by whatever code; the page says when they were
collected. Nothing is fitted here. Of what is scored, llm-foundry's software of 2023 alone was fitted on, by other runs than
these: its rows are also predicted without that (``benchmarks.parallel_runs --held-out``).
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import cast

from benchmarks.parallel_rows import CARDS, GIB, kinds_of, read_rows
from benchmarks.parallel_runs import (
    FITTED_ON,
    HELD_OUT,
    KINDS,
    STORE,
    Compared,
    compared,
    scores_memory,
    scores_step,
)
from benchmarks.residuals import Counts, Residual, replace_residuals
from cost_models.cluster import ClusterSpec
from cost_models.intervals import Interval, PlanKind, RateSource
from cost_models.room import room_share
from cost_models.spreads import PEAK_BYTES, STEP_SECONDS
from partitioner.planning.options import RISK

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/accuracy.md"
SCORES = ROOT / "benchmarks/data/parallel_scores.csv"
GRID = "nanotron-grid"
SOURCES = {
    GRID: "nanotron, Ultra-Scale Playbook",
    "mosaic": "llm-foundry, FSDP",
    HELD_OUT + "mosaic": "llm-foundry, nothing fitted on it",
    HELD_OUT + GRID: "nanotron, nothing fitted on it",
    "bigscience": "Megatron-DeepSpeed, BLOOM's search",
    "internlm": "InternLM",
    "nemo-launcher": "NeMo launcher",
    "mlm-golden": "Megatron-LM, functional tests",
}
COUNTS: dict[str, Counts] = {
    "nanotron-grid": "reserved",
    "bigscience": "driver",
    "mlm-golden": "allocated",
}
"""What the published memory counts."""
FULL = 0.95
"""The share of a device's memory from which on allocators are known to free and ask again, which no prediction here has."""


@dataclass(frozen=True)
class Score:
    """A published run and its prediction. Zero: not published, or not worth scoring. ``errs_like``: its interval's kind.

    ``share``: of the fullest device's memory, that the plan takes with all that is beside tensors. ``tokens``: of a
    micro-batch, that a shard has.
    """

    id: str
    source: str
    kinds: str
    errs_like: str
    rates: str
    step_seconds: float
    published_seconds: float
    peak_gib: float
    published_gib: float
    share: float
    tokens: float

    @property
    def step_error(self) -> float | None:
        return self.step_seconds / self.published_seconds - 1.0 if self.published_seconds else None

    @property
    def memory_error(self) -> float | None:
        return self.peak_gib / self.published_gib - 1.0 if self.published_gib else None

    @property
    def step_interval(self) -> Interval:
        return STEP_SECONDS[cast(PlanKind, self.errs_like), cast(RateSource, self.rates)].interval(
            self.step_seconds
        )

    @property
    def peak_interval(self) -> Interval:
        return PEAK_BYTES["cuda"].interval(self.peak_gib)

    @property
    def fits(self) -> bool:
        return self.share <= room_share("cuda", RISK)


@cache
def _memory_bytes(preset: str) -> int:
    return ClusterSpec.model_validate({"nodes": [{"device": {"preset": preset}}]}).devices[0].memory_bytes


def score_of(item: Compared, held_out: bool) -> Score:
    """Return what the page needs of a row."""
    row, made = item.row, item.predicted
    whole = made.peaks[2] + made.allocators[2] + made.communicators[2] + made.context_bytes
    return Score(
        row["id"],
        HELD_OUT * held_out + row["source_id"],
        ", ".join(kinds_of(row)),
        made.kind,
        made.rates,
        float(f"{item.step_seconds:.5g}"),
        float(row["step_seconds"]) if scores_step(row) else 0.0,
        float(f"{item.peak_bytes / GIB:.4g}"),
        float(row["peak_memory_gib"]) if scores_memory(row) else 0.0,
        float(f"{whole / _memory_bytes(CARDS[row['gpu']][0]):.4f}"),
        int(row["micro_batch"]) * int(row["sequence"]) / int(row["tp"] or 1),
    )


def collected(runs: Path, store: Path = STORE) -> list[Score]:
    """Return the scores of all rows that a prediction is stored of."""
    rows = [row for row in read_rows(runs) if scores_step(row) or scores_memory(row)]
    found = [
        score_of(item, held_out)
        for held_out in (False, True)
        for item in compared(rows, stored_only=True, path=store, held_out=held_out)
        if isinstance(item, Compared)
    ]
    return sorted(found, key=_order)


def _order(score: Score) -> tuple[int, str]:
    return list(SOURCES).index(score.source), score.id


def read_scores(path: Path = SCORES) -> tuple[str, list[Score]]:
    """Read the date on which scores were collected, and the scores."""
    with path.open(newline="") as file:
        date = file.readline().removeprefix("# ").strip()
        numbers = {field.name for field in fields(Score) if field.type == "float"}
        return date, [
            Score(**{key: float(value) if key in numbers else value for key, value in row.items()})
            for row in csv.DictReader(file)
        ]


def residuals(scores: Iterable[Score]) -> list[Residual]:
    """Return the residuals of runs as they ran, those of which a step or a peak was published.

    Steps of the grid are one iteration each, on a cluster in trouble: they tell of that, and are compared alone.
    """
    return [
        Residual(
            "parallel",
            SOURCES[score.source],
            score.id,
            score.errs_like,
            score.rates,
            "cuda",
            score.published_seconds / score.step_seconds if _fits_steps(score) else None,
            score.published_gib / score.peak_gib if score.published_gib else None,
            COUNTS[score.source] if score.published_gib else "",
        )
        for score in scores
        if not score.source.startswith(HELD_OUT) and (_fits_steps(score) or score.published_gib)
    ]


def _fits_steps(score: Score) -> bool:
    return score.published_seconds > 0 and score.source != GRID


def write_scores(scores: Sequence[Score], path: Path = SCORES) -> None:
    """Write scores, with today's date above them."""
    with path.open("w", newline="") as file:
        file.write(f"# {datetime.now(UTC):%Y-%m-%d}\n")
        writer = csv.DictWriter(file, [field.name for field in fields(Score)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, scores))


# --------------------------------------------------------------------------------------------------
# The page


def _inside(published: float, interval: Interval) -> bool:
    return interval.low <= published <= interval.high


def _figures(errors: Sequence[float], inside: Sequence[bool]) -> str:
    if not errors:
        return "| | | | | "
    sizes = sorted(map(abs, errors))
    most = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return (
        f"| {len(errors)} | {statistics.median(sizes):.1%} | {most:.1%} | {statistics.median(errors):+.1%} "
        f"| {sum(inside) / len(inside):.0%} "
    )


def line(name: str, scores: Sequence[Score]) -> str:
    """Write a line of a table of medians."""
    steps = [score for score in scores if score.step_error is not None]
    peaks = [score for score in scores if score.memory_error is not None]
    step = _figures(
        [cast(float, score.step_error) for score in steps],
        [_inside(score.published_seconds, score.step_interval) for score in steps],
    )
    memory = _figures(
        [cast(float, score.memory_error) for score in peaks],
        [_inside(score.published_gib, score.peak_interval) for score in peaks],
    )
    return f"| {name} {step}{memory}|"


def _grouped(scores: Iterable[Score], of: Callable[[Score], Iterable[str]]) -> dict[str, list[Score]]:
    groups: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        for name in of(score):
            groups[name].append(score)
    return groups


HEAD = (
    "| | steps | median error | 90% of errors below | bias | in the interval "
    "| peaks | median error | 90% of errors below | bias | in the interval |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)
ABOUT = """\
# Accuracy: predictions beside published parallel runs

Made by `python -m benchmarks.accuracy` from predictions collected until {date}. {runs} runs of {sources} sources, that
others made on A100s, H100s and GB200s and published, each planned as it was run: its model, its cluster, its batch
and one `--fix` line of degrees, ZeRO, micro-batches, recomputation and stage borders (`benchmarks/parallel_sources.py`
says what each framework does alike in all of its runs, and where that is written). The file of runs is not part of
this repository: of each the id, and the figures that are compared, are. The error is predicted over published, less
one. Which runs can be planned, and which cannot and why, is what `make parallel` prints.

Nothing was fitted on these runs. Two sources' software was fitted on, by other runs of it: the attention and the
memory of llm-foundry's (`stack: "2023"`), and the time of nanotron's host (below). Their rows are predicted a second
time by numbers that know none of their runs. The stack of 2023 stands for the software of InternLM and of
Megatron-DeepSpeed of those years too, which it was not fitted on. Of the grid of the Playbook, which is one iteration
each, only steps of at least 10% MFU are compared, and {sampled}.

Published peaks are of unlike kinds: what torch's allocator reserved on the first stage (nanotron), allocated on the
last (Megatron-LM), the driver's count (Megatron-DeepSpeed, with the context and NCCL's communicators). Predicted is
the same.
"""
FIT = """
## Would they fit?

All of these ran. At a risk of {risk:.0%} (`--risk`) a plan is refused whose chance of not fitting is larger: one that is
predicted to take more than {room:.0%} of the memory.
"""
READING = """\
## How to read it

- **The interval** is the range that a plan prints for nine of ten runs. Where fewer lie in it, it claims too much.
- **Bias** below zero: predicted too fast, or too small.
- **nanotron's host.** In the grid's other rows a layer of a micro-batch takes no less than 4.5 ms, and where a
  pipeline goes over machines 2.5 ms more for each rank of its tensor group: 24 ms at 8, as long for a model of 1 as
  for one of 80 billion parameters (`python -m benchmarks.nanotron_host`). So a step of nanotron's is predicted to take
  that, where it is longer than what the devices need. Why it grows with the group is not known here; no other source
  shows it.
- **Few tokens a shard** (a micro-batch's over the shards): steps are predicted too fast, the more so the fewer.
- **BLOOM's search** ran with `CUDA_LAUNCH_BLOCKING=1`: each kernel waits for its launch, and so it is predicted. What
  is missing grows with the ranks of tensor groups, and not with the micro-batch: 10 to 17 ms for a layer of one.
- {full} of llm-foundry's runs would fill more than {share:.0%} of the memory by prediction: the median error of their
  steps is {full_error:.1%}, of the others {other_error:.1%}. An allocator
  that is so full frees memory and asks for it anew, which no prediction has.
- **Peaks** are predicted as torch's allocator reserves them where that is what was published (nanotron,
  Megatron-DeepSpeed). What a framework holds beside a plan of ours is counted with it: buffers of gradients, outputs
  of stages, a bucket of ZeRO, and for nanotron what its host allocates a micro-batch ahead
  (`benchmarks/parallel_sources.py`). What Megatron-LM allocated is predicted too small by a twentieth.
"""


def page(date: str, scores: Sequence[Score]) -> str:
    """Return the page."""
    as_ran = [score for score in scores if not score.source.startswith(HELD_OUT)]
    without = [score for score in scores if score.source.startswith(HELD_OUT)]
    honest = [score for score in as_ran if score.source not in FITTED_ON] + without
    sources = _grouped(scores, lambda score: [score.source])
    grid = sources.get(GRID, [])
    parts = [
        ABOUT.format(
            date=date,
            runs=len(as_ran),
            sources=len({score.source for score in as_ran}),
            sampled=f"of those with memory or step, {len(grid)} evenly taken ones",
        ),
        "## By kind of plan\n\n" + HEAD,
        *_by_kind(as_ran, ""),
        line("**all**", as_ran),
        line("**all, nothing fitted**", honest),
        *_by_kind([score for score in as_ran if score.source != GRID], ", without the grid"),
        "\n## By tokens of a micro-batch that a shard has\n\n" + HEAD,
        *(line(name, group) for name, group in sorted(_grouped(as_ran, _by_tokens).items(), key=_least)),
        "\n## By source\n\n" + HEAD,
        *(line(name, sources[source]) for source, name in SOURCES.items() if source in sources),
        FIT.format(risk=RISK, room=room_share("cuda", RISK)),
        "| | runs | fit at this risk | fit by prediction |\n|---|--:|--:|--:|",
        *(
            _fit_line(SOURCES[source], group)
            for source, group in _grouped(as_ran, lambda score: [score.source]).items()
        ),
        _fit_line("**all**", as_ran),
        "\n" + _reading(date, sources.get("mosaic", [])),
        "## Every run\n\n"
        "| run | kind | step, predicted | published | error | peak, predicted | published | error |\n"
        "|---|---|--:|--:|--:|--:|--:|--:|",
        *map(_row, as_ran),
    ]
    return "\n".join(parts) + "\n"


def _by_kind(scores: Sequence[Score], words: str) -> Iterator[str]:
    groups = _grouped(scores, lambda score: score.kinds.split(", "))
    yield from (line(kind + words, groups[kind]) for kind in KINDS if kind in groups)


def _by_tokens(score: Score) -> list[str]:
    """The power of four at or below a run's tokens."""
    least = 4 ** int(math.log(score.tokens, 4) + 1e-9)
    return [f"{least:,} to {4 * least - 1:,}"]


def _least(group: tuple[str, list[Score]]) -> float:
    return min(score.tokens for score in group[1])


def _fit_line(name: str, scores: Sequence[Score]) -> str:
    count = len(scores)
    safe, fitting = (
        sum(found) / count for found in ([s.fits for s in scores], [s.share <= 1 for s in scores])
    )
    return f"| {name} | {count} | {safe:.0%} | {fitting:.0%} |"


def _reading(date: str, scores: Sequence[Score]) -> str:
    full, other = (
        [
            abs(score.step_error)
            for score in scores
            if score.step_error is not None and (score.share > FULL) == above
        ]
        for above in (True, False)
    )
    return READING.format(
        date=date,
        full=len(full),
        share=FULL,
        full_error=statistics.median(full or [0.0]),
        other_error=statistics.median(other or [0.0]),
    )


def _row(score: Score) -> str:
    step = memory = "| | "
    if score.step_error is not None:
        step = f"| {score.published_seconds:.3f} | {score.step_error:+.1%} "
    if score.memory_error is not None:
        memory = f"| {score.published_gib:.1f} | {score.memory_error:+.1%} "
    return f"| {score.id} | {score.kinds} | {score.step_seconds:.3f} s {step}| {score.peak_gib:.1f} GiB {memory}|"


def page_now() -> str:
    """Return the page as the file of scores makes it."""
    return page(*read_scores())


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, and with ``--runs`` the scores first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="the CSV file of runs, beside which predictions are stored")
    options = parser.parse_args(arguments)
    if options.runs:
        earlier = {(score.id, score.source): score for score in read_scores()[1]}
        new = {(score.id, score.source): score for score in collected(options.runs)}
        write_scores(sorted((earlier | new).values(), key=_order))
    replace_residuals("parallel", residuals(read_scores()[1]))  # python -m benchmarks.intervals fits anew
    PAGE.write_text(page_now())
    print("\n".join(_summary(PAGE.read_text())))


def _summary(text: str) -> Iterator[str]:
    yield from (row for row in text.partition("## Every run")[0].splitlines() if row.startswith("|"))


if __name__ == "__main__":
    main()
