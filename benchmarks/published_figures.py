"""Figures of published runs on GPUs, as docs/10 and docs/evidence.md have them: both from benchmarks/residuals.csv.

    python -m benchmarks.published --runs runs.csv --residuals      measured over predicted, row by row
    python -m benchmarks.make_docs --files                          the table of docs/10, the sentences of docs/evidence.md

The error of a step is predicted over measured, less one. The bias is its median with its sign.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.residuals import Residual, read_residuals

START, END = "<!-- published: made by `make generated` -->", "<!-- end of published -->"
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


def errors(part: str = "") -> list[float]:
    """Return the errors of the steps of published runs whose source has ``part`` in its name."""
    rows: Sequence[Residual] = [row for row in read_residuals() if row.benchmark == "published"]
    return [1 / row.step - 1 for row in rows if row.step and part in row.source]


def table() -> str:
    """Write the table of docs/10."""
    lines = ["| step time | runs | median error | mean | within 10% | bias |", "|---|---|---|---|---|---|"]
    for name, part in GROUPS:
        found = errors(part)
        sizes = [abs(error) for error in found]
        near = sum(size <= 0.1 for size in sizes) / len(sizes)
        lines.append(
            f"| {name} | {len(found)} | {_median(found):.1%} | {statistics.fmean(sizes):.1%} | {near:.0%} | "
            f"{statistics.median(found):+.1%} |"
        )
    return "\n".join(["", *lines, ""])


def sentences() -> str:
    """Write the sentences of docs/evidence.md."""
    every, fitted = errors(), errors(f"{FITTED_ON},")
    publishers = {row.source.partition(",")[0] for row in read_residuals() if row.benchmark == "published"}
    others = sorted(_median(errors(f"{name},")) for name in publishers - {FITTED_ON})
    *first, last = (f"{100 * median:.1f}" for median in others)
    return (
        f"  {len(every)} published runs on GPUs, by the presets: median error of the step time {_median(every):.1%}.\n"
        f"  **{len(fitted)} of the {len(every)} are one source**, llm-foundry's MPT models under FSDP, on which\n"
        f"  the efficiencies of attention were fitted; the {len(others)} others come to {', '.join(first)} and {last}%."
    )


def _median(found: Sequence[float]) -> float:
    return statistics.median(abs(error) for error in found)
