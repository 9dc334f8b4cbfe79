"""Offers of several clusters in one table: ``plan`` with more than one of them, and ``fit``. It imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError, InfeasibleError, TimeLimitError, UsageError
from partitioner.api import plan_traced
from partitioner.commands.options import ModelOptions, check_output, emit, progress
from partitioner.commands.plan_model import PlanAsked
from partitioner.largest_fit import TracedModel, checked_limits, first_tokens, largest_offer, refuse_unpriced
from partitioner.models.as_graph import as_graph
from partitioner.plan import Plan
from partitioner.record.describe import model_info
from partitioner.report.offers import Offer, OfferOrder, Offers, ordered
from passes.graph.graph import OpGraph


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
    refuse_unpriced(order, machines)
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
    most: int | None,
    step: int | None,
    arguments: Mapping[str, Any],
    *,
    quiet: bool,
    json: bool,
) -> int:
    """Find the largest batch, or sequence, of each model on each cluster. ``arguments``: of a plan."""
    limits = checked_limits(largest, most, step)
    wanted, order = _read(arguments, "as given")
    of_model: ModelOptions = arguments["model_options"]
    if largest == "sequence" and of_model.seq is not None:
        raise UsageError("cannot look for the largest sequence", [f"--seq {of_model.seq} gives it"])
    machines = [ClusterSpec.parse(text) for text in clusters]
    refuse_unpriced(order, machines)
    found: list[Offer] = []
    for model in models:
        traced: TracedModel
        if largest == "batch":
            traced = wanted.trace(model, of_model, quiet=quiet)
        else:
            traced = cache(partial(_traced, model, of_model, wanted, first_tokens(limits)))
        for cluster in machines:
            with progress(f"fitting {model} on {cluster.name}", quiet=quiet):
                found.append(largest_offer(traced, cluster, wanted.options, wanted.precision, limits))
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
        return Offer(
            model, cluster, None, None, tuple(error.because) or (error.what,), tuple(error.suggestions)
        )


def _traced(model: str, of_model: ModelOptions, wanted: PlanAsked, first: int, tokens: int) -> OpGraph:
    """Trace a model for sequences of ``tokens``. Only the ``first`` is compared with the model, if that is asked for."""
    check = wanted.of_trace["check"] if tokens == first else "off"
    return as_graph(replace(of_model, seq=tokens).load(model), **{**wanted.of_trace, "check": check})


def _show(offers: Offers, json: bool) -> int:
    """Print the table; the exit code says whether anything fits."""
    emit(offers, offers.to_dict(), json)
    return 0 if any(offer.plan for offer in offers) else InfeasibleError.exit_code
