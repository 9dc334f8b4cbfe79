"""The outcome of a search: labels as people read them, kinds that tell runner-ups apart, what a runner-up keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from passes.lower.candidate import Candidate, Origin, Trail, anywhere
from passes.search.judge import Simulated
from passes.search.outcome import (
    Label,
    LayerWiseLabel,
    MeshLabel,
    RunnerUp,
    StagesLabel,
    TrailLabel,
    VariantLabel,
)

ANNEALED = Trail.of(Origin.ANNEALED)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (StagesLabel(1, "1f1b", 1), "1 stage, 1f1b, 1 micro-batch"),
        (StagesLabel(8, "zb-h1", 32), "8 stages, zb-h1, 32 micro-batches"),
        (StagesLabel(4, "1f1b", 8, 1), "4 stages, 1f1b, 8 micro-batches, 1 stage recompute"),
        (StagesLabel(4, "1f1b", 8, 2), "4 stages, 1f1b, 8 micro-batches, 2 stages recompute"),
        (TrailLabel(ANNEALED, 1), "annealed, 1 micro-batch"),
        (TrailLabel(ANNEALED.then(Origin.MOVED), 8), "annealed, moved, 8 micro-batches"),
        (TrailLabel(Trail.of(Origin.CONTIGUOUS_RUNS, 3), 2), "3 contiguous runs, 2 micro-batches"),
        (TrailLabel(Trail.of(Origin.ALL_ON_RANK, 0), 2), "all on rank 0, 2 micro-batches"),
        (TrailLabel(Trail.of(Origin.MODULES_APART, 2), 2), "modules of depth 2 apart, 2 micro-batches"),
        (VariantLabel(1, 1, 0), "1 segment, 1 micro-batch"),
        (VariantLabel(14, 2, 1), "14 segments, 2 micro-batches, 1 op split"),
        (VariantLabel(14, 2, 3), "14 segments, 2 micro-batches, 3 ops split"),
        (LayerWiseLabel(StagesLabel(2, "1f1b", 8)), "layer-wise: 2 stages, 1f1b, 8 micro-batches"),
        (MeshLabel((4,), 1), "mesh 4, 1 micro-batch"),
        (MeshLabel((2, 4), 8), "mesh 2×4, 8 micro-batches"),
    ],
)
def test_labels_are_read_by_people(label: Label, text: str) -> None:
    assert str(label) == text


ALIKE: list[tuple[Label, Label]] = [
    (StagesLabel(2, "1f1b", 8), StagesLabel(4, "1f1b", 8, recomputing=1)),
    (TrailLabel(Trail.of(Origin.CONTIGUOUS_RUNS, 3), 8), TrailLabel(Trail.of(Origin.CONTIGUOUS_RUNS, 4), 8)),
    (LayerWiseLabel(StagesLabel(2, "1f1b", 8)), LayerWiseLabel(StagesLabel(3, "1f1b", 8))),
    (MeshLabel((2, 4), 8), MeshLabel((2, 4), 8)),
]
UNLIKE: list[tuple[Label, Label]] = [
    (StagesLabel(2, "1f1b", 8), StagesLabel(2, "1f1b", 4)),
    (StagesLabel(2, "1f1b", 8), StagesLabel(2, "gpipe", 8)),
    (TrailLabel(ANNEALED, 8), TrailLabel(ANNEALED, 4)),
    (TrailLabel(ANNEALED, 8), TrailLabel(ANNEALED.then(Origin.MOVED), 8)),
    (VariantLabel(14, 2, 0), VariantLabel(13, 2, 0)),
    (VariantLabel(14, 2, 0), VariantLabel(14, 2, 3)),
    (LayerWiseLabel(StagesLabel(2, "1f1b", 8)), StagesLabel(2, "1f1b", 8)),
    (MeshLabel((2, 4), 8), MeshLabel((4, 2), 8)),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_what_is_much_alike_is_of_one_kind(one: Label, other: Label) -> None:
    assert one.kind == other.kind


@pytest.mark.parametrize(("one", "other"), UNLIKE)
def test_what_is_worth_telling_apart_is_of_two_kinds(one: Label, other: Label) -> None:
    assert one.kind != other.kind


def test_a_pipeline_is_labelled_by_its_candidate() -> None:
    candidate = Candidate({"a": 0, "b": 1, "c": 2}, ((0,), (1,), (0,)), 4, "1f1b")
    assert StagesLabel.of(candidate) == StagesLabel(3, "1f1b", 4)
    lean = replace(candidate, recomputed_blocks=((), ("h.0", "h.1"), ("h.2",)))
    assert StagesLabel.of(lean) == StagesLabel(3, "1f1b", 4, recomputing=2)


def test_a_runner_up_keeps_the_figures_of_the_fullest_device() -> None:
    simulated = Simulated(anywhere({"a": 0}, 2, 4), 1.5, [10, 30], overflow_bytes=5)
    found = RunnerUp.of(TrailLabel(ANNEALED, 4), simulated)
    assert (found.step_seconds, found.peak_bytes, found.overflow_bytes) == (1.5, 30, 5)
    assert not found.fits
    assert not found.bounded
    assert replace(found, overflow_bytes=0).fits
