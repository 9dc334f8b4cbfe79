"""The placement graph of a plan: its ops with their stages, layouts and parameters, and the bridges between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from cost_models.conversion import Step, steps
from cost_models.layout import Mesh
from partitioner.pictures.layout_words import choice_words, layout_words
from partitioner.pictures.tree import module_tree
from partitioner.record.data import PlanData
from partitioner.record.outline import ModelOutline
from passes.shard.words import Choice, read_choice, read_placements
from passes.split.values import block_name

KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "slice": "slice",
    "keep_first": "slice",
}
"""The words for steps of a bridge inside a stage. To keep a value on the first rank alone moves nothing: a slice."""


def op_graph_data(plan: PlanData | None, outline: ModelOutline | None = None) -> dict[str, Any] | None:
    """Return the placement graph as the page draws it; None of a plan that does not remember its model.

    ``outline``: the model's, where it is known from elsewhere. Without a plan, the model's ops as they are.
    """
    if outline is None and plan is not None:
        outline = plan.outline
    if outline is None:
        return None
    stages = () if plan is None else plan.stages
    stage_of = {op: index for index, stage in enumerate(stages) for op in stage.ops}
    ways = {} if plan is None else _ways(plan)
    texts: dict[str, int] = {}
    layout_of = {
        op: texts.setdefault(choice_words(choices, axes), len(texts))
        for op, (choices, axes, _) in ways.items()
    }
    whole_of = {
        block_name(split.op, number): index
        for index, split in enumerate(() if plan is None else plan.splits)
        for number in range(len(split.sizes))
    }
    parameters = [index for index, given in enumerate(outline.inputs) if given.kind == "parameter"]
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
        "kinds": [_kind(outline, number) for number in range(len(outline.kinds))],
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
        "tree": module_tree(outline, stage_of),
        "bridges": []
        if plan is None
        else [
            *_between_stages(plan, outline, stage_of),
            *_inside(outline, ways),
            *_of_parameters(plan, outline, ways),
        ],
    }


def short_op(target: str) -> str:
    """Name an op as people do: aten.linear.default -> linear."""
    return target.removeprefix("aten.").removesuffix(".default")


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "one number"


def _kind(outline: ModelOutline, number: int) -> dict[str, Any]:
    kind = outline.kinds[number]
    return {
        "op": short_op(kind.op),
        "target": kind.op,
        "shape": _shape(kind.shape) if kind.dtype else "",
        "dtype": kind.dtype,
        "forward_flops": kind.forward_flops,
        "backward_flops": kind.backward_flops,
        "output_bytes": kind.output_bytes,
        "saved_bytes": kind.saved_bytes,
        "forward_seconds": kind.forward_seconds,
        "backward_seconds": kind.backward_seconds,
    }


def _stored(plan: PlanData, parameter: str) -> str:
    """Say how the stages keep a parameter; "" if they keep it whole."""
    found: dict[str, None] = {}
    for stage in plan.stages:
        if stage.sharding is None or parameter not in stage.sharding.stored:
            continue
        axes = list(stage.sharding.axes)
        text = layout_words(read_placements(stage.sharding.stored[parameter]), axes)
        if state := stage.sharding.state.get(parameter):
            own = layout_words(read_placements(state), axes)
            text = f"{text or 'whole'}; gradients and optimizer state {own}"
        found[text] = None
    return " / ".join(filter(None, found))


_Way = tuple[tuple[Choice, ...], tuple[str, ...], Mesh]


def _ways(plan: PlanData) -> dict[str, _Way]:
    """Return how each op of a sharded stage runs: a choice per axis, the axes, and the mesh."""
    read = cache(read_choice)
    found = {}
    for stage in plan.stages:
        if stage.sharding is not None:
            mesh = stage.sharding.mesh(stage.devices)
            for op, texts in stage.sharding.choices.items():
                found[op] = tuple(map(read, texts)), tuple(stage.sharding.axes), mesh
    return found


def _between_stages(
    plan: PlanData, outline: ModelOutline, stage_of: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield a bridge per value that another stage's devices read: from the op that makes it to the first that reads it."""
    number = {name: op for op, name in enumerate(outline.names)}
    values = {value.name: value for value in plan.values}
    first_reader: dict[tuple[int, int], int] = {}
    for op, reads in enumerate(outline.reads_of()):
        for read in reads:
            first_reader.setdefault((read, stage_of.get(outline.names[op], -1)), op)
    for transfer in plan.transfers:
        value = values.get(transfer.value)
        if value is None or transfer.value not in number:
            continue
        for consumer in value.consumers:
            reader = first_reader.get((number[transfer.value], consumer))
            if reader is None or transfer.target not in plan.stages[consumer].devices:
                continue
            yield {
                "from": number[transfer.value],
                "to": reader,
                "kind": "send/recv",
                "size_bytes": transfer.size_bytes,
                "gradient": transfer.gradient,
                "text": f"stage {value.producer} sends {transfer.value} to stage {consumer}"
                + (", and its gradient comes back" if transfer.gradient else ""),
            }


def _inside(outline: ModelOutline, ways: Mapping[str, _Way]) -> Iterator[dict[str, Any]]:
    """Yield the bridges inside of stages: where an op needs what it reads in another layout than it was made in."""

    @cache
    def way(
        source: tuple[Choice, ...], target: tuple[Choice, ...], operand: int, mesh: Mesh
    ) -> tuple[Step, ...]:
        made = [choice.outputs[0] for choice in source]
        needed = [choice.inputs[operand] for choice in target]
        return steps(made, needed, mesh)[0]

    for op, reads in enumerate(outline.reads_of()):
        reader = ways.get(outline.names[op])
        if reader is None:
            continue
        for operand, read in enumerate(reads):
            maker = ways.get(outline.names[read]) if read >= 0 else None
            if maker is None or maker[2] != reader[2] or operand >= len(reader[0][0].inputs):
                continue
            if any(len(choice.outputs) != 1 for choice in maker[0]):
                continue
            for step in way(maker[0], reader[0], operand, reader[2]):
                whole_bytes = outline.kinds[outline.kind_of[read]].output_bytes
                yield {
                    "from": read,
                    "to": op,
                    "kind": KINDS[step.kind],
                    "size_bytes": int(whole_bytes * step.share),
                    "gradient": False,
                    "text": f"{KINDS[step.kind]} over {reader[1][step.axis]}",
                }


def _of_parameters(
    plan: PlanData, outline: ModelOutline, ways: Mapping[str, _Way]
) -> Iterator[dict[str, Any]]:
    """Yield the bridges of parameters that a stage keeps in other layouts than its ops need: from an op to itself."""
    way = cache(steps)
    number = {name: op for op, name in enumerate(outline.names)}
    reads = outline.reads_of()
    for stage in plan.stages:
        if stage.sharding is None:
            continue
        stored = {name: read_placements(text) for name, text in stage.sharding.stored.items()}
        for name in stage.ops:
            op, (choices, axes, mesh) = number[name], ways[name]
            for operand, read in enumerate(reads[op]):
                given = outline.inputs[-1 - read] if read < 0 else None
                if given is None or given.name not in stored or operand >= len(choices[0].inputs):
                    continue
                needed = tuple(choice.inputs[operand] for choice in choices)
                for step in way(stored[given.name], needed, mesh)[0]:
                    if KINDS[step.kind] != "slice":  # moves nothing
                        yield {
                            "from": op,
                            "to": op,
                            "kind": KINDS[step.kind],
                            "size_bytes": int(given.size_bytes * step.share),
                            "gradient": False,
                            "text": f"{KINDS[step.kind]} of {given.name} over {axes[step.axis]}",
                        }
