"""Simplify: what remains after this pass is placeholders, ATen ops, sizes and one output.

    wrap_with_set_grad_enabled(False, body, x)   →  body's ops, detached (passes.trace.normal.gradients)
    wrap_with_autocast("cpu", bf16, True, body)  →  body's ops with explicit ``to(bfloat16)`` (passes.trace.normal.autocast)
    _assert_scalar, _assert_tensor_metadata      →  gone, with the comparisons that only they read
    x.multiply(y) ; concatenate([x, y])          →  x.mul(y) ; cat([x, y]): one name for an op
    x.type_as(y) ; x.to(y)                       →  x.to(bf16): of y only the type is asked, which is known
    x[:, :] ; x.to(x.dtype) ; lift_fresh_copy    →  x
    x.transpose(1, 2).view(4, -1)                →  x.transpose(1, 2).reshape(4, -1)

Other higher-order ops (``cond``, ``while_loop``, ``map``, …) choose what to run from data; no static placement covers
that, so they are refused by name and line.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.graph.nodes import (
    argument,
    drop_dead_code,
    new_module,
    op_name,
    recorded_requires_grad,
    reshaping,
    storage_key,
    symbolic,
    tensors_of,
    where,
)
from passes.trace.normal.aliasing import view_of, written_storages
from passes.trace.normal.autocast import Autocast, CastCache, copy_with_casts
from passes.trace.normal.gradients import cut_gradients
from passes.trace.opaque.refused import OPAQUE_ADVICE, PartError, blamed

aten = torch.ops.aten

_ASSERTS = frozenset(
    {
        "aten::_assert_scalar",
        "aten::_assert_async",
        "aten::_functional_assert_scalar",
        "aten::_functional_assert_async",
        "aten::_assert_tensor_metadata",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
        "aten::_functional_sym_constrain_range",
        "aten::_functional_sym_constrain_range_for_size",
    }
)

_ADVICE = {
    "cond": "replace torch.cond by torch.where, or by a Python `if` on something known before training",
    "while_loop": "unroll the loop in Python (a fixed number of iterations)",
    "map_impl": "write the mapped function on the whole batched tensor",
    "map": "write the mapped function on the whole batched tensor",
    "scan": "unroll the scan in Python",
    "associative_scan": "unroll the scan in Python, or use cumsum / cumprod",
}


@dataclass(frozen=True)
class _Modes:
    """The modes around a piece of graph: gradient mode (None: as the caller's) and autocast per device type."""

    grad_enabled: bool | None = None
    autocast: Autocast | None = None


def simplify(gm: fx.GraphModule) -> fx.GraphModule:
    """Make a new module without higher-order ops, asserts, no-ops and dead code; ``gm`` is left as it is."""
    graph = _inline(gm)
    _use_one_name(graph)
    _name_types(graph)
    _drop_no_ops(graph)
    _accept_other_orders(graph)
    drop_dead_code(graph)
    cut_gradients(graph, strict=False)
    return new_module(gm, graph)


# --------------------------------------------------------------------------------------------------
# Higher-order ops


def _inline(gm: fx.GraphModule) -> fx.Graph:
    inliner = _Inliner()
    environment: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            copied = inliner.graph.output(fx.map_arg(node.args[0], lambda n: environment[n]))
            copied.meta.update(node.meta)
        else:
            inliner.copy(gm, node, environment, _Modes())
    if inliner.problems:
        raise PartError(
            "the traced graph holds operations that choose what to run from data",
            [place for place, _ in inliner.problems],
            [*dict.fromkeys(advice for _, advice in inliner.problems), OPAQUE_ADVICE],
            list(dict.fromkeys(inliner.blamed)),
        )
    return inliner.graph


@dataclass
class _Inliner:
    """The new graph as it grows, the casts in it, and (place, advice) of ops that it cannot hold."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    casts: CastCache = field(default_factory=CastCache)
    problems: list[tuple[str, str]] = field(default_factory=list)
    blamed: list[str] = field(default_factory=list)
    """The modules whose code these operations are."""

    def copy(
        self, owner: torch.nn.Module, node: fx.Node, environment: dict[fx.Node, Any], modes: _Modes
    ) -> None:
        """Copy one node of ``owner``; ``environment`` maps old nodes to new ones (or tuples of them)."""
        if node.op == "get_attr":
            environment[node] = _attribute(owner, str(node.target))
            if not isinstance(environment[node], torch.nn.Module):
                environment[node] = self.graph.node_copy(node, lambda n: environment[n])
            return
        if node.op == "call_module" or _is_assert(node):
            environment[node] = None  # guards and asserts return nothing that is read
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            environment[node] = self._expand(node, environment, modes)
            return
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and isinstance(environment.get(source), list | tuple):
            environment[node] = environment[source][node.args[1]]  # projection of an inlined graph's result
            return
        new = copy_with_casts(self.graph, node, environment, modes.autocast, self.casts)
        for copied in new if isinstance(new, tuple) else (new,):
            if modes.grad_enabled is not None:
                copied.meta["grad_enabled"] = modes.grad_enabled
        environment[node] = new

    def _expand(self, node: fx.Node, environment: dict[fx.Node, Any], modes: _Modes) -> list[Any]:
        """Inline one higher-order op; returns its results."""
        args = [environment[a] if isinstance(a, fx.Node) else a for a in node.args]
        name = getattr(node.target, "__name__", str(node.target))
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *inputs = args
            inner = _Modes(bool(enabled), modes.autocast)
        elif name == "wrap_with_autocast":
            device, dtype, enabled, _cache, body, *inputs = args
            inner = _Modes(modes.grad_enabled, self._autocast(node, str(device), dtype, bool(enabled), modes))
        else:
            advice = _ADVICE.get(name, f"rewrite the model without torch.ops.higher_order.{name}")
            self.problems.append((f"{name}: {where(node)}", advice))
            self.blamed.append(blamed(node))
            count = len(node.meta["val"]) if isinstance(node.meta.get("val"), list | tuple) else 1
            return [self.graph.node_copy(node, lambda n: None)] * max(count, 1)
        assert isinstance(body, fx.GraphModule)
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        local: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
        results: list[Any] = []
        for inside in body.graph.nodes:
            if inside.op == "output":
                found = fx.map_arg(inside.args[0], lambda n: local[n])
                results = list(found) if isinstance(found, list | tuple) else [found]
            elif inside.op != "placeholder":
                self.copy(body, inside, local, inner)
        return results

    def _autocast(
        self, node: fx.Node, device: str, dtype: Any, enabled: bool, modes: _Modes
    ) -> Autocast | None:
        """Return the autocast state inside. Only the device that the trace ran on (CPU) has one."""
        if device == "cpu":
            return Autocast(device, dtype or torch.get_autocast_dtype("cpu")) if enabled else None
        if enabled:
            self.problems.append(
                (
                    f"autocast for {device!r} has no effect in a trace, which runs on fake CPU tensors: {where(node)}",
                    "write torch.autocast(x.device.type, ...) instead of a fixed device type",
                )
            )
        return modes.autocast


def _attribute(owner: torch.nn.Module, path: str) -> Any:
    found: Any = owner
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _is_assert(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name in _ASSERTS
    return node.target is torch._check


# --------------------------------------------------------------------------------------------------
# Second names of ops

_NAMES = {
    **{"multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg"},
    **{"absolute": "abs", "concat": "cat", "concatenate": "cat", "special_expit": "sigmoid"},
    "special_erf": "erf",
    **{"special_exp2": "exp2", "special_expm1": "expm1", "special_log1p": "log1p", "not_equal": "ne"},
    **{"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le"},
}
"""Names that ATen has twice, under which passes would not know the op."""


def _use_one_name(graph: fx.Graph) -> None:
    """Call ops that ATen has under two names, in place or not, by the one that all passes know; in place."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            name = op_name(node)
            plain = _NAMES.get(name.removesuffix("_"))
            if plain is not None:
                packet = getattr(aten, f"{plain}_" if name.endswith("_") else plain)
                node.target = getattr(packet, node.target._overloadname)


# --------------------------------------------------------------------------------------------------
# Casts to the type of another tensor


def _name_types(graph: fx.Graph) -> None:
    """Let casts name their type, in place: nobody then waits for, sends or gathers a tensor whose numbers nobody reads."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (aten.type_as.default, aten.to.other):
            node.target, node.args = aten.to.dtype, (node.args[0], node.meta["val"].dtype, *node.args[2:])


# --------------------------------------------------------------------------------------------------
# Nodes that do nothing


def _drop_no_ops(graph: fx.Graph) -> None:
    written = written_storages(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if node.target == aten.lift_fresh_copy.default:
            if storage_key(node.meta["val"]) in written:
                node.target = aten.clone.default  # what follows writes the copy, not the constant
                continue
        elif node.target == aten.detach_.default:
            node.target = aten.detach.default  # changes the Python object, not the memory
            if recorded_requires_grad(source) is not False:
                continue
        elif not _is_identity(node, source):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _is_identity(node: fx.Node, source: fx.Node) -> bool:
    """Tell whether the op returns its input: same memory, shape and dtype."""
    if node.target == aten.slice.Tensor:
        whole = argument(node, "end") in (None, sys.maxsize)
        return whole and argument(node, "start") in (None, 0) and argument(node, "step") == 1
    if node.target in (aten.alias.default, aten.lift_fresh.default):
        return True
    if node.target in (aten.to.dtype, aten.contiguous.default, aten.to.dtype_layout, aten.to.device):
        value, before = node.meta["val"], source.meta["val"]
        return value.dtype == before.dtype and storage_key(value) == storage_key(before)
    return False


# --------------------------------------------------------------------------------------------------
# Orders in memory


def _accept_other_orders(graph: fx.Graph) -> None:
    """Make ``reshape`` of each ``view`` whose legality depends on the order in which its operand lies in memory.

    Attention on this machine returns its heads side by side, so that ``y.transpose(1, 2)`` is in one piece, and the
    exporter records nothing of the ``contiguous()`` behind it. Another device, shards, or what arrives from another rank
    lie in the order of their dimensions.
    """
    moved: set[fx.Node] = set()
    for node in graph.nodes:
        view = view_of(node)
        if (view is not None and view.source in moved) or any(map(_out_of_order, tensors_of(node))):
            moved.add(node)
        if view is not None and view.source in moved:
            node.target = reshaping(node.target)


def _out_of_order(value: torch.Tensor) -> bool:
    """Tell whether a dimension of several elements lies further apart in memory than one before it."""
    if value.layout != torch.strided:
        return False
    strides = [
        _typical(step) for size, step in zip(value.shape, value.stride(), strict=True) if _typical(size) != 1
    ]
    return any(before < after for before, after in itertools.pairwise(strides))


def _typical(size: int | torch.SymInt) -> int:
    """Return a size with a number for its open ones, so that comparing it fixes none."""
    known = symbolic(size)
    return known if isinstance(known, int) else int(known.subs(dict.fromkeys(known.free_symbols, _OPEN_SIZE)))


_OPEN_SIZE = 1_000_003
"""Stands for open sizes where orders are compared: larger than what it is multiplied with or compared to, mostly."""
