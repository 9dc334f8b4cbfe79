"""The plain training loop that ranks are held against: the user's own module, eager, on one process.

    for parts in steps:
        for part in parts:                    the whole batch, or the plan's micro-batches where samples are coupled
            (loss_of(part.leaves) * weight).backward()
        hooks on parameters, once, on the sum
        clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        scheduler.step()

It is written with torch only, so that no line of this project is on both sides of the comparison. Where a parameter's
types differ from the module's, the module computes on copies in the leaf's type, sums are kept in the gradient's and the
optimizer updates the owner's, as every mixed-precision loop does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.precision import ParameterPrecision
from passes.fidelity.agree import StepResult


@dataclass(frozen=True)
class WeighedPart:
    """A part of a batch, and the weight of its loss. ``within``: what its forward and backward run in."""

    leaves: Mapping[str, Tensor]
    weight: float
    within: AbstractContextManager[Any]


def plain_loop(
    module: nn.Module,
    steps: Sequence[Sequence[WeighedPart]],
    loss_of: Callable[[Mapping[str, Tensor]], Tensor],
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    max_norm: Callable[[float], float] | None,
    kept: Collection[int],
    types: Mapping[str, ParameterPrecision] | None = None,
    loss_scale: float | None = None,
    once: Collection[str] = (),
) -> list[StepResult]:
    """Train ``module``, which is changed, and return every step's results.

    ``max_norm``: the bound of clipping, from the first step's norm. ``kept``: numbers of the steps, from 1, whose tensors
    are copied. ``types``: those of the parameters; the module's own without them. ``loss_scale``: backward runs on
    the loss times it; a step whose gradients overflow is dropped, and the scale halved. ``once``: names of buffers that a
    step writes once, so that each part starts from what was there before it.
    """
    module.train()
    leaves = dict(module.named_parameters())
    own = {n: ParameterPrecision.plain(p.dtype) for n, p in leaves.items()} if types is None else types
    owners = {name: _owner(leaf, own[name]) for name, leaf in leaves.items()}
    hooks = {name: _taken_off(leaf) for name, leaf in leaves.items()}
    optimizer = make_optimizer([(name, owner) for name, owner in owners.items() if owner.requires_grad])
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    bound: float | None = None
    results: list[StepResult] = []
    for number, parts in enumerate(steps, 1):
        sums: dict[str, Tensor] = {}
        total = 0.0
        before = {name: module.get_buffer(name).detach().clone() for name in once}
        for part in parts:
            for name, contents in before.items():
                module.get_buffer(name).detach().copy_(contents)
            with part.within:
                loss = loss_of(part.leaves)
                if loss.requires_grad:
                    (loss * (part.weight * (loss_scale or 1.0))).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * part.weight
            _add(sums, leaves, own)
        overflowed = loss_scale is not None and not all(bool(g.isfinite().all()) for g in sums.values())
        for name, owner in owners.items():
            gradient = None if overflowed else sums.get(name)
            owner.grad_dtype = None
            owner.grad = None if gradient is None else gradient / (loss_scale or 1.0)
            _run_hooks(hooks[name], leaves[name], owner)
            if owner.grad is not None and owner.grad.is_sparse:  # neither clipping nor Adam takes these
                owner.grad = owner.grad.to_dense()
        gradients = {n: p.grad for n, p in owners.items() if p.grad is not None}
        norms = {name: float(gradient.norm()) for name, gradient in gradients.items()}
        norm = math.inf if overflowed else math.sqrt(sum(n**2 for n in norms.values()))
        gradients = {n: g.clone() for n, g in gradients.items()} if number in kept else {}
        if max_norm is not None:
            bound = max_norm(norm) if bound is None else bound
            if not overflowed:
                nn.utils.clip_grad_norm_(owners.values(), bound)
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        for owner in owners.values():
            owner.grad = None if owner.grad is None else owner.grad.to(owner.dtype)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for name, leaf in leaves.items():
                if owners[name] is not leaf:
                    leaf.copy_(owners[name])
        loss_scale = loss_scale / 2 if overflowed and loss_scale is not None else loss_scale
        state = _copied(owners, module, optimizer) if number in kept else ({}, {}, {})
        results.append(StepResult(total, gradients, *state, norm, norms, rates))
        for owner in owners.values():
            owner.grad = None
    return results


def _owner(leaf: nn.Parameter, types: ParameterPrecision) -> nn.Parameter:
    """Return what the optimizer updates; the module's own parameter becomes the copy that forward reads."""
    if types.leaf == types.owner == leaf.dtype:
        return leaf
    owner = nn.Parameter(leaf.detach().to(types.owner, copy=True), leaf.requires_grad)
    leaf.data = leaf.detach().to(types.leaf)
    return owner


def _taken_off(leaf: nn.Parameter) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Take off the hooks of a parameter, which would run for each piece: of the gradient, of the parameter with it."""
    before, after = leaf._backward_hooks or {}, leaf._post_accumulate_grad_hooks or {}
    hooks = list(before.values()), list(after.values())
    for table in (before, after):
        table.clear()
    return hooks


@torch.no_grad()
def _run_hooks(
    hooks: tuple[list[Callable[..., Any]], list[Callable[..., Any]]], leaf: nn.Parameter, owner: nn.Parameter
) -> None:
    """Run the hooks on the owner's gradient; the module's own parameter holds what is trained meanwhile."""
    gradient, (before, after) = owner.grad, hooks
    if gradient is None or not (before or after):
        return
    data, owner.grad, leaf.grad = leaf.data, None, None
    leaf.data, leaf.grad_dtype = owner.data, None
    for hook in before:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    leaf.grad = gradient
    for hook in after:
        hook(leaf)
    gradient, leaf.grad = leaf.grad, None
    leaf.data = data
    if leaf is not owner:
        leaf.grad_dtype = data.dtype
    owner.grad = gradient


def _add(
    sums: dict[str, Tensor], leaves: Mapping[str, nn.Parameter], types: Mapping[str, ParameterPrecision]
) -> None:
    """Add the gradients of one piece to ``sums``, in their own type, and drop them."""
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            gradient = leaf.grad.to(types[name].gradient)
            sums[name] = gradient if name not in sums else sums[name] + gradient
            leaf.grad = None


def _copied(
    owners: Mapping[str, nn.Parameter], module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Copy parameters, buffers and the optimizer's state. A parameter that is registered as a buffer too is no buffer."""
    states = {
        name: {
            key: value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value))
            for key, value in optimizer.state.get(owner, {}).items()
            if isinstance(value, Tensor | int | float)
        }
        for name, owner in owners.items()
    }
    buffers = {n: b for n, b in module.named_buffers() if not isinstance(b, nn.Parameter)}
    return (
        {name: owner.detach().clone() for name, owner in owners.items()},
        {name: buffer.detach().clone() for name, buffer in buffers.items()},
        states,
    )
