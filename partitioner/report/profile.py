"""A profile, measured beside predicted, as data and as a person reads it: the step, each rank, each segment."""

from __future__ import annotations

import statistics
from dataclasses import astuple, dataclass
from pathlib import Path

from cost_models.shown import ShownInNotebooks, printable
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.report.profile_file import FACTS, KEY, Beside, ProfileFacts
from partitioner.report.text import columns, labelled, rate_text
from runtime.measure.measured_step import RankTimes
from runtime.program.program import Backward, BackwardInput, BackwardWeight, Compute, Forward
from runtime.simulate.simulation import Simulation
from runtime.simulate.timeline import render
from runtime.simulate.trace_events import chrome_trace, save_trace

_KINDS: tuple[tuple[str, type[Compute]], ...] = (
    ("forward", Forward),
    ("backward", Backward),
    ("input half", BackwardInput),
    ("weight half", BackwardWeight),
)


@dataclass(frozen=True)
class TrainingRates:
    """The speed of training. ``mfu``: model FLOPs utilisation; None if the plan does not know the model's FLOPs."""

    samples_per_second: float
    tokens_per_second: float | None
    mfu: float | None


@dataclass(frozen=True, kw_only=True)
class Profile(ShownInNotebooks, ProfileFacts):
    """Measured steps of an engine, and the plan's prediction. Sequences are per rank."""

    rates: TrainingRates
    predicted_rates: TrainingRates
    measured: Simulation
    """The measured step, as a simulation would tell it; its memory is not measured."""
    predicted: Simulation
    """The simulated step of a full batch."""
    predicted_times: tuple[RankTimes, ...]

    def __str__(self) -> str:
        return render_profile(self)

    def timeline(self, width: int = 80) -> str:
        """Draw the measured step over the predicted one, to one scale of time."""
        longest = max(self.measured.step_seconds, self.predicted.step_seconds)
        pictures = []
        for label, step in (("measured", self.measured), ("predicted", self.predicted)):
            columns = max(1, round(width * step.step_seconds / longest))
            pictures.append(f"{label}: {render(step, columns)}")
        return "\n".join(pictures)

    def save(self, path: str | Path) -> None:
        """Write both timelines as a Chrome trace, packed if it ends in .gz: "rank N measured" and "rank N predicted".

        ``partitioner compare PLAN TRACE`` reads it.
        """
        ranks = range(len(self.times))
        measured = chrome_trace(self.measured, "measured", ranks=ranks)
        predicted = chrome_trace(self.predicted, "predicted", first=len(ranks), ranks=ranks)
        events = [*measured["traceEvents"], *predicted["traceEvents"]]
        save_trace(path, {**measured, "traceEvents": events, "otherData": {KEY: FACTS.dump_python(self)}})

    def mean_seconds(self, kind: type[Compute], segment: int) -> Beside:
        """Return the means over the micro-batches of one segment's computes of this kind."""
        return Beside(_mean(self.measured, kind, segment), _mean(self.predicted, kind, segment))


def _mean(step: Simulation, kind: type[Compute], segment: int) -> float:
    found = [
        span.end_seconds - span.start_seconds
        for spans in step.timeline
        for span in spans
        if isinstance(span.instruction, kind) and span.instruction.segment == segment
    ]
    return statistics.fmean(found) if found else 0.0


def render_profile(profile: Profile) -> str:
    """Write the text of ``print(profile)``."""
    steps = len(profile.step_seconds)
    heading = labelled(
        "profile",
        f"{profile.model}, step {profile.shown + 1} of {counted(steps, 'step')} ({profile.samples} samples)",
    )
    clocks = (
        [labelled("clocks", f"of ranks may be {format_seconds(profile.clock_error_seconds)} apart")]
        if profile.clock_error_seconds
        else []
    )
    return printable(
        "\n\n".join(["\n".join([heading, *clocks]), _step(profile), _ranks(profile), _segments(profile)])
    )


def _step(profile: Profile) -> str:
    measured, predicted = profile.measured, profile.predicted
    rates, planned = profile.rates, profile.predicted_rates
    sent = Beside(sum(measured.message_bytes.values()), sum(predicted.message_bytes.values()))
    train_step = Beside(profile.step_seconds[profile.shown], predicted.step_seconds)
    program = Beside(measured.step_seconds, predicted.step_seconds)
    samples = Beside(rates.samples_per_second, planned.samples_per_second)
    rows = [
        ["train_step", *train_step.cells()],
        ["program and optimizer", *program.cells()],
        ["bubble", *Beside(measured.bubble_fraction, predicted.bubble_fraction).cells(percent)],
        ["messages", *sent.cells(format_bytes)],
        ["samples/s", *samples.cells(rate_text)],
    ]
    if rates.tokens_per_second is not None and planned.tokens_per_second is not None:
        tokens = Beside(rates.tokens_per_second, planned.tokens_per_second)
        rows.append(["tokens/s", *tokens.cells(rate_text)])
    if rates.mfu is not None and planned.mfu is not None:
        rows.append(["MFU", *Beside(rates.mfu, planned.mfu).cells(percent)])
    return columns(("step", "measured", "predicted", "ratio"), rows, left=("step",))


def _ranks(profile: Profile) -> str:
    header = ("rank", "", "forward", "backward", "waiting", "communication", "optimizer", "other", "messages")
    rows = []
    for rank, pair in enumerate(zip(profile.times, profile.predicted_times, strict=True)):
        for label, times, step in zip(
            ("measured", "predicted"), pair, (profile.measured, profile.predicted), strict=True
        ):
            sent = sum(size for (source, _), size in step.message_bytes.items() if source == rank)
            first = str(rank) if label == "measured" else ""
            rows.append([first, label, *map(format_seconds, astuple(times)), format_bytes(sent)])
    return columns(header, rows, left=("",))


def _segments(profile: Profile) -> str:
    """Write a table of mean seconds per micro-batch, of each kind of compute that a segment has."""
    found = {
        span.instruction.segment: rank
        for rank, spans in enumerate(profile.predicted.timeline)
        for span in spans
        if isinstance(span.instruction, Forward)
    }
    rows = []
    for segment, rank in sorted(found.items()):
        for name, kind in _KINDS:
            mean = profile.mean_seconds(kind, segment)
            if any(mean):
                rows.append([str(segment), str(rank), name, *mean.cells()])
    return columns(
        ("segment", "rank", "per micro-batch", "measured", "predicted", "ratio"),
        rows,
        left=("per micro-batch",),
    )
