"""The report of a verified training run: what was compared, and the first thing that differs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cost_models.errors import VerificationError
from cost_models.shown import ShownInNotebooks
from partitioner.report.text import hanging

_PLURAL = {
    "loss": "losses",
    "samples": "batches of samples",
    "learning rates": "sets of learning rates",
    "parameter as read": "parameters as read",
    "optimizer state": "tensors of optimizer state",
    "random states": "sets of random states",
    "saved state": "tensors of saved state",
}
_MOST = 10
"""The most differences that are printed."""


@dataclass(frozen=True)
class TrainComparison:
    """One compared quantity of one step on one rank. It agrees iff error ≤ allowed.

    ``rank``: None for what is put together from all ranks. ``said``: what differs, where that is no distance.
    """

    run: str
    step: int
    rank: int | None
    kind: str
    name: str
    error: float
    allowed: float
    said: str = ""

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed  # False for nan

    @property
    def severity(self) -> float:
        """The quotient error / allowed; infinite when the error is no number."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.allowed if self.allowed else (math.inf if self.error else 0.0)

    def __str__(self) -> str:
        where = "all ranks together" if self.rank is None else f"rank {self.rank}"
        what = self.kind if self.name in ("", self.kind) else f"{self.kind} {self.name}"
        how = self.said or f"off by {self.error:.3e}, allowed {self.allowed:.3e}"
        return f"{self.run}, step {self.step}, {what} on {where}: {how}"


@dataclass(frozen=True)
class TrainReport(ShownInNotebooks):
    """The report. ``str()`` is what the command prints; differences are in the order in which a run meets them."""

    model: str
    placed: str
    """The plan in a few words."""
    other_placed: str | None
    """The plan under which the run was resumed as well."""
    steps: int
    samples: int
    """Samples in a step."""
    optimizer: str
    compared: Mapping[str, int]
    differences: tuple[TrainComparison, ...]
    worst: TrainComparison | None
    seconds: float
    notes: tuple[str, ...]
    comparable: int | None = None
    """The last step whose numbers can be compared, where the model draws random ones; None if all can."""

    @property
    def passed(self) -> bool:
        return not self.differences

    @property
    def first_difference(self) -> str | None:
        """The first thing that differs: run, step, kind, name and rank; None if nothing does."""
        return str(self.differences[0]) if self.differences else None

    def __str__(self) -> str:
        return hanging("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        counts = ", ".join(
            f"{n} {kind if n == 1 else _PLURAL.get(kind, f'{kind}s')}" for kind, n in self.compared.items()
        )
        verdict = "trained alike" if self.passed else "TRAINS DIFFERENTLY"
        if self.passed and self.comparable is not None:
            verdict = f"not comparable beyond step {self.comparable}, the rest alike"
        other = "" if self.other_placed is None else f" and under {self.other_placed}"
        lines = [
            f"{verdict}: {self.model}, {self.placed}, {self.steps} steps "
            f"of {self.samples} samples with {self.optimizer}, clipped, annealed, saved, resumed in the same plan"
            f"{other}, beside a plain loop ({self.seconds:.1f} s)",
            f"  compared: {counts}",
        ]
        if self.worst is not None and self.passed:
            lines.append(f"  largest error: {self.worst}")
        if self.differences:
            lines.append(f"  first difference: {self.first_difference}")
            lines += [f"  then: {d}" for d in self.differences[1:_MOST]]
            if len(self.differences) > _MOST:
                lines.append(f"  and {len(self.differences) - _MOST} more")
        return [*lines, *(f"  note: {note}" for note in self.notes)]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return {"passed": self.passed, "first_difference": self.first_difference, **asdict(self)}

    def raise_if_different(self) -> None:
        """Raise VerificationError unless everything agreed."""
        if not self.passed:
            raise VerificationError(
                "training with the plan is other than plain training", because=self._lines()
            )
