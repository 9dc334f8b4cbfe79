"""A measured step beside the predicted one, as data: residuals, corrected factors, and what they say of the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from cost_models.cluster import ClusterSpec
from partitioner.record.data import PlanData
from partitioner.report.profile_file import MeasuredTrace


class Beside(NamedTuple):
    """Seconds measured and predicted of the same thing."""

    measured: float
    predicted: float

    @property
    def residual(self) -> float | None:
        """Return measured / predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted > 0.0 else None


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
class Choice:
    """The plan's corrected step beside the recorded alternatives. ``alone``: none is recorded that fits."""

    verdict: Verdict
    rival: str | None
    """The alternative with the least predicted step."""
    rival_seconds: tuple[float, float] | None
    """The least and the most that its step can be."""


@dataclass(frozen=True)
class Comparison:
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
    def choice(self) -> Choice:
        """Tell whether the plan would still be chosen, as far as that can be told without the model."""
        rivals = [
            (other.step_seconds, other.strategy)
            for other in self.plan.alternatives
            if other.feasible and other.step_seconds is not None
        ]
        if not rivals:
            return Choice("alone", None, None)
        seconds, name = min(rivals)
        least, most = min(self.factors.all) * seconds, max(self.factors.all) * seconds
        if self.corrected_seconds <= least:
            return Choice("stays", name, (least, most))
        return Choice("changes" if self.corrected_seconds > most else "open", name, (least, most))

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
            "segments": [
                {"segment": s.segment, "kind": s.kind, "computes": s.computes, "seconds": _pair(s.seconds)}
                for s in self.segments
            ],
            "ranks": [
                {
                    "rank": r.rank,
                    "device": r.device,
                    "model": r.model,
                    **{name: _pair(getattr(r, name)) for name in RANK_PARTS},
                    "other_seconds": r.other_seconds,
                }
                for r in self.ranks
            ],
            "links": [
                {
                    "source": link.source,
                    "target": link.target,
                    "between_nodes": link.between_nodes,
                    "messages": link.messages,
                    "bytes": link.size_bytes,
                    "seconds": _pair(link.seconds),
                }
                for link in self.links
            ],
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
