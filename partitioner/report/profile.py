"""A profile as a person reads it: the step, each rank, each segment; measured beside predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cost_models.units import format_bytes, format_seconds
from partitioner.report.text import columns, counted, labelled, percent, printable
from runtime.program.program import Backward, BackwardInput, BackwardWeight, Compute, Forward

if TYPE_CHECKING:
    from partitioner.engine.profile import Profile

_KINDS: tuple[tuple[str, type[Compute]], ...] = (
    ("forward", Forward),
    ("backward", Backward),
    ("input half", BackwardInput),
    ("weight half", BackwardWeight),
)


def render_profile(profile: Profile) -> str:
    """The text of ``print(profile)``."""
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
        _row("samples/s", rates.samples_per_second, planned.samples_per_second, _number),
        _row("tokens/s", rates.tokens_per_second, planned.tokens_per_second, _number),
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
            numbers = (
                times.forward,
                times.backward,
                times.waiting,
                times.communication,
                times.optimizer,
                times.other,
            )
            first = str(rank) if label == "measured" else ""
            rows.append([first, label, *map(format_seconds, numbers), format_bytes(sent)])
    return columns(header, rows, left=("",))


def _segments(profile: Profile) -> str:
    """Mean seconds per micro-batch of each kind of compute that a segment has."""
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


def _number(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:,.3g}"
