"""The sections of a cluster file as pydantic models (docs/01-hardware.md describes the keys).

A section keeps what was written; ``resolved`` fills in what its preset supplies. Written keys win over the preset,
``flops`` as a whole (what is written is what is supported), ``efficiency`` key by key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from cost_models.devices import CONTEXT_BYTES, DeviceKind
from cost_models.op_profile import OpTimes
from cost_models.spec.fields import (
    Bandwidth,
    CountField,
    Efficiency,
    Flops,
    NodeNames,
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
from cost_models.spec.presets import DEVICES, MACHINES, NEWEST, STACKS, efficiency_of
from cost_models.spec.wiring import NodeLinksField, pair_problems
from cost_models.units import BANDWIDTH_EXPECTED, SIZE_EXPECTED, format_bytes, show


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
    """Bytes of the memory that others use."""
    memory_context: ReservedSize | None = None
    """Bytes that the driver's context takes in each process; None: ``cost_models.devices.CONTEXT_BYTES`` of a GPU's."""
    memory_process: ReservedSize | None = None
    """All that a process holds of it beside tensors, where that is known: communicators are then not predicted."""
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
        if full.memory is not None and (full.memory_reserved or 0) + full.beside_tensors >= full.memory:
            taken = {"memory_reserved": full.memory_reserved or 0, "memory_context": full.beside_tensors}
            key = max(taken, key=taken.__getitem__)
            got = " + ".join(format_bytes(size) for size in taken.values() if size)
            found.append((key, f"expected less than memory ({format_bytes(full.memory)}), got {got}"))
        return found

    @property
    def communicators(self) -> Literal["none", "lazy", "eager"]:
        """Return how the memory of communicators is counted; see ``cost_models.devices.Device``."""
        if self.kind not in (None, "cuda") or self.memory_process is not None:
            return "none"
        return "lazy" if self.stack in (None, NEWEST) else "eager"

    @property
    def beside_tensors(self) -> int:
        """Return the bytes that a process holds before any tensor or communicator."""
        if self.memory_process is not None:
            return self.memory_process
        if self.memory_context is not None:
            return self.memory_context
        return CONTEXT_BYTES if self.kind in (None, "cuda") else 0


def bare_name(machine: str) -> str:
    """Return a machine preset's name without the cloud's, fit for a node: "aws:p5.48xlarge" is "p5.48xlarge"."""
    return machine.rpartition(":")[2]


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
        base = expand_names(self.name or bare_name(self.preset or "node"))
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
        yield from ((f"links.{key}", text) for key, text in pair_problems(full.links, full.count or 1))


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


def _written(section: Section) -> dict[str, Any]:
    return {key: getattr(section, key) for key in section.model_fields_set}
