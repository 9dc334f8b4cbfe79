"""The verifier of the graph: what holds after every pass, as a table of rules.

``verify_graph(graph, after="simplify")`` checks all rules and names the pass that broke them. Each rule is one walk
over the nodes, cheap enough to run between all passes, always.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from cost_models.errors import InternalError
from passes.graph.graph import OpGraph
from passes.graph.nodes import is_size
from runtime.ops.bridges import is_bridge
from runtime.ops.local import run_local
from runtime.ops.opaque import Opaque

_NAMED_BELOW = 10
"""The number of violations of one rule that the error names; it counts the others."""


@dataclass(frozen=True)
class Invariant:
    """``violations(graph)`` yields what breaks the rule; the message says what would hold."""

    name: str
    holds: str
    violations: Callable[[OpGraph], Iterator[str]]


def verify_graph(graph: OpGraph, after: str) -> None:
    """Raise ``InternalError`` that names pass ``after`` and every broken rule, if any is."""
    because: list[str] = []
    for rule in RULES:
        found = list(rule.violations(graph))
        if found:
            named = ", ".join(found[:_NAMED_BELOW])
            more = f" and {len(found) - _NAMED_BELOW} more" if len(found) > _NAMED_BELOW else ""
            because.append(f"[{rule.name}] {rule.holds}, but: {named}{more}")
    if because:
        raise InternalError(
            f"pass {after!r} left an invalid graph of {graph.model_name}",
            because,
            ["this is a bug of the compiler: please report it with the model"],
        )


def _ops(graph: OpGraph) -> Iterator[fx.Node]:
    return (node for node in graph.graph.nodes if node.op == "call_function")


def _node_kinds(graph: OpGraph) -> Iterator[str]:
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            yield f"{node.name} is a {node.op}"


def _topological(graph: OpGraph) -> Iterator[str]:
    seen: set[fx.Node] = set()
    for node in graph.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield f"{node.name} reads {source.name} before it is made"
        seen.add(node)


def _placeholders_first(graph: OpGraph) -> Iterator[str]:
    op_seen = False
    for node in graph.graph.nodes:
        op_seen |= node.op == "call_function"
        if node.op == "placeholder" and op_seen:
            yield f"{node.name} comes after an op"


def _one_output(graph: OpGraph) -> Iterator[str]:
    count = sum(node.op == "output" for node in graph.graph.nodes)
    if count != 1:
        yield f"there are {count}"


def _have_values(graph: OpGraph) -> Iterator[str]:
    for node in graph.graph.nodes:
        if node.op != "output" and node.meta.get("val") is None:
            yield node.name


def _have_origin(graph: OpGraph) -> Iterator[str]:
    for node in _ops(graph):
        missing = [key for key in ("module_path", "source") if not isinstance(node.meta.get(key), str)]
        if missing:
            yield f"{node.name} lacks {' and '.join(missing)}"


def _known_ops(graph: OpGraph) -> Iterator[str]:
    for node in _ops(graph):
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            yield f"{node.name} is the higher-order op {node.target}"
        elif _is_op(node):
            continue
        elif not is_size(node.meta.get("val")):
            yield f"{node.name} calls {node.target}"


def _is_op(node: fx.Node) -> bool:
    """Tell whether an op is torch's, or one of ours: a projection, a bridge, an op's local form, an opaque part."""
    known = isinstance(node.target, torch._ops.OpOverload | Opaque) or node.target in (
        operator.getitem,
        run_local,
    )
    return known or is_bridge(node)


def _functional(graph: OpGraph) -> Iterator[str]:
    for node in _ops(graph):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            yield f"{node.name} ({node.target})"


def _projections(graph: OpGraph) -> Iterator[str]:
    for node in _ops(graph):
        if node.target is operator.getitem:
            source = node.args[0]
            if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), list | tuple):
                yield node.name


def _inputs_match(graph: OpGraph) -> Iterator[str]:
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    table = [entry.node for entry in graph.inputs]
    if placeholders != table:
        yield f"placeholders {_difference(placeholders, table)}"


def _outputs_match(graph: OpGraph) -> Iterator[str]:
    for node in graph.graph.nodes:
        if node.op != "output":
            continue
        returned = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
        names = [item.name if isinstance(item, fx.Node) else repr(item) for item in returned]
        table = [entry.node for entry in graph.outputs]
        if names != table:
            yield f"the graph's outputs {_difference(names, table)}"


def _difference(found: list[str], table: list[str]) -> str:
    extra, missing = sorted(set(found) - set(table)), sorted(set(table) - set(found))
    if extra or missing:
        return f"not in the table: {extra}; only in the table: {missing}"
    return "are in another order, or one is twice"


def _one_per_name(graph: OpGraph) -> Iterator[str]:
    for (kind, name), count in Counter((entry.kind, entry.name) for entry in graph.inputs).items():
        if count > 1:
            yield f"{kind} {name} has {count} placeholders"


def _state_known(graph: OpGraph) -> Iterator[str]:
    tables = {"parameter": graph.parameters, "buffer": graph.buffers, "constant": graph.constants}
    for entry in graph.inputs:
        if entry.kind in tables and entry.name not in tables[entry.kind]:
            yield f"{entry.kind} {entry.name} is in no table"
    for specs in (graph.parameters, graph.buffers):
        for name, spec in specs.items():
            if spec.name != name:
                yield f"{name} is filed under another name than its own, {spec.name}"
    for name in set(graph.parameters) & set(graph.buffers):
        yield f"{name} is both a parameter and a buffer"


def _state_shapes(graph: OpGraph) -> Iterator[str]:
    values = {node.name: node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"}
    for entry in graph.inputs:
        specs = graph.parameters if entry.kind == "parameter" else graph.buffers
        value = values.get(entry.node)
        if entry.kind not in ("parameter", "buffer") or entry.name not in specs or value is None:
            continue
        spec = specs[entry.name]
        dtype = spec.dtype
        if entry.kind == "parameter":  # read in the precision that was traced; buffers keep their type
            dtype = graph.precision.of(spec.dtype, keeps_dtype=spec.keeps_dtype).leaf
        if tuple(value.shape) != spec.shape or value.dtype != dtype:
            yield f"{entry.name} is {tuple(value.shape)} {value.dtype} in the graph, {spec.shape} {dtype} in the table"


def _aliases_known(graph: OpGraph) -> Iterator[str]:
    canonical = graph.parameters.keys() | graph.buffers.keys() | {p.whole for p in graph.parts.values()}
    for name, view in graph.views.items():
        if view.owner not in canonical:
            yield f"{name} is a view of {view.owner}, which is no parameter or buffer"
        if name in canonical:
            yield f"{name} is a view and a tensor of its own at once"
    for alias, name in graph.aliases.items():
        if name not in canonical:
            yield f"{alias} stands for {name}, which is no parameter or buffer"
        if alias in canonical:
            yield f"{alias} is an alias and a canonical name at once"


def _buffers_known(graph: OpGraph) -> Iterator[str]:
    for entry in graph.outputs:
        if entry.kind == "buffer" and entry.name not in graph.buffers:
            yield f"{entry.name} ({entry.node})"
    for (kind, name), count in Counter((entry.kind, entry.name) for entry in graph.outputs).items():
        if kind == "buffer" and count > 1:
            yield f"{name} is written {count} times"


def _sizes_from_batch(graph: OpGraph) -> Iterator[str]:
    batch = {entry.node for entry in graph.inputs if entry.kind in ("batch", "value")}
    for node in _ops(graph):
        if not is_size(node.meta.get("val")):
            continue
        for source in node.all_input_nodes:
            if not is_size(source.meta.get("val")) and source.name not in batch:
                yield f"{node.name} reads {source.name}"


def _is_part(graph: OpGraph) -> bool:
    """Tell whether a graph takes or makes values of other parts of a model, or computes of parameters alone."""
    kinds = {entry.kind for entry in graph.inputs}
    makes = {entry.kind for entry in graph.outputs}
    return "value" in kinds | makes or "batch" not in kinds


def _batch_known(graph: OpGraph) -> Iterator[str]:
    leaves = {entry.name for entry in graph.inputs if entry.kind == "batch"}
    for name in leaves - graph.batch.batch_dims.keys():
        yield f"batch input {name} has no batch dimension on record (None would do)"
    for symbol, (name, _) in graph.batch.symbols.items():
        # A part of a model may not read the leaf itself.
        if name not in leaves and not (name in graph.batch.batch_dims and _is_part(graph)):
            yield f"symbol {symbol} is read from {name}, which is no batch input"


def _loss_scalar(graph: OpGraph) -> Iterator[str]:
    losses = [entry.node for entry in graph.outputs if entry.kind == "loss"]
    if len(losses) > 1:
        yield f"there are {len(losses)} losses"
    values = {node.name: node.meta.get("val") for node in graph.graph.nodes}
    for name in losses:
        value = values.get(name)
        if not isinstance(value, torch.Tensor):
            yield f"{name} is no tensor"
        elif value.dim() != 0 or not value.is_floating_point():
            yield f"{name} is {tuple(value.shape)} {value.dtype}"


RULES: tuple[Invariant, ...] = (
    Invariant("node-kinds", "nodes are placeholders, ops and the output", _node_kinds),
    Invariant("topological", "every op comes after what it reads", _topological),
    Invariant("placeholders-first", "placeholders come before all ops", _placeholders_first),
    Invariant("one-output", "there is one output node", _one_output),
    Invariant("values", "every node has an example value", _have_values),
    Invariant("origin", "every op says which module and source line made it", _have_origin),
    Invariant(
        "known-ops", "ops are ATen overloads, opaque parts, projections or arithmetic on sizes", _known_ops
    ),
    Invariant("functional", "no op writes its inputs", _functional),
    Invariant("projections", "getitem takes one result of an op with several", _projections),
    Invariant("inputs", "the input table lists the placeholders in order", _inputs_match),
    Invariant("outputs", "the output table lists the graph's results in order", _outputs_match),
    Invariant("one-per-name", "a name has one placeholder", _one_per_name),
    Invariant("state", "parameters, buffers and constants are in their tables", _state_known),
    Invariant("state-shapes", "the graph and the tables agree on shapes and dtypes", _state_shapes),
    Invariant("aliases", "aliases lead to canonical names", _aliases_known),
    Invariant("buffers", "each written buffer is known, and written once", _buffers_known),
    Invariant("sizes", "sizes come from shapes of batch inputs only", _sizes_from_batch),
    Invariant("batch", "the batch specification covers the batch inputs", _batch_known),
    Invariant("loss", "the loss is one floating-point scalar", _loss_scalar),
)
