"""The recipes of one piece on one kind of group: at every price of memory, for every pair of interfaces, the cheapest.

piece ─► its feature-wise problem on the group's mesh ─► elimination ─► amounts [prices, arrives as, leaves as]

On the axis of replicas every op is split by samples, so it adds no choices; how replicas keep parameters (whole, ZeRO-1,
ZeRO-3) is each parameter's own choice. A value that lives over several joints has one layout at all of them: split by
samples, else whole. A stream, which only the pieces at one joint know, has any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models.arrays import FloatArray
from cost_models.cluster import ClusterSpec
from cost_models.layout import Mesh, Replicate, Shard
from passes.costs.costs import GraphCosts, costs_of
from passes.graph.blocks import regions_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.feature.bound import wire_tables
from passes.search.feature.bridges import Bridges
from passes.search.feature.codes import DEFERRED, digits
from passes.search.feature.graph import FeatureGraph, Unit, feature_graph, leaving_name
from passes.search.feature.options import Options, UnitNumbers, placements_of
from passes.search.feature.pins import Pin, pins_of_part, resolve, restricted
from passes.search.feature.problem import FeatureProblem, build_problem
from passes.search.feature.seconds import counts_samples
from passes.search.feature.setting import PartPlace, Setting
from passes.search.feature.ties import each_without_needless_sums
from passes.search.hybrid.recipes.eliminate import Amounts, Elimination, eliminate
from passes.search.hybrid.recipes.joints import Pieces
from passes.search.recomputed import Regions
from passes.shard.discover import Discovery
from passes.shard.words import Placements
from passes.timings import phase


@dataclass(frozen=True)
class GroupKind:
    """Equal groups of devices: replicas, each of devices that share its ops. ``ranks``: of the first such group."""

    ranks: tuple[int, ...]
    replicas: int
    tensor: int

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The name and size of each axis of the group's mesh, replicas outermost."""
        found = tuple(a for a in (("data", self.replicas), ("tensor", self.tensor)) if a[1] > 1)
        return found or (("tensor", 1),)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first group."""
        return Mesh(self.ranks, tuple(size for _, size in self.axes), tuple(name for name, _ in self.axes))


@dataclass(frozen=True)
class Prices:
    """Prices of memory, in seconds per step and byte: of what is there all the time, of what a micro-batch holds."""

    state: FloatArray
    held: FloatArray

    def __len__(self) -> int:
        return len(self.state)


@dataclass(frozen=True, eq=False)
class Least:
    """The costs of the cheapest ways to run a piece. Arrays: [prices, ways to arrive, ways to leave]."""

    arriving: tuple[Placements | None, ...]
    """Layouts of the stream in; one None where there is none."""
    leaving: tuple[Placements | None, ...]
    least: FloatArray
    """Seconds per step and what memory costs at the prices: no way is below."""
    floor_bytes: float
    """Bytes that backward works in at least, whatever is chosen; not in what memory costs."""


@dataclass(frozen=True, eq=False)
class Recipes(Least):
    """The cheapest ways to run a piece, and what each takes."""

    problem: FeatureProblem
    amounts: Amounts
    """The amounts of the ways that are chosen."""
    chosen: NDArray[np.intp]
    """[units, prices, ways to arrive, ways to leave] options."""

    def options(self, price: int, arriving: int, leaving: int) -> tuple[int, ...]:
        """Return the option of each unit, as ``assemble`` takes them."""
        chosen = self.chosen[:, price, arriving, leaving].tolist()
        return tuple(int(u.index[k]) for u, k in zip(self.problem.units, chosen, strict=True))


@dataclass(frozen=True, eq=False)
class _PinnedSpace:
    """A class of pieces: its problem without numbers, and what its units are held to."""

    graph: FeatureGraph
    pins: Mapping[str, Pin]
    """Pins on the axis of replicas, which share the samples."""
    fixed: Mapping[str, Pin]
    """Pins that the user fixed, on all axes."""


@dataclass(eq=False)
class PieceSearch:
    """Finds the recipes of the classes of pieces."""

    pieces: Pieces
    cluster: ClusterSpec
    shared: frozenset[str]
    """Parameters and buffers that several pieces read: whole on every rank."""
    discovery: Discovery = field(default_factory=Discovery.stored)
    fixed: Callable[[GroupKind], Mapping[str, Pin]] | None = None
    """The pins of the model's nodes on groups with such axes, beside those of replicas."""
    within: str = ""
    """The part of pieces, not computed again as wholes, that backward computes again: ``GATHERS``, ``SELECTIVE`` or ""."""
    _spaces: dict[tuple[int, bool, bool, bool], _PinnedSpace] = field(default_factory=dict)
    _costs: dict[int, GraphCosts] = field(default_factory=dict)
    _bridges: dict[GroupKind, Bridges] = field(default_factory=dict)

    @cached_property
    def _by_samples(self) -> Mapping[str, Pin]:
        """The pins of ops, values and the batch on the axis of replicas."""
        found = resolve(self.pieces.graph, {"*": "data"})
        return {node: pin for node, pin in found.items() if not self._is_parameter(node)}

    def _is_parameter(self, node: str) -> bool:
        given = self.pieces.graph.input_of.get(node)
        return given is not None and given.kind == "parameter"

    def part(self, kind: int) -> OpGraph:
        """Return the first piece of a class."""
        return self.pieces.parts[self.pieces.first[kind]]

    def costs(self, kind: int) -> GraphCosts:
        """Return the costs of the first piece of a class."""
        if kind not in self._costs:
            self._costs[kind] = costs_of(self.part(kind), self.cluster)
        return self._costs[kind]

    def problem(
        self,
        kind: int,
        group: GroupKind,
        job: Job,
        microbatches: int,
        *,
        again: bool = False,
        ops_cost: bool = True,
    ) -> FeatureProblem:
        """Make the feature-wise problem of a class of pieces. ``again``: its ops run again in backward; ``ops_cost``: False
        where only parameters are asked about."""
        made = self._space(kind, group, again=again)
        space, pins, fixed = made.graph, made.pins, made.fixed
        names = tuple(name for name, _ in group.axes)
        part = PartPlace(group.ranks, names, shared=self.shared.intersection(space.graph.parameters))
        regions = self._regions(kind, again=again)
        setting = Setting(self.cluster, job, 0.0, regions, part)
        if group not in self._bridges:
            self._bridges[group] = Bridges(group.mesh.shape, setting.links(group.mesh))

        def restrict(unit: Unit, numbers: UnitNumbers) -> UnitNumbers:
            pin = pins.get(unit.name)
            numbers = numbers if pin is None else restricted(unit, numbers, pin, len(names))
            if group.replicas > 1 and unit.kind == "op":
                numbers = self._whole_on_replicas(unit, numbers)
            numbers = self._at_joints(kind, group, unit, numbers)
            return restricted(unit, numbers, fixed[unit.name], len(names)) if unit.name in fixed else numbers

        bridges = self._bridges[group]
        return build_problem(space, group.mesh, microbatches, setting, bridges, restrict, ops_cost=ops_cost)

    @phase("recipes")
    def recipes(
        self, kind: int, group: GroupKind, job: Job, microbatches: int, prices: Prices, *, again: bool = False
    ) -> Recipes:
        """Find the recipes of a class of pieces; see ``problem``."""
        least, found = self._eliminated(kind, group, job, microbatches, prices, again=again)
        problem, shape = found.problem, least.least.shape
        chosen = without_needless(problem, found.decode())
        amounts = _reshaped(found.amounts(chosen), shape)
        return Recipes(**vars(least), problem=problem, amounts=amounts, chosen=chosen.reshape(-1, *shape))

    @phase("recipes")
    def least(
        self,
        kind: int,
        group: GroupKind,
        job: Job,
        microbatches: int,
        prices: Prices,
        *,
        again: bool = False,
        parameters: bool = True,
    ) -> Least:
        """Find what the recipes of a class of pieces cost, not which they are. ``parameters``: False where readers get
        parameters for nothing, wherever these are."""
        return self._eliminated(kind, group, job, microbatches, prices, again=again, parameters=parameters)[0]

    def _eliminated(
        self,
        kind: int,
        group: GroupKind,
        job: Job,
        microbatches: int,
        prices: Prices,
        *,
        again: bool,
        parameters: bool = True,
    ) -> tuple[Least, Elimination]:
        problem = self.problem(kind, group, job, microbatches, again=again)
        ends = self._ends(kind, problem)
        kept = tuple(unit for unit in ends if unit is not None)
        tables = wire_tables(problem)
        found = eliminate(problem, tables, prices.state, prices.held, kept, parameters=parameters)
        shape = (len(prices), *(1 if u is None else len(problem.units[u].seconds) for u in ends))
        arriving, leaving = (
            (None,) if unit is None else tuple(_layouts(problem.units[unit])) for unit in ends
        )
        return Least(arriving, leaving, found.least.reshape(shape), problem.floor_bytes), found

    def saved(self, recipes: Sequence[Recipes]) -> FloatArray:
        """[classes] the most that a block of each class saves; 0 of other pieces: they are never computed again."""
        found = []
        for own, first in zip(recipes, self.pieces.first, strict=True):
            held = own.amounts.held_bytes.reshape(len(own.least), -1)
            cheapest = own.least.reshape(len(own.least), -1).argmin(axis=1)
            most = float(held[np.arange(len(held)), cheapest].max())
            found.append(most if self.pieces.blocks[first] else 0.0)
        return np.array(found)

    def _regions(self, kind: int, *, again: bool) -> Regions:
        piece = self.pieces.first[kind]
        if again and self.pieces.blocks[piece]:
            return (self.pieces.ops[piece],)
        return regions_of(self.part(kind), (self.within,)) if self.within else ()

    def fixed_of(self, kind: int, group: GroupKind) -> Mapping[str, Pin]:
        """Return what is fixed of the nodes of a class of pieces."""
        return self._space(kind, group, again=False).fixed

    def _space(self, kind: int, group: GroupKind, *, again: bool) -> _PinnedSpace:
        key = (kind, again, group.replicas > 1, group.tensor > 1)
        if key not in self._spaces and again:
            kept = self._space(kind, group, again=False)
            space = kept.graph.recomputing(self._regions(kind, again=True))
            self._spaces[key] = replace(kept, graph=space)
        if key not in self._spaces:
            part, pins, fixed = self.part(kind), dict[str, Pin](), dict[str, Pin]()
            if group.replicas > 1:
                free = (None,) if group.tensor > 1 else ()
                found = pins_of_part(part, self._by_samples, {}, self.shared)
                pins = {node: replace(pin, rules=(*pin.rules, *free)) for node, pin in found.items()}
            if self.fixed is not None:
                fixed = pins_of_part(part, self.fixed(group), {}, self.shared)
                pins = {node: pin for node, pin in pins.items() if node not in fixed or fixed[node].pattern}
            marks = {node: pin.mark for node, pin in pins.items()}
            marks |= {node: f"{marks.get(node, '')} {pin.mark}" for node, pin in fixed.items()}
            regions = self._regions(kind, again=False)
            alike = self.pieces.kind.count(kind)
            space = feature_graph(part, self.costs(kind), self.discovery.choices, marks, regions, alike)
            self._spaces[key] = _PinnedSpace(space, pins, fixed)
        return self._spaces[key]

    def _streams(self, kind: int) -> tuple[str | None, str | None]:
        piece = self.pieces.first[kind]
        return self.pieces.streams[piece], self.pieces.streams[piece + 1]

    def _ends(self, kind: int, problem: FeatureProblem) -> tuple[int | None, int | None]:
        """Return the units of the stream in and of the stream out."""
        into, out = self._streams(kind)
        left = None if out is None else problem.space.unit_of.get(leaving_name(out))
        return (None if into is None else problem.space.unit_of.get(into)), left

    def _whole_on_replicas(self, unit: Unit, numbers: UnitNumbers) -> UnitNumbers:
        """Leave an op of no samples the ways that replicas do not share: else more of them would take less."""
        batch, detail = self.pieces.graph.batch.batch_symbol, numbers.detail
        if not isinstance(detail, Options) or any(
            counts_samples(spec, batch) for spec in (*unit.operands, *unit.outputs)
        ):
            return numbers
        split = np.array([any(isinstance(p, Shard) for p in placements_of(c)) for c in detail.choices])
        keep = ~split[detail.axes[numbers.index, 0]]
        return numbers.keep(keep) if keep.any() else numbers

    def _at_joints(self, kind: int, group: GroupKind, unit: Unit, numbers: UnitNumbers) -> UnitNumbers:
        """Leave a unit at a piece's border the layouts that it may have there."""
        if unit.kind not in ("value", "leaving", "batch"):
            return numbers
        name = unit.name.removeprefix(leaving_name("")) if unit.kind == "leaving" else unit.name
        layouts = _layouts(numbers)
        keep = np.array([layout is not None for layout in layouts], dtype=bool)
        crossing = unit.kind != "batch" and name in self._streams(kind)
        if group.replicas > 1 and unit.kind != "batch":
            rule = self._by_samples[name].rules[0] if name in self._by_samples else None
            allowed = None if rule is None else rule.outputs
            if allowed is None and not crossing:
                allowed = frozenset({Replicate()})
            split = np.array([allowed is None or (x is not None and x[0] in allowed) for x in layouts])
            keep = keep & split if (keep & split).any() else keep
        if not crossing:
            inner = range(group.replicas > 1, len(group.axes))
            keep &= np.array([x is not None and all(x[a] == Replicate() for a in inner) for x in layouts])
        return numbers.keep(keep)


def _layouts(numbers: UnitNumbers) -> list[Placements | None]:
    """List the layout of each option of a unit at a piece's border; None: its gradient goes back in parts of a sum."""
    detail = numbers.detail
    if not isinstance(detail, Options):
        ways = [detail[k] for k in numbers.index.tolist()]
        return [
            tuple(c.stored for c in way) if all(c.stored == c.state for c in way) else None for way in ways
        ]
    found: list[Placements | None] = []
    for k in numbers.index.tolist():
        choices = detail.per_axis(k)
        found.append(tuple(c.inputs[0].placement if c.inputs else c.outputs[0] for c in choices))
    return found


def cheaper(one: Least, other: Least) -> Least:
    """Return what the cheaper of two recipes costs in each place."""
    floor_bytes = min(one.floor_bytes, other.floor_bytes)
    return Least(one.arriving, one.leaving, np.minimum(one.least, other.least), floor_bytes)


def without_needless(problem: FeatureProblem, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
    """[units, …] choices without the needless sums of ``without_needless_sums``, which is asked where there may be some.

    A sum over more axes may be charged less than over fewer. Parameters are summed along replicas; along other axes it is
    needless unless a reader leaves parts there.
    """
    flat = chosen.reshape(len(chosen), -1)
    axes = len(problem.mesh.shape)
    inner = [a for a in range(axes) if problem.mesh.axes[a] != "data"]
    may = np.zeros(flat.shape[1], dtype=bool)
    for unit, numbers, row in zip(problem.space.units, problem.units, flat, strict=True):
        if unit.kind == "parameter":
            later = [any(digits(int(c), axes)[a] == DEFERRED for a in inner) for c in numbers.outputs[0]]
            may |= np.array(later, dtype=bool)[row]
    found = flat.copy()
    number: dict[bytes, int] = {}  # most choices are the same at many prices
    which = [number.setdefault(choice.tobytes(), len(number)) for choice in flat.T[may]]
    if number:
        columns = np.stack([np.frombuffer(choice, dtype=flat.dtype) for choice in number], axis=1)
        found[:, may] = each_without_needless_sums(problem, columns)[:, which]
    return found.reshape(chosen.shape)


def _reshaped(amounts: Amounts, shape: Sequence[int]) -> Amounts:
    return Amounts(*(getattr(amounts, name).reshape(shape) for name in Amounts.__dataclass_fields__))
