"""The outputs of a placed evaluation graph: who computes each, and how its micro-batches' parts become one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cost_models.errors import InternalError
from passes.graph.graph import OpGraph, tensor_specs
from passes.lower.segment import Segmentation
from runtime.execute.gather_outputs import Joining, OutputPlace
from runtime.segment.code import TensorSpec


def evaluation_outputs(
    graph: OpGraph, segmentation: Segmentation, holders: Mapping[str, Sequence[int]]
) -> tuple[OutputPlace, ...]:
    """List every output of the model, without the loss and metrics, in the model's order.

    ``holders``: ranks that hold each parameter and buffer, numbered as in ``segmentation``.
    """
    names: dict[str, list[str]] = {}
    for output in graph.outputs:
        if output.kind == "output":
            names.setdefault(output.node, []).append(output.name)
    of_samples = _of_samples(graph)
    places = []
    for node, called in names.items():
        specs = tensor_specs(graph.nodes[node])
        if len(specs) != 1:
            raise InternalError(f"evaluation: output {called[0]} is not one tensor")
        placeholder = graph.input_of.get(node)
        if placeholder is None:
            joining, dim = _joining(graph, specs[0], node in of_samples)
            rank = segmentation.ranks[segmentation.segment_of[node]][0]
            places.append(OutputPlace(tuple(called), specs[0], joining, dim, rank))
            continue
        joining, dim = _joining(graph, specs[0], of_samples=False)
        if placeholder.kind == "batch":
            holder = _reader(graph, segmentation, node)
        else:
            holder = min(holders.get(placeholder.name, ()), default=None)
        places.append(OutputPlace(tuple(called), specs[0], joining, dim, holder, placeholder.name))
    return tuple(places)


def _joining(graph: OpGraph, spec: TensorSpec, of_samples: bool) -> tuple[Joining, int]:
    symbol = graph.batch.batch_symbol
    dims = [d for d, size in enumerate(spec.shape) if not isinstance(size, int) and size.has(symbol)]
    if len(dims) > 1:
        return "refuse", dims[0]
    if dims:
        return "concatenate", dims[0]
    return ("stack" if of_samples else "same"), 0


def _reader(graph: OpGraph, segmentation: Segmentation, leaf: str) -> int | None:
    """Return the first rank whose segments read a leaf of the batch: it has the leaf, others may not."""
    readers = (segmentation.segment_of.get(user.name) for user in graph.nodes[leaf].users)
    return min((segmentation.ranks[index][0] for index in readers if index is not None), default=None)


def _of_samples(graph: OpGraph) -> frozenset[str]:
    """Name the nodes that read a batch leaf with a batch dimension, themselves or through others."""
    found = {
        i.node for i in graph.inputs if i.kind == "batch" and graph.batch.batch_dims.get(i.name) is not None
    }
    for node in graph.ops:
        if any(source.name in found for source in node.all_input_nodes):
            found.add(node.name)
    return frozenset(found)
