"""Offers: a model's plans on several clusters, a row each: what fits, how fast, and for how many dollars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from cost_models.cluster import ClusterSpec
from cost_models.intervals import SHARE
from cost_models.shown import printable
from cost_models.units import format_bytes
from partitioner.record.data import PlanData
from partitioner.record.records import ModelInfo
from partitioner.report.intervals import chance_cell, peak_text, risk_text, step_text
from partitioner.report.table import shape_text
from partitioner.report.text import columns, hanging, rate_text

OfferOrder = Literal["as given", "time", "usd"]
"""Order of the rows: as the clusters were given; the most samples per second first; the fewest dollars per sample first."""
HOUR_SECONDS = 3600
NOTHING_FOUND = (
    "With the next size nothing was found that fits. On one device without recomputation there is one plan only, so that "
    "it does not; elsewhere a search that finds nothing is no proof."
)


@dataclass(frozen=True)
class Offer:
    """A model on a cluster: its plan, or why there is none."""

    model: ModelInfo
    cluster: ClusterSpec
    plan: PlanData | None
    tokens: int | None = None
    """Tokens in a sample, where this was looked for."""
    why: tuple[str, ...] = ()
    """The reasons why there is no plan."""
    ways: tuple[str, ...] = ()
    """Ways to make one fit, as far as they are known."""
    largest: bool = False
    """True where the largest batch, or the longest sequence, was looked for."""
    beyond: int | None = None
    """The size above the largest, for which nothing was found that fits; None where it was not looked for."""

    @property
    def more(self) -> bool:
        """True where a larger batch, or longer sequence, may fit as well: it was not looked for."""
        return self.largest and self.beyond is None

    @property
    def usd_per_million_samples(self) -> float | None:
        """Dollars for a million samples; None without a plan or a price."""
        return None if self.plan is None else self._usd_per_million(self.plan.prediction.samples_per_second)

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Dollars for a million tokens; None without a plan, a price or tokens."""
        return None if self.plan is None else self._usd_per_million(self.plan.prediction.tokens_per_second)

    def _usd_per_million(self, per_second: float | None) -> float | None:
        price = self.cluster.usd_per_hour
        return price / HOUR_SECONDS / per_second * 1e6 if price is not None and per_second else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: seconds, bytes, dollars; null for what there is not."""
        data: dict[str, Any] = {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "parameter_bytes": self.model.parameter_bytes,
            "cluster": self.cluster.name,
            "devices": self.cluster.world_size,
            "fits": self.plan is not None,
            "why": list(self.why),
            "ways": list(self.ways),
            "sequence": self.tokens,
            "more_may_fit": self.more,
            "nothing_found_at": self.beyond,
            "usd_per_hour": self.cluster.usd_per_hour,
            "usd_per_million_samples": self.usd_per_million_samples,
            "usd_per_million_tokens": self.usd_per_million_tokens,
        }
        plan = self.plan
        return data if plan is None else {**data, **_figures(plan)}


def _figures(plan: PlanData) -> dict[str, Any]:
    fullest, prediction, intervals = plan.fullest_device, plan.prediction, plan.intervals
    return {
        "strategy": plan.strategy,
        "plan": shape_text(plan),
        "batch_size": plan.batch_size,
        "microbatches": plan.microbatches,
        "step_seconds": prediction.step_seconds,
        "step_seconds_interval": intervals.step_seconds,
        "samples_per_second": prediction.samples_per_second,
        "tokens_per_second": prediction.tokens_per_second,
        "fullest_device": fullest,
        "peak_memory_bytes": prediction.peak_memory_bytes[str(fullest)],
        "peak_memory_bytes_interval": intervals.peak_memory_bytes,
        "memory_bytes": plan.cluster.devices[fullest].memory_bytes,
        "chance_of_not_fitting": intervals.chance_of_not_fitting,
    }


class Offers(tuple[Offer, ...]):
    """Offers in the order of their table, which is their text."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as ``--json`` prints it."""
        return {"offers": [offer.to_dict() for offer in self]}

    def __str__(self) -> str:
        return render_offers(self)


def ordered(offers: Sequence[Offer], order: OfferOrder) -> Offers:
    """Order the offers of each model; those without a safe plan, or without a price where that decides, are last."""

    def cost(offer: Offer) -> float:
        if offer.plan is None or offer.plan.is_too_risky:
            return math.inf
        usd = offer.usd_per_million_samples
        if order == "usd":
            return math.inf if usd is None else usd
        return 1 / offer.plan.prediction.samples_per_second

    groups = _by_model(offers)
    return Offers(
        offer for group in groups for offer in (group if order == "as given" else sorted(group, key=cost))
    )


def _by_model(offers: Sequence[Offer]) -> list[list[Offer]]:
    """Group the offers by their models, which follow each other."""
    return [list(group) for _, group in groupby(offers, lambda o: (o.model.name, o.model.parameters))]


def render_offers(offers: Sequence[Offer]) -> str:
    """Write a table per model, and below them how to read it."""
    tables = [_table(group) for group in _by_model(offers)]
    notes = [f"In parentheses {SHARE:.0%} intervals; chance: of not fitting."]
    if any(offer.plan and offer.beyond is not None for offer in offers):
        notes.append(hanging(NOTHING_FOUND))
    return printable("\n\n".join([*tables, "\n".join(notes)]))


def _table(offers: Sequence[Offer]) -> str:
    model = offers[0].model
    trained = model.trainable_parameters
    head = f"{model.name}: {model.parameters:,} parameters, {format_bytes(model.parameter_bytes)}"
    head += f", of which {trained:,} train" if trained != model.parameters else ""
    priced = any(offer.cluster.usd_per_hour is not None for offer in offers)
    tokens = any(offer.plan is not None and offer.plan.prediction.tokens_per_second for offer in offers)
    header = [
        "cluster",
        *(["sequence"] if any(offer.tokens for offer in offers) else []),
        "batch",
        "cut into",
    ]
    header += ["plan", "step", "tokens/s" if tokens else "samples/s", "fullest device", "chance"]
    header += ["$/h", f"$/M {'tokens' if tokens else 'samples'}"] if priced else []
    rows = [[_cell(offer, name) for name in header] for offer in offers]
    refused = [text for o in offers if o.plan is None for text in _refusal(o)]
    refused += [f"{o.cluster.name}: {text}" for o in offers if o.plan and (text := risk_text(o.plan))]
    return "\n".join([hanging(head), columns(header, rows, left=("cluster", "plan")), *map(hanging, refused)])


def _refusal(offer: Offer) -> list[str]:
    """Say why an offer has no plan, and what to try."""
    why = "; ".join(offer.why).replace(":; ", ": ")
    return [f"{offer.cluster.name} does not fit: {why}", *(f"    try: {way}" for way in offer.ways)]


def _cell(offer: Offer, column: str) -> str:
    plan, price = offer.plan, offer.cluster.usd_per_hour
    if column == "cluster":
        return offer.cluster.name
    if column == "$/h":
        return "-" if price is None else _dollars(price)
    if plan is None:
        return "-"
    sequence = offer.tokens is not None
    match column:
        case "sequence":
            return f"{offer.tokens or 0:,}{'+' if offer.more else ''}"
        case "batch":
            return f"{plan.batch_size:,}{'+' if offer.more and not sequence else ''}"
        case "cut into":
            return f"{plan.microbatches:,}"
        case "plan":
            return shape_text(plan)
        case "step":
            return step_text(plan)
        case "samples/s":
            return rate_text(plan.prediction.samples_per_second)
        case "tokens/s":
            return rate_text(plan.prediction.tokens_per_second or 0.0)
        case "fullest device":
            return (
                f"{peak_text(plan)} of {format_bytes(plan.cluster.devices[plan.fullest_device].memory_bytes)}"
            )
        case "chance":
            return chance_cell(plan.intervals.chance_of_not_fitting)
    usd = offer.usd_per_million_tokens if column == "$/M tokens" else offer.usd_per_million_samples
    return "-" if usd is None else _dollars(usd)


def _dollars(usd: float) -> str:
    """Write dollars: cents where there are any dollars, else three digits."""
    return f"{usd:,.2f}" if usd >= 1 else f"{usd:.3g}"
