"""The check of another tool's configuration: whether it is legal and fits, what a step takes, and what would be better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, UsageError
from cost_models.units import counted, format_bytes, format_seconds
from partitioner.api import plan_traced
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism, is_block, units_of
from partitioner.formats.planned import planned
from partitioner.formats.tool import Understood
from partitioner.plan import Plan
from partitioner.planning.options import PlanOptions
from partitioner.report.intervals import chance_cell
from partitioner.report.text import labelled
from passes.graph.graph import OpGraph

HEADS: Mapping[str, Sequence[str]] = {
    "attention heads": ("num_attention_heads", "n_head", "num_heads"),
    "key-value heads": ("num_key_value_heads",),
}
"""The heads that shards divide, and the names that configurations of transformers models have for their number."""
CHANGES_SHOWN = 2
"""The number of changes that are said: those that help most, of what is within the risk."""
Telling = Callable[[str], AbstractContextManager[None]]
"""A function that says what goes on meanwhile."""


@dataclass(frozen=True)
class Neighbour:
    """A configuration that differs in one degree, planned."""

    words: str
    step_seconds: float
    peak_bytes: int
    chance_of_not_fitting: float


@dataclass(frozen=True)
class Checked:
    """The answers about a configuration. Seconds are of a step, bytes of the fullest device."""

    source: str
    title: str
    parallelism: Parallelism
    problems: tuple[str, ...]
    """Rules that it breaks: it does not run; none if it is legal."""
    notes: tuple[str, ...]
    plan: Plan | None = None
    """The configuration as a plan, if it is legal and fits."""
    too_large: tuple[str, ...] = ()
    """Reasons why it does not fit, and what would."""
    best: Plan | None = None
    changes: tuple[Neighbour, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: legal, and fits; 2: not legal; 4: does not fit."""
        return 2 if self.problems else 4 if self.plan is None else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the answers as JSON has them (``docs/check.schema.json``)."""
        return {
            "source": self.source,
            "tool": self.title,
            "parallelism": {**asdict(self.parallelism), "layers": list(self.parallelism.layers)},
            "legal": not self.problems,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "fits": None if self.problems else self.plan is not None,
            "too_large": list(self.too_large),
            "plan": None if self.plan is None else _figures(self.plan),
            "proved_instructions": None if self.plan is None else self.plan.proof.instructions,
            "best": None if self.best is None else _figures(self.best),
            "changes": [
                {"change": c.words, "step_seconds": c.step_seconds, "peak_bytes": c.peak_bytes,
                 "chance_of_not_fitting": c.chance_of_not_fitting} for c in self.changes
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(labelled(name, text) for name, text in self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "file", f"{self.source}, {self.title}"
        yield "says", described(self.parallelism)
        for index, problem in enumerate(self.problems):
            yield "" if index else "not legal", problem
        if not self.problems:
            yield "legal", "yes"
        for index, reason in enumerate(self.too_large):
            yield "" if index else "too large", reason
        if self.plan is not None:
            yield from _rows_of(self.plan)
        if self.best is not None:
            seconds = self.best.prediction.step_seconds
            ratio = f" ({seconds / self.plan.prediction.step_seconds:.2f}x)" if self.plan is not None else ""
            yield "best found", f"{format_seconds(seconds)}{ratio}: {_words(self.best)}"
        for index, change in enumerate(self.changes):
            figures = f"{format_seconds(change.step_seconds)}, {format_bytes(change.peak_bytes)}"
            yield "" if index else "try", f"{change.words}: {figures}"
        for index, note in enumerate(self.notes):
            yield "" if index else "note", note


def _rows_of(plan: Plan) -> Iterator[tuple[str, str]]:
    figures = _figures(plan)
    rank, memory = plan.fullest_device, plan.cluster.devices[plan.fullest_device].memory_bytes
    holds = f"{format_bytes(figures['peak_bytes'])} of {format_bytes(memory)}"
    chance = chance_cell(figures["chance_of_not_fitting"])
    yield "step", f"{format_seconds(figures['step_seconds'])}, {figures['samples_per_second']:,.3g} samples/s"
    yield "memory", f"the fullest device (rank {rank}) holds {holds}; {chance} chance of not fitting"
    if plan.is_too_risky:
        yield "not safe", "that chance is above what --risk allows: it runs out of memory too often"
    yield "hangs", f"no: {plan.proof.instructions} instructions proved free of deadlock, as run here"


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "step_seconds": plan.prediction.step_seconds,
        "samples_per_second": plan.prediction.samples_per_second,
        "peak_bytes": plan.prediction.peak_memory_bytes[str(plan.fullest_device)],
        "peak_bytes_by_rank": {
            str(rank): plan.prediction.peak_memory_bytes[str(rank)] for rank in plan.used_devices
        },
        "chance_of_not_fitting": plan.intervals.chance_of_not_fitting,
        "words": _words(plan),
    }


def _words(plan: Plan) -> str:
    try:
        return described(parallelism_of(plan))
    except UsageError:  # it has no degrees: op by op, or unequal groups
        return f"{plan.strategy}, {counted(len(plan.stages), 'stage')} on {counted(len(plan.used_devices), 'device')}"


def described(p: Parallelism) -> str:
    """Write a parallelism in a line."""
    words = []
    if p.pipeline > 1:
        chunks = f" of {p.chunks} chunks" if p.chunks > 1 else ""
        words.append(f"pipeline {p.pipeline}{chunks} ({p.schedule})")
    if p.tensor > 1:
        words.append(f"{'sequence' if p.sequence else 'tensor'} {p.tensor}")
    words.append(f"data {p.data}" + (f" (ZeRO-{p.zero})" if p.zero else ""))
    words.append(f"{counted(p.microbatches, 'micro-batch')} of {p.microbatch} on each replica")
    words.append(f"recompute {p.recompute}")
    layers = f"; layers {'+'.join(map(str, p.layers))}" if p.layers else ""
    return ", ".join(words) + layers


def check_configuration(
    source: str,
    title: str,
    understood: Understood,
    graph: OpGraph,
    cluster: ClusterSpec,
    options: PlanOptions,
    heads: Mapping[str, int],
    progress: Telling,
    *,
    best: bool = True,
) -> Checked:
    """Check a configuration of a traced model on a cluster.

    ``options``: those that a configuration says nothing of (optimizer, risk); ``heads``: as :func:`heads_of` has
    them; ``best``: search, too, for what is better.
    """
    p = understood.parallelism
    modules = list(
        dict.fromkeys(filter(None, units_of(str(n.meta.get("module_path", "")) for n in graph.ops)))
    )
    problems = [*understood.problems, *_illegal(p, understood.said, modules, heads, cluster)]
    checked = Checked(source, title, p, tuple(problems), understood.notes)
    if problems:
        return checked
    wanted = replace(options, batch_size=p.batch_size)
    try:
        with progress("planning it as it is"):
            plan = planned(graph, cluster, replace(wanted, microbatches=p.microbatches), p, p.fix(modules))
        checked = replace(checked, plan=plan)
    except InfeasibleError as error:
        checked = replace(checked, too_large=(*error.because, *error.suggestions))
    if not best:
        return checked
    with progress("searching for the best plan"), suppress(InfeasibleError):  # nothing fits: there is none
        checked = replace(checked, best=plan_traced(graph, cluster, wanted, None))
    changes = []
    for words, changed in neighbours(p):
        # One that does not fit, or that the batch or the model cannot be divided into, is none.
        with progress(f"trying {words}"), suppress(InfeasibleError, UsageError):
            own = planned(graph, cluster, wanted, changed, changed.fix(modules))
            chance = own.intervals.chance_of_not_fitting
            changes.append(Neighbour(words, own.prediction.step_seconds, _figures(own)["peak_bytes"], chance))
    known = checked.plan.prediction.step_seconds if checked.plan is not None else math.inf
    safe = [c for c in changes if c.chance_of_not_fitting <= options.risk and c.step_seconds < known]
    return replace(checked, changes=tuple(sorted(safe, key=lambda c: c.step_seconds)[:CHANGES_SHOWN]))


def _illegal(
    p: Parallelism,
    said: Mapping[str, int],
    modules: list[str],
    heads: Mapping[str, int],
    cluster: ClusterSpec,
) -> Iterator[str]:
    """Yield the rules about the model and the cluster that a configuration breaks."""
    blocks = sum(map(is_block, modules))
    if p.world_size != cluster.world_size:
        yield f"its degrees make {counted(p.world_size, 'device')}, the cluster has {cluster.world_size}"
    if said.get("layers", blocks) != blocks:
        yield f"it says {said['layers']} layers, the model has {blocks}"
    if p.layers and sum(p.layers) != blocks:
        yield f"its stages have {sum(p.layers)} layers, the model has {blocks}"
    if p.pipeline * p.chunks > blocks + 2:
        yield f"{p.pipeline * p.chunks} stages for {blocks} layers, embedding and head"
    for name, count in heads.items():
        if count % p.tensor:
            yield f"tensor {p.tensor} does not divide the model's {count} {name}"
    inside = max(map(len, cluster.ranks_per_node))
    if p.tensor > inside:
        yield f"tensor {p.tensor} goes over machines of {inside} devices: every sum of a layer would cross the network"


def heads_of(model: object) -> dict[str, int]:
    """Return the numbers of a model's heads, as far as its configuration says them."""
    config = getattr(model, "config", None)
    values = {name: [getattr(config, a, None) for a in attributes] for name, attributes in HEADS.items()}
    return {name: count for name, found in values.items() for count in found[::-1] if isinstance(count, int)}


def neighbours(p: Parallelism) -> Iterator[tuple[str, Parallelism]]:
    """Yield what differs in one degree, and what is said of it."""
    for mode in ("none", "gathers", "selective", "full"):
        if mode != p.recompute:
            yield f"recompute {mode}", replace(p, recompute=mode)
    for zero in (0, 1, 3):
        if zero != p.zero and p.data > 1:
            yield f"ZeRO-{zero}", replace(p, zero=zero)
    if p.microbatches % 2 == 0:
        yield (
            f"micro-batches of {2 * p.microbatch}",
            replace(p, microbatch=2 * p.microbatch, microbatches=p.microbatches // 2),
        )
    if p.microbatch % 2 == 0:
        yield (
            f"micro-batches of {p.microbatch // 2}",
            replace(p, microbatch=p.microbatch // 2, microbatches=2 * p.microbatches),
        )
    yield from _moved(p, "tensor", p.tensor, p.layers)
    yield from _moved(p, "pipeline", p.pipeline, ())
    if p.tensor > 1 and not p.sequence:
        yield "sequence parallelism", replace(p, sequence=True)


def _moved(
    p: Parallelism, name: Literal["tensor", "pipeline"], degree: int, layers: tuple[int, ...]
) -> Iterator[tuple[str, Parallelism]]:
    """Yield half of a degree for twice the replicas, and the other way round."""
    left = replace(p, layers=layers)
    if degree % 2 == 0 and p.microbatches % 2 == 0:
        more = replace(left, data=2 * p.data, microbatches=p.microbatches // 2)
        yield f"{name} {degree // 2}, data {more.data}", _with(more, name, degree // 2)
    if p.data % 2 == 0:
        less = replace(left, data=p.data // 2, microbatches=2 * p.microbatches)
        yield f"{name} {2 * degree}, data {less.data}", _with(less, name, 2 * degree)


def _with(p: Parallelism, name: Literal["tensor", "pipeline"], degree: int) -> Parallelism:
    if name == "pipeline":
        return replace(p, pipeline=degree)
    return replace(p, tensor=degree, sequence=p.sequence and degree > 1)
