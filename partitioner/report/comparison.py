"""A measured step beside the predicted one: residuals, corrected factors, and what they say of the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from cost_models.cluster import ClusterSpec
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.record.data import PlanData
from partitioner.report.profile_file import Beside, MeasuredTrace
from partitioner.report.text import columns, labelled


class SegmentResidual(NamedTuple):
    """All computes of one kind of a segment, on all its ranks. ``seconds``: of one compute, the mean."""

    segment: int
    kind: str
    computes: int
    seconds: Beside


class RankResidual(NamedTuple):
    """One rank's step by what it did. ``device``: its number in the plan."""

    rank: int
    device: int
    model: str
    computing: Beside
    waiting: Beside
    communication: Beside
    optimizer: Beside
    other_seconds: float


class LinkResidual(NamedTuple):
    """All messages from one rank to another. ``seconds``: of all of them, each the least of its size."""

    source: int
    target: int
    between_nodes: bool
    messages: int
    size_bytes: int
    seconds: Beside


class Factors(NamedTuple):
    """The factors by which seconds would be corrected; None where nothing of the kind was measured."""

    devices: Mapping[str, float]
    optimizer: float | None
    node_links: float | None
    network: float | None

    @property
    def all(self) -> list[float]:
        """All that are known."""
        more = (self.optimizer, self.node_links, self.network)
        return [*self.devices.values(), *(factor for factor in more if factor is not None)]


Verdict = Literal["stays", "changes", "open", "alone"]


@dataclass(frozen=True)
class ChosenAgain:
    """The plan's corrected step beside the recorded alternatives. ``alone``: none is recorded that fits."""

    verdict: Verdict
    rival: str | None
    """The alternative with the least predicted step."""
    rival_seconds: tuple[float, float] | None
    """The least and the most that its step can be."""


@dataclass(frozen=True)
class ProfileComparison:
    """A measured step beside the predicted one. ``step``: from the first instruction of any rank to the last one's end."""

    plan: PlanData
    trace: MeasuredTrace
    step: Beside
    bubble: Beside
    segments: tuple[SegmentResidual, ...]
    ranks: tuple[RankResidual, ...]
    links: tuple[LinkResidual, ...]
    factors: Factors
    cluster: ClusterSpec
    """The plan's cluster at the corrected rates."""
    uncorrected: tuple[str, ...]
    """Factors that the cluster could not be given, and why."""
    corrected_seconds: float

    @cached_property
    def choice(self) -> ChosenAgain:
        """Tell whether the plan would still be chosen, as far as that can be told without the model."""
        rivals = [
            (other.step_seconds, other.strategy)
            for other in self.plan.alternatives
            if other.feasible and other.step_seconds is not None
        ]
        if not rivals:
            return ChosenAgain("alone", None, None)
        seconds, name = min(rivals)
        least, most = min(self.factors.all) * seconds, max(self.factors.all) * seconds
        if self.corrected_seconds <= least:
            return ChosenAgain("stays", name, (least, most))
        return ChosenAgain("changes" if self.corrected_seconds > most else "open", name, (least, most))

    @property
    def command(self) -> str:
        """The command that plans with the corrected cluster; only it can tell for sure what would be chosen."""
        return (
            f"partitioner plan MODEL --cluster FILE --batch-size {self.plan.batch_size} "
            f"--strategy {self.plan.strategy} -o new.json"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain JSON data."""
        facts, choice = self.trace.facts, self.choice
        return {
            "model": self.plan.model.name,
            "profiled_step": facts.shown + 1,
            "profiled_steps": len(facts.step_seconds),
            "step_seconds": _pair(self.step),
            "bubble_fraction": {"measured": self.bubble.measured, "predicted": self.bubble.predicted},
            "segments": [_row(segment) for segment in self.segments],
            "ranks": [_row(rank) for rank in self.ranks],
            "links": [_row(link) for link in self.links],
            "corrected": {
                "factors": {**self.factors._asdict(), "devices": dict(self.factors.devices)},
                "step_seconds": self.corrected_seconds,
                "not_corrected": list(self.uncorrected),
            },
            "choice": {
                "verdict": choice.verdict,
                "rival": choice.rival,
                "rival_step_seconds": choice.rival_seconds and list(choice.rival_seconds),
                "command": self.command,
            },
        }


RANK_PARTS = ("computing", "waiting", "communication", "optimizer")


def _pair(beside: Beside) -> dict[str, float | None]:
    return {**beside._asdict(), "residual": beside.residual}


def _row(residual: SegmentResidual | RankResidual | LinkResidual) -> dict[str, Any]:
    """Write a residual by the names of its fields; a size is called bytes."""
    return {
        name.removeprefix("size_"): _pair(value) if isinstance(value, Beside) else value
        for name, value in residual._asdict().items()
    }


# --------------------------------------------------------------------------------------------------
# As a person reads it


MOST_ROWS = 64
"""The most rows of a table; --json has all."""


def render_comparison(found: ProfileComparison) -> str:
    """Write the text of ``partitioner compare``. Residuals are measured / predicted."""
    facts = found.trace.facts
    head = [
        labelled(
            "compared",
            f"{found.plan.model.name}, step {facts.shown + 1} of {counted(len(facts.step_seconds), 'profiled step')} "
            f"({counted(facts.samples, 'sample')}) beside the plan's prediction; residual = measured / predicted",
        )
    ]
    if facts.clock_error_seconds:
        head.append(
            labelled(
                "clocks",
                f"of ranks may be {format_seconds(facts.clock_error_seconds)} apart; so may links' seconds",
            )
        )
    return "\n\n".join(
        ["\n".join(head), _step(found), _segments(found), _ranks(found), *_links(found), _verdict(found)]
    )


def _step(found: ProfileComparison) -> str:
    rows = [["step", *found.step.cells()], ["bubble", *found.bubble.cells(percent)]]
    for name in RANK_PARTS:
        parts = [getattr(rank, name) for rank in found.ranks]
        mean = Beside(*(sum(column) / len(parts) for column in zip(*parts, strict=True)))
        if any(mean):
            rows.append([f"{name}, a rank", *mean.cells()])
    other = sum(rank.other_seconds for rank in found.ranks) / len(found.ranks)
    rows.append(["other, a rank", format_seconds(other), "-", "-"])
    return columns(("", "measured", "predicted", "residual"), rows, left=("",))


def _segments(found: ProfileComparison) -> str:
    rows = [[str(s.segment), s.kind, str(s.computes), *s.seconds.cells()] for s in found.segments[:MOST_ROWS]]
    header = ("segment", "a micro-batch's", "computes", "measured", "predicted", "residual")
    return columns(header, rows, left=("a micro-batch's",)) + _left_out(len(found.segments))


def _ranks(found: ProfileComparison) -> str:
    rows = []
    for rank in found.ranks[:MOST_ROWS]:
        waits = rank.waiting
        cells = [
            rank.computing.residual_text,
            rank.optimizer.residual_text,
            f"{format_seconds(waits.measured)} ({format_seconds(waits.predicted)})",
        ]
        rows.append([str(rank.rank), str(rank.device), rank.model, *cells])
    header = ("rank", "device", "model", "computing", "optimizer", "waiting (predicted)")
    return columns(header, rows, left=("model",)) + _left_out(len(found.ranks))


def _links(found: ProfileComparison) -> list[str]:
    if not found.links:
        return []
    rows = []
    for link in found.links[:MOST_ROWS]:
        where = "network" if link.between_nodes else "node"
        size = format_bytes(link.size_bytes)
        rows.append(
            [f"{link.source} -> {link.target}", where, str(link.messages), size, *link.seconds.cells()]
        )
    header = ("link", "in", "messages", "bytes", "measured", "predicted", "residual")
    return [columns(header, rows, left=("link", "in")) + _left_out(len(found.links))]


def _left_out(rows: int) -> str:
    return f"\nand {rows - MOST_ROWS} more: --json" if rows > MOST_ROWS else ""


def _verdict(found: ProfileComparison) -> str:
    """Write what a recalibration would change, and whether the plan would still be chosen."""
    factors = found.factors
    changes = [f"{model} takes {factor:.2f}x the time" for model, factor in factors.devices.items()]
    for name, factor in (
        ("optimizer steps", factors.optimizer),
        ("links inside nodes", factors.node_links),
        ("the network", factors.network),
    ):
        if factor is not None:
            changes.append(f"{name} {factor:.2f}x")
    step = found.step
    lines = [
        labelled("corrected", "; ".join(changes)),
        labelled(
            "",
            f"so the plan simulates to {format_seconds(found.corrected_seconds)} "
            f"(predicted {format_seconds(step.predicted)}, measured {format_seconds(step.measured)}: "
            f"{step.measured / found.corrected_seconds:.2f}x of it)",
        ),
        *(labelled("", f"not corrected: {text}") for text in found.uncorrected),
        labelled("choice", _choice(found)),
        labelled("for sure", f"write the corrected cluster with -o FILE, then {found.command}"),
    ]
    return "\n".join(lines)


def _choice(found: ProfileComparison) -> str:
    choice = found.choice
    if choice.rival_seconds is None:
        return "the plan holds no alternative that fits, so only planning anew tells"
    least, most = map(format_seconds, choice.rival_seconds)
    rival = f"{choice.rival} would take {least}" + (f" to {most}" if most != least else "")
    own = format_seconds(found.corrected_seconds)
    return {
        "stays": f"the plan would still be chosen over its alternatives: {own}; the next, {rival}",
        "changes": f"another would be chosen: this plan takes {own}; {rival}",
        "open": f"it cannot be told: this plan takes {own}; {rival}, as its parts are off by one factor or another",
    }[choice.verdict]
