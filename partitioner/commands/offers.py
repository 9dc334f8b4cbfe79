"""Offers of several clusters in one table: ``plan`` with more than one of them, and ``fit``. It imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError, InfeasibleError, TimeLimitError, UsageError
from partitioner.api import plan_traced
from partitioner.commands.options import ModelOptions, check_output, emit, progress
from partitioner.commands.plan_model import PlanAsked
from partitioner.models.as_graph import as_graph
from partitioner.plan import Plan
from partitioner.planning.largest import FIRST_STEPS, STEP_TOKENS, largest_batch, largest_sequence
from partitioner.record.describe import model_info
from partitioner.report.offers import Offer, OfferOrder, ordered, render_offers
from passes.graph.graph import OpGraph

Size = Literal["batch", "sequence"]


def plan_on_each(
    model: str,
    clusters: Sequence[str],
    arguments: Mapping[str, Any],
    output: Path | None,
    *,
    quiet: bool,
    json: bool,
) -> int:
    """Plan a model on each cluster, and print what comes of it, the best first. ``arguments``: of the command."""
    wanted, order = _read(arguments, "time")
    check_output(output)
    machines = [ClusterSpec.parse(text) for text in clusters]
    _refuse_unpriced(order, machines)
    graph = wanted.trace(model, arguments["model_options"], quiet=quiet)
    found: list[Offer] = []
    for cluster in machines:
        with progress(f"planning on {cluster.name}", quiet=quiet):
            found.append(_planned(graph, cluster, wanted))
    offers = ordered(found, order)
    if output is not None and isinstance(offers[0].plan, Plan):
        offers[0].plan.save(output)
    return _show(offers, json)


def fit_each(
    models: Sequence[str],
    clusters: Sequence[str],
    largest: str,
    limits: Mapping[str, int],
    arguments: Mapping[str, Any],
    *,
    quiet: bool,
    json: bool,
) -> int:
    """Find the largest batch, or sequence, of each model on each cluster. ``limits``: most and step, as far as given."""
    wanted, order = _read(arguments, "as given")
    of_model: ModelOptions = arguments["model_options"]
    if largest not in get_args(Size):
        raise UsageError("cannot read --largest", [f"{largest!r} is neither batch nor sequence"])
    if largest == "sequence" and of_model.seq is not None:
        raise UsageError("cannot look for the largest sequence", [f"--seq {of_model.seq} gives it"])
    machines = [ClusterSpec.parse(text) for text in clusters]
    _refuse_unpriced(order, machines)
    found: list[Offer] = []
    for model in models:
        if largest == "batch":
            graph = wanted.trace(model, of_model, quiet=quiet)
            fit = partial(_fit_batch, graph)
        else:
            fit = partial(_fit_sequence, cache(partial(_traced, model, of_model, wanted, limits)))
        for cluster in machines:
            with progress(f"fitting {model} on {cluster.name}", quiet=quiet):
                wanted.options.check_mesh(cluster)
                found.append(fit(cluster, wanted, limits))
    return _show(ordered(found, order), json)


def _read(arguments: Mapping[str, Any], order: OfferOrder) -> tuple[PlanAsked, OfferOrder]:
    """Read the options of plans, and the order of the table: "usd" if it is asked for, else ``order``."""
    if arguments["objective"] != "usd":
        return PlanAsked.read(arguments), order
    return PlanAsked.read({**arguments, "objective": None}), "usd"


def _planned(graph: OpGraph, cluster: ClusterSpec, wanted: PlanAsked) -> Offer:
    model = model_info(graph)
    try:
        wanted.options.check_mesh(cluster)
        return Offer(model, cluster, plan_traced(graph, cluster, wanted.options, wanted.precision))
    except (ClusterError, InfeasibleError, TimeLimitError) as error:
        return Offer(model, cluster, None, why=tuple(error.because) or (error.what,))


def _fit_batch(graph: OpGraph, cluster: ClusterSpec, wanted: PlanAsked, limits: Mapping[str, int]) -> Offer:
    found = largest_batch(Plan, graph, cluster, wanted.options, wanted.precision, **limits)
    return Offer(model_info(graph), cluster, found.plan, why=found.why, largest=True, beyond=found.beyond)


def _fit_sequence(
    traced: Callable[[int], OpGraph], cluster: ClusterSpec, wanted: PlanAsked, limits: Mapping[str, int]
) -> Offer:
    found = largest_sequence(Plan, traced, cluster, wanted.options, wanted.precision, **limits)
    model = model_info(traced(found.size or _first_tokens(limits)))
    return Offer(model, cluster, found.plan, found.size or None, found.why, True, found.beyond)


def _traced(
    model: str, of_model: ModelOptions, wanted: PlanAsked, limits: Mapping[str, int], tokens: int
) -> OpGraph:
    """Trace a model for sequences of ``tokens``. Only the first trace is compared with the model, if that is asked for."""
    check = wanted.of_trace["check"] if tokens == _first_tokens(limits) else "off"
    return as_graph(replace(of_model, seq=tokens).load(model), **{**wanted.of_trace, "check": check})


def _first_tokens(limits: Mapping[str, int]) -> int:
    return FIRST_STEPS * limits.get("step", STEP_TOKENS)


def _refuse_unpriced(order: OfferOrder, clusters: Sequence[ClusterSpec]) -> None:
    if order == "usd" and all(cluster.usd_per_hour is None for cluster in clusters):
        raise UsageError(
            "cannot compare dollars",
            ["none of the clusters has a price"],
            ["usd_per_hour of each node in a cluster file"],
        )


def _show(offers: Sequence[Offer], json: bool) -> int:
    """Print the table; the exit code says whether anything fits."""
    emit(_Table(offers), {"offers": [offer.to_dict() for offer in offers]}, json)
    return 0 if any(offer.plan for offer in offers) else InfeasibleError.exit_code


@dataclass(frozen=True)
class _Table:
    """Offers, as they are written when it is known how wide the terminal is."""

    offers: Sequence[Offer]

    def __str__(self) -> str:
        return render_offers(self.offers)
