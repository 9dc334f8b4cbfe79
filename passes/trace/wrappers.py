"""Wrappers around a model that hide its code or rename its parameters: taken off where nothing is lost, else refused."""

from __future__ import annotations

from torch import nn

from cost_models.errors import ModelError


def unwrapped(model: nn.Module) -> tuple[nn.Module, str | None]:
    """Return the model inside ``torch.compile(model)``, and a note that says so; any other model as it is.

    Submodules that are compiled, and ``model.compile()``, change no name and trace as they are.
    """
    inner = model._modules.get("_orig_mod") if type(model).__name__ == "OptimizedModule" else None
    if inner is None:
        return model, None
    innermost, _ = unwrapped(inner)
    return innermost, (
        "the model was compiled: the plan is for the model inside, whose names have no `_orig_mod.`; "
        "deploy(..., compile=True) compiles each segment"
    )


def refuse_data_parallel(model: nn.Module) -> None:
    """Raise ModelError for DataParallel and DistributedDataParallel: they would average gradients once more."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            "the model is wrapped by a data-parallel wrapper",
            [f"{type(model).__name__} renames the model's parameters and averages their gradients itself"],
            ["pass model.module"],
        )
