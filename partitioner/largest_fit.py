"""``fit(model, clusters)``: the largest batch, or the longest sequence, that fits each cluster, and its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from inspect import signature
from typing import Any, Literal, TypeAlias, get_args

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.precision import Precision
from partitioner.models.as_graph import ModelOrTrace, as_graph
from partitioner.models.workload import Workload
from partitioner.plan import Plan
from partitioner.planning.largest import FIRST_STEPS, STEP_TOKENS, largest_batch, largest_sequence
from partitioner.planning.options import PlanOptions
from partitioner.record.describe import model_info
from partitioner.report.offers import Offer, OfferOrder, Offers, ordered
from partitioner.unforeseen import versions_named
from passes.graph.graph import OpGraph
from runtime.collector import collector_paused

Size: TypeAlias = Literal["batch", "sequence"]
"""The size that is made as large as fits: samples in a step, or tokens in a sample."""
TracedModel: TypeAlias = OpGraph | Callable[[int], OpGraph]
"""A model whose batch is looked for, or the model for so many tokens in a sample."""
OF_PLAN = frozenset(field.name for field in fields(PlanOptions))
OF_TRACE = frozenset(signature(as_graph).parameters) - {"model"}


@versions_named()
@collector_paused()
def fit(
    model: ModelOrTrace | Callable[[int], Workload],
    clusters: ClusterSpec | Sequence[ClusterSpec],
    *,
    largest: Size = "batch",
    most: int | None = None,
    step: int | None = None,
    precision: Precision | None = None,
    order: OfferOrder = "as given",
    **options: Any,
) -> Offers:
    """Find the largest batch, or sequence, that fits each cluster: the rows that ``partitioner fit`` prints.

    ``model``: as for :func:`partition`; for ``largest="sequence"`` a function from tokens to a :class:`Workload`.
    ``clusters``: one or several, such as ``[ClusterSpec.parse("RTX4090:1"), ClusterSpec.parse("RTX4090:2")]``.
    ``most``: no more is looked for; 65,536 samples or 1,048,576 tokens if not given.
    ``step``: multiples of it only; of 1 sample or 128 tokens if not given.
    ``order``: "as given", "time" (the most samples per second first) or "usd" (the fewest dollars per sample first).
    ``options``: those of :func:`partition` and its trace. ``microbatches`` is 1 if not given.

    ``print`` writes the rows as a table, ``to_dict()`` returns plain data. A row has its ``plan``, or None and ``why``.
    At ``beyond``, the size above, nothing was found that fits; on several devices that is no proof.

    Raises ClusterError, ModelError or UsageError.
    """
    if unknown := sorted(options.keys() - OF_PLAN - OF_TRACE):
        raise UsageError("cannot fit with these options", [f"there is no option {name}" for name in unknown])
    of_trace = {name: value for name, value in options.items() if name in OF_TRACE}
    of_plan = {name: value for name, value in options.items() if name in OF_PLAN}
    wanted = PlanOptions(**{"microbatches": 1, **of_plan})
    wanted.check()
    machines = [clusters] if isinstance(clusters, ClusterSpec) else list(clusters)
    limits = checked_limits(largest, most, step)
    refuse_unpriced(order, machines)
    traced: TracedModel
    if largest == "batch":
        traced = as_graph(model, **of_trace, precision=precision)  # type: ignore[arg-type]
    elif callable(model) and not isinstance(model, Workload):
        traced = cache(lambda tokens: as_graph(model(tokens), **of_trace, precision=precision))
    else:
        wrong = f"a function from tokens to a Workload is expected, this is of type {type(model).__name__}"
        raise UsageError("cannot look for the longest sequence", [wrong])
    return ordered([largest_offer(traced, each, wanted, precision, limits) for each in machines], order)


def largest_offer(
    traced: TracedModel,
    cluster: ClusterSpec,
    wanted: PlanOptions,
    precision: Precision | None,
    limits: Mapping[str, int],
) -> Offer:
    """Find what fits one cluster. ``limits``: ``most`` and ``step``, as far as given."""
    wanted.check_mesh(cluster)
    if isinstance(traced, OpGraph):
        found = largest_batch(Plan, traced, cluster, wanted, precision, **limits)
        return Offer(model_info(traced), cluster, found.plan, None, found.why, found.ways, True, found.beyond)
    found = largest_sequence(Plan, traced, cluster, wanted, precision, **limits)
    model = model_info(traced(found.size or first_tokens(limits)))
    return Offer(model, cluster, found.plan, found.size or None, found.why, found.ways, True, found.beyond)


def first_tokens(limits: Mapping[str, int]) -> int:
    """Return the length of the sequences that are tried first."""
    return FIRST_STEPS * limits.get("step", STEP_TOKENS)


def checked_limits(largest: str, most: int | None, step: int | None) -> dict[str, int]:
    """Return ``most`` and ``step`` as far as given; refuse those that mean nothing, and another word than ``Size`` has."""
    limits = {name: value for name, value in (("most", most), ("step", step)) if value is not None}
    wrong = [f"{name} is {value}, expected 1 or more" for name, value in limits.items() if value < 1]
    if largest not in get_args(Size):
        wrong.append(f"largest {largest!r} is neither batch nor sequence")
    if wrong:
        raise UsageError("cannot look for what fits", wrong)
    return limits


def refuse_unpriced(order: OfferOrder, clusters: Sequence[ClusterSpec]) -> None:
    """Refuse an order by dollars where no cluster has a price."""
    if order == "usd" and all(cluster.usd_per_hour is None for cluster in clusters):
        raise UsageError(
            "cannot compare dollars",
            [f"none of {', '.join(cluster.name for cluster in clusters)} has a price"],
            [
                "a machine of a cloud, such as aws:p5.48xlarge:1 (docs/presets.md lists those with prices)",
                "usd_per_hour of each node in a cluster file",
            ],
        )
