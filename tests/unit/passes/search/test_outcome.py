"""The outcome of a search: labels as people read them, kinds that tell runner-ups apart, what a runner-up keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from passes.lower.candidate import Candidate, Origin, Trail, anywhere
from passes.search.judge import Simulated
from passes.search.outcome import Label, RunnerUp

SOONEST = Trail.of(Origin.EARLIEST_FINISH)


def _pipeline(stages: int, schedule: str, microbatches: int, recomputing: int = 0) -> Candidate:
    again = tuple(("h.0",) if stage < recomputing else () for stage in range(stages))
    return Candidate({}, tuple((rank,) for rank in range(stages)), microbatches, schedule, again)


def _stages(stages: int, schedule: str, microbatches: int, recomputing: int = 0) -> Label:
    return Label.of_stages(_pipeline(stages, schedule, microbatches, recomputing))


def _layer_wise(stages: int, schedule: str, microbatches: int) -> Label:
    return Label.of_layer_wise(_pipeline(stages, schedule, microbatches))


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (_stages(1, "1f1b", 1), "1 stage, 1f1b, 1 micro-batch"),
        (_stages(8, "zb-h1", 32), "8 stages, zb-h1, 32 micro-batches"),
        (_stages(4, "1f1b", 8, 1), "4 stages, 1f1b, 8 micro-batches, 1 stage recompute"),
        (_stages(4, "1f1b", 8, 2), "4 stages, 1f1b, 8 micro-batches, 2 stages recompute"),
        (Label.of_trail(SOONEST, 1), "earliest finish, 1 micro-batch"),
        (Label.of_trail(SOONEST.then(Origin.MOVED), 8), "earliest finish, moved, 8 micro-batches"),
        (Label.of_trail(Trail.of(Origin.CONTIGUOUS_RUNS, 3), 2), "3 contiguous runs, 2 micro-batches"),
        (Label.of_trail(Trail.of(Origin.CONTIGUOUS_RUNS, 2), 2), "2 contiguous runs, 2 micro-batches"),
        (Label.of_variant(1, 1, 0), "1 segment, 1 micro-batch"),
        (Label.of_variant(14, 2, 1), "14 segments, 2 micro-batches, 1 op split"),
        (Label.of_variant(14, 2, 3), "14 segments, 2 micro-batches, 3 ops split"),
        (_layer_wise(2, "1f1b", 8), "layer-wise: 2 stages, 1f1b, 8 micro-batches"),
        (Label.of_mesh((4,), 1), "mesh 4, 1 micro-batch"),
        (Label.of_mesh((2, 4), 8), "mesh 2×4, 8 micro-batches"),
    ],
)
def test_labels_are_read_by_people(label: Label, text: str) -> None:
    assert str(label) == text


ALIKE: list[tuple[Label, Label]] = [
    (_stages(2, "1f1b", 8), _stages(4, "1f1b", 8, recomputing=1)),
    (
        Label.of_trail(Trail.of(Origin.CONTIGUOUS_RUNS, 3), 8),
        Label.of_trail(Trail.of(Origin.CONTIGUOUS_RUNS, 4), 8),
    ),
    (_layer_wise(2, "1f1b", 8), _layer_wise(3, "1f1b", 8)),
    (Label.of_mesh((2, 4), 8), Label.of_mesh((2, 4), 8)),
]
UNLIKE: list[tuple[Label, Label]] = [
    (_stages(2, "1f1b", 8), _stages(2, "1f1b", 4)),
    (_stages(2, "1f1b", 8), _stages(2, "gpipe", 8)),
    (Label.of_trail(SOONEST, 8), Label.of_trail(SOONEST, 4)),
    (Label.of_trail(SOONEST, 8), Label.of_trail(SOONEST.then(Origin.MOVED), 8)),
    (Label.of_variant(14, 2, 0), Label.of_variant(13, 2, 0)),
    (Label.of_variant(14, 2, 0), Label.of_variant(14, 2, 3)),
    (_layer_wise(2, "1f1b", 8), _stages(2, "1f1b", 8)),
    (Label.of_mesh((2, 4), 8), Label.of_mesh((4, 2), 8)),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_what_is_much_alike_is_of_one_kind(one: Label, other: Label) -> None:
    assert one.kind == other.kind


@pytest.mark.parametrize(("one", "other"), UNLIKE)
def test_what_is_worth_telling_apart_is_of_two_kinds(one: Label, other: Label) -> None:
    assert one.kind != other.kind


def test_a_pipeline_is_labelled_by_its_candidate() -> None:
    candidate = Candidate({"a": 0, "b": 1, "c": 2}, ((0,), (1,), (0,)), 4, "1f1b")
    assert Label.of_stages(candidate) == _stages(3, "1f1b", 4)
    lean = replace(candidate, recomputed_blocks=((), ("h.0", "h.1"), ("h.2",)))
    assert Label.of_stages(lean) == _stages(3, "1f1b", 4, recomputing=2)


def test_a_runner_up_keeps_the_figures_of_the_fullest_device() -> None:
    simulated = Simulated(anywhere({"a": 0}, 2, 4), 1.5, [10, 30], overflow_bytes=5)
    found = RunnerUp.of(Label.of_trail(SOONEST, 4), simulated)
    assert (found.step_seconds, found.peak_bytes, found.overflow_bytes) == (1.5, 30, 5)
    assert not found.fits
    assert not found.bounded
    assert replace(found, overflow_bytes=0).fits
