"""The reports of a verification and of a verified training run: what was compared, the worst of it, what differs first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from cost_models.errors import VerificationError
from cost_models.shown import ShownInNotebooks
from cost_models.units import counted
from partitioner.report.text import hanging
from partitioner.verify.draws import DRAWN
from partitioner.verify.rounding import ORDERS
from passes.fidelity.agree import ComparedQuantity

_PLURAL = {
    "loss": "losses",
    DRAWN: f"sets of {DRAWN}",
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
class TrainComparison(ComparedQuantity):
    """One compared quantity of one step on one rank.

    ``rank``: None for what is put together from all ranks. ``said``: what differs, where that is no distance.
    """

    run: str
    step: int
    rank: int | None
    said: str = ""

    def __str__(self) -> str:
        where = "all ranks together" if self.rank is None else f"rank {self.rank}"
        what = self.kind if self.name in ("", self.kind) else f"{self.kind} {self.name}"
        how = self.said or f"off by {self.error:.3e}, allowed {self.allowed:.3e}"
        return f"{self.run}, step {self.step}, {what} on {where}: {how}"


class ComparisonReport(ShownInNotebooks):
    """A report of compared quantities. ``str()`` is what the command prints."""

    differences: tuple[ComparedQuantity, ...]
    notes: tuple[str, ...]
    compared: Mapping[str, int]
    first_difference: Any
    _title: ClassVar[str]
    """The words of the error where something differs."""

    @property
    def passed(self) -> bool:
        return not self.differences

    @property
    def counts(self) -> str:
        """The compared quantities, counted by kind."""
        return ", ".join(
            f"{n} {kind if n == 1 else _PLURAL.get(kind, f'{kind}s')}" for kind, n in self.compared.items()
        )

    def __str__(self) -> str:
        return hanging("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        return [*self._said(), *(f"  note: {note}" for note in self.notes)]

    def _said(self) -> Iterator[str]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return {
            "passed": self.passed,
            "first_difference": self.first_difference,
            **asdict(self),  # type: ignore[call-overload]  # every report is a dataclass
        }

    def raise_if_different(self) -> None:
        """Raise VerificationError unless everything agreed."""
        if not self.passed:
            raise VerificationError(self._title, because=self._lines())


@dataclass(frozen=True)
class VerifyReport(ComparisonReport):
    """The report of a verification: what was compared, and the worst of it. ``str()`` is what the command prints."""

    model: str
    stages: int
    schedule: str
    microbatches: int
    samples: int
    compared: Mapping[str, int]
    differences: tuple[ComparedQuantity, ...]
    worst: ComparedQuantity | None
    seconds: float
    notes: tuple[str, ...]
    first_difference: str | None = None
    types: str = "float64"
    """The types that both sides computed in."""
    why_own_types: str = ""
    """The reason why these are the model's own; "" in float64."""
    mesh: tuple[int, ...] = ()
    """The mesh of the stage that is all of the plan; () for a plan of several stages, or on one device."""
    _title = "the partitioned model computes something else"

    def _said(self) -> Iterator[str]:
        placed = f"{counted(self.stages, 'stage')}, {self.schedule}"
        if self.mesh:
            placed = f"mesh {'×'.join(map(str, self.mesh))}"
        yield (
            f"{'verified' if self.passed else 'DIFFERS'}: {self.model}, {placed}, "
            f"{counted(self.microbatches, 'micro-batch')}, {counted(self.samples, 'sample')}, in {self.types}: "
            f"{self.counts} compared ({self.seconds:.1f} s)"
        )
        if self.why_own_types:
            yield (
                f"  in its own types: {self.why_own_types}; allowed is what rounding does there, {ORDERS:.0f} times "
                "what it changes to round the results of every op once more"
            )
        if self.worst is not None:
            yield (
                f"  largest error: {self.worst.kind} {self.worst.name}, {self.worst.error:.2e} "
                f"of {self.worst.allowed:.2e} allowed"
            )
        for d in self.differences[:_MOST]:
            yield f"  differs: {d.kind} {d.name}: {d.error:.3e}, allowed {d.allowed:.3e}"
        if self.first_difference:
            yield f"  first op that differs: {self.first_difference}"


@dataclass(frozen=True)
class TrainReport(ComparisonReport):
    """The report of a verified training run. ``str()`` is what the command prints.

    Differences are in the order in which a run meets them.
    """

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
    _title = "training with the plan is other than plain training"

    @property
    def first_difference(self) -> str | None:
        """The first thing that differs: run, step, kind, name and rank; None if nothing does."""
        return str(self.differences[0]) if self.differences else None

    def _said(self) -> Iterator[str]:
        verdict = "trained alike" if self.passed else "TRAINS DIFFERENTLY"
        if self.passed and self.comparable is not None:
            verdict = f"not comparable beyond step {self.comparable}, the rest alike"
        other = "" if self.other_placed is None else f" and under {self.other_placed}"
        yield (
            f"{verdict}: {self.model}, {self.placed}, {self.steps} steps "
            f"of {self.samples} samples with {self.optimizer}, clipped, annealed, saved, resumed in the same plan"
            f"{other}, beside a plain loop ({self.seconds:.1f} s)"
        )
        yield f"  compared: {self.counts}"
        if self.worst is not None and self.passed:
            yield f"  largest error: {self.worst}"
        if self.differences:
            yield f"  first difference: {self.first_difference}"
            for d in self.differences[1:_MOST]:
                yield f"  then: {d}"
            if len(self.differences) > _MOST:
                yield f"  and {len(self.differences) - _MOST} more"
