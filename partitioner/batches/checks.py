"""Where a call of the engine would silently do something else than it says, it is refused."""

from __future__ import annotations

import torch

from cost_models.errors import UsageError


def refuse_autocast(method: str, device_type: str) -> None:
    """Raise UsageError under ``torch.autocast``: it would cast inside this rank's segments, against the trace."""
    active = [kind for kind in dict.fromkeys(("cpu", device_type)) if torch.is_autocast_enabled(kind)]
    if active:
        raise UsageError(
            f"engine.{method} was called under torch.autocast",
            because=[
                f"autocast is enabled for {', '.join(active)}; the data type of every op was fixed when the model "
                "was traced, and ranks exchange tensors of exactly those types"
            ],
            suggestions=[
                "call it outside of torch.autocast",
                "plan with precision=Precision(compute=torch.bfloat16)",
                "call partition under torch.autocast: the trace records its casts",
            ],
        )


def refuse_no_grad(method: str) -> None:
    """Raise UsageError where no gradients can be computed."""
    mode = (
        "torch.inference_mode"
        if torch.is_inference_mode_enabled()
        else "torch.no_grad"
        if not torch.is_grad_enabled()
        else None
    )
    if mode:
        raise UsageError(
            f"engine.{method} was called under {mode}",
            because=["a training step computes gradients"],
            suggestions=["call it outside", "engine.eval_step(batch) evaluates"],
        )
