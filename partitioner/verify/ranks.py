"""Results of all ranks of a verification, held against the unpartitioned step.

If ranks hold blocks of a tensor (shards, or parts of ops that were split), whole tensors are put together from them first.
Every copy counts: with blocks A and B, A on ranks 0 and 2, B on ranks 1 and 3, there are two whole tensors, of ranks 0 1
and of ranks 2 3. An element that nobody has is infinite, which no number of a model agrees with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from partitioner.verify.rank import VerificationTask
from passes.fidelity.agree import TOLERANCE, ComparedQuantity, StepResult, compare
from runtime.mesh.sharding import Block
from runtime.state.state_view import StateView


def put_together(results: Sequence[StepResult], task: VerificationTask) -> list[StepResult]:
    """Return one result per copy of the model, if ranks share work; else the ranks' own. Losses of shards are summed."""
    alone = all(len(segment.ranks) == 1 for segment in task.segments.segments)
    if alone and not task.parts:
        return list(results)
    blocks: dict[tuple[str, str], list[tuple[Block, Tensor]]] = {}
    for rank, result in enumerate(results):
        for kind, name, tensor in _tensors(result, task):
            block = _block(kind, name, rank, task)
            blocks.setdefault((kind, task.whole_of(name)), []).append((block, tensor))
    copies: list[dict[str, dict[str, Tensor]]] = []
    for (kind, name), placed in blocks.items():
        wholes = list(_wholes(placed, task.state[name]))
        if kind == "gradients" and name in task.shardings:
            # If ranks train parts of what they all store, there are fewer gradients than parameters.
            shape, sharding = task.state[name].shape, task.shardings[name]
            ranks, parameters = sharding.mesh.ranks, blocks["parameters", name]
            trained = len(ranks) // len({sharding.owner_block(shape, rank) for rank in ranks})
            stored = len(parameters) // len({block for block, _ in parameters})
            if len(wholes) == trained:
                wholes = [wholes[number % trained] for number in range(stored)]
        for number, whole in enumerate(wholes):
            if number == len(copies):
                copies.append({"gradients": {}, "parameters": {}, "buffers": {}})
            copies[number][kind][name] = whole
    loss = _loss([result.loss for result in results], task)
    return [
        StepResult(loss if number == 0 else None, copy["gradients"], copy["parameters"], copy["buffers"])
        for number, copy in enumerate(copies)
    ]


def with_views(results: Sequence[StepResult], views: Mapping[str, StateView]) -> list[StepResult]:
    """Add the buffers that are views, as everybody sees them who has their owners."""
    seen = []
    for result in results:
        held = {**result.buffers, **result.parameters}
        own = {name: view.of(held[view.owner]) for name, view in views.items() if view.owner in held}
        seen.append(replace(result, buffers={**result.buffers, **own}))
    return seen


def compare_ranks(
    expected: StepResult,
    actual: Sequence[StepResult],
    initial: Mapping[str, Tensor],
    learning_rate: float,
    tolerance: float = TOLERANCE,
) -> list[ComparedQuantity]:
    """Compare every copy; what nobody holds must not have changed."""
    losses = [result.loss for result in actual if result.loss is not None]
    unknown = replace(expected, gradients={}, parameters={}, buffers={})
    compared = compare(
        unknown, replace(unknown, loss=losses[0] if len(losses) == 1 else None), tolerance=tolerance
    )
    seen: set[str] = set()
    for result in actual:
        names = set(result.parameters) | set(result.buffers)
        seen |= names
        own = StepResult(
            expected.loss,
            {n: g for n, g in expected.gradients.items() if n in names or n in result.gradients},
            {n: p for n, p in expected.parameters.items() if n in names},
            {n: b for n, b in expected.buffers.items() if n in names},
        )
        buffers = {n: b for n, b in result.buffers.items() if n in expected.buffers}
        mine = replace(result, loss=expected.loss, buffers=buffers)
        compared += compare(own, mine, learning_rate, whole=expected.gradients, tolerance=tolerance)[1:]
    lost = {n: g for n, g in expected.gradients.items() if n not in seen}
    kept = {n: b for n, b in expected.buffers.items() if n not in seen and n in initial}
    unheld = replace(unknown, buffers={n: initial[n] for n in kept})
    return compared + compare(replace(unknown, gradients=lost, buffers=kept), unheld, tolerance=tolerance)[1:]


def _tensors(result: StepResult, task: VerificationTask) -> Iterator[tuple[str, str, Tensor]]:
    for kind in ("gradients", "parameters", "buffers"):
        for name, tensor in getattr(result, kind).items():
            yield kind, name, tensor
    for name, part in task.parts.items():  # no gradient is zero, also where other parts have one
        if name in result.parameters and name not in result.gradients and part.whole in task.trainable:
            yield "gradients", name, torch.zeros_like(result.parameters[name])


def _block(kind: str, name: str, rank: int, task: VerificationTask) -> Block:
    """Return the block that ``rank`` holds as ``name``, of the tensor that the model has."""
    if name in task.parts:
        return task.parts[name].block
    shape, sharding = task.state[name].shape, task.shardings.get(name)
    if sharding is None:
        return Block((0,) * len(shape), tuple(shape))
    return (sharding.owner_block if kind == "gradients" else sharding.leaf_block)(shape, rank)


def _loss(losses: Sequence[float | None], task: VerificationTask) -> float | None:
    """Return the loss of the batch: what ranks have that share its segment are parts of it; all others have none."""
    segments = task.segments.segments
    computing = {
        rank
        for index, code in task.codes.items()
        if any(output.kind == "loss" for output in code.outputs)
        for rank in segments[index].ranks
    }
    known = {rank: loss for rank, loss in enumerate(losses) if loss is not None}
    return sum(known.values()) if known.keys() == computing else None


def _wholes(placed: Sequence[tuple[Block, Tensor]], like: Tensor) -> Iterator[Tensor]:
    """Yield whole tensors, as many as ranks hold the most frequent block; infinity where a block is missing."""
    holders: dict[Block, list[Tensor]] = {}
    for block, tensor in placed:
        holders.setdefault(block, []).append(tensor)
    for number in range(max(map(len, holders.values()))):
        dense = next(iter(holders.values()))[0]
        complete = sum(math.prod(block.shape) for block in holders) == like.numel()
        has_infinity = dense.is_floating_point() or dense.is_complex()
        dtype = dense.dtype if has_infinity or complete else torch.float64
        whole = torch.full_like(like, math.inf if has_infinity or not complete else 0, dtype=dtype)
        for block, tensors in holders.items():
            own = tensors[min(number, len(tensors) - 1)]
            block.of(whole).copy_(own.to_dense() if own.is_sparse else own)
        yield whole
