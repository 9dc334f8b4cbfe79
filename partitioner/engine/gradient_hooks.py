"""Hooks on the gradients of parameters, run where the parameters live: once per step, on the gradient of the whole batch.

    backward of all micro-batches ─► sums over ranks ─► unscaled ─► hooks ─► clipping ─► optimizer

A plain loop over a batch calls ``parameter.register_hook``'s function once, with the gradient of that batch; into how
many micro-batches a plan cuts it changes nothing of that. So a hook that clips or masks does here what it does there.
It gets the whole gradient also where ranks hold blocks of the parameter: the blocks are put together first, by one sum
over all ranks for each such parameter. Every rank that holds a copy runs the hook itself, so hooks must not draw random
numbers (``passes.fidelity`` refuses those).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cost_models.layout import Shard
from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from runtime.mesh.sharding import Block
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

    @property
    def before(self) -> Sequence[Callable[[Tensor], Tensor | None]]:
        """Functions of the gradient, which may return another one (``register_hook``)."""
        return tuple((self.parameter._backward_hooks or {}).values())

    @property
    def after(self) -> Sequence[Callable[[Tensor], None]]:
        """Functions of the parameter with its gradient in place (``register_post_accumulate_grad_hook``)."""
        return tuple((self.parameter._post_accumulate_grad_hooks or {}).values())


def hooked_parameters(model: nn.Module, graph: OpGraph, precision: Precision) -> tuple[HookedParameter, ...]:
    """Return the trained parameters of ``model`` that have hooks, in the model's order, the same on every rank."""
    found = []
    for name, parameter in model.named_parameters():
        if name in graph.trained and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
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
                    run_hooks(hooked, owner)

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
        mine = self._own_blocks(name, shape)
        gradients = {n: p.grad for n in mine if (p := self._state.parameters[n]).grad is not None}
        whole = self._whole(name, shape, gradients, hooked.gradient_dtype, "gradient")
        values = torch.empty(shape, dtype=hooked.dtype, device="meta")
        if hooked.after:
            own = {n: self._state.parameters[n].detach() for n in mine}
            values = self._whole(name, shape, own, hooked.dtype, "values")
        if not mine:
            return
        stand_in = (
            nn.Parameter(values)
            if hooked.after
            else nn.Parameter(torch.empty_like(whole, dtype=hooked.dtype))
        )
        stand_in.grad_dtype = None
        stand_in.grad = whole
        run_hooks(hooked, stand_in)
        for own_name, block in mine.items():
            gradient = stand_in.grad
            self._state.parameters[own_name].grad = (
                None if gradient is None else block.of(gradient).clone(memory_format=torch.contiguous_format)
            )

    def _own_blocks(self, name: str, shape: tuple[int, ...]) -> dict[str, Block]:
        """Return the blocks of a parameter that this rank trains, by the names that it has for them."""
        sharding = self._state.shardings.get(name)
        if sharding is not None:
            return (
                {name: sharding.owner_block(shape, self._state.rank)}
                if name in self._state.parameters
                else {}
            )
        return {
            n: self._state.parts[n].block for n in self._state.names_of(name) if n in self._state.parameters
        }

    def _whole(
        self, name: str, shape: tuple[int, ...], own: Mapping[str, Tensor], dtype: torch.dtype, what: str
    ) -> Tensor:
        """Put a tensor together from the blocks that ranks speak for. Collective."""
        whole = torch.zeros(shape, dtype=dtype, device=self._collectives.device)
        for piece in pieces_of(self._state, name, shape):
            if piece.rank == self._state.rank and piece.name in own:
                value = own[piece.name]
                dense = value.to_dense() if value.is_sparse else value
                Block(piece.offsets, piece.shape).of(whole).copy_(dense)
        return self._collectives.all_reduce(whole, f"the whole {what} of {name}").wait()


def run_hooks(hooked: HookedParameter, parameter: nn.Parameter) -> None:
    """Run the hooks on ``parameter``, which stands for the user's, and on its gradient, in autograd's order."""
    for hook in hooked.before:
        assert parameter.grad is not None
        changed = hook(parameter.grad)
        if changed is not None:
            parameter.grad = changed
    for after in hooked.after:
        after(parameter)
