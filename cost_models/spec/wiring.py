"""The sections of a cluster file that say what joins devices and nodes: links, pairs, switches, the network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_serializer, model_validator

from cost_models.spec.fields import (
    Bandwidth,
    CountField,
    IndexField,
    NodeNames,
    Problem,
    Seconds,
    Section,
    TextField,
    expand_names,
    known_name,
    problems_error,
    short_form,
    whole,
)
from cost_models.spec.presets import LINKS
from cost_models.units import BANDWIDTH_EXPECTED, SECONDS_EXPECTED, listed

Duplex = Literal["full", "half"]
RingSize = Annotated[int, Field(ge=2, le=65536)]


class LinkSpec(Section):
    """A link: a preset, or bandwidth and latency."""

    preset: Annotated[str | None, known_name(LINKS, "a link")] = None
    bandwidth: Bandwidth | None = None
    latency: Seconds | None = None
    duplex: Duplex | None = None
    in_network: Bandwidth | None = None
    """Bytes per second at which the switch behind ``links.default`` sums by itself (NVLink SHARP)."""
    mesh: bool | None = None
    """True: every two devices have a wire of their own of this bandwidth, instead of a port each (``links.default``)."""
    rings: Annotated[dict[RingSize, Bandwidth], Field(min_length=1)] | None = None
    """The bus bandwidth of collectives by how many devices take part, where it is another (``links.default``)."""

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Self:
        if whole(info) and (found := _missing_rates(self)):
            raise problems_error(found)
        return self

    def filled(self) -> LinkSpec:
        """Return the section with the preset's keys filled in. Its ``rings`` are those of its own bandwidth only."""
        if self.preset is None:
            return self
        keys = ("bandwidth", "latency", "duplex", "in_network", "mesh", "rings")
        given = {key: value for key in keys if (value := getattr(self, key)) is not None}
        if self.bandwidth is not None:
            given.setdefault("rings", None)
        return LinkSpec.model_validate(LINKS[self.preset]).model_copy(update=given)

    def resolved(self) -> tuple[float, float, Duplex]:
        """Return (bytes per second, seconds, duplex), the preset's values filled in."""
        full = self.filled()
        assert full.bandwidth is not None  # validated: no link is without
        assert full.latency is not None
        return full.bandwidth, full.latency, full.duplex or "full"


LinkField = Annotated[LinkSpec, short_form("preset")]


class PairSpec(LinkSpec):
    """A wire of its own between two devices of a node."""

    between: tuple[IndexField, IndexField]

    @field_serializer("between")
    def _as_list(self, between: tuple[int, int]) -> list[int]:
        return list(between)


class NodeLinks(Section):
    """``links`` of a node. ``default``: each device's port; ``pairs``: wires of their own; ``host``: to the cards."""

    default: LinkField | None = None
    pairs: tuple[PairSpec, ...] = ()
    host: LinkField | None = None


NodeLinksField = Annotated[NodeLinks, short_form("default")]


def pair_problems(links: NodeLinks, count: int) -> Iterable[Problem]:
    """Find what is wrong with the wires between the ``count`` devices of a node."""
    seen: dict[frozenset[int], int] = {}
    for i, pair in enumerate(links.pairs):
        a, b = pair.between
        key = frozenset(pair.between)
        if a == b:
            yield f"pairs[{i}].between", f"expected two devices, got {a} twice"
        elif max(a, b) >= count:
            yield (
                f"pairs[{i}].between",
                f"expected indices below the node's count of {count}, got {max(a, b)}",
            )
        elif key in seen:
            yield (
                f"pairs[{i}].between",
                f"expected each pair once, got {a} and {b} also in pairs[{seen[key]}]",
            )
        seen.setdefault(key, i)
    # Bounded: a thousand devices without a default would be half a million missing pairs.
    if links.default is None and count <= 1024:
        missing = [p for p in itertools.combinations(range(count), 2) if frozenset(p) not in seen]
        if missing:
            shown = listed((f"{a}-{b}" for a, b in missing), 4)
            yield (
                "default",
                f"expected a link for the pairs that have none of their own ({shown}), got nothing",
            )


class SwitchSpec(Section):
    """A switch. What passes it upwards (or across, at the top) is its members' total / ``oversubscription``."""

    name: TextField
    members: tuple[NodeNames, ...] = Field(min_length=1)
    oversubscription: float = Field(default=1.0, ge=1.0, le=1e6, allow_inf_nan=False)
    latency: Seconds = 0.0

    def member_names(self) -> tuple[str, ...]:
        """List the members, ranges expanded."""
        return tuple(name for text in self.members for name in expand_names(text))


class GraphLink(LinkSpec):
    """An edge of an explicit link graph between nodes, devices (``node:index``) and switches (any other name)."""

    a: TextField
    b: TextField


class NetworkSpec(LinkSpec):
    """``network``: cards of one kind behind switches, or an explicit link graph (``links``). Itself one card's link."""

    per: Literal["node", "device"] | None = None
    cards: CountField | None = None
    switches: tuple[SwitchSpec, ...] = ()
    links: tuple[GraphLink, ...] = ()

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Self:
        found: list[Problem] = []
        if self.links:
            others = ("preset", "bandwidth", "latency", "duplex", "per", "cards", "switches")
            found += [
                (key, "expected nothing beside an explicit link graph (network.links)")
                for key in others
                if getattr(self, key)
            ]
        else:
            found += _missing_rates(self)
        if self.per is not None and self.cards is not None:
            found.append(("cards", 'expected either "per" or "cards", got both'))
        if found and whole(info):
            raise problems_error(found)
        return self

    def cards_of(self, count: int) -> int:
        """Return the number of network cards of a node with ``count`` devices: one per device unless told otherwise."""
        if self.cards is not None:
            return min(self.cards, count)
        return 1 if self.per == "node" else count


def _missing_rates(link: LinkSpec) -> list[Problem]:
    if link.preset is not None:
        return []
    needed = {
        "bandwidth": (link.bandwidth, BANDWIDTH_EXPECTED),
        "latency": (link.latency, SECONDS_EXPECTED),
    }
    return [
        (key, f"expected {what} (or a preset), got nothing")
        for key, (value, what) in needed.items()
        if value is None
    ]
