"""Ways that something could have been placed, each with what the step is then; every strategy explains itself in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlacedWay:
    """One way, and the step with it, everything else as it is. Seconds per step."""

    layout: str
    """The layout, or the device, by its name."""
    step_seconds: float
    """Seconds of the step."""
    computes_seconds: float
    """Seconds of the ops themselves, all equals together."""
    sends_seconds: float
    """Seconds of messages, bridges, sums of gradients and updates."""
    memory_bytes: float
    """Memory of one device."""
    chosen: bool
    possible: bool = True
    """True if its bridges may be used at all."""
