"""Sharding without a network: run an op on the shards that a choice makes, put them together, compare with the whole op.

What proves the rules in tests, and what finds choices of ops without a rule (``passes.shard.discover``). Ranks are numbers
in a list; a function of ``runtime.ops.local`` gets threads that meet at a barrier.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from cost_models.layout import Partial, Placement, Replicate, Shard
from passes.graph.nodes import tensors_in
from passes.shard.rules.local import local_op
from passes.shard.rules.threads import Rank, Rendezvous, on_all
from passes.shard.words import Choice, Need
from runtime.ops.local import LOCAL
from runtime.ops.opaque import Opaque

_R = Replicate()


def node_of(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Make a node of one op on real tensors, as rules and trials take it. Every tensor becomes an operand of its own."""
    graph = fx.Graph()

    def held(value: Any) -> Any:
        if isinstance(value, Tensor):
            node = graph.placeholder("x")
            node.meta["val"] = value
            return node
        return [held(item) for item in value] if isinstance(value, list | tuple) else value

    nodes = [held(value) for value in args]
    named = {name: held(value) for name, value in kwargs.items()}
    node = graph.call_function(op, tuple(nodes), named)
    with no_gradients(op):
        node.meta["val"] = op(*_filled(args), **_filled(kwargs))
    return node


def no_gradients(op: object) -> torch.set_grad_enabled:
    """Switch autograd off where nobody wants an op's gradients; not in the user's code, which may ask for some."""
    return torch.set_grad_enabled(isinstance(op, Opaque))


def _filled(value: Any) -> Any:
    """Fill in the operands; ops that write (batch norm's statistics) get copies."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _filled(item) for name, item in value.items()}
    return type(value)(_filled(item) for item in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Trial:
    """An op on whole tensors: what it gives, and the gradients of its operands for drawn gradients of its outputs."""

    node: fx.Node
    values: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    output_gradients: tuple[Tensor | None, ...]
    """None where an output has no gradient."""
    gradients: tuple[Tensor | None, ...]
    """None where an operand can have none."""
    after: tuple[Tensor, ...]
    """The operands when the op has run: some write to them."""
    tolerance: float
    call: Callable[..., Any]
    """The op on shards: ``node.target``, unless a test plants a wrong one."""

    @cached_property
    def known_to_fit(self) -> set[str] | None:
        """Operands and arguments whose shapes were checked without running the op; None where that cannot be done."""
        values = self.values
        try:
            _on_meta(self.call, self.node, values, self.node.args, self.node.kwargs)
        except Exception:  # noqa: BLE001 an unknown op may raise anything
            return None
        return {_form(values, self.node.args, self.node.kwargs)}

    def refuse_unfit(self, shards: Sequence[Tensor], args: Any, kwargs: Any) -> None:
        """Raise for shapes that do not fit. Some kernels (``_weight_norm``) do not look, and write beyond what is theirs.

        The same shapes are checked once: ranks have mostly the same, and an LSTM takes 100 ms on the meta device.
        """
        form = _form(shards, args, kwargs)
        if self.known_to_fit is not None and form not in self.known_to_fit:
            _on_meta(self.call, self.node, shards, args, kwargs)
            self.known_to_fit.add(form)


def trial(
    node: fx.Node,
    values: Sequence[Tensor],
    tolerance: float = 1e-12,
    frozen: Collection[int] = (),
    call: Callable[..., Any] | None = None,
) -> Trial:
    """Run the whole op. Differentiates floating operands, except those whose numbers are ``frozen``."""
    assert callable(node.target)
    leaves = _leaves(values, frozen)
    outputs = _run(node.target, node, leaves, node.args, dict(node.kwargs))
    drawn = tuple(torch.randn_like(y) if y.requires_grad else None for y in outputs)
    return Trial(
        node,
        tuple(values),
        tuple(y.detach() for y in outputs),
        drawn,
        _differentiate(outputs, drawn, leaves),
        tuple(leaf.detach() for leaf in leaves),
        tolerance,
        call or node.target,
    )


@dataclass(frozen=True)
class RankResult:
    """Results of one rank that has run an op on its shards."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    after: tuple[Tensor, ...]


def problem(trial: Trial, choices: Sequence[Choice], mesh_shape: Sequence[int]) -> str | None:
    """Say what is wrong with these choices (one per mesh axis); None if forward and gradients agree."""
    found = run_shards(trial, choices, mesh_shape)
    for j, whole in enumerate(trial.outputs):
        parts = {rank: result.outputs[j] for rank, result in found.items()}
        wrong = _differs(parts, [c.outputs[j] for c in choices], mesh_shape, whole, trial.tolerance)
        if wrong:
            return f"output {j} {wrong}"
    for i, of_whole in enumerate(trial.gradients):
        needs = [choice.inputs[i] for choice in choices]
        if of_whole is None:
            name, wanted, placements = "operand {} afterwards", trial.after[i], [n.placement for n in needs]
            parts = {rank: result.after[i] for rank, result in found.items()}
        else:
            name, wanted, placements = "gradient of operand {}", of_whole, [gradient_from(n) for n in needs]
            parts = {rank: g for rank, result in found.items() if (g := result.gradients[i]) is not None}
        wrong = _differs(parts, placements, mesh_shape, wanted, trial.tolerance)
        if wrong:
            return f"{name.format(i)} {wrong}"
    return None


def run_shards(
    trial: Trial, choices: Sequence[Choice], mesh_shape: Sequence[int], backward: bool = True
) -> dict[Rank, RankResult]:
    """Run every rank on shards made as the choices need them, with gradients as their outputs expect them."""
    shards = [
        scatter(value, [choice.inputs[i].placement for choice in choices], mesh_shape)
        for i, value in enumerate(trial.values)
    ]
    drawn = [
        None
        if g is None or not backward
        else scatter(g, [gradient_of(c.outputs[j]) for c in choices], mesh_shape)
        for j, g in enumerate(trial.output_gradients)
    ]
    frozen = [i for i, g in enumerate(trial.gradients) if g is None]
    target, args, kwargs = local_op(trial.node, choices, mesh_shape)
    op = trial.call if target is trial.node.target else target
    meeting = Rendezvous(mesh_shape)
    local = any(choice.local for choice in choices)  # what stands for the op then is not the op
    checked = target is trial.node.target and not local

    def on_rank(rank: Rank) -> RankResult:
        if checked:
            trial.refuse_unfit([shard[rank] for shard in shards], args, kwargs)
        leaves = _leaves([shard[rank] for shard in shards], frozen)
        outputs = _run(_local_call(op, choices, rank, meeting), trial.node, leaves, args, kwargs)
        if not backward:
            return RankResult(tuple(y.detach() for y in outputs), (), ())
        # A wrong choice may make outputs that the gradient does not fit: they are found to differ anyway.
        given = [
            None if g is None or g[rank].shape != y.shape else g[rank]
            for g, y in zip(drawn, outputs, strict=True)
        ]
        gradients = _differentiate(outputs, given, leaves)
        return RankResult(tuple(y.detach() for y in outputs), gradients, tuple(x.detach() for x in leaves))

    ranks = list(itertools.product(*map(range, mesh_shape)))
    results = on_all(on_rank, ranks, meeting if local else None)
    return dict(zip(ranks, results, strict=True))


def _form(values: Sequence[Tensor], args: Any, kwargs: Any) -> str:
    """Write down all that shapes depend on."""
    return repr(([(value.shape, value.stride(), value.dtype) for value in values], args, kwargs))


def _on_meta(
    call: Callable[..., Any], node: fx.Node, values: Sequence[Tensor], args: Any, kwargs: Any
) -> None:
    """Run the op without numbers: raises for shapes that do not fit."""
    _run(call, node, [torch.empty_like(value, device="meta") for value in values], args, kwargs)


def gradient_of(placement: Placement) -> Placement:
    """Return how the gradient of something produced so is expected."""
    return placement if isinstance(placement, Shard) else _R


def gradient_from(need: Need) -> Placement:
    """Return what the gradients that ranks make for an operand are."""
    if isinstance(need.placement, Shard):
        return need.placement
    return Partial() if need.partial_gradient else _R


def scatter(value: Tensor, placements: Sequence[Placement], mesh_shape: Sequence[int]) -> dict[Rank, Tensor]:
    """Cut a tensor into each rank's part: shards, copies, or random parts of a sum."""
    if not placements:
        return {(): value}
    parts: Sequence[Tensor] = [value] * mesh_shape[0]
    if isinstance(placements[0], Shard):
        parts = value.tensor_split(mesh_shape[0], placements[0].dim)
    elif isinstance(placements[0], Partial):
        first = [torch.randn_like(value) for _ in range(mesh_shape[0] - 1)]
        parts = [*first, value - sum(first)]
    return {
        (at, *rest): piece
        for at, part in enumerate(parts)
        for rest, piece in scatter(part, placements[1:], mesh_shape[1:]).items()
    }


def _differs(
    parts: Mapping[Rank, Tensor],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    whole: Tensor,
    tolerance: float,
) -> str | None:
    """Say how the ranks' parts, put together, are not the whole tensor; None if they are."""
    if not placements:
        return difference(parts[()], whole, tolerance)
    *outer, last = placements
    together: dict[Rank, Tensor] = {}
    for rank in dict.fromkeys(rank[:-1] for rank in parts):
        pieces = [parts[(*rank, at)] for at in range(mesh_shape[-1])]
        try:
            together[rank] = gather(pieces, last, tolerance)
        except ValueError as error:
            return str(error)
    return _differs(together, outer, mesh_shape[:-1], whole, tolerance)


def gather(pieces: Sequence[Tensor], placement: Placement, tolerance: float) -> Tensor:
    """Put the tensor that the ranks of one axis hold together; raises ``ValueError`` if they do not hold one."""
    if isinstance(placement, Shard):
        if len({(*p.shape[: placement.dim], *p.shape[placement.dim + 1 :]) for p in pieces}) != 1:
            raise ValueError(f"has shards of unlike shapes {[tuple(p.shape) for p in pieces]}")
        return torch.cat(list(pieces), placement.dim)
    if isinstance(placement, Partial):
        if len({p.shape for p in pieces}) != 1:
            raise ValueError(f"has parts of unlike shapes {[tuple(p.shape) for p in pieces]}")
        return torch.stack(list(pieces)).sum(0)
    for piece in pieces[1:]:
        wrong = difference(piece, pieces[0], tolerance)
        if wrong:
            raise ValueError(f"is not the same on all ranks: {wrong}")
    return pieces[0]


def difference(found: Tensor, wanted: Tensor, tolerance: float) -> str | None:
    """Say how two tensors differ, floats by more than ``tolerance`` of the largest (at least 1); None if they do not."""
    if found.shape != wanted.shape:
        return f"has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    if not wanted.numel():
        return None
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return None if torch.equal(found.to(wanted.dtype), wanted) else "has other values"
    finite = wanted[wanted.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    if torch.allclose(found, wanted, rtol=0.0, atol=tolerance * scale, equal_nan=True):
        return None
    return f"differs by {float((found - wanted).abs().nan_to_num(float('inf')).max()):.1e} (of {scale:.1e})"


def _leaves(values: Sequence[Tensor], frozen: Collection[int]) -> list[Tensor]:
    return [
        value.detach().clone().requires_grad_(i not in frozen and is_float(value))
        for i, value in enumerate(values)
    ]


def is_float(value: Tensor) -> bool:
    """Tell whether it can have a gradient."""
    return value.is_floating_point() or value.is_complex()


def _run(
    call: Callable[..., Any], node: fx.Node, leaves: Sequence[Tensor], args: Any, kwargs: Any
) -> tuple[Tensor, ...]:
    """Run the op: the tensors that it gives, in order. Operands are taken in the order of ``operands(node)``."""
    left = iter(leaves)

    def value(source: fx.Node) -> Any:
        known = source.meta["val"]
        return next(left) if isinstance(known, Tensor) else known

    args = fx.map_arg(args, value)
    result = call(*args, **fx.map_arg(kwargs, value))
    return tensors_in(result)


def _differentiate(
    outputs: Sequence[Tensor], drawn: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    roots = [(y, g) for y, g in zip(outputs, drawn, strict=True) if g is not None and y.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not roots or not wanted:
        return tuple(torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves)
    found = iter(torch.autograd.grad([y for y, _ in roots], wanted, [g for _, g in roots], allow_unused=True))
    gradients = [_dense(next(found)) if leaf.requires_grad else None for leaf in leaves]
    return tuple(
        torch.zeros_like(leaf) if g is None and leaf.requires_grad else g
        for g, leaf in zip(gradients, leaves, strict=True)
    )


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return the numbers of a gradient; embeddings may give it by rows."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _local_call(
    op: Callable[..., Any], choices: Sequence[Choice], rank: Rank, meeting: Rendezvous
) -> Callable[..., Any]:
    """Return what a rank calls: the op, or the local function with an axis per role."""
    dims: dict[str, tuple[int, ...]] = {}
    functions = {choice.local.partition(":")[0] for choice in choices if choice.local}
    for d, choice in enumerate(choices):
        if choice.local:
            role = choice.local.partition(":")[2]
            dims[role] = (*dims.get(role, ()), d)
    if not functions:
        return op
    (function,) = functions
    axes = {role: meeting.axis(at, rank) for role, at in dims.items()}
    return lambda *args, **kwargs: LOCAL[function](op, axes, *args, **kwargs)
