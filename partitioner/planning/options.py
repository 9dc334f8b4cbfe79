"""Everything that a user may fix about a plan, checked, and the requests to the searches that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard, TypeVar, get_args

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.memory import OPTIMIZERS
from cost_models.precision import Precision
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.feature.meshes import meshes
from passes.search.feature.pins import axes_of_layout
from passes.search.feature.place import FeatureRequest
from passes.search.feature.tuning import TUNING
from passes.search.free.request import FreeRequest, Objective
from passes.search.hybrid.fix import read_fix
from passes.search.hybrid.request import HybridRequest
from passes.search.layer.request import LayerRequest
from passes.search.request import Request
from passes.search.words import STRATEGY_WORDS, RecomputeMode, of_activations
from passes.shard.couplings import why_whole
from passes.trace.precision import check_precision
from runtime.schedules import SCHEDULES

STRATEGIES = (*STRATEGY_WORDS, "auto")
SEARCHING = ("hybrid", "free")
"""The strategies of "auto": the others are parts of the first, from which the second starts."""
AUTO_SECONDS, OTHER_SECONDS = 20.0, 60.0
"""The time limit where none is given: of "auto" with nothing fixed, and of a strategy alone."""
AUTO_GAP = 0.01
"""The gap within which "auto" answers once it is proved."""
RISK = 0.05
"""The chance of not fitting that a plan may have unless told otherwise: one job of twenty runs out of memory. By hand."""
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
MOST_SAMPLES = 1 << 30
MOST_MICROBATCHES = 1 << 16
"""The most micro-batches; a larger number is a typing error, for programs list every micro-batch."""

_ABOUT_STAGES = "{option}={value!r} is about stages of a pipeline; strategy {mine!r} has its own way"
_IS_FOR = '{option}={value!r} is for strategy "{knows}"'
NOT_HERE = {
    "mesh": 'mesh= arranges the devices of strategy "{knows}"; strategy {mine!r} has none',
    "fix": _IS_FOR,
    "objective": _IS_FOR,
    "splits": _IS_FOR,
    "schedule": _ABOUT_STAGES,
    "min_stages": _ABOUT_STAGES,
    "max_stages": _ABOUT_STAGES,
    "recompute": _ABOUT_STAGES,
}
"""The problem with an option that the strategy does not know."""
NEUTRAL = {"schedule": "auto", "recompute": "none"}
"""Values of these that every strategy can be given."""

Pins = Mapping[str, int] | Mapping[str, str]
PlaceT = TypeVar("PlaceT", int, str)


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan, named as :func:`partitioner.partition` names them."""

    batch_size: int | None = None
    optimizer_memory: str = "adamw"
    strategy: str = "auto"
    schedule: str = "auto"
    microbatches: int | Literal["auto"] = "auto"
    micro_couplings: bool = False
    pins: Pins | None = None
    mesh: Sequence[int] | None = None
    objective: Objective | None = None
    splits: Mapping[str, Sequence[int]] | None = None
    recompute: RecomputeMode | None = None
    fix: str | Mapping[str, object] | None = None
    min_stages: int | None = None
    max_stages: int | None = None
    risk: float = RISK
    time_limit_seconds: float | None = None

    @property
    def searched(self) -> tuple[str, ...]:
        """The strategies to plan by. Of auto those of ``SEARCHING`` that know all that is given, or the first that does."""
        if self.strategy != "auto":
            return (self.strategy,)
        given = self._given().keys()
        able = [
            name
            for name, words in STRATEGY_WORDS.items()
            if given <= words.options and not any(self._wrong_pins(name))
        ]
        return tuple(name for name in SEARCHING if name in able and not self.pins) or tuple(able[:1])

    def check(self) -> None:
        """Refuse unknown words and numbers that mean nothing, all at once."""
        keys = [*self._wrong_keys()]
        problems = [*self._unknown_words(), *self._wrong_numbers(), *keys]
        problems += [] if keys else self._of_the_other_strategy()
        if problems:
            raise UsageError("cannot plan with these options", because=problems)
        self._check_layouts()
        if self.batch_size is not None:
            self._check_microbatches(self.batch_size)

    def check_mesh(self, cluster: ClusterSpec) -> None:
        """Refuse a mesh that is not the cluster's devices, and pins to others, before anything is traced for them."""
        if self.mesh is not None:
            meshes(cluster, TUNING.most_axes, self.mesh)
        if any(STRATEGY_WORDS[name].pinned_to == "device" for name in self.searched):
            world = cluster.world_size
            problems = [
                f"{glob!r} is pinned to device {rank}; {cluster.name} has devices 0 to {world - 1}"
                for glob, rank in (self.pins or {}).items()
                if isinstance(rank, int) and not 0 <= rank < world
            ]
            if problems:
                raise UsageError("cannot use these pins", problems)

    def requests(self, graph: OpGraph, precision: Precision | None) -> tuple[Request, ...]:
        """Make one request per strategy to plan by. ``precision``: the trace's if not given."""
        if graph.loss is None:
            raise UsageError(
                f"cannot plan training of {graph.model_name}",
                because=["the trace has no loss"],
                suggestions=["give `loss_fn=`, or a model that returns its loss"],
            )
        precision = graph.precision if precision is None else Precision.checked(precision)
        check_precision(graph, precision, self.optimizer_memory)
        size = graph.example_batch_size if self.batch_size is None else self.batch_size
        self._check_microbatches(size)
        job = Job(size, self.optimizer_memory, precision, self.risk)
        requests = tuple(self._request(name, job, graph) for name in self.searched)
        why = "" if self._cuts_the_batch else why_whole(graph)
        return tuple(replace(r, microbatches=1, whole_batch=why) for r in requests) if why else requests

    @property
    def _cuts_the_batch(self) -> bool:
        """The user says how the batch is cut, or that it may be, whatever couples samples."""
        return (
            self.micro_couplings or self.microbatches != "auto" or read_fix(self.fix).microbatch is not None
        )

    def _request(self, name: str, job: Job, graph: OpGraph) -> Request:
        again = self.recompute or ("full" if graph.checkpointing else "auto")
        several = len(self.searched) > 1
        shared: dict[str, Any] = {
            "job": job,
            "microbatches": self.microbatches,
            "time_limit_seconds": self.time_limit_seconds or (AUTO_SECONDS if several else OTHER_SECONDS),
            "gap": AUTO_GAP if several else 0.0,
        }
        match name:
            case "layer":
                return LayerRequest(
                    **shared,
                    pins=self._pinned(int),
                    schedule=self.schedule,
                    min_stages=self.min_stages,
                    max_stages=self.max_stages,
                    recompute=of_activations(again),
                )
            case "feature":
                return FeatureRequest(
                    **shared,
                    pins=self._pinned(str),
                    mesh=None if self.mesh is None else tuple(self.mesh),
                    recompute=self.recompute or ("full" if graph.checkpointing else None),
                )
            case "hybrid":
                pins, fix = self._pinned(str), read_fix(self.fix)
                return HybridRequest(**shared, pins=pins, schedule=self.schedule, fix=fix, recompute=again)
        return FreeRequest(
            **shared,
            pins=self._pinned(int),
            objective=self.objective or "throughput",
            split=self.splits is None,
            splits={glob: tuple(sizes) for glob, sizes in (self.splits or {}).items()},
        )

    def _pinned(self, kind: type[PlaceT]) -> dict[str, PlaceT]:
        return {glob: place for glob, place in (self.pins or {}).items() if isinstance(place, kind)}

    def _unknown_words(self) -> Iterator[str]:
        if self.strategy not in STRATEGIES:
            yield f"strategy {self.strategy!r} is not one of: {', '.join(STRATEGIES)}"
        if self.schedule != "auto" and self.schedule not in SCHEDULES:
            yield f"schedule {self.schedule!r} is not one of: auto, {', '.join(SCHEDULES)}"
        if self.optimizer_memory not in OPTIMIZERS:
            yield f"optimizer memory {self.optimizer_memory!r} is not one of: {', '.join(OPTIMIZERS)}"
        if self.recompute is not None and self.recompute not in RECOMPUTE_MODES:
            yield f"recompute {self.recompute!r} is not one of: {', '.join(RECOMPUTE_MODES)}"
        if self.recompute == "gathers" and self.strategy == "layer":
            yield "recompute 'gathers' is for shardings: in pipelines of single devices nothing is gathered"
        if self.recompute == "selective" and self.strategy == "layer":
            yield "recompute 'selective' is looked at by strategy hybrid, and not by layer"
        if self.objective is not None and self.objective not in OBJECTIVES:
            yield f"objective {self.objective!r} is not one of: {', '.join(OBJECTIVES)}"

    def _wrong_numbers(self) -> Iterator[str]:
        size, count, limit = self.batch_size, self.microbatches, self.time_limit_seconds
        if size is not None and not _is_count(size, MOST_SAMPLES):
            yield f"the batch size is {size!r}, expected 1 to {MOST_SAMPLES:,} samples"
        if count != "auto" and not _is_count(count, MOST_MICROBATCHES):
            yield f"the number of micro-batches is {count!r}, expected auto or 1 to {MOST_MICROBATCHES:,}"
        least, most = self.min_stages, self.max_stages
        for option, number in (("min_stages", least), ("max_stages", most)):
            if number is not None and not _is_count(number, MOST_SAMPLES):
                yield f"{option} is {number!r}, expected 1 or more"
        if _is_count(least, MOST_SAMPLES) and _is_count(most, MOST_SAMPLES) and least > most:
            yield f"min_stages is {least}, more than max_stages, {most}"
        if limit is not None and not (isinstance(limit, int | float) and 0 < limit < math.inf):
            yield f"the time limit is {limit!r}, expected more than 0 seconds"
        if isinstance(self.risk, bool) or not (isinstance(self.risk, int | float) and 0 < self.risk <= 1):
            yield f"the risk is {self.risk!r}, expected a chance of more than 0 and at most 1, such as 0.05 (5%)"
        if self.mesh is not None and not (
            isinstance(self.mesh, Sequence) and all(_is_count(n, MOST_SAMPLES) for n in self.mesh)
        ):
            yield f"the mesh is {self.mesh!r}, expected sizes such as (2, 4)"
        yield from self._wrong_splits()

    def _wrong_splits(self) -> Iterator[str]:
        given: object = self.splits
        if given is not None and not isinstance(given, Mapping):
            yield f'splits is {given!r}, expected sizes by name such as {{"mlp": (60, 40)}}'
            return
        for glob, sizes in (given or {}).items():
            if not isinstance(glob, str):
                yield f"split {glob!r}: expected the name of an op, or of what can be split"
            if not (isinstance(sizes, Sequence) and sizes and all(_is_count(n, MOST_SAMPLES) for n in sizes)):
                yield f"split {glob!r}: {sizes!r} are no sizes such as (60, 40)"

    def _wrong_keys(self) -> Iterator[str]:
        pins: object = self.pins
        if pins is not None and not isinstance(pins, Mapping):
            yield f'pins is {pins!r}, expected places by name such as {{"layers.0.*": 0}}'
        elif pins:
            yield from (f"pin {glob!r}: expected a text" for glob in pins if not isinstance(glob, str))

    def _of_the_other_strategy(self) -> Iterator[str]:
        """Name options that the strategy would silently ignore."""
        if self.strategy == "auto":
            yield from self._apart()
        elif self.strategy in STRATEGY_WORDS:
            for option, value in self._given().items():
                if option not in STRATEGY_WORDS[self.strategy].options:
                    knows = next(name for name, other in STRATEGY_WORDS.items() if option in other.options)
                    yield NOT_HERE[option].format(option=option, value=value, mine=self.strategy, knows=knows)
            yield from self._wrong_pins(self.strategy)

    def _apart(self) -> Iterator[str]:
        """Name what is given if no strategy knows all of it."""
        if self.searched:
            return
        for option, value in self._given().items():
            knows = [name for name, words in STRATEGY_WORDS.items() if option in words.options]
            yield f"{option}={value!r} is for strategy {' or '.join(knows)}; no strategy knows all that is given"
        for glob, place in (self.pins or {}).items():
            knows = [name for name in STRATEGY_WORDS if not any(_wrong_place(name, glob, place))]
            said = f"is for strategy {' or '.join(knows)}" if knows else "is neither a number nor a layout"
            yield f"pin {glob!r}: {place!r} {said}; no strategy knows all that is given"

    def _given(self) -> Mapping[str, object]:
        """Return the options that not every strategy knows, as far as they were given."""
        given = {option: getattr(self, option) for option in NOT_HERE}
        return {o: value for o, value in given.items() if value is not None and value != NEUTRAL.get(o)}

    def _wrong_pins(self, strategy: str) -> Iterator[str]:
        """Name pins that are not the strategy's."""
        for glob, pinned in (self.pins or {}).items():
            yield from _wrong_place(strategy, glob, pinned)

    def _check_layouts(self) -> None:
        """Refuse pinned layouts that cannot be read, or name other axes than the mesh has."""
        layouts = {glob: text for glob, text in (self.pins or {}).items() if isinstance(text, str)}
        axes = None if self.mesh is None else len(self.mesh)
        problems = [
            f"pin {glob!r}: {text!r} names {words} placements, the mesh has {axes} {'axis' if axes == 1 else 'axes'}"
            for glob, text in layouts.items()
            if (words := axes_of_layout(text)) is not None and axes not in (None, words)
        ]
        if problems:
            raise UsageError(
                "cannot plan with these options",
                problems,
                ["one placement per mesh axis, the outermost first"],
            )

    def _check_microbatches(self, batch_size: int) -> None:
        """Refuse a number of micro-batches that the batch cannot be cut into."""
        if self.microbatches != "auto" and self.microbatches > batch_size:
            raise UsageError(
                f"cannot cut a batch of {batch_size} into {self.microbatches} micro-batches",
                because=["every micro-batch needs a sample"],
                suggestions=[f"use at most {batch_size} micro-batches, or a larger batch size"],
            )


def _wrong_place(strategy: str, glob: str, pinned: object) -> Iterator[str]:
    """Say what is wrong with a pin of the strategy."""
    place = STRATEGY_WORDS[strategy].pinned_to
    number = isinstance(pinned, int) and not isinstance(pinned, bool)
    if place == "layout" and not isinstance(pinned, str):
        yield f'pin {glob!r}: the layout {pinned!r} is not a text such as "S0" or "R S1"'
    elif place != "layout" and not number:
        yield f"pin {glob!r}: the {place} {pinned!r} is not a number"


def _is_count(value: object, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
