"""Recompute: keep a block's inputs instead of its activations, and run its forward again in backward.

``checkpointed`` rewrites a segment's graph: the ops of each region become one call that goes through
``torch.utils.checkpoint`` (non-reentrant).

    before   a = norm(x, w1);  b = linear(a, w2);  y = add(b, x)           autograd keeps x, a, …
    after    region = recomputed_0(x, w1, w2);  y = region[0]             autograd keeps x, until backward

The second forward draws the random numbers of the first (their generators' states are kept), and writes no
buffer: batch normalization's running statistics advance once. Everything else in a segment's graph is free
of side effects. Products whose results only lead out of the region save their operands in the second forward, and
do not multiply: nobody reads what they would make. Weight halves that ``runtime.segment.split_backward`` defers
read recomputed inputs; they stay alive until the half has run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from cost_models.errors import InternalError
from runtime.ops.idle_products import multiplies, without_products
from runtime.ops.local import LEADING, run_local

REGION = "recomputed_region"
"""Key in a node's ``meta``: the region that it belongs to."""

RegionFunction = Callable[..., tuple[Any, ...]]
AsFunction = Callable[[fx.GraphModule], RegionFunction]

aten = torch.ops.aten


def marked(module: fx.GraphModule, regions: Sequence[Sequence[str]]) -> fx.GraphModule:
    """Return a copy of ``module`` whose nodes know their region, so that rewrites which replace nodes keep it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, val_map={}))
    region_of = {name: index for index, names in enumerate(regions) for name in names}
    for old, new in zip(module.graph.nodes, graph.nodes, strict=True):
        if old.name in region_of:
            new.meta[REGION] = region_of[old.name]
    return fx.GraphModule(module, graph)


def checkpointed(
    module: fx.GraphModule, *, random: bool, as_function: AsFunction | None = None
) -> fx.GraphModule:
    """Make one recomputed call of the ops of each region that ``marked`` noted, in a copy of ``module``.

    random       True if the segment draws random numbers; else no generator's state need be kept
    as_function  compiles the ops of a region that writes no statistics (default: they run as they are)
    """
    members: dict[int, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if REGION in node.meta:
            members.setdefault(node.meta[REGION], []).append(node)
    ends = {nodes[-1] for nodes in members.values()}
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}

    def emit(region: int) -> None:
        nodes = members.pop(region)
        _emit_region(graph, nodes, made, find, f"recomputed_{region}", random, as_function)

    def find(node: fx.Node) -> fx.Node:
        """Return what ``node`` became. A region that is read before its last op runs when it is first read."""
        if node not in made and node.meta.get(REGION) in members:
            emit(node.meta[REGION])
        if node not in made:
            raise InternalError(f"recompute: {node} is read before its region is complete")
        return made[node]

    for node in module.graph.nodes:
        if REGION not in node.meta:
            made[node] = graph.node_copy(node, find)
        elif node in ends and node.meta[REGION] in members:
            emit(node.meta[REGION])
    return fx.GraphModule(module, graph)


def _emit_region(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    made: dict[fx.Node, fx.Node],
    find: Callable[[fx.Node], fx.Node],
    name: str,
    random: bool,
    as_function: AsFunction | None,
) -> None:
    """Add the region's call and its results to ``graph``."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    writes = any(writes_statistics(node) for node in nodes)
    if not outputs:  # nobody reads it, so nothing is kept of it either; what it writes counts all the same
        for node in nodes if writes else ():
            made[node] = graph.node_copy(node, find)
        return
    body = _body(nodes, inputs, outputs)
    idle = _idle(nodes)
    # Uncompiled where it writes: what a compiled function writes into its inputs, checkpointing would refuse to read again.
    if as_function is not None and not writes:
        function = recomputed(as_function(body), random=random)
    elif idle or writes:
        again = _without_writes(_body(nodes, inputs, outputs, idle))
        function = recomputed(body.forward, again.forward, random=random)
    else:
        function = recomputed(body.forward, random=random)
    function.__name__ = function.__qualname__ = name
    call = graph.call_function(function, tuple(find(node) for node in inputs))
    for position, node in enumerate(outputs):
        made[node] = graph.call_function(operator.getitem, (call, position))
        made[node].meta = {key: value for key, value in node.meta.items() if key != REGION}


def _idle(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the products of a region that nothing in it reads, and the parts of what they make."""
    inside, idle = set(nodes), set[fx.Node]()
    for node in reversed(nodes):
        if inside.intersection(node.users) <= idle and (node.target is operator.getitem or multiplies(node)):
            idle.add(node)
    return idle


def _body(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    idle: Collection[fx.Node] = (),
) -> fx.GraphModule:
    """Make a module of a region's nodes; of those that are ``idle`` autograd keeps what it keeps, and they give nothing."""
    graph = fx.Graph()
    own = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        own[node] = graph.node_copy(node, own.__getitem__)
        if node in idle and callable(node.target) and node.target is not operator.getitem:
            own[node].target = without_products(node.target)
    graph.output(tuple(own[node] for node in outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def recomputed(
    first: RegionFunction, again: RegionFunction | None = None, *, random: bool = True
) -> RegionFunction:
    """Return ``first`` with its activations computed a second time in backward, by ``again`` where that differs."""

    def run(*inputs: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return first(*inputs)
        function = first if again is None else _first_then(first, again)
        result: tuple[Any, ...] = checkpoint(
            function, *inputs, use_reentrant=False, preserve_rng_state=random
        )
        return result

    return run


def _first_then(first: RegionFunction, again: RegionFunction) -> RegionFunction:
    """Return a function that is ``first`` when called for the first time, ``again`` from then on."""
    ran = False

    def run(*inputs: Any) -> tuple[Any, ...]:
        nonlocal ran
        if ran:
            return again(*inputs)
        ran = True
        return first(*inputs)

    return run


def writes_statistics(node: fx.Node) -> bool:
    """Tell whether the op writes running statistics: the one kind of op in a segment's graph that writes anything.

    aten.batch_norm(input, weight, bias, running_mean, running_var, training, …)
    aten.instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, …)
    """
    first = _first_argument(node)
    return first is not None and node.args[first + 3] is not None and bool(node.args[first + 5])


def _first_argument(node: fx.Node) -> int | None:
    """Return where a batch norm's arguments begin, in its form over several ranks (``runtime.ops.local``), too."""
    if node.target in (aten.batch_norm.default, aten.instance_norm.default):
        return 0
    is_local = getattr(node.target, "__name__", "") == run_local.__name__ and node.args[0] == "batch_norm"
    return LEADING if is_local else None


def _without_writes(body: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``body`` that writes throw-away copies of running statistics.

    What training computes does not depend on them; left out, autograd would save fewer tensors than the first time.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, val_map={}))
    for node in list(graph.nodes):
        if not writes_statistics(node):
            continue
        arguments, first = list(node.args), _first_argument(node) or 0
        with graph.inserting_before(node):
            for at in (first + 3, first + 4):
                arguments[at] = graph.call_function(_copy, (arguments[at],))
        node.args = tuple(arguments)
    return fx.GraphModule(body, graph)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
