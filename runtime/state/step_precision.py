"""The precision of a training step: scale, collect and check gradients, and keep leaves and owners together.

The scale is dynamic: gradients that float16 would round to 0 are computed times a large power of two.

    gradients of scale · loss ─► found anywhere inf or nan?  ─ yes ─► all ranks drop them, scale ← scale / 2
                                                             └ no ──► divided by scale; after 2,000 such steps
                                                                      in a row, scale ← 2 · scale

Initial scale, growth and backoff are those of ``torch.amp.GradScaler``. A dropped gradient is None, and
``torch.optim`` skips parameters without a gradient, so neither weights nor the optimizer's state change in that step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.errors import CheckpointError
from cost_models.precision import Precision
from runtime.ranks.collective import Collectives
from runtime.state.precision import ApartOwners, LeavesAndOwners
from runtime.state.rank_state import RankState
from runtime.state.sharded_owners import ShardedOwners

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Good steps in a row after which the scale doubles."""
SMALLEST, LARGEST = 2.0**-24, 2.0**24
"""Bounds of the scale. Below, gradients are infinite or no numbers in themselves; above, 1 / scale is no longer exact."""

Reduce = Callable[[Tensor], Tensor]
"""A function that returns the maximum over all ranks. Collective."""


class LossScale:
    """The scale of one training run, alike on every rank."""

    def __init__(self, scale: float = INITIAL_SCALE) -> None:
        self.scale = scale
        self.good_steps = 0

    def unscale_or_drop(
        self, parameters: Iterable[nn.Parameter], device: torch.device, reduce: Reduce
    ) -> bool:
        """Divide gradients by the scale, or drop all of them if any rank has one that is not finite; True if dropped.

        Collective. Updates the scale.
        """
        held = [parameter for parameter in parameters if parameter.grad is not None]
        bad = torch.zeros((), dtype=torch.float32, device=device)
        for parameter in held:
            assert parameter.grad is not None
            bad = torch.maximum(bad, _not_finite(parameter.grad))
        dropped = bool(reduce(bad).item())
        for parameter in held:
            if dropped:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)
        self._update(dropped)
        return dropped

    def _update(self, dropped: bool) -> None:
        if dropped:
            self.scale, self.good_steps = max(self.scale / 2, SMALLEST), 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = min(self.scale * 2, LARGEST), 0

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": float(self.good_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scale of the run that wrote ``state``; raise ``CheckpointError`` if no run wrote it."""
        scale, steps = state.get("scale"), state.get("good_steps")
        valid = isinstance(scale, int | float) and isinstance(steps, int | float)
        if not valid or not (math.isfinite(scale) and scale > 0 and 0 <= steps < GROWTH_INTERVAL):  # type: ignore[arg-type,operator]
            raise CheckpointError(
                "cannot restore the loss scale",
                because=[f"scale {scale!r} and {steps!r} good steps are not what a run writes"],
            )
        self.scale, self.good_steps = float(scale), int(steps)  # type: ignore[arg-type]


def _not_finite(gradient: Tensor) -> Tensor:
    """Return 1 if any element is infinite or not a number, else 0, as a 0-dim float32; needs no memory of its size."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=gradient.device)
    low, high = torch.aminmax(values)  # both are nan where any element is
    return torch.logical_not(torch.isfinite(low) & torch.isfinite(high)).float()


class StepPrecision:
    """The work on gradients and parameters between backward and the next forward. Collective where it scales."""

    def __init__(
        self,
        state: RankState,
        precision: Precision,
        collectives: Collectives,
        sharded: ShardedOwners,
    ) -> None:
        self._state, self._collectives = state, collectives
        self._apart: tuple[ApartOwners, ...] = LeavesAndOwners(state), sharded
        self.loss_scale = LossScale() if precision.loss_scale == "dynamic" else None

    @property
    def gradient_scale(self) -> float:
        """Factor that the next backward multiplies its gradients by."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def after_backward(self, scale: float = 1.0) -> bool:
        """Hand owners their gradients, unscaled. Returns True if some overflowed and all ranks dropped theirs.

        ``scale``: a factor that backward multiplied gradients by beside ``gradient_scale``.
        """
        for owners in self._apart:
            owners.collect()
        if scale != 1.0:
            for parameter in self._state.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / scale)
        if self.loss_scale is None:
            return False
        return self.loss_scale.unscale_or_drop(
            self._state.parameters.values(), self._collectives.device, self._maximum
        )

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep leaves up to date with every ``optimizer.step()``, whoever calls it."""
        for owners in self._apart:
            owners.attach(optimizer)

    def publish(self) -> None:
        """Copy owners' values to their leaves, after something else than the optimizer wrote them."""
        for owners in self._apart:
            owners.publish()

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps, the same on every rank; empty without a loss scale."""
        return {} if self.loss_scale is None else self.loss_scale.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned. A run without a loss scale saved nothing: this one's stays at its start."""
        if self.loss_scale is not None and saved:
            self.loss_scale.load_state_dict(saved)

    def _maximum(self, value: Tensor) -> Tensor:
        """Return the maximum over all ranks."""
        return self._collectives.all_reduce(value, "the check for overflow", dist.ReduceOp.MAX).wait()
