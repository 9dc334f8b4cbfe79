"""One placement for two traces: the evaluation graph runs where the training graph was placed.

Training mode is baked into a trace, so evaluation is a second one. Its ops are matched with the training ops by module
path, kind of op and count, and whatever is left follows its inputs:

    training                                stage        evaluation                          stage
    fc1        linear   module "fc1"          0          linear    module "fc1"                0   (same)
    drop       dropout  module "drop"         0          -
    fc2        linear   module "fc2"          1          linear    module "fc2"                1   (same)
                                                         softmax   module ""                   1   (follows its input)

A parameter or buffer stays where training holds it. Three attempts, each for what the one before cannot place:

    stages        every edge leads to the same or a later stage, one segment per stage
    fewer copies  the same, and cheap ops that read a buffer run once, where it is held, and send their result
    anywhere      every op runs where its parameters are, values travel back too; a parameter travels as a value where
                  one op reads several that no group holds together
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from cost_models.errors import UsageError
from cost_models.layout import Mesh
from passes.graph.graph import OpGraph
from passes.graph.nodes import argument, copy_graph, fake_call, fake_mode_of, new_module, origin, replaced
from passes.graph.part import with_outputs
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import needed_state
from passes.lower.placed_graph import PlacedGraph
from passes.lower.segment import Segmentation, by_reach, by_stage

OpKey = tuple[str, str, int]
"""Module path, kind of op, how many of these came before."""


def reuse_placement(
    training: OpGraph,
    stage_of: Mapping[str, int],
    evaluation: OpGraph,
    groups: Sequence[tuple[int, ...]],
    holders: Mapping[str, Collection[int]],
    meshes: Sequence[Mesh | None] = (),
) -> PlacedGraph:
    """Place every op of ``evaluation`` that is not recomputed wherever it is needed (``passes.graph.recomputed``).

    ``stage_of``: stage of each placed op of ``training``. ``groups``: the ranks that run each stage; ``meshes``: how they
    are arranged where several share it. ``holders``: the ranks that hold each parameter and buffer, or blocks of it.

    The graph has an op more for every parameter that travels as a value. Raises UsageError where only one rank of a
    stage's group holds what an op reads, and the stage is on a mesh.
    """
    known = {key: stage_of[node.name] for key, node in keyed_ops(training) if node.name in stage_of}
    attempts = _Attempts(evaluation, known, groups, {name: frozenset(at) for name, at in holders.items()})
    cheap = recomputed_ops(evaluation)
    needed = needed_state(evaluation, cheap)
    without_state = frozenset(name for name in cheap if not needed[name])
    for recomputed in dict.fromkeys((cheap, without_state)):
        placed = attempts.by_stages(recomputed)
        if placed is not None:
            segmentation = _one_segment_per_stage(evaluation, placed, groups, recomputed, meshes)
            return PlacedGraph(evaluation, segmentation)
    graph, group_of = attempts.anywhere(without_state)
    segmentation = by_reach(graph, group_of, without_state)
    mesh_of = dict(zip(groups, meshes, strict=True)) if any(meshes) else {}
    own_meshes = tuple(mesh_of[group] for group in segmentation.ranks) if mesh_of else ()
    return PlacedGraph(graph, dataclasses.replace(segmentation, meshes=own_meshes))


@dataclass(frozen=True)
class _Attempts:
    """The facts that all attempts look at."""

    graph: OpGraph
    known: Mapping[OpKey, int]
    """Stage of each training op."""
    groups: Sequence[tuple[int, ...]]
    holders: Mapping[str, frozenset[int]]

    def by_stages(self, recomputed: frozenset[str]) -> dict[str, int] | None:
        """Find a stage for every placed op such that no edge leads back; None if there is no such placement."""
        needed = needed_state(self.graph, recomputed)
        placed: dict[str, int] = {}
        for key, node in keyed_ops(self.graph):
            if node.name in recomputed:
                continue
            sources = [placed[source.name] for source in node.all_input_nodes if source.name in placed]
            earliest = max(sources, default=0)
            stage = max(earliest, self.known.get(key, earliest))
            if node.target is operator.getitem and sources:  # results of one op cannot be sent together
                stage = earliest
            names = needed[node.name]
            if not self._holds(stage, names):
                later = [other for other in range(earliest, len(self.groups)) if self._holds(other, names)]
                if not later:
                    return None
                stage = later[0]
            placed[node.name] = stage
        return placed

    def _holds(self, stage: int, names: Collection[str]) -> bool:
        """Tell whether every rank of a stage holds ``names``, or blocks of them."""
        return all(self.holders[name].issuperset(self.groups[stage]) for name in names)

    def anywhere(self, recomputed: frozenset[str]) -> tuple[OpGraph, dict[str, tuple[int, ...]]]:
        """Find a group for every placed op; in the new graph, parameters travel that their readers' groups do not hold."""
        needed = needed_state(self.graph, recomputed)
        group_of: dict[str, tuple[int, ...]] = {}
        travels: dict[tuple[str, str], str] = {}
        for key, node in keyed_ops(self.graph):
            if node.name in recomputed:
                continue
            sources = [group_of[source.name] for source in node.all_input_nodes if source.name in group_of]
            stage = self.known.get(key)
            wanted = self.groups[stage] if stage is not None else (sources or self.groups)[-1]
            if node.target is operator.getitem and sources:
                wanted = sources[0]
            group_of[node.name] = group = self._near(wanted, sources, needed[node.name])
            for source in node.all_input_nodes:
                placeholder = self.graph.input_of.get(source.name)
                if placeholder is not None and not self.holders.get(placeholder.name, {*group}).issuperset(
                    group
                ):
                    travels[node.name, source.name] = placeholder.name
        graph, copies = _with_copies(self.graph, travels)
        return graph, {**group_of, **{copy: self._home(name) for copy, name in copies.items()}}

    def _near(
        self, wanted: tuple[int, ...], sources: Sequence[tuple[int, ...]], names: Collection[str]
    ) -> tuple[int, ...]:
        """Choose the group that holds most bytes of ``names``: ``wanted`` among equals, else one that an input is on."""
        held: Counter[tuple[int, ...]] = Counter({wanted: 0})
        for name in names:
            spec = self.graph.parameters.get(name) or self.graph.buffers[name]
            for group in self._groups_with(name):
                held[group] += max(1, spec.size_bytes)
        return max(held, key=lambda group: (held[group], group == wanted, group in sources, -group[0]))

    def _groups_with(self, name: str) -> list[tuple[int, ...]]:
        """List the groups of which every rank holds the tensor called ``name``, or a block of it."""
        return sorted(group for group in {*self.groups} if self.holders[name].issuperset(group))

    def _home(self, name: str) -> tuple[int, ...]:
        """Return the group that a parameter travels from."""
        homes = self._groups_with(name)
        if not homes:
            raise UsageError(
                f"cannot evaluate {self.graph.model_name} on these stages",
                [f"{name} is read in evaluation only, and held by rank {min(self.holders[name])} alone"],
                ["plan with strategy='layer', or use the parameter in training too"],
            )
        return homes[0]


def _one_segment_per_stage(
    graph: OpGraph,
    stage_of: Mapping[str, int],
    groups: Sequence[tuple[int, ...]],
    recomputed: frozenset[str],
    meshes: Sequence[Mesh | None],
) -> Segmentation:
    """Make one segment per stage; stages that evaluation has nothing of are left out."""
    used = sorted(set(stage_of.values()))
    index = {stage: position for position, stage in enumerate(used)}
    renumbered = {name: index[stage] for name, stage in stage_of.items()}
    own_meshes = [meshes[stage] for stage in used] if meshes else []
    return by_stage(graph, renumbered, [groups[stage] for stage in used], recomputed, (), own_meshes)


def _with_copies(graph: OpGraph, travels: Mapping[tuple[str, str], str]) -> tuple[OpGraph, Mapping[str, str]]:
    """Let the readers in ``travels`` read an op's result instead of the parameter itself.

    ``travels``: (reader, placeholder) -> parameter. Returns the name of each such op with its parameter as well.
    """
    new = copy_graph(graph.graph)
    nodes = {node.name: node for node in new.nodes}
    last = new.find_nodes(op="placeholder")[-1]
    copies: dict[str, fx.Node] = {}
    for (reader, placeholder), name in travels.items():
        if name not in copies:
            with new.inserting_after(last):
                copies[name] = new.call_function(torch.ops.aten.alias.default, (nodes[placeholder],))
            copies[name].meta = dict(nodes[placeholder].meta)
        nodes[reader].replace_input_with(nodes[placeholder], copies[name])
    made = dataclasses.replace(graph, module=new_module(graph.module, new))
    return made, {copy.name: name for name, copy in copies.items()}


def keyed_ops(graph: OpGraph) -> list[tuple[OpKey, fx.Node]]:
    """List each op with (module path, op, how many of these came before)."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    keyed = []
    for node in graph.ops:
        kind = (str(node.meta.get("module_path", "")), str(node.target))
        keyed.append(((*kind, counts[kind]), node))
        counts[kind] += 1
    return keyed


def without_writes(graph: OpGraph) -> OpGraph:
    """Remove the new contents of buffers from the outputs, and the momentum that statistics are written with.

    counter.add_(1) -> new contents of "counter"           dropped, with the ops that only it needed
    batch_norm(x, …, training=True, momentum=0.1)          momentum 0: statistics of the batch, running ones unchanged
    """
    new = copy_graph(graph.graph)
    outputs = tuple(output for output in graph.outputs if output.kind != "buffer")
    for node in new.nodes:
        if argument(node, "momentum") is not None:
            node.args, node.kwargs = replaced(node, node.args, node.kwargs, "momentum", 0.0)
    return with_outputs(graph, new, outputs)


def without_outputs(graph: OpGraph) -> OpGraph:
    """Remove the model's own outputs; the loss and metrics stay."""
    new = copy_graph(graph.graph)
    outputs = tuple(output for output in graph.outputs if output.kind != "output")
    return with_outputs(graph, new, outputs)


def with_computed_outputs(graph: OpGraph) -> OpGraph:
    """Make every output of ``graph`` an op's result, also one that is a parameter or a leaf of the batch itself."""
    given = {output.node for output in graph.outputs if output.node in graph.input_of}
    if not given:
        return graph
    new = copy_graph(graph.graph)
    nodes = {node.name: node for node in new.nodes}
    mode = fake_mode_of(graph.graph)
    computed: dict[str, fx.Node] = {}
    for name in sorted(given):
        source = nodes[name]
        with new.inserting_before(new.output_node()):
            computed[name] = new.call_function(torch.ops.aten.alias.default, (source,))
        value = fake_call(mode, torch.ops.aten.alias.default, (source.meta["val"],), {})
        computed[name].meta = {**origin(source), "val": value}
    outputs = tuple(
        dataclasses.replace(
            output, node=computed[output.node].name if output.node in computed else output.node
        )
        for output in graph.outputs
    )
    return with_outputs(graph, new, outputs)
