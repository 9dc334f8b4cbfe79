"""An evaluation graph on the parts of parameters and buffers that ranks hold.

Evaluation is a trace of its own, of whole tensors; training may have split its ops into blocks (``passes.split.split``).
Ops that both do are split alike, so that evaluation reads the parts where they are. They are matched as placements are:
by module path, kind and count (``partitioner.evaluation.placement``).

    training     fc1 split 60/40        parts fc1.weight#0, fc1.weight#1
    evaluation   fc1: the same op       split 60/40 too, its blocks run where training's do

Any other op, and one that cannot be split, reads parts put together:

    %fc1_weight                        # (100, 32)         %fc1_weight_0, %fc1_weight_1        # (60, 32), (40, 32)
    %linear = linear(%x, %fc1_weight)                      %cat = cat([%fc1_weight_0, %fc1_weight_1], 0)
                                                           %linear = linear(%x, %cat)
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from cost_models.errors import InternalError, UsageError
from partitioner.evaluation.placement import keyed_ops
from passes.graph.graph import GraphInput, OpGraph, StateSpec
from passes.graph.nodes import call, copy_graph, fake_call, fake_mode_of, new_module
from passes.split.split import Split, split_neurons
from runtime.state.rank_state import TensorPart, names_of_parts

log = logging.getLogger("partitioner")

PartNode = tuple[TensorPart, fx.Node]


def reuse_splits(evaluation: OpGraph, training: OpGraph, run: OpGraph, splits: Sequence[Split]) -> OpGraph:
    """Put ``evaluation`` on the parts of ``run``, which is ``training`` after ``splits``."""
    if not run.parts:
        return evaluation
    key_of = {node.name: key for key, node in keyed_ops(training)}
    op_of = {key: node.name for key, node in keyed_ops(evaluation)}
    found = tuple(
        dataclasses.replace(s, op=op_of[key_of[s.op]])
        for s in splits
        if s.op in key_of and key_of[s.op] in op_of
    )
    return read_parts(_split(evaluation, run, found), run.parts)


def _split(evaluation: OpGraph, run: OpGraph, splits: tuple[Split, ...]) -> OpGraph:
    """Split ``evaluation``; return it as it is if that makes other parts than those of ``run``."""
    try:
        made = split_neurons(evaluation, splits) if splits else evaluation
    except UsageError as error:
        log.info("evaluation is not split as training is: %s", "; ".join(error.because))
        return evaluation
    if any(run.parts.get(name) != part for name, part in made.parts.items()):
        log.info("evaluation is not split as training is: its parts would be others")
        return evaluation
    return made


def read_parts(graph: OpGraph, parts: Mapping[str, TensorPart]) -> OpGraph:
    """Give ``graph`` the tensors in ``parts`` as its inputs, instead of those that they are parts of."""
    of_whole = names_of_parts(parts)
    if not any(i.kind in ("parameter", "buffer") and i.name in of_whole for i in graph.inputs):
        return graph
    new = copy_graph(graph.graph)
    nodes = {node.name: node for node in new.nodes}
    begin = next(node for node in new.nodes if node.op != "placeholder")
    inputs: list[GraphInput] = []
    parameters, buffers = dict(graph.parameters), dict(graph.buffers)
    replaced: dict[str, str] = {}
    for given in graph.inputs:
        if given.kind not in ("parameter", "buffer") or given.name not in of_whole:
            inputs.append(given)
            continue
        whole, pieces = nodes[given.node], []
        specs = parameters if given.kind == "parameter" else buffers
        spec = specs.pop(given.name)
        for name in of_whole[given.name]:
            node = _placeholder(new, whole, parts[name])
            inputs.append(dataclasses.replace(given, node=node.name, name=name))
            pieces.append((parts[name], node))
            specs[name] = dataclasses.replace(spec, name=name, shape=parts[name].block.shape)
        with new.inserting_before(begin):
            together = _together(new, pieces, whole, spec)
        whole.replace_all_uses_with(together)
        new.erase_node(whole)
        replaced[given.node] = together.name
    outputs = [dataclasses.replace(o, node=replaced.get(o.node, o.node)) for o in graph.outputs]
    return dataclasses.replace(
        graph,
        module=new_module(graph.module, new),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        parameters=parameters,
        buffers=buffers,
        parts={name: part for name, part in parts.items() if name in parameters or name in buffers},
    )


def _placeholder(new: fx.Graph, whole: fx.Node, part: TensorPart) -> fx.Node:
    value = whole.meta["val"]
    with new.inserting_before(whole):
        node = new.placeholder(whole.name)
    node.target = node.name  # the argument's name, which is another one for each part
    made = fake_call(fake_mode_of(new), torch.empty, (part.block.shape,), {"dtype": value.dtype})
    node.meta = {**whole.meta, "val": made.requires_grad_(value.requires_grad)}
    return node


def _together(new: fx.Graph, pieces: Sequence[PartNode], whole: fx.Node, spec: StateSpec) -> fx.Node:
    """Put together the tensor that ``pieces`` are the blocks of: cut it wherever a plane meets none, and go on inside."""
    if len(pieces) == 1:
        return pieces[0][1]
    for dim in range(len(spec.shape)):
        slabs = _slabs(pieces, dim)
        if len(slabs) > 1:
            nodes = [_together(new, slab, whole, spec) for slab in slabs]
            made = call(new, fake_mode_of(new), torch.ops.aten.cat.default, (nodes, dim), like=whole)
            made.meta["module_path"] = spec.name.rpartition(".")[0]
            return made
    raise InternalError(f"the parts of {spec.name} lie in no rows", [str(part.block) for part, _ in pieces])


def _slabs(pieces: Sequence[PartNode], dim: int) -> list[list[PartNode]]:
    """Group ``pieces`` by where they are along ``dim``: those that overlap there are together."""
    slabs: list[list[PartNode]] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece[0].block.offsets[dim]):
        block = piece[0].block
        if not slabs or block.offsets[dim] >= end:
            slabs.append([])
        slabs[-1].append(piece)
        end = max(end, block.offsets[dim] + block.shape[dim])
    return slabs
