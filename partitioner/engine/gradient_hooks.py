"""Hooks on the gradients of parameters, run where the parameters live: once per step, on the gradient of the whole batch.

    backward of all micro-batches ─► sums over ranks ─► unscaled ─► hooks ─► clipping ─► optimizer

A plain loop over a batch calls ``parameter.register_hook``'s function once, with the gradient of that batch; into how
many micro-batches a plan cuts it changes nothing of that. So a hook that clips or masks does here what it does there.
It gets the whole gradient also where ranks hold blocks of the parameter: the blocks of gradient and parameter are put
together first, by two sums over all ranks for each such parameter. While it runs, the user's own parameter holds what is
trained, whichever way the hook reads it; hooks that read other tensors of the model are refused when it is traced
(``passes.trace.hook_reads``). Every rank that holds a copy runs the hook itself, so hooks must not draw random numbers
(``passes.fidelity`` refuses those).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cost_models.errors import ModelError
from cost_models.layout import Shard
from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from passes.trace.hook_reads import hook_tables, reads_own
from runtime.ranks.collective import Collectives
from runtime.state.gather import pieces_of
from runtime.state.rank_state import RankState


@dataclass(frozen=True)
class HookedParameter:
    """A parameter of the user's model that has hooks, and the types of its gradient and of what is trained."""

    name: str
    parameter: nn.Parameter
    gradient_dtype: torch.dtype
    dtype: torch.dtype


def hooked_parameters(model: nn.Module, graph: OpGraph, precision: Precision) -> tuple[HookedParameter, ...]:
    """Return the trained parameters of ``model`` that have hooks, in the model's order, the same on every rank."""
    found = []
    for name, parameter in model.named_parameters():
        if name in graph.trained and any(hook_tables(parameter)):
            if parameter.is_meta and reads_own(parameter):
                raise ModelError(
                    f"a hook of {name} reads the parameter, which has no values in the module that is deployed",
                    [
                        f"{name} is on the meta device, and a plan lets the module's own parameter hold what is trained"
                    ],
                    [
                        "deploy a module with values",
                        "register_post_accumulate_grad_hook, whose function gets the parameter as its argument",
                    ],
                )
            types = graph.types_of(name, precision)
            found.append(HookedParameter(name, parameter, types.gradient, types.owner))
    return tuple(found)


class GradientHooks:
    """The hooks of one rank's engine. ``run`` is collective where ranks hold blocks of a hooked parameter."""

    def __init__(self, hooked: Sequence[HookedParameter], state: RankState, collectives: Collectives) -> None:
        self._hooked, self._state, self._collectives = hooked, state, collectives

    @torch.no_grad()
    def run(self) -> None:
        """Run all hooks on the gradients that the optimizer's parameters have now."""
        for hooked in self._hooked:
            if self._in_blocks(hooked.name):
                self._run_on_whole(hooked)
            else:
                owner = self._state.parameters.get(hooked.name)
                if owner is not None and owner.grad is not None:
                    owner.grad = run_hooks(hooked, owner.detach(), owner.grad)

    def _in_blocks(self, name: str) -> bool:
        sharding = self._state.shardings.get(name) or self._state.elsewhere.get(name)
        if sharding is None:
            return self._state.names_of(name) != (name,)
        placed = (
            *zip(sharding.leaf, sharding.mesh.shape, strict=True),
            *zip(sharding.owner, sharding.mesh.shape, strict=True),
        )
        return any(isinstance(placement, Shard) and size > 1 for placement, size in placed)

    def _run_on_whole(self, hooked: HookedParameter) -> None:
        """Put the blocks of a gradient together, run the hooks, and keep this rank's blocks of what they make of it."""
        name, shape = hooked.name, tuple(hooked.parameter.shape)
        names = (n for n in self._state.names_of(name) if n in self._state.parameters)
        mine = {n: self._state.own_block(n, shape) for n in names}
        gradients = {n: p.grad for n in mine if (p := self._state.parameters[n]).grad is not None}
        whole = self._whole(name, shape, gradients, hooked.gradient_dtype, "gradient")
        if whole is None:  # the batch did not reach it: no gradient, no hooks, as in a plain loop
            return
        own = {n: self._state.parameters[n].detach() for n in mine}
        values = self._whole(name, shape, own, hooked.dtype, "values")
        if not mine or values is None:
            return
        changed = run_hooks(hooked, values, whole)
        for own_name, block in mine.items():
            self._state.parameters[own_name].grad = (
                None if changed is None else block.of(changed).clone(memory_format=torch.contiguous_format)
            )

    def _whole(
        self, name: str, shape: tuple[int, ...], own: Mapping[str, Tensor], dtype: torch.dtype, what: str
    ) -> Tensor | None:
        """Put a tensor together from the blocks that ranks speak for; None if no rank has one. Collective."""
        memory = torch.zeros(math.prod(shape) + 1, dtype=dtype, device=self._collectives.device)
        whole, blocks = memory[:-1].view(shape), memory[-1]
        for piece in pieces_of(self._state, name, shape):
            if piece.rank == self._state.rank and piece.name in own:
                value = own[piece.name]
                dense = value.to_dense() if value.is_sparse else value
                piece.block.of(whole).copy_(dense)
                blocks.add_(1)
        memory = self._collectives.all_reduce(memory, f"the whole {what} of {name}").wait()
        return memory[:-1].view(shape) if memory[-1] else None


def run_hooks(hooked: HookedParameter, values: Tensor, gradient: Tensor) -> Tensor | None:
    """Run the hooks in autograd's order; return the gradient that they leave. ``values``: the parameter, as trained."""
    before, after = hook_tables(hooked.parameter)
    with live(hooked.parameter, values) as parameter:
        for hook in before.values():
            changed = hook(gradient)
            if changed is not None:
                gradient = changed
        parameter.grad = gradient
        for hook in after.values():
            hook(parameter)
        return parameter.grad


@contextlib.contextmanager
def live(parameter: nn.Parameter, values: Tensor) -> Iterator[nn.Parameter]:
    """Let the user's parameter, which hooks can reach by name, hold ``values`` meanwhile, without a copy.

    One without values stays as it is, and another stands for it: ``hooked_parameters`` has refused hooks that read it.
    """
    if parameter.is_meta:
        stand_in = nn.Parameter(values)
        stand_in.grad_dtype = None
        yield stand_in
        return
    data, gradient, gradient_dtype = parameter.data, parameter.grad, parameter.grad_dtype
    parameter.grad = None
    parameter.data = values
    parameter.grad_dtype = None
    try:
        yield parameter
    finally:
        parameter.grad = None
        parameter.data = data
        parameter.grad_dtype = gradient_dtype
        parameter.grad = gradient
