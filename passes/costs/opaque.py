"""Costs of opaque parts that do not run on fake tensors: from a measured run, else from parameters and shapes.

measured    kernels counted while the part ran on the arguments that the live model gave it (``Opaque.measured``), at a
            few batch sizes; straight lines between them
estimated   every weight is multiplied once with every row of the largest input; everything is kept for backward
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cost_models.compute import OpWork
from passes.costs.kernels import KernelCounter
from passes.graph.nodes import storage_key
from passes.graph.signatures import Signature, concrete
from runtime.ops.opaque import Measured, Opaque, no_compile


def measure(opaque: Opaque, tensors: Sequence[Tensor]) -> Measured:
    """Run the part forward and backward on real tensors, and count."""
    inputs = len(tensors) - len(opaque.code.state)
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(storage_key(tensor) or 0, tensor.untyped_storage().nbytes())
        return tensor

    counter = KernelCounter()
    with (
        no_compile(),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        counter,
    ):
        own = [t.clone() if t.requires_grad and i < inputs else t for i, t in enumerate(leaves)]
        counter.take()
        results = [t for t in pytree.tree_leaves(opaque.outputs(own)[0]) if isinstance(t, Tensor)]
        forward = counter.take()
        roots = [result for result in results if result.requires_grad]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        if roots and trained:
            torch.autograd.grad(roots, trained, [torch.ones_like(r) for r in roots], allow_unused=True)
        backward = counter.take()
    known = {storage_key(tensor) for tensor in (*own, *results)}
    places = tuple(i for i, tensor in enumerate(own) if storage_key(tensor) in kept)
    own_bytes = sum(size for storage, size in kept.items() if storage not in known)
    counts = (
        forward.flops,
        forward.bytes,
        forward.launches,
        backward.flops,
        backward.bytes,
        backward.launches,
    )
    return Measured((), (*counts, own_bytes), places, counter.op_class, tuple(counter.uncounted))


def measured_work(
    opaque: Opaque, signature: Signature, symbols: Mapping[sympy.Symbol, int]
) -> tuple[OpWork, int, tuple[int, ...]] | None:
    """Return the part's work, the bytes and the operands that it keeps; None if nothing was measured."""
    if not opaque.measured:
        return None
    shapes = [[concrete(d, symbols) for d in operand.spec.shape] for operand in signature.operands]
    size = math.prod(shapes[v.tensor][v.dim] // v.divisor for v in opaque.variables)
    runs = sorted(opaque.measured, key=lambda run: math.prod(run.numbers))
    sizes = [math.prod(run.numbers) for run in runs]
    values = [_line(sizes, [run.counts[k] for run in runs], size) for k in range(len(runs[0].counts))]
    roles = {operand.role for operand in signature.operands} if signature.differentiated else set()
    half = "input" if "input" in roles else "weight" if "weight" in roles else None
    work = {"forward_flops": values[0], "forward_bytes": values[1], "forward_launches": max(1, values[2])}
    if half is not None:  # its own backward is one piece
        names = [f"backward_{half}_{what}" for what in ("flops", "bytes", "launches")]
        work.update(zip(names, values[3:6], strict=True))
    return OpWork(**work), round(values[6]), runs[0].saved


def guessed_flops(signature: Signature, symbols: Mapping[sympy.Symbol, int]) -> tuple[int, int]:
    """Return the forward FLOPs of an unknown part, and those of its backward, for what its weights and inputs are."""
    shapes = {
        role: [
            [concrete(d, symbols) for d in operand.spec.shape]
            for operand in signature.operands
            if (operand.role == "weight") == (role == "weight")
        ]
        for role in ("weight", "other")
    }
    rows = max((math.prod(shape[:-1]) for shape in shapes["other"]), default=1)
    flops = sum(2 * rows * math.prod(shape) for shape in shapes["weight"] if len(shape) > 1)
    return flops, 2 * flops


def _line(sizes: Sequence[int], counts: Sequence[float], size: int) -> float:
    """Interpolate between the nearest two measured sizes (or go on from the last two); never below zero."""
    if len(sizes) == 1 or sizes[0] == sizes[-1]:
        return counts[0]
    right = next((i for i, known in enumerate(sizes) if known >= size and i), len(sizes) - 1)
    left = right - 1
    slope = (counts[right] - counts[left]) / max(1, sizes[right] - sizes[left])
    return max(0.0, counts[left] + slope * (size - sizes[left]))
