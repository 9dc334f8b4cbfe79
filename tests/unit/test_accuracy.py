"""The page of predictions beside published parallel runs: its medians, intervals and rows (``benchmarks.accuracy``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accuracy import Score, collected, line, page, read_scores, residuals, write_scores
from benchmarks.parallel_runs import HELD_OUT, Predicted, store
from tests.unit.test_parallel_rows import MPT, ROW

SCORE = Score("nt", "nanotron-grid", "TP, ZeRO", "sharded", "presets", 1.1, 1.0, 9.0, 10.0, 0.5, 2048)


def test_a_line_has_medians_and_what_lies_in_the_interval():
    """Errors of 10, 10 and -50%: of steps of a kind without runs, the interval holds the former."""
    scores = [SCORE, SCORE, replace(SCORE, step_seconds=0.5, published_gib=0.0)]
    assert (
        line("TP", scores) == "| TP | 3 | 10.0% | 50.0% | +10.0% | 67% | 2 | 10.0% | 10.0% | -10.0% | 100% |"
    )


def test_a_page_sets_apart_what_was_fitted_on():
    fitted = replace(SCORE, id="mpt", source="mosaic", kinds="ZeRO", published_gib=0.0, share=0.97)
    without = [
        replace(score, source=HELD_OUT + score.source, step_seconds=seconds)
        for score, seconds in ((SCORE, 1.5), (fitted, 2.0))
    ]
    text = page("2026-01-02", [SCORE, fitted, *without])
    assert "collected until 2026-01-02" in text
    assert "| **all** | 2 | 10.0%" in text
    assert "| **all, nothing fitted** | 2 | 75.0%" in text
    assert "| llm-foundry, FSDP | 1 | 0% | 100% |" in text
    assert "| ZeRO | 2 |" in text
    assert "| ZeRO, without the grid | 1 |" in text
    assert "| 1,024 to 4,095 | 2 | 10.0%" in text
    assert text.count("| mpt |") == 1


def test_residuals_are_of_runs_as_they_ran():
    """Of the grid, whose steps are one iteration each, peaks alone."""
    bloom = replace(SCORE, source="bigscience")
    scores = [bloom, replace(bloom, published_gib=0.0), SCORE, replace(SCORE, source=HELD_OUT + SCORE.source)]
    assert [(row.step, row.memory, row.counts) for row in residuals(scores)] == [
        (1 / 1.1, 10 / 9, "driver"),
        (1 / 1.1, None, ""),
        (None, 10 / 9, "reserved"),
    ]


def test_scores_are_those_of_stored_predictions(tmp_path: Path):
    columns = {"mfu_pct": "40", "trust": "B", "step_seconds": "2", "peak_memory_gib": "", **ROW}
    columns |= {"model": "", "recompute": "", "precision": ""}
    mpt = {**columns, **MPT, "id": "mpt"}
    runs, kept, scores = tmp_path / "runs.csv", tmp_path / "kept.jsonl", tmp_path / "scores.csv"
    runs.write_text(
        "\n".join([",".join(mpt), ",".join(mpt.values()), ",".join((columns | {"id": "nt"}).values())])
    )
    for name, seconds in (("mpt", 2.2), (HELD_OUT + "mpt", 2.4), ("nt", 0.1)):
        store(Predicted(name, "", seconds, kind="data parallel", rates="named stack"), kept)
    write_scores(collected(runs, kept), scores)
    _, found = read_scores(scores)
    assert {
        (score.id, score.source.startswith(HELD_OUT)): score.step_error for score in found
    } == pytest.approx(
        {
            ("mpt", False): 0.1,
            ("mpt", True): 0.2,
            # The host's: 4.5 + 4 x 2.5 ms, for 4 layers, 32 micro-batches and 3 to fill.
            ("nt", False): 14.5e-3 * 4 * 35 / 2 - 1,
            ("nt", True): 0.1 / 2 - 1,
        }
    )
