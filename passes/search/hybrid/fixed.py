"""Everything that a user fixed of a hybrid plan, as the search reads it: the options that are left, borders, layouts.

    8 devices, pipeline=2 tensor=2        group 0: ranks 0-3, group 1: ranks 4-7        each a mesh data 2 x tensor 2

Ranks follow the cluster's order: groups are outermost and tensor parallelism is innermost, where links are fastest. Degrees
that are fixed fix the layouts of ops too: replicas split samples, shards of an op split products by columns, then by rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.units import counted, listed
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import colocated
from passes.search.feature.pins import Pin, resolve
from passes.search.hybrid.fix import Fix, pins_of_stages
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.pools import fixed_runs
from passes.search.hybrid.recipes.joints import Pieces, pieces_of
from passes.search.hybrid.recipes.pieces import GroupKind
from passes.search.hybrid.request import HybridRequest
from passes.search.microbatches import accepted_counts
from passes.search.pins import matches
from runtime.schedules import SCHEDULES

DATA_PATTERNS = {0: "data", 1: "zero1", 3: "zero3"}
"""ZeRO's stage -> the pattern (``passes.search.feature.presets``) on the axis of replicas."""


@dataclass(frozen=True)
class Degrees:
    """The device groups of a pipeline, and how each arranges its devices."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group."""
    chunks: int
    """Stages that each group runs."""
    tensor: int | None
    """Devices of a group that share each op's neurons; None: how a group shares its stage is searched."""
    sequence: bool

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.groups) * self.chunks

    @property
    def replicas(self) -> int | None:
        """The number of replicas in every group; None where it is searched, or where groups differ."""
        found = {None if self.tensor is None else len(group) // self.tensor for group in self.groups}
        return found.pop() if len(found) == 1 else None

    def shapes(self, samples: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the (replicas, tensor) of each group, for micro-batches of ``samples``: equally large groups are alike."""
        sizes = list(dict.fromkeys(map(len, self.groups)))
        every = [
            [
                (size // tensor, tensor)
                for tensor in range(1, size + 1)
                if size % tensor == 0 and samples % (size // tensor) == 0 and self.tensor in (None, tensor)
            ]
            for size in sizes
        ]
        for chosen in itertools.product(*every):
            shape_of = dict(zip(sizes, chosen, strict=True))
            yield tuple(shape_of[len(group)] for group in self.groups)


@dataclass(frozen=True, eq=False)
class Fixed:
    """The restrictions of one request."""

    graph: OpGraph
    cluster: ClusterSpec
    request: HybridRequest
    degrees: Degrees
    schedule: str
    pins: tuple[Mapping[str, str], ...]
    """Per stage, glob -> layout."""
    stage_of: Mapping[str, int] | None
    """The stage of each op, where borders are fixed."""

    @staticmethod
    def of(graph: OpGraph, cluster: ClusterSpec, request: HybridRequest) -> Fixed:
        """Read a request. Raises UsageError for what cannot hold."""
        fix = request.fix
        degrees = degrees_of(fix, cluster.world_size)
        if fix.borders is not None and fix.interleave is None and fix.pipeline is None:
            degrees = _as_many_as_borders(fix, degrees, cluster.world_size)
        degrees, schedule = _scheduled(fix, degrees, request.schedule)
        pins = tuple(pins_of_stages(request.pins, degrees.stages))
        stage_of = None if fix.borders is None else stages_at_borders(graph, fix.borders, degrees.stages)
        return Fixed(graph, cluster, request, degrees, schedule, pins, stage_of)

    @cached_property
    def options(self) -> tuple[GroupOption, ...]:
        """The options that are left. Raises UsageError where that is none."""
        batch, degrees = self.request.job.batch_size, self.degrees
        counts = microbatch_counts(self.request.fix, degrees, batch, self.request.microbatches)
        found, why = [], None
        for m in accepted_counts(self.graph, batch, counts):
            refused = SCHEDULES[self.schedule].check(degrees.stages, len(degrees.groups), m)
            why = why or refused
            for shapes in degrees.shapes(batch // m) if refused is None else ():
                runs = fixed_runs(self.cluster, degrees.groups, shapes)
                found.append(GroupOption(runs, batch // m, m, self.schedule, degrees.chunks))
        if not found and why is not None:
            raise UsageError(
                f"cannot run {counted(degrees.stages, 'stage')} under schedule {self.schedule}",
                [why.replace("ranks", "groups")],
                ["interleave= is the number of stages of each group"],
            )
        if not found:
            sizes = listed(list(map(len, degrees.groups)))
            raise UsageError(
                f"cannot cut a batch of {batch} for groups of {sizes} devices",
                ["every replica of every group needs equally many samples of a micro-batch"],
                ["another batch size, or number of micro-batches"],
            )
        return tuple(found)

    @cached_property
    def pieces(self) -> Pieces:
        """The pieces that stages are made of: unlike ones where what is fixed tells them apart."""
        marks: dict[str, str] = {}
        for pins in {id(own): own for own in self._resolved.values()}.values():
            for node, pin in pins.items():
                marks[node] = f"{marks.get(node, '')} | {pin.mark}"
        pieces = pieces_of(self.graph, self.degrees.stages, self.stage_of, marks)
        if len(pieces) < self.degrees.stages:
            raise UsageError(
                f"cannot cut {self.graph.model_name} into {counted(self.degrees.stages, 'stage')}",
                ["it has fewer ops that may be parted"],
                ["fewer groups, less interleaving, or borders= of your own"],
            )
        return pieces

    @cached_property
    def begins(self) -> tuple[int, ...] | None:
        """The first piece of each stage, where borders are fixed."""
        if self.stage_of is None:
            return None
        stages = [self.stage_of[ops[0]] for ops in self.pieces.ops]
        return tuple(map(stages.index, range(self.degrees.stages)))

    def axes(self, group: Sequence[int]) -> tuple[tuple[str, int, str], ...] | None:
        """Return (name, size, pattern) of the axes of a group's mesh; None where they are searched."""
        tensor = self.degrees.tensor
        if tensor is None:
            return None
        sizes = (("data", len(group) // tensor), ("tensor", tensor))
        pattern = self.pattern(replicated=sizes[0][1] > 1, shared=tensor > 1).get("*", "").split()
        return tuple(
            (name, size, word)
            for (name, size), word in zip(((n, s) for n, s in sizes if s > 1), pattern, strict=True)
        )

    def whole_pins(self, stage: int, group: Sequence[int]) -> Mapping[str, Pin]:
        """Node -> what is fixed of it in a stage that is decided about as a whole."""
        pattern = {"*": " ".join(word for _, _, word in axes)} if (axes := self.axes(group)) else {}
        return resolve(self.graph, {**pattern, **self.pins[stage]})

    def layouts(self, stage: int, group: GroupKind) -> Mapping[str, Pin]:
        """Node -> what is fixed of it in a stage on such groups."""
        key = tuple(self.pins[stage].items()), group.replicas > 1, group.tensor > 1
        return self._resolved[key] if len(group.ranks) > 1 else {}

    @cached_property
    def _resolved(self) -> dict[tuple[tuple[tuple[str, str], ...], bool, bool], Mapping[str, Pin]]:
        """(pins, replicas, shards) -> node -> what is fixed of it, for all that occur in options."""
        shapes = {(run.replicas > 1, run.tensor > 1) for option in self.options for run in option.runs}
        every = itertools.product(dict.fromkeys(tuple(own.items()) for own in self.pins), shapes)
        return {(pins, *shape): self._pins(dict(pins), *shape) for pins, shape in every}

    def pattern(self, *, replicated: bool, shared: bool) -> Mapping[str, str]:
        """Return the pins that degrees are, on groups with these axes; nothing where degrees are searched."""
        words = [DATA_PATTERNS[self.request.fix.zero or 0]] if replicated else []
        words += ["sequence" if self.degrees.sequence else "column_row"] if shared else []
        return {"*": " ".join(words)} if words and self.degrees.tensor is not None else {}

    def _pins(self, pins: Mapping[str, str], replicated: bool, shared: bool) -> Mapping[str, Pin]:
        """Resolve ``pins`` beside the patterns of the degrees. Where ZeRO is open, so is how parameters are kept."""
        pattern = self.pattern(replicated=replicated, shared=shared)
        found = resolve(self.graph, {**pattern, **pins})
        if self.request.fix.zero is not None or not replicated or not pattern:
            return found
        parameters = {given.node for given in self.graph.inputs if given.kind == "parameter"}
        return {
            node: replace(pin, rules=(None, *pin.rules[1:]))
            if node in parameters and pin.glob == "*"
            else pin
            for node, pin in found.items()
        }


def _as_many_as_borders(fix: Fix, degrees: Degrees, world: int) -> Degrees:
    """Interleave as the borders say: as many stages as they make, if groups can have equally many."""
    stages, groups = len(fix.borders or ()) + 1, len(degrees.groups)
    if fix.groups is None and stages > 1 and groups == 1:
        return degrees_of(replace(fix, pipeline=stages), world)
    return replace(degrees, chunks=max(1, stages // groups))


def _scheduled(fix: Fix, degrees: Degrees, name: str) -> tuple[Degrees, str]:
    """Choose the schedule, and refuse one that the stages cannot have."""
    if name == "auto":
        name = "interleaved" if degrees.chunks > 1 else "1f1b"
    if SCHEDULES[name].chunks == 2 and fix.interleave is None:
        degrees = replace(degrees, chunks=2)
    if why := SCHEDULES[name].check(degrees.stages, len(degrees.groups), 1):
        raise UsageError(
            f"cannot run {counted(degrees.stages, 'stage')} under schedule {name}",
            [why.replace("ranks", "groups")],
            ["interleave= is the number of stages of each group"],
        )
    return degrees, name


def stages_at_borders(graph: OpGraph, borders: Sequence[str], stages: int) -> dict[str, int]:
    """Op -> stage: a new one begins with the first op of each of ``borders``. Raises UsageError where that cannot be."""
    if len(borders) != stages - 1:
        raise UsageError(
            f"cannot cut {graph.model_name} into {counted(stages, 'stage')} at {counted(len(borders), 'border')}",
            [f"{counted(stages, 'stage')} have {stages - 1} borders between them"],
        )
    copied = recomputed_ops(graph)
    stage, stage_of = 0, {}
    for node in graph.ops:
        path = str(node.meta.get("module_path", ""))
        if stage < len(borders) and matches(borders[stage], node.name, path):
            stage += 1
        if node.name not in copied:
            stage_of[node.name] = stage
    problems = [f"no op of {name!r} comes after those of the border before it" for name in borders[stage:]]
    for together in colocated(graph):
        if len({stage_of[op] for op in together if op in stage_of}) > 1:
            problems.append(f"a border parts {', '.join(sorted(together)[:3])}, which must share a stage")
    if problems:
        raise UsageError(f"cannot cut {graph.model_name} at these borders", problems[:8])
    return stage_of


def degrees_of(fix: Fix, world: int) -> Degrees:
    """Arrange ``world`` devices as ``fix`` says. Raises UsageError for what cannot be."""
    problems: list[str] = []
    tensor = fix.tensor
    sequence = fix.sequence is not None and fix.sequence > 1
    if sequence:
        if tensor not in (None, fix.sequence):
            problems.append(f"sequence={fix.sequence}, tensor={tensor}: they are the same devices")
        tensor = fix.sequence
    sizes = _sizes(fix, tensor, world, problems)
    if problems:
        raise UsageError(
            f"cannot arrange {counted(world, 'device')} so", problems,
            ["pipeline x data x tensor = devices; what is left out follows from the others"],
        )  # fmt: skip
    searched = fix.data is None and tensor is None and fix.zero is None
    if tensor is None and not searched:
        tensor = 1 if fix.data is None else sizes[0] // fix.data
    ends = list(itertools.accumulate(sizes))
    groups = tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))
    return Degrees(groups, fix.interleave or 1, None if searched else tensor, sequence)


def _sizes(fix: Fix, tensor: int | None, world: int, problems: list[str]) -> tuple[int, ...]:
    """Count the devices of each group."""
    inside = (tensor or 1) * (fix.data or 1)
    if fix.groups is not None:
        sizes: tuple[int, ...] = fix.groups
        if fix.pipeline not in (None, len(sizes)):
            problems.append(f"groups={listed(list(sizes))} are {len(sizes)}, pipeline={fix.pipeline}")
    elif fix.data is not None and (tensor is not None or fix.pipeline is None):
        sizes = (inside,) * (fix.pipeline or max(1, world // inside))
    else:
        groups = fix.pipeline or 1
        if world % groups:
            problems.append(f"{world} devices are not {groups} equal groups: groups= gives unequal ones")
        sizes = (world // groups,) * groups
    if sum(sizes) > world or (fix.groups is None and fix.pipeline is None and sum(sizes) != world):
        problems.append(f"{_product(sizes, fix, tensor)} = {sum(sizes)} devices, there are {world}")
    for size in dict.fromkeys(sizes):
        if size % inside:
            parts = " x ".join(f"{n}={d}" for n, d in (("data", fix.data), ("tensor", tensor)) if d)
            problems.append(f"a group of {counted(size, 'device')} is not {parts}")
        elif fix.data and tensor and size != inside:
            problems.append(f"a group of {counted(size, 'device')} is not data={fix.data} x tensor={tensor}")
    return sizes


def _product(sizes: Sequence[int], fix: Fix, tensor: int | None) -> str:
    if fix.groups is not None:
        return " + ".join(map(str, sizes))
    parts = (("pipeline", len(sizes)), ("data", fix.data), ("tensor", tensor))
    return " x ".join(f"{name} {degree}" for name, degree in parts if degree)


def microbatch_counts(fix: Fix, degrees: Degrees, batch_size: int, wanted: int | str) -> list[int]:
    """Return the numbers of micro-batches to try: the fixed one, or all that give every replica whole samples. Raises
    UsageError."""
    replicas = degrees.replicas
    if fix.microbatch is not None:
        if replicas is None:
            raise UsageError(
                f"cannot make micro-batches of {counted(fix.microbatch, 'sample')} on each replica",
                ["groups have unlike numbers of replicas, or theirs is searched"],
                ["give the number of micro-batches instead, or fix tensor= and data="],
            )
        together = fix.microbatch * replicas
        size = f"{fix.microbatch} x {counted(replicas, 'replica')} = {counted(together, 'sample')}"
        if batch_size % together:
            raise UsageError(
                f"cannot cut a batch of {batch_size} into micro-batches of {size}",
                [f"{together} does not divide {batch_size}"],
                [f"a multiple of {together} as the batch size"],
            )
        if wanted not in ("auto", batch_size // together):
            raise UsageError(
                f"cannot cut a batch of {batch_size} into {wanted} micro-batches of {size}",
                [f"that makes {batch_size // together}"],
                ["fix microbatch= or the number of micro-batches, not both"],
            )
        return [batch_size // together]
    unit = replicas or 1
    fitting = [m for m in range(1, batch_size + 1) if batch_size % m == 0 and batch_size // m % unit == 0]
    if isinstance(wanted, int):
        if wanted not in fitting:
            closest = sorted(sorted(fitting, key=lambda m: abs(m - wanted))[:3])
            raise UsageError(
                f"cannot cut a batch of {batch_size} into {wanted} micro-batches",
                [f"each has equally many samples, a multiple of {unit}"],
                [f"{' or '.join(map(str, closest))} micro-batches"] if closest else [f"a batch size that {unit} divides"],
            )  # fmt: skip
        return [wanted]
    if not fitting:
        raise UsageError(
            f"cannot cut a batch of {batch_size} for {counted(unit, 'replica')}",
            ["every replica needs a sample"],
            [f"a batch size that {unit} divides"],
        )
    return fitting
