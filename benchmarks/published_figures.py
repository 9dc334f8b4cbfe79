"""Figures of published runs on GPUs, as docs/10 and docs/evidence.md have them: both from the residuals of benchmarks.

    python -m benchmarks.published --runs runs.csv --residuals [--held-out]   measured over predicted, row by row
    python -m benchmarks.make_docs --files                 the tables of docs/10, the sentences of docs/evidence.md

The error of a step or a peak is predicted over measured, less one. The bias is its median with its sign.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence

from benchmarks.residuals import FILE, HELD_OUT_FILE, Residual, read_residuals

START, END = "<!-- published: made by `make generated` -->", "<!-- end of published -->"
HELD_OUT_START, HELD_OUT_END = "<!-- held out: made by `make generated` -->", "<!-- end of held out -->"
FITTED_ON = "llm-foundry"
"""The source whose runs efficiencies of attention were fitted on."""
GROUPS = (
    ("all", ""),
    ("MPT, 125 million to 30 billion parameters, 8 devices", "llm-foundry,"),
    ("BERT-large, a V100", "Hugging Face,"),
    ("GPT-2 124M, an A100", "LLMs-from-scratch,"),
    ("ResNet-50, 1 and 8 V100", "DeepLearningExamples,"),
    ("H100 with 80 GB", ", h100_80gb"),
    ("A100 with 80 GB", ", a100_80gb"),
    ("A100 with 40 GB", ", a100_40gb"),
)
"""Rows of the table: a name, and the part of a source's name that its runs have."""


HELD_OUT_GROUPS = tuple((name.partition(",")[0], part) for name, part in GROUPS if not part.startswith(", "))
"""Rows of the table of predictions without what was fitted on a source."""


def rows_of(benchmark: str, part: str = "", held_out: bool = False) -> list[Residual]:
    """Return a benchmark's runs whose source has ``part`` in its name."""
    found = read_residuals(HELD_OUT_FILE if held_out else FILE)
    return [row for row in found if row.benchmark == benchmark and part in row.source]


def errors(rows: Iterable[Residual]) -> list[float]:
    """Return the errors of the steps that were measured."""
    return [1 / row.step - 1 for row in rows if row.step]


def peak_errors(rows: Iterable[Residual]) -> list[float]:
    """Return the errors of the peaks that were measured."""
    return [1 / row.memory - 1 for row in rows if row.memory]


def table() -> str:
    """Write the table of docs/10; its last row is of peaks, without what the driver counts beside torch."""
    peaks = peak_errors(rows_of("published"))
    return _table("step time", GROUPS, held_out=False) + _row("peak memory, where published", peaks) + "\n"


def held_out_table() -> str:
    """Write the table of docs/10 of predictions without what was fitted on a run's source."""
    return _table("held out", HELD_OUT_GROUPS, held_out=True)


def _table(title: str, groups: Sequence[tuple[str, str]], *, held_out: bool) -> str:
    lines = [f"| {title} | runs | median error | mean | within 10% | bias |", "|---|---|---|---|---|---|"]
    lines += [_row(name, errors(rows_of("published", part, held_out))) for name, part in groups]
    return "\n".join(["", *lines, ""])


def _row(name: str, found: Sequence[float]) -> str:
    sizes = [abs(error) for error in found]
    near = sum(size <= 0.1 for size in sizes) / len(sizes)
    return (
        f"| {name} | {len(found)} | {_median(found):.1%} | {statistics.fmean(sizes):.1%} | {near:.0%} | "
        f"{statistics.median(found):+.1%} |"
    )


def sentences() -> str:
    """Write the sentences of docs/evidence.md."""
    published = rows_of("published")
    every, fitted = errors(published), errors(rows_of("published", f"{FITTED_ON},"))
    publishers = {row.source.partition(",")[0] for row in published}
    others = sorted(_median(errors(rows_of("published", f"{name},"))) for name in publishers - {FITTED_ON})
    *first, last = (f"{100 * median:.1f}" for median in others)
    peaks = peak_errors(published)
    unfitted = errors(rows_of("published", held_out=True))
    text = (
        f"{len(every)} published runs on GPUs, by the presets: median error of the step time {_median(every):.1%}. "
        f"**{len(fitted)} of the {len(every)} are one source**, llm-foundry's MPT models under FSDP, on which the "
        f"efficiencies of attention were fitted; the {len(others)} others come to {', '.join(first)} and {last}%. "
        f"Without what was fitted the median of all is {_median(unfitted):.1%}. Memory was published for {len(peaks)} of "
        f"them: median {_median(peaks):.1%}, at most {max(map(abs, peaks)):.0%} (`make published`, same page)."
    )
    return textwrap.fill(text, 120, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _median(found: Sequence[float]) -> float:
    return statistics.median(abs(error) for error in found)
