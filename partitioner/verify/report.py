"""The report of a verification: what was compared, in which types, and the worst of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cost_models.errors import VerificationError
from cost_models.shown import ShownInNotebooks
from cost_models.units import counted
from partitioner.report.text import hanging
from partitioner.verify.compare import ORDERS, Comparison
from partitioner.verify.own_draws import DRAWN

_PLURAL = {
    **{"loss": "losses", "gradient": "gradients", "parameter": "parameters", "buffer": "buffers"},
    DRAWN: f"sets of {DRAWN}",
}


@dataclass(frozen=True)
class VerifyReport(ShownInNotebooks):
    """The report of a verification: what was compared, and the worst of it. ``str()`` is what the command prints."""

    model: str
    stages: int
    schedule: str
    microbatches: int
    samples: int
    compared: Mapping[str, int]
    differences: tuple[Comparison, ...]
    worst: Comparison | None
    seconds: float
    notes: tuple[str, ...]
    first_difference: str | None = None
    types: str = "float64"
    """The types that both sides computed in."""
    why_own_types: str = ""
    """The reason why these are the model's own; "" in float64."""
    mesh: tuple[int, ...] = ()
    """The mesh of the stage that is all of the plan; () for a plan of several stages, or on one device."""

    @property
    def passed(self) -> bool:
        return not self.differences

    @property
    def _placed(self) -> str:
        if self.mesh:
            return f"mesh {'×'.join(map(str, self.mesh))}"
        return f"{counted(self.stages, 'stage')}, {self.schedule}"

    def __str__(self) -> str:
        return hanging("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        counts = ", ".join(f"{n} {kind if n == 1 else _PLURAL[kind]}" for kind, n in self.compared.items())
        lines = [
            f"{'verified' if self.passed else 'DIFFERS'}: {self.model}, {self._placed}, "
            f"{counted(self.microbatches, 'micro-batch')}, {counted(self.samples, 'sample')}, in {self.types}: "
            f"{counts} compared ({self.seconds:.1f} s)"
        ]
        if self.why_own_types:
            lines.append(
                f"  in its own types: {self.why_own_types}; allowed is what rounding does there, {ORDERS:.0f} times "
                "what it changes to round the results of every op once more"
            )
        if self.worst is not None:
            lines.append(
                f"  largest error: {self.worst.kind} {self.worst.name}, {self.worst.error:.2e} "
                f"of {self.worst.allowed:.2e} allowed"
            )
        lines += [
            f"  differs: {d.kind} {d.name}: {d.error:.3e}, allowed {d.allowed:.3e}"
            for d in self.differences[:10]
        ]
        if self.first_difference:
            lines.append(f"  first op that differs: {self.first_difference}")
        return [*lines, *(f"  note: {note}" for note in self.notes)]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return {"passed": self.passed, **asdict(self)}

    def raise_if_different(self) -> None:
        """Raise VerificationError unless everything agreed."""
        if not self.passed:
            raise VerificationError("the partitioned model computes something else", because=self._lines())
