"""Refusals of a model whose step on the example fails, as a whole or in parts."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.errors import ModelError
from cost_models.units import listed
from passes.graph.graph import OpGraph
from passes.trace.attempts import WHOLE

OFF = 'check="off" plans it all the same'


def backward_fails(graph: OpGraph, because: list[str]) -> ModelError:
    return ModelError(
        f"backward of {graph.model_name} fails on the example, as it would in every step",
        because,
        [
            "give the op a backward (torch.library.register_autograd, autograd.Function), or detach what it is given",
            "call loss.backward() on example_inputs yourself: it fails alike",
            OFF,
        ],
    )


def parts_need_more(graph: OpGraph, leaves: Sequence[str], why: str) -> ModelError:
    first, shapes = leaves[0], graph.example_shapes
    fixed = [note for note in graph.notes if note.startswith(tuple(f"{leaf} {WHOLE}" for leaf in leaves))]
    return ModelError(
        f"micro-batches of {graph.model_name} would get {listed(leaves)} whole, and need their own samples of it",
        [why, *(fixed or [f"{name}, {shapes[name]}, has no batch dimension" for name in leaves])],
        [
            "take sizes from tensor.shape in the model: no list, loop or split with an entry for each sample",
            f"opaque=[the module that fixes the size of {first}] runs its code as it is, as one op",
            f"batch_dims={{{first!r}: dim}} says which of its dimensions counts samples; {{{first!r}: None}} that none "
            f"does, as with microbatches=1 and batches of {graph.example_batch_size} samples only",
        ],
    )
