"""A profile, measured beside predicted, as data and as a person reads it: the step, each rank, each segment."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

from cost_models.shown import ShownInNotebooks, printable
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.report.profile_file import KEY, ProfileFacts
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


@dataclass(frozen=True)
class Profile(ShownInNotebooks):
    """Measured steps of an engine, and the plan's prediction. Sequences are per rank."""

    model: str
    fingerprint: str
    """The fingerprint of the model's graph, as in the plan."""
    devices: tuple[int, ...]
    """The device of the plan that each rank plays."""
    step_seconds: tuple[float, ...]
    """The time of every step: the slowest rank's ``train_step``. Ranks do not begin at one moment, so all of them
    together, as in ``measured``, may take longer."""
    shown: int
    """The number of the step that the rest describes: the median of the full batches, without the first step."""
    samples: int
    """The samples in that step."""
    rates: TrainingRates
    predicted_rates: TrainingRates
    measured: Simulation
    """The measured step, as a simulation would tell it; its memory is not measured."""
    predicted: Simulation
    """The simulated step of a full batch."""
    times: tuple[RankTimes, ...]
    predicted_times: tuple[RankTimes, ...]
    clock_error_seconds: float
    """The most that ranks' times may be shifted against each other: 0 on one machine."""

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
        save_trace(path, {**measured, "traceEvents": events, "otherData": {KEY: self._facts().model_dump()}})

    def _facts(self) -> ProfileFacts:
        return ProfileFacts(
            model=self.model,
            fingerprint=self.fingerprint,
            devices=self.devices,
            step_seconds=self.step_seconds,
            shown=self.shown,
            samples=self.samples,
            clock_error_seconds=self.clock_error_seconds,
            times=self.times,
        )

    def mean_seconds(self, kind: type[Compute], segment: int) -> tuple[float, float]:
        """Return (measured, predicted): means over the micro-batches of one segment's computes of this kind."""
        return _mean(self.measured, kind, segment), _mean(self.predicted, kind, segment)


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
    bytes_sent = sum(measured.message_bytes.values()), sum(predicted.message_bytes.values())
    rows = [
        _row("train_step", profile.step_seconds[profile.shown], predicted.step_seconds, format_seconds),
        _row("program and optimizer", measured.step_seconds, predicted.step_seconds, format_seconds),
        _row("bubble", measured.bubble_fraction, predicted.bubble_fraction, percent),
        _row("messages", *bytes_sent, format_bytes),
        _row("samples/s", rates.samples_per_second, planned.samples_per_second, rate_text),
        _row("tokens/s", rates.tokens_per_second, planned.tokens_per_second, rate_text),
        _row("MFU", rates.mfu, planned.mfu, percent),
    ]
    return columns(
        ("step", "measured", "predicted", "ratio"), [row for row in rows if row[1] != "-"], left=("step",)
    )


def _row(
    name: str, measured: float | None, predicted: float | None, shown: Callable[[float], str]
) -> list[str]:
    ratio = f"{measured / predicted:.2f}x" if measured is not None and predicted else "-"
    return [name, *("-" if value is None else shown(value) for value in (measured, predicted)), ratio]


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
            measured, predicted = profile.mean_seconds(kind, segment)
            if measured or predicted:
                row = _row(name, measured, predicted, format_seconds)
                rows.append([str(segment), str(rank), *row])
    return columns(
        ("segment", "rank", "per micro-batch", "measured", "predicted", "ratio"),
        rows,
        left=("per micro-batch",),
    )
