"""The certificate: what was minimized, over which space, how close to the proved minimum, and what no plan can beat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Certificate:
    """The proof that comes with a plan.

    ``objective_seconds`` and ``bound_seconds`` are about the surrogate named by ``objective``, over
    ``space``; ``simulated_lower_bound_seconds`` is about the simulated time of any layer-wise plan of the
    request.
    """

    objective: str
    objective_seconds: float
    bound_seconds: float
    gap: float
    """(objective - bound) / objective; 0: proved optimal over the space."""
    simulated_lower_bound_seconds: float
    space: str
    method: str
    solver_status: str
    search_seconds: float

    def __post_init__(self) -> None:
        if self.bound_seconds > self.objective_seconds * (1 + 1e-9):
            raise ValueError(f"bound {self.bound_seconds} s above the objective {self.objective_seconds} s")


def relative_gap(objective_seconds: float, bound_seconds: float) -> float:
    """(objective - bound) / objective, never negative."""
    if objective_seconds <= 0:
        return 0.0
    return max(0.0, (objective_seconds - bound_seconds) / objective_seconds)
