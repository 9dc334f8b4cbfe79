"""The placement graph of a plan: its ops with their stages, layouts and parameters, and the bridges between them.

Layouts and ways to run an op are said in words, for people who do not know the letters:

    S0 R    over data 2 × tensor 4        ->   split along dimension 0 over data, whole over tensor
    R S1 -> S1                            ->   takes whole, split along dimension 1; makes split along dimension 1
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from cost_models.layout import Placement, Replicate, Shard
from partitioner.explain import known
from partitioner.pictures.bridges import bridges_data
from partitioner.pictures.tree import module_tree
from partitioner.record.data import PlanData
from partitioner.record.outline import ModelOutline
from passes.shard.words import Choice, Placements, read_choice, read_placements
from passes.split.values import block_name

AMOUNTS = (
    "forward_flops",
    "backward_flops",
    "output_bytes",
    "saved_bytes",
    "forward_seconds",
    "backward_seconds",
)
"""Fields of ``OpKind`` that ops are added up by."""


def op_graph_data(plan: PlanData | None, outline: ModelOutline | None = None) -> dict[str, Any] | None:
    """Return the placement graph as the page draws it; None of a plan that does not remember its model.

    ``outline``: the model's, where it is known from elsewhere. Without a plan, the model's ops as they are.
    """
    if outline is None and plan is not None:
        outline = plan.outline
    if outline is None:
        return None
    stages, splits = ((), ()) if plan is None else (plan.stages, plan.splits)
    stage_of = {op: index for index, stage in enumerate(stages) for op in stage.ops}
    texts: dict[str, int] = {}
    words = cache(_choice_words)
    layout_of = {
        op: texts.setdefault(words(tuple(map(read_choice, ways)), tuple(stage.sharding.axes)), len(texts))
        for stage in stages
        if stage.sharding is not None
        for op, ways in stage.sharding.choices.items()
        if op in stage_of  # what every stage computes for itself has as many layouts as stages
    }
    whole_of = {
        block_name(split.op, number): index
        for index, split in enumerate(splits)
        for number in range(len(split.sizes))
    }
    parameters = [index for index, tensor in enumerate(outline.inputs) if tensor.kind == "parameter"]
    position = {index: number for number, index in enumerate(parameters)}
    ops = [
        [
            name,
            outline.kind_of[op],
            stage_of.get(name, -1),
            outline.source_of[op] if outline.sources[outline.source_of[op]] else -1,
            [read for read in dict.fromkeys(reads) if read >= 0],
            [position[-1 - read] for read in dict.fromkeys(reads) if -1 - read in position],
            layout_of.get(name, -1),
            whole_of.get(name, -1),
        ]
        for op, (name, reads) in enumerate(zip(outline.names, outline.reads_of(), strict=True))
    ]
    return {
        "kinds": [
            {
                "op": _short_op(kind.op),
                "target": kind.op,
                "shape": _shape(kind.shape) if kind.dtype else "",
                "dtype": kind.dtype,
                **{amount: getattr(kind, amount) for amount in AMOUNTS},
            }
            for kind in outline.kinds
        ],
        "sources": list(outline.sources),
        "parameters": [
            {
                "name": outline.inputs[index].name,
                "shape": _shape(outline.inputs[index].shape),
                "size_bytes": outline.inputs[index].size_bytes,
                "layout": "" if plan is None else _stored(plan, outline.inputs[index].name),
            }
            for index in parameters
        ],
        "ops": ops,
        "layouts": list(texts),
        "tree": module_tree(outline, stage_of, layout_of),
        "bridges": [] if plan is None else bridges_data(plan, outline),
        "explained": None if plan is None else _explained(plan, outline),
    }


def _explained(plan: PlanData, outline: ModelOutline) -> dict[str, Any]:
    """Return what ``partitioner explain`` says of ops and modules, as far as the plan alone tells it.

    ``try`` names an op NAME, which the page replaces.
    """
    number = {name: op for op, name in enumerate(outline.names)}
    stages = range(len(plan.stages))
    return {
        "runs_in": [known.runs_in(plan, stage) for stage in stages],
        "slowest": known.slowest(plan),
        "why": known.why(plan),
        "everywhere": known.COMPUTED_EVERYWHERE,
        "sent": {
            str(number[value.name]): known.sent([value]) for value in plan.values if value.name in number
        },
        "try": [known.other_stage(plan, "NAME", stage) for stage in stages],
        "with_model": known.with_model(plan),
    }


def _short_op(target: str) -> str:
    """Name an op as people do: aten.linear.default -> linear."""
    return target.removeprefix("aten.").removesuffix(".default")


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "one number"


def _stored(plan: PlanData, parameter: str) -> str:
    """Say how the stages keep a parameter; "" if they keep it whole."""
    found: dict[str, None] = {}
    for stage in plan.stages:
        if stage.sharding is None or parameter not in stage.sharding.stored:
            continue
        axes = list(stage.sharding.axes)
        text = _layout_words(read_placements(stage.sharding.stored[parameter]), axes)
        if state := stage.sharding.state.get(parameter):
            own = _layout_words(read_placements(state), axes)
            text = f"{text or 'whole'}; gradients and optimizer state {own}"
        found[text] = None
    return " / ".join(filter(None, found))


def _layout_words(placements: Placements, axes: Sequence[str]) -> str:
    """Say how a tensor lies on the axes of a mesh; "" if it is whole on all of them."""
    if all(isinstance(one, Replicate) for one in placements):
        return ""
    return ", ".join(f"{_words(one)} over {axis}" for one, axis in zip(placements, axes, strict=True))


def _choice_words(choices: Sequence[Choice], axes: Sequence[str]) -> str:
    """Say how an op takes its operands and what it makes, axis by axis."""
    return "; ".join(f"over {axis}: {_choice(choice)}" for choice, axis in zip(choices, axes, strict=True))


def _choice(choice: Choice) -> str:
    takes = ", ".join(_words(need.placement) for need in choice.inputs) or "nothing"
    makes = ", ".join(map(_words, choice.outputs)) or "nothing"
    if choice.local:
        makes += f" by {choice.local.replace(':', ', ').replace('_', ' ')}"
    return f"takes {takes}; makes {makes}"


def _words(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"split along dimension {placement.dim}"
    return "whole" if isinstance(placement, Replicate) else "a part of a sum"
