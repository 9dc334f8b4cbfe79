"""The plain training loop that an engine's steps are held against: the user's own module, eager, on one process.

    for pieces in steps:
        for piece in pieces:                  the whole batch, or the plan's micro-batches where samples are coupled
            (loss_of(module, piece) * weight).backward()
        hooks on parameters, once, on the sum
        clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        scheduler.step()

It is written with torch only, so that no line of this project is on both sides of the comparison. Where the types of
``PlainTypes`` differ from the module's, the module computes on copies in the leaf's type, sums are kept in the gradient's
and the optimizer updates the owner's, as every mixed-precision loop does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Piece:
    """A part of a batch, and the weight of its loss. ``within``: makes what its forward and backward run in."""

    batch: Any
    weight: float
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class PlainTypes:
    """The types of one parameter: what forward reads, what micro-batches are summed in, what the optimizer updates."""

    leaf: torch.dtype
    gradient: torch.dtype
    owner: torch.dtype


@dataclass(frozen=True)
class PlainState:
    """A copy of everything that a step changes. ``optimizer``: name of a parameter -> key -> value."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class PlainStep:
    """The results of one step. ``rates``: the learning rates that it used, by group; ``state``: None if it was not kept."""

    loss: float
    norm: float
    rates: tuple[float, ...]
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    """The 2-norm of each parameter's gradient, before clipping."""
    state: PlainState | None = None


def plain_loop(
    module: nn.Module,
    steps: Sequence[Sequence[Piece]],
    loss_of: Callable[[nn.Module, Any], Tensor],
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any],
    max_norm: Callable[[float], float],
    kept: Collection[int],
    types: Mapping[str, PlainTypes] | None = None,
    loss_scale: float | None = None,
    once: Collection[str] = (),
) -> list[PlainStep]:
    """Train ``module``, which is changed, and return every step's results.

    ``max_norm``: the bound of clipping, from the first step's norm. ``kept``: numbers of the steps, from 1, after which
    the state is copied. ``types``: those of the parameters; the module's own without them. ``loss_scale``: backward runs on
    the loss times it; a step whose gradients overflow is dropped, and the scale halved. ``once``: names of buffers that a
    step writes once, so that each piece starts from what was there before it.
    """
    module.train()
    leaves = dict(module.named_parameters())
    own = {n: PlainTypes(p.dtype, p.dtype, p.dtype) for n, p in leaves.items()} if types is None else types
    owners = {name: _owner(leaf, own[name]) for name, leaf in leaves.items()}
    hooks = {name: _taken_off(leaf) for name, leaf in leaves.items()}
    optimizer = make_optimizer([(name, owner) for name, owner in owners.items() if owner.requires_grad])
    scheduler = make_scheduler(optimizer)
    bound: float | None = None
    results: list[PlainStep] = []
    for number, pieces in enumerate(steps, 1):
        sums: dict[str, Tensor] = {}
        total = 0.0
        before = {name: module.get_buffer(name).detach().clone() for name in once}
        for piece in pieces:
            for name, contents in before.items():
                module.get_buffer(name).detach().copy_(contents)
            with piece.within():
                loss = loss_of(module, piece.batch)
                if loss.requires_grad:
                    (loss * (piece.weight * (loss_scale or 1.0))).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * piece.weight
            _add(sums, leaves, own)
        overflowed = loss_scale is not None and not all(bool(g.isfinite().all()) for g in sums.values())
        for name, owner in owners.items():
            gradient = None if overflowed else sums.get(name)
            owner.grad_dtype = None
            owner.grad = None if gradient is None else gradient / (loss_scale or 1.0)
            _run_hooks(hooks[name], leaves[name], owner)
            if owner.grad is not None and owner.grad.is_sparse:  # neither clipping nor Adam takes these
                owner.grad = owner.grad.to_dense()
        norms = {n: float(p.grad.norm()) for n, p in owners.items() if p.grad is not None}
        norm = math.inf if overflowed else math.sqrt(sum(n**2 for n in norms.values()))
        bound = max_norm(norm) if bound is None else bound
        if not overflowed:
            nn.utils.clip_grad_norm_(owners.values(), bound)
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        for owner in owners.values():
            owner.grad = None if owner.grad is None else owner.grad.to(owner.dtype)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for name, leaf in leaves.items():
                if owners[name] is not leaf:
                    leaf.copy_(owners[name])
        loss_scale = loss_scale / 2 if overflowed and loss_scale is not None else loss_scale
        state = _copied(owners, module, optimizer) if number in kept else None
        results.append(PlainStep(total, norm, rates, norms, state))
        for owner in owners.values():
            owner.grad = None
    return results


def _owner(leaf: nn.Parameter, types: PlainTypes) -> nn.Parameter:
    """Return what the optimizer updates; the module's own parameter becomes the copy that forward reads."""
    owner = nn.Parameter(leaf.detach().to(types.owner, copy=True), leaf.requires_grad)
    if types.leaf == types.owner == leaf.dtype:
        return leaf
    leaf.data = leaf.detach().to(types.leaf)
    return owner


def _taken_off(leaf: nn.Parameter) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Take off the hooks of a parameter, which would run for each piece: of the gradient, of the parameter with it."""
    before, after = leaf._backward_hooks or {}, leaf._post_accumulate_grad_hooks or {}
    found = list(before.values()), list(after.values())
    for table in (before, after):
        table.clear()
    return found


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
    sums: dict[str, Tensor], leaves: Mapping[str, nn.Parameter], types: Mapping[str, PlainTypes]
) -> None:
    """Add the gradients of one piece to ``sums``, in their own type, and drop them."""
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            found = leaf.grad.to(types[name].gradient)
            sums[name] = found if name not in sums else sums[name] + found
            leaf.grad = None


def _copied(
    owners: Mapping[str, nn.Parameter], module: nn.Module, optimizer: torch.optim.Optimizer
) -> PlainState:
    states: dict[str, dict[str, Tensor]] = {}
    for name, owner in owners.items():
        found = optimizer.state.get(owner, {})
        states[name] = {
            key: value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value))
            for key, value in found.items()
            if isinstance(value, Tensor | int | float)
        }
    return PlainState(
        {name: owner.detach().clone() for name, owner in owners.items()},
        {  # a parameter that is registered as a buffer too is compared as the parameter
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if not isinstance(buffer, nn.Parameter)
        },
        states,
    )
