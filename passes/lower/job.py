"""The training step that is to be placed: how many samples, whose optimizer, in which data types, how sure to fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from cost_models.precision import Precision
from cost_models.room import FILLS
from runtime.segment.microbatch import microbatch_sizes


@dataclass(frozen=True)
class Job:
    """One training step, the same for every way of placing it."""

    batch_size: int
    """Samples per optimizer step."""
    optimizer: str = "adamw"
    """Name of the optimizer whose state is budgeted, a key of ``cost_models.memory.OPTIMIZERS``."""
    precision: Precision = field(default_factory=Precision)
    """Data types of leaves, gradients and updates; the model's own unless said otherwise."""
    risk: float = FILLS
    """Chance of not fitting that its placement may have (``cost_models.room``)."""

    def sizes(self, microbatches: int) -> tuple[int, ...]:
        """Return the samples of each of so many micro-batches."""
        return microbatch_sizes(self.batch_size, microbatches)
