"""The sections of a cluster file as pydantic models (docs/01-hardware.md describes the keys).

A section keeps what was written; ``resolved`` fills in what its preset supplies. Written keys win over the preset,
``flops`` as a whole (what is written is what is supported), ``efficiency`` key by key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_serializer,
    model_validator,
)

from cost_models.devices import DeviceKind
from cost_models.op_profile import OpTimes
from cost_models.spec.fields import (
    Bandwidth,
    CountField,
    Efficiency,
    Flops,
    IndexField,
    Problem,
    ReservedSize,
    Seconds,
    Section,
    SizeField,
    TextField,
    UsdPerHour,
    expand_names,
    expected,
    known_name,
    problems_error,
    short_form,
    whole,
)
from cost_models.spec.presets import DEVICES, LINKS, MACHINES, STACKS, efficiency_of
from cost_models.units import BANDWIDTH_EXPECTED, SECONDS_EXPECTED, SIZE_EXPECTED, format_bytes, listed, show

Duplex = Literal["full", "half"]


def _names(value: object) -> object:
    if not isinstance(value, str):
        hint = " (quote it)" if isinstance(value, int | float | bool) else ""
        raise expected(f"a name{hint}", value)
    try:
        expand_names(value)
    except ValueError as error:
        raise expected(str(error), value) from None
    return value


NodeNames = Annotated[str, BeforeValidator(_names)]


def _op_times(value: object) -> object:
    if isinstance(value, OpTimes):
        return value
    if not isinstance(value, dict):
        raise expected("seconds by kind of op, as `partitioner calibrate` writes them", value)
    try:
        return OpTimes.from_dict(value)
    except ValueError as error:
        raise problems_error([("", str(error))]) from None


OpTimesField = Annotated[
    OpTimes,
    BeforeValidator(_op_times),
    PlainSerializer(lambda times: times.to_dict()),
    WithJsonSchema({"type": "object", "description": "measured by `partitioner calibrate`"}),
]


class DeviceSpec(Section):
    """``device``: a preset, or memory, memory_bandwidth and flops, or a preset with some keys overridden."""

    preset: Annotated[str | None, known_name(DEVICES, "a device")] = None
    stack: Annotated[str | None, known_name(STACKS, "a stack")] = None
    """The software whose speed is assumed of the preset (``cost_models.spec.presets``)."""
    name: TextField | None = None
    kind: DeviceKind | None = None
    memory: SizeField | None = None
    memory_reserved: ReservedSize | None = None
    memory_bandwidth: Bandwidth | None = None
    flops: Flops | None = None
    launch_overhead: Seconds | None = None
    kernel_overhead: Seconds | None = None
    efficiency: Efficiency | None = None
    op_times: OpTimesField | None = None
    """Measured seconds by kind of op (``cost_models.op_profile``); written by a calibration, not by hand."""

    def over(self, base: DeviceSpec) -> DeviceSpec:
        """Lay this section's keys over those of ``base``."""
        given = {key: value for key, value in _written(self).items() if value is not None}
        if self.efficiency is not None and base.efficiency is not None:
            given["efficiency"] = {**base.efficiency, **self.efficiency}
        return base.model_copy(update=given)

    def resolved(self) -> DeviceSpec:
        """Return the section with the preset's keys filled in."""
        if self.preset is None:
            return self
        efficiency = efficiency_of(self.preset, self.stack)
        known = {"efficiency": efficiency} if efficiency else {}
        return self.over(DeviceSpec.model_validate({**DEVICES[self.preset], **known}))

    def problems(self) -> list[Problem]:
        """List the problems that remain once the preset has filled its keys in."""
        full = self.resolved()
        needed: dict[str, tuple[object, str]] = {
            "memory": (full.memory, SIZE_EXPECTED),
            "memory_bandwidth": (full.memory_bandwidth, BANDWIDTH_EXPECTED),
            "flops": (full.flops, 'a mapping from dtypes to rates such as {bfloat16: "989TFLOPS"}'),
        }
        found = [
            (key, f"expected {what} (or a preset), got nothing")
            for key, (value, what) in needed.items()
            if value is None
        ]
        if self.stack is not None and self.preset is None:
            found.append(
                ("stack", f"expected a preset beside it, whose speed it is, got {show(self.stack)} alone")
            )
        if full.memory is not None and (full.memory_reserved or 0) >= full.memory:
            reserved = format_bytes(full.memory_reserved or 0)
            found.append(
                (
                    "memory_reserved",
                    f"expected less than memory ({format_bytes(full.memory)}), got {reserved}",
                )
            )
        return found


class LinkSpec(Section):
    """A link: a preset, or bandwidth and latency."""

    preset: Annotated[str | None, known_name(LINKS, "a link")] = None
    bandwidth: Bandwidth | None = None
    latency: Seconds | None = None
    duplex: Duplex | None = None
    in_network: Bandwidth | None = None
    """Bytes per second at which the switch behind ``links.default`` sums by itself (NVLink SHARP)."""

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Self:
        if whole(info) and (found := _missing_rates(self)):
            raise problems_error(found)
        return self

    def summing(self) -> float:
        """Return the bytes per second at which the switch sums, the preset's filled in; 0 where it does not."""
        if self.in_network is None and self.preset is not None:
            return LinkSpec.model_validate(LINKS[self.preset]).in_network or 0.0
        return self.in_network or 0.0

    def resolved(self) -> tuple[float, float, Duplex]:
        """Return (bytes per second, seconds, duplex), the preset's values filled in."""
        bandwidth, latency, duplex = self.bandwidth, self.latency, self.duplex
        if self.preset is not None:
            base = LinkSpec.model_validate(LINKS[self.preset])
            bandwidth = base.bandwidth if bandwidth is None else bandwidth
            latency = base.latency if latency is None else latency
            duplex = duplex or base.duplex
        assert bandwidth is not None  # validated: no link is without
        assert latency is not None
        return bandwidth, latency, duplex or "full"


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


class NodeSpec(Section):
    """One entry of ``nodes``: one node, or as many as its name's ranges or ``replicas`` say."""

    name: NodeNames | None = None
    preset: Annotated[str | None, known_name(MACHINES, "a machine")] = None
    host: TextField | None = None
    count: CountField | None = None
    device: Annotated[DeviceSpec, short_form("preset")] | None = None
    links: NodeLinksField | None = None
    host_memory: SizeField | None = None
    usd_per_hour: UsdPerHour | None = None
    """The price of one such node."""
    replicas: CountField = 1

    def resolved(self) -> NodeSpec:
        """Return the section with the preset's keys filled in."""
        if self.preset is None:
            return self if self.count is not None else self.model_copy(update={"count": 1})
        base = NodeSpec.model_validate(MACHINES[self.preset])
        given = {key: value for key, value in _written(self).items() if value is not None}
        if self.device is not None and self.device.preset is None and base.device is not None:
            given["device"] = self.device.over(base.device)
        return base.model_copy(update=given)

    def names(self) -> tuple[str, ...]:
        """List the names of the nodes this entry stands for, in order; ``name-0``, ``name-1``, … for replicas."""
        base = expand_names(self.name or self.preset or "node")
        return tuple(f"{base[0]}-{i}" for i in range(self.replicas)) if self.replicas > 1 else base

    def hosts(self) -> tuple[str | None, ...]:
        """Return one host per node, None where the entry names none."""
        if self.host is None:
            return (None,) * len(self.names())
        return expand_names(self.host)

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        if whole(info) and (found := list(_node_problems(self))):
            raise problems_error(found)
        return self


def _node_problems(node: NodeSpec) -> Iterable[Problem]:
    full = node.resolved()
    if node.replicas > 1 and len(expand_names(node.name or "node")) > 1:
        yield "replicas", f"expected no replicas beside a name with a range, got {node.replicas}"
        return
    if node.host is not None:
        try:
            hosts: tuple[str | None, ...] = node.hosts()
        except ValueError as error:
            yield "host", f"expected {error}, got {show(node.host)}"
        else:
            if len(hosts) != len(node.names()):
                yield "host", f"expected {len(node.names())} hosts, one per node, got {len(hosts)}"
    if full.device is None:
        yield "device", 'expected a device such as "H100-80GB" (or a preset for the node), got nothing'
    else:
        yield from ((f"device.{key}", text) for key, text in full.device.problems())
    if full.links is not None:
        yield from ((f"links.{key}", text) for key, text in _pair_problems(full.links, full.count or 1))


def _pair_problems(links: NodeLinks, count: int) -> Iterable[Problem]:
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


GPU_CONTENTION = 1.35
"""Factor by which GPUs compute slower beside a collective, whose kernels take multiprocessors and memory bandwidth:
products "30-40% slower" on 8 H100 (pytorch's pull request 179937); whole steps 18.9% on average (arXiv 2507.03114)."""


PositiveBytes = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]


class CollectiveSpec(Section):
    """The seconds of one kind of collective between two ranks of a machine, by the bytes of the whole tensor."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    measured: tuple[tuple[PositiveBytes, Seconds], ...] = Field(min_length=2)
    """(bytes, seconds), by rising bytes."""

    @model_validator(mode="after")
    def _rising(self) -> Self:
        sizes = [size for size, _ in self.measured]
        if sorted(set(sizes)) != sizes:
            raise ValueError("bytes: expected rising numbers")
        return self


class HostSpec(Section):
    """``host_costs``: what a step costs beside arithmetic and bytes. Measured by a calibration; nothing by default."""

    contention: float | None = Field(default=None, ge=1.0, le=100.0, allow_inf_nan=False)
    """Factor by which a rank's computes slow down while a transfer of that rank is under way; by default ``GPU_CONTENTION``
    for GPUs and 1 for others."""
    compute_overhead: Seconds = 0.0
    """Time per forward or backward of a segment: looking up tensors, starting autograd."""
    send_overhead: Seconds = 0.0
    receive_overhead: Seconds = 0.0
    collectives: tuple[CollectiveSpec, ...] = ()
    """Measured collectives of workers of one machine; others, and those of GPUs, go by their links."""


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


def _written(section: Section) -> dict[str, Any]:
    return {key: getattr(section, key) for key in section.model_fields_set}
