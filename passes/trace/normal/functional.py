"""Functional: after this pass no op writes a tensor that another op can see.

Before                                     After
    y = relu_(x)                               y = relu(x)
    v = select(x, 1, 0); fill_(v, 7)           v' = full_like(v, 7); x' = select_scatter(x, v', 1, 0)
    z = sum(x)      ← no edge to fill_         z = sum(x')
    add_(num_batches_tracked, 1)               new = add(num_batches_tracked, 1), reported as the buffer's contents

Tensors that share memory form a family: one root (the op or placeholder that made the memory) and views of it. A family
has a version, which each write raises; a write through a view is carried to the root by the view's inverse. A read of a
member that is older than the family takes its view again of the root's new contents.

Only batch and instance norms may still write (their running statistics, which they do not declare).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from passes.graph.nodes import (
    copy_graph,
    drop_dead_code,
    fake_mode_of,
    new_module,
    recorded_requires_grad,
    storage_key,
    where,
)
from passes.trace.normal.aliasing import (
    View,
    Writer,
    accept_any_strides,
    can_write,
    changes_view_only,
    replay,
    same_strides,
    view_of,
    write,
    written_arguments,
    written_storages,
)
from passes.trace.normal.gradients import cut_gradients
from passes.trace.normal.out_of_place import fitted, functional_form, out_of_place
from passes.trace.opaque.refused import PartError, blamed

aten = torch.ops.aten


def functionalize(
    gm: fx.GraphModule,
    mutable_buffers: Mapping[str, str],
    names: Mapping[str, str] | None = None,
    parameters: Collection[str] = (),
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Remove the writes of a module; for each written buffer (by name) return the node with its new contents too.

    A graph without writes is returned as it is.

    ``mutable_buffers``: placeholder node name → fully qualified name of every buffer that the model may write.
    ``names``: the user's names of all placeholders, for errors; ``parameters``: those that nothing may write.
    """
    if not any(written_arguments(node) for node in gm.graph.nodes):
        nodes = len(gm.graph.nodes)
        cut_gradients(gm.graph, strict=True)
        if len(gm.graph.nodes) != nodes:
            gm.recompile()
        return gm, {}
    graph = copy_graph(gm.graph)
    rewriter = _Rewriter(graph, mutable_buffers, names or {}, parameters)
    rewriter.run()
    contents = rewriter.buffer_contents()
    output = graph.output_node()
    result = output.args[0]
    output.args = ((result, list(contents.values())),)  # keeps the buffers' new contents alive
    drop_dead_code(graph)
    cut_gradients(graph, strict=True, written=frozenset(rewriter.written))
    result, kept = output.args[0]
    output.args = (result,)
    return new_module(gm, graph), {fqn: node.name for fqn, node in zip(contents, kept, strict=True)}


def _one_place(left: fx.Node, right: fx.Node) -> bool:
    """Tell whether two tensors of one storage begin at the same element."""
    first, second = left.meta["val"], right.meta["val"]
    return bool(first.storage_offset() == second.storage_offset()) and first.shape == second.shape


@dataclass
class _AliasFamily:
    """Tensors that share memory. ``root`` made the memory."""

    root: fx.Node
    differentiable: bool
    version: int = 0


@dataclass
class _Member:
    """One tensor: the view that makes it (None for the root), and its contents as of ``version``."""

    family: _AliasFamily
    view: View | None
    contents: fx.Node
    version: int


@dataclass
class _Rewriter:
    graph: fx.Graph
    mutable_buffers: Mapping[str, str]
    names: Mapping[str, str]
    parameters: Collection[str]
    members: dict[fx.Node, _Member] = field(default_factory=dict)
    """Every tensor of a written family. An in-place op returns the tensor that it writes: the same member."""
    written: set[fx.Node] = field(default_factory=set)
    restrided: set[fx.Node] = field(default_factory=set)
    """Tensors that may have other strides than in the traced graph."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    blamed: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Rewrite the whole graph in place, in the order of the model's code."""
        storages = written_storages(self.graph)
        self.mode = fake_mode_of(self.graph)
        nodes = list(self.graph.nodes)
        views = {node: view for node in nodes if (view := view_of(node)) is not None}
        firsts: dict[int | None, fx.Node] = {}
        taken: dict[fx.Node, int] = {}  # when an op with several views ran: its projections are that old
        for node in nodes:
            targets = written_arguments(node)
            mine = storage_key(node.meta.get("val")) in storages
            if node.op == "placeholder":
                if mine:
                    self._add_placeholder(node, firsts.setdefault(storage_key(node.meta["val"]), node))
                continue
            view_only = changes_view_only(node)
            if view_only:
                views[node] = self._make_out_of_place_view(node)
            self._refresh(node)
            if targets and not view_only:
                self._rewrite(node, targets)
            elif node in views:
                self._add_view(node, views[node], taken)
            elif mine:
                family = _AliasFamily(node, bool(recorded_requires_grad(node)))
                self.members[node] = _Member(family, None, node, 0)
            elif isinstance(node.meta.get("val"), list | tuple):
                taken[node] = max((self._version(source) for source in node.all_input_nodes), default=0)
        self._raise_problems()
        for node in reversed(nodes):
            if not node.users and written_arguments(node):
                self.graph.erase_node(node)

    def buffer_contents(self) -> dict[str, fx.Node]:
        """Return the node with the new contents of every buffer that was written, by its fully qualified name."""
        output = self.graph.output_node()
        return {
            self.mutable_buffers[node.name]: self._current(node, output)
            for node in self.graph.find_nodes(op="placeholder")
            if node in self.members
            and self.members[node].family.version
            and node.name in self.mutable_buffers
        }

    # ---------------------------------------------------------------------------------------------
    # Families and reads

    def _add_placeholder(self, node: fx.Node, first: fx.Node) -> None:
        # One tensor under two names. Others that have one storage lie beside each other in it (``remake_views``).
        if first is not node and first in self.members and _one_place(first, node):
            self.members[node] = self.members[first]
            return
        self.members[node] = _Member(_AliasFamily(node, bool(recorded_requires_grad(node))), None, node, 0)

    def _add_view(self, node: fx.Node, view: View, taken: Mapping[fx.Node, int]) -> None:
        source = self.members.get(view.source)
        if source is not None:
            version = source.family.version if view.multi is None else taken.get(view.multi, 0)
            self.members[node] = _Member(source.family, view, node, version)

    def _version(self, node: fx.Node) -> int:
        return self.members[node].family.version if node in self.members else 0

    def _refresh(self, node: fx.Node) -> None:
        """Make the op read the newest contents of everything that it reads."""
        for source in node.all_input_nodes:
            member = self.members.get(source)
            if member is None:
                continue
            if member.version < member.family.version or member.contents is not source:
                contents = self._current(source, node)
                node.replace_input_with(source, contents)
                if not same_strides(source, contents):
                    self.restrided.add(contents)
        if any(source in self.restrided for source in node.all_input_nodes):
            self.restrided.add(node)
            with self.graph.inserting_before(node):
                accept_any_strides(node, Writer(self.graph, self.mode, node))

    def _current(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the node with the contents of ``node`` as ``reader`` finds them."""
        member = self.members.get(node)
        if member is None:
            return node
        if member.version < member.family.version:
            assert member.view is not None  # every write updates its root
            parent = self._current(member.view.source, reader)
            with self.graph.inserting_before(reader):
                member.contents = replay(member.view, parent, Writer(self.graph, self.mode, member.view.node))
            member.version = member.family.version
        return member.contents

    def _make_out_of_place_view(self, node: fx.Node) -> View:
        """Turn ``t_(x)`` into ``t(x)``: what follows reads the node, so only the op changes."""
        assert isinstance(node.target, torch._ops.OpOverload)
        source = written_arguments(node)[0]
        form = aten.detach.default if node.target == aten.detach_.default else functional_form(node.target)
        if form is None:
            self._refuse(node, f"use the out-of-place form of {node.target} in the model")
        else:
            node.target = form
        return View.of(node, source)

    # ---------------------------------------------------------------------------------------------
    # Writes

    def _rewrite(self, node: fx.Node, targets: Sequence[fx.Node]) -> None:
        """Replace an op that writes ``targets`` by its out-of-place form and give them their new contents."""
        with self.graph.inserting_before(node):
            writer = Writer(self.graph, self.mode, node)
            results = out_of_place(node, tuple(node.args), dict(node.kwargs), writer)
            if results is None:
                self._refuse(
                    node, f"replace {node.target} in the model by an operation that returns a new tensor"
                )
                results = [self._current(target, node) for target in targets]
            for target, result in zip(targets, results, strict=True):
                self._write(node, target, self._finished(node, target, result, writer), writer)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.members[node] = self.members[targets[0]]

    def _finished(self, node: fx.Node, target: fx.Node, result: fx.Node, writer: Writer) -> fx.Node:
        """Give the new contents the written tensor's dtype, and no gradient if the write had none."""
        existed = result in node.all_input_nodes or result.op == "placeholder"
        result = fitted(result, target, writer)
        existed = existed and result in node.all_input_nodes
        if existed and recorded_requires_grad(node) is False and recorded_requires_grad(result) is not False:
            result, existed = writer.call(aten.detach.default, result), False
        if not existed:
            value = result.meta["val"]
            result.meta.update({**node.meta, "val": value})
        self.written.add(result)
        return result

    def _write(self, node: fx.Node, target: fx.Node, new: fx.Node, writer: Writer) -> None:
        """Store ``new`` in ``target`` and carry it to the root through the views between them."""
        member = self.members[target]
        family = member.family
        self._check_write(node, family)
        family.differentiable |= bool(recorded_requires_grad(node))
        updated: list[tuple[_Member, fx.Node]] = [(member, new)]
        while member.view is not None:
            parent = self._current(member.view.source, node)
            if not can_write(member.view):
                advice = f"write to a clone of the view that {member.view.target} returns"
                self._refuse(node, advice)
                return
            new = write(member.view, parent, new, writer)
            self.written.add(new)
            member = self.members[member.view.source]
            updated.append((member, new))
        family.version += 1
        for member, contents in updated:
            member.contents, member.version = contents, family.version

    def _check_write(self, node: fx.Node, family: _AliasFamily) -> None:
        root = family.root
        without_gradient = recorded_requires_grad(node) is False or node.meta.get("grad_enabled") is False
        if root.op == "placeholder" and root.name not in self.mutable_buffers:
            name = self.names.get(root.name, root.name)
            if root.name in self.parameters or root.meta["val"].requires_grad:
                frozen = (
                    ""
                    if root.meta["val"].requires_grad
                    else "keep it in a buffer, which forward may write, or "
                )
                self._refuse(
                    node, f"{frozen}write parameter {name} outside of forward (an optimizer or a hook)"
                )
                return
            if "tensor_meta" not in root.meta:
                self._refuse(node, f"register the tensor {name} as a buffer, so that its contents are kept")
                return
        if family.differentiable and without_gradient:
            self._refuse(
                node, "write to a clone: a tensor with a gradient is overwritten under no_grad or detach"
            )

    def _refuse(self, node: fx.Node, advice: str) -> None:
        self.problems.append((where(node), advice))
        self.blamed.append(blamed(node))

    def _raise_problems(self) -> None:
        if self.problems:
            raise PartError(
                "the model writes tensors in place in a way that has no out-of-place form",
                list(dict.fromkeys(place for place, _ in self.problems)),
                list(dict.fromkeys(advice for _, advice in self.problems))[:3],
                list(dict.fromkeys(self.blamed)),
            )
