"""The smallest micro-batch that the model accepts: two samples if one alone would be treated in another way.

select of the k-th sample             needs k + 1 of them
batch_norm over (samples, channels)   refuses a single value per channel (a check in Python, lost in an exported
                                      graph, which would put 0/0 into the running variance)
squeeze of all dimensions             takes the batch dimension of a single sample away
var, std over samples                 0/0 for a single sample
a size of b - 1, b // 3, ...          needs as many that nothing is empty that the example has
an opaque part                        whatever its code refuses a single sample for: it is run with one, on fake tensors
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import sympy
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from passes.graph.graph import OpGraph, once_per_graph, tensor_specs
from passes.graph.nodes import argument
from passes.graph.signatures import concrete
from runtime.ops.opaque import Opaque, no_compile
from runtime.segment.code import Dim, TensorSpec

aten = torch.ops.aten


@once_per_graph
def least_samples(graph: OpGraph) -> tuple[int, str]:
    """Return the fewest samples that a micro-batch needs, and the op that needs as many ("" if one will do)."""
    sizes = {**graph.example_sizes, graph.batch.batch_symbol: 1}
    most, reason = 1, ""
    filled: dict[sympy.Expr, int] = {}
    for node in graph.ops:
        least = max(
            (_filled(size, graph, filled) for spec in tensor_specs(node) for size in spec.shape), default=1
        )
        if node.target is aten.select.int:
            least = max(least, _selected(node, graph))
        elif node.target in _REFUSES:
            (spec,) = tensor_specs(node.all_input_nodes[0])
            least = max(least, 2 if _REFUSES[node.target](node, spec, spec.concrete(sizes)) else 1)
        elif isinstance(node.target, Opaque):
            given = [spec for argument in node.all_input_nodes for spec in tensor_specs(argument)]
            tensors = tuple((tuple(spec.concrete(sizes)), spec.dtype) for spec in given)
            least = max(least, 2 if _refuses_one(node.target, tensors) else 1)
        if least > most:
            most, reason = least, f"{node.name} in module {node.meta.get('module_path') or '(root)'}"
    return most, reason


def _filled(size: Dim, graph: OpGraph, known: dict[sympy.Expr, int]) -> int:
    """Return the samples from which on ``size`` is above zero, if it is in the example."""
    batch = graph.batch.batch_symbol
    if isinstance(size, int) or size.as_coeff_Mul()[1].is_Symbol or batch not in size.free_symbols:
        return 1
    if size not in known:
        enough = graph.example_batch_size
        for samples in range(enough, 0, -1):
            if concrete(size, {**graph.example_sizes, batch: samples}) <= 0:
                break
            enough = samples
        known[size] = enough
    return known[size]


@lru_cache(maxsize=256)
def _refuses_one(part: Opaque, tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> bool:
    """Tell whether torch refuses to normalize the one value per channel that a single sample has, somewhere in the part."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]), no_compile():
        try:
            part.outputs([torch.empty(shape, dtype=dtype) for shape, dtype in tensors])
        except ValueError as error:
            return _ONE_VALUE in str(error)
        except Exception:  # noqa: BLE001 the user's code may raise anything on fake tensors
            return False
    return False


_ONE_VALUE = "Expected more than 1 value per channel"
"""The words in which ``torch.nn.functional.batch_norm`` refuses a single sample."""


def _selected(node: fx.Node, graph: OpGraph) -> int:
    """Return the least samples of a batch that has the one which the op selects."""
    (spec,) = tensor_specs(node.all_input_nodes[0])
    dim, index = argument(node, "dim"), argument(node, "index")
    if not isinstance(index, int) or spec.shape[dim] != graph.batch.batch_symbol:
        return 1
    return index + 1 if index >= 0 else -index


def _normalizes_one(node: fx.Node, spec: TensorSpec, shape: Sequence[int]) -> bool:
    return bool(argument(node, "training")) and math.prod((*shape[:1], *shape[2:])) == 1


def _squeezes_samples(node: fx.Node, spec: TensorSpec, shape: Sequence[int]) -> bool:
    dims = _dims(node, len(shape))
    return any(shape[dim] == 1 and not isinstance(spec.shape[dim], int) for dim in dims)


def _varies_one(node: fx.Node, spec: TensorSpec, shape: Sequence[int]) -> bool:
    correction = argument(node, "correction", 1)
    wanted = 1 if correction is None else correction
    unbiased = argument(node, "unbiased", True) is not False and wanted > 0
    dims = _dims(node, len(shape))
    return unbiased and math.prod(shape[dim] for dim in dims) == 1 != math.prod(
        spec.shape[dim] for dim in dims
    )


def _dims(node: fx.Node, rank: int) -> tuple[int, ...]:
    """Return the dimensions that the op works on: all if it names none."""
    dim = argument(node, "dim")
    given = range(rank) if dim is None else dim if isinstance(dim, list | tuple) else (dim,)
    return tuple(d % rank for d in given) if rank else ()


_REFUSES: Mapping[object, Callable[[fx.Node, TensorSpec, Sequence[int]], bool]] = {
    aten.batch_norm.default: _normalizes_one,
    aten.squeeze.default: _squeezes_samples,
    aten.squeeze.dim: _squeezes_samples,
    aten.squeeze.dims: _squeezes_samples,
    **{
        op: _varies_one
        for packet in (aten.var, aten.std, aten.var_mean, aten.std_mean)
        for op in (packet.default, packet.dim, packet.correction)
    },
}
