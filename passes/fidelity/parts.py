"""Leaves that every micro-batch gets whole: is a batch still what its parts are, added up?

    input_ids (4 samples, 24)    batch dimension 0
    pixel_values (4, 3, 8, 8)    none: the code fixed its size at 4     two samples of text meet four images
    mask (4, 4)                  none: 4 tokens, by coincidence         the same for all samples: right

    edges (2, 20)                none: 20 edges between the batch's 4   the edges of four nodes meet two of them

A leaf without a batch dimension is one or the other, and a trial tells: two parts of the batch, run by the model itself,
then by the graph in float64, beside the whole.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from cost_models.errors import ModelError
from cost_models.units import listed
from passes.copies.dropout import random_ops, without_dropout
from passes.copies.float64 import code_in_float64, in_float64, wide
from passes.fidelity.agree import TOLERANCE, StepResult, difference
from passes.fidelity.steps import EagerSubject, cut, eager_step, graph_step
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.shard.couplings import couplings
from passes.trace.loss.reduction import loss_weights, samples_in, step_batch
from passes.trace.python_state import PythonState
from runtime.segment.microbatch import microbatch_sizes
from runtime.user_code import is_users


def refuse_coupled_guess(graph: OpGraph, declared: Collection[str]) -> None:
    """Refuse samples that were looked for behind another dimension, and depend on each other along it.

    They are as likely positions of a sequence. ``declared``: leaves whose batch dimension the user has given.
    """
    dims = {name: dim for name, dim in graph.batch.batch_dims.items() if dim is not None}
    if not dims or 0 in dims.values() or not dims.keys().isdisjoint(declared):
        return
    found = [coupling for coupling in couplings(graph) if coupling.kind == "samples"]
    if not found:
        return
    raise ModelError(
        f"it is not clear along which dimension {graph.model_name} has its samples",
        [
            *(note for note in graph.notes if "is taken for its samples" in note),
            f"what lies along dimension {next(iter(dims.values()))} depends on each other: {listed(found, 3)}",
        ],
        [
            "take sizes from tensor.shape in the model: no buffer, list or split with an entry for each sample",
            *(
                f"batch_dims={{{name!r}: {dim}}} if these are the samples all the same"
                for name, dim in dims.items()
            ),
        ],
    )


def whole_leaves(graph: OpGraph, declared: Collection[str]) -> tuple[str, ...]:
    """Name the leaves that the graph reads whole. ``declared``: the user has said so."""
    dims, shapes = graph.batch.batch_dims, graph.example_shapes
    return tuple(
        name for name, dim in dims.items() if dim is None and name not in declared and shapes.get(name)
    )


def why_parts_differ(graph: OpGraph, subject: EagerSubject, state: PythonState) -> str:
    """Say what goes wrong with two parts of a batch that runs as a whole; "" if nothing, or if nothing can be told."""
    samples = samples_in(graph, subject.leaves)
    if samples // 2 < least_samples(graph)[0]:
        return ""
    sizes = microbatch_sizes(samples, 2)
    for leaves in cut(subject.leaves, graph.batch.batch_dims, sizes):
        state.restore()
        try:
            eager_step(replace(subject, leaves=leaves))
        except Exception as error:  # noqa: BLE001 the user's code may raise anything
            lines = str(error).strip().splitlines() or ["no message"]
            users = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
            place = f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""
            return f"a part of the batch fails with {type(error).__name__}: {lines[0]}{place}"
    state.restore()
    plain, _ = without_dropout(graph)
    if random_ops(plain) or couplings(graph):
        return ""  # the parts of a batch make another loss for that reason already
    plain = in_float64(plain)
    whole, added = (_loss(plain, subject, cut) for cut in ((samples,), sizes))
    if not difference(StepResult(whole, {}, {}), StepResult(added, {}, {}), TOLERANCE):
        return ""
    return f"the loss of the batch is {whole:.6g}, that of its parts of {sizes[0]} and {sizes[1]} samples {added:.6g}"


def _loss(graph: OpGraph, subject: EagerSubject, sizes: Sequence[int]) -> float:
    """Add up the losses of parts as a plan does, in float64."""
    leaves = {name: wide(leaf) for name, leaf in step_batch(graph, subject.leaves, sizes).items()}
    parts = cut(leaves, graph.batch.batch_dims, sizes)
    with code_in_float64(graph):
        return sum(
            (graph_step(graph, subject, wide, part).loss or 0.0) * weight
            for part, weight in zip(parts, loss_weights(graph.loss_reduction, sizes), strict=True)
        )
