"""Views of state are read from their owners: their placeholders become ops on the owners' placeholders.

Before                                        After
    p_a_weight, b_mirror: placeholders            p_a_weight: placeholder
    y = linear(x, b_mirror)                       d = detach(p_a_weight); v = slice(d, 0, 0, 2); y = linear(x, v)

From here on nothing else needs to know of shared memory: wherever the owner goes, cut into blocks or not, its views are
computed from it, and they have its new values after every optimizer step. Pass ``functional`` carries writes of an owner
that is a buffer to its views, in the order of the model's code, and writes of a view to its owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from cost_models.errors import ModelError
from passes.graph.graph import GraphInput
from passes.graph.nodes import WRITES_UNDECLARED, call, fake_mode_of, storage_key
from passes.trace.normal.aliasing import written_storages
from passes.trace.shared_storage import OwnerView, SharedStorage
from runtime.state.state_view import StateView

__all__ = ["remake_views"]

aten = torch.ops.aten

_OPS: Mapping[str, Any] = {
    "reshape": lambda shape: (aten.reshape.default, (list(shape),)),
    "permute": lambda dims: (aten.permute.default, (list(dims),)),
    "slice": lambda numbers: (aten.slice.Tensor, numbers),
    "select": lambda numbers: (aten.select.int, numbers),
    "unsqueeze": lambda numbers: (aten.unsqueeze.default, numbers),
    "expand": lambda shape: (aten.expand.default, (list(shape),)),
}
"""The op of each step of a view, and its arguments after the tensor (``runtime.state.state_view``)."""


def remake_views(
    graph: fx.Graph,
    stands_for: Mapping[str, GraphInput],
    shared: SharedStorage,
    constants: Mapping[str, Tensor],
) -> tuple[dict[str, GraphInput], dict[str, StateView]]:
    """Replace the placeholders in place; return the inputs that are left, and the views that the graph reads, by name.

    ``constants``: the lifted tensors as the model holds them, by name. Raises ModelError where memory is shared in a way
    that this cannot express.
    """
    return _Remaking(graph, stands_for, shared, constants).run()


@dataclass
class _Remaking:
    graph: fx.Graph
    stands_for: Mapping[str, GraphInput]
    shared: SharedStorage
    constants: Mapping[str, Tensor]
    problems: list[str] = field(default_factory=list)

    def run(self) -> tuple[dict[str, GraphInput], dict[str, StateView]]:
        placeholders = self.graph.find_nodes(op="placeholder")
        by_name = {self.stands_for[node.name].name: node for node in placeholders if self._is_state(node)}
        found = {node: how for node in placeholders if (how := self._found(node)) is not None}
        views: dict[fx.Node, StateView] = {}
        for node, how in found.items():
            name = self.stands_for[node.name].name
            if how.view is None:
                self.problems.append(f"{how.owner} and {name}: {how.why}")
            elif node.users:
                views[node] = how.view
                self.problems += self._unlike(name, node, by_name[how.owner])
        self.problems += self._written(by_name, views)
        if self.problems:
            raise ModelError(
                "the model reads one memory under two names, in a way that a plan cannot keep",
                list(dict.fromkeys(self.problems)),
                [
                    "give each a memory of its own: tensor.clone()",
                    "keep one tensor, and compute the other from it in forward",
                ],
            )
        for node, view in views.items():
            self._remake(node, view, by_name[view.owner], differentiable=found[node].differentiable)
        for node in found:
            if not node.users:
                self.graph.erase_node(node)
        left = {node.name for node in self.graph.find_nodes(op="placeholder")}
        inputs = {name: entry for name, entry in self.stands_for.items() if name in left}
        return inputs, {self.stands_for[node.name].name: view for node, view in views.items()}

    def _is_state(self, node: fx.Node) -> bool:
        return self.stands_for[node.name].kind in ("parameter", "buffer")

    def _found(self, node: fx.Node) -> OwnerView | None:
        entry = self.stands_for[node.name]
        if entry.kind == "constant" and node.users:
            return self.shared.owner_of(self.constants[entry.name])
        return self.shared.views.get(entry.name) if entry.kind == "buffer" else None

    def _unlike(self, name: str, node: fx.Node, owner: fx.Node) -> Iterator[str]:
        """Say what of the owner is not as the view reads it: under a precision, graphs read parameters cast."""
        own, other = owner.meta["val"].dtype, node.meta["val"].dtype
        if own != other:
            first = self.stands_for[owner.name].name
            yield f"{first} and {name}: this precision computes the one in {own}, the other in {other}"

    def _written(self, by_name: Mapping[str, fx.Node], views: Mapping[fx.Node, StateView]) -> Iterator[str]:
        """Say which shared memory is written where the owner is not, or where order cannot be told."""
        written = written_storages(self.graph)
        silently = {
            node
            for op in self.graph.nodes
            if isinstance(op.target, torch._ops.OpOverload) and op.target._schema.name in WRITES_UNDECLARED
            for node in op.all_input_nodes
            if node.name in self.stands_for and self.stands_for[node.name].kind == "buffer"
        }
        for node, view in views.items():
            owner, name = by_name[view.owner], self.stands_for[node.name].name
            if self.stands_for[owner.name].kind == "parameter" and storage_key(node.meta["val"]) in written:
                yield f"forward writes {view.owner} or {name}, one memory; only an optimizer may write a parameter"
            if node in silently or owner in silently:
                yield f"a batch norm writes {view.owner} or {name}, which are one memory"
        for left, right, why in self.shared.loose:
            nodes = [by_name[name] for name in (left, right) if name in by_name]
            if any(node in silently or storage_key(node.meta["val"]) in written for node in nodes):
                yield f"{left} and {right} share memory that forward writes, and {why}"

    def _remake(self, node: fx.Node, view: StateView, owner: fx.Node, *, differentiable: bool) -> None:
        """Let the readers of ``node`` read it from ``owner``."""
        mode, path = fake_mode_of(self.graph), self.stands_for[node.name].name.rpartition(".")[0]
        last = self.graph.find_nodes(op="placeholder")[-1]
        cut = owner.meta["val"].requires_grad and not differentiable
        calls = [(aten.detach.default, ())] if cut else []
        calls += [_OPS[name](numbers) for name, numbers in view.steps]
        current = owner
        for target, args in calls:
            with self.graph.inserting_after(last):
                current = last = call(self.graph, mode, target, (current, *args), like=node)
            current.meta["module_path"] = path
        node.replace_all_uses_with(current)
