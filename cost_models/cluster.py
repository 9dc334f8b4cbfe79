"""``ClusterSpec``: the hardware a model is planned for.

    cluster = ClusterSpec.load("cluster.yaml")      # or .parse("dgx-h100:8"), .preset("dgx-h100", nodes=8), .local(2)
    cluster.devices[9].memory_bytes                 # rank r is the r-th device in file order
    cluster.path(0, 9).transfer_seconds(2**20)      # latency + bytes / narrowest link

The keys of a file are in docs/01-hardware.md; the sections' models in ``cost_models.spec.sections`` and ``wiring``.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator

from cost_models import host
from cost_models.devices import DEFAULT_EFFICIENCY, Device, DeviceKind, Rates, counted_kind
from cost_models.errors import ClusterError
from cost_models.links import Link, Path
from cost_models.measure.fit import worker_rates
from cost_models.measure.stored import stored_calibration
from cost_models.shown import as_html
from cost_models.spec.checks import cluster_problems
from cost_models.spec.diagnosis import cluster_error
from cost_models.spec.document import Document, read_document
from cost_models.spec.fields import Section, TextField, did_you_mean, expected, problems_error, short_form
from cost_models.spec.presets import DEVICE_LINKS, DEVICES, MACHINE_NETWORKS, MACHINES
from cost_models.spec.provenance import DEFAULTS, RateOrigin, origin_of
from cost_models.spec.rates import MeasuredRates, with_rates
from cost_models.spec.sections import GPU_CONTENTION, DeviceSpec, HostSpec, NodeSpec, bare_name
from cost_models.spec.wiring import NetworkSpec
from cost_models.topology import NodeWiring, Topology
from cost_models.units import format_bandwidth, format_bytes, format_flops_rate, format_seconds, parse_bytes

_WHERE_LISTED = (
    f"docs/presets.md lists the {len(DEVICES)} devices and {len(MACHINES)} machines that there are"
)

__all__ = ["DEFAULTS", "ClusterSpec", "Device", "DeviceKind", "MeasuredRates", "Rates"]


class ClusterSpec(Section):
    """Nodes, their devices, and what joins them. Frozen and hashable; written back, it reads as the same cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    version: Literal[1] = 1
    name: TextField = "cluster"
    """Short text for tables."""
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)
    network: Annotated[NetworkSpec, short_form("preset")] | None = None
    provenance: TextField = DEFAULTS
    """The source of the rates: ``"defaults"``, or ``"calibration <file>"``."""
    host_costs: HostSpec = HostSpec()
    """Contention and overheads of the hosts' runtime; measured by a calibration."""

    # ----------------------------------------------------------------------------------------------
    # Ways in

    @classmethod
    def load(cls, path: str | FilePath) -> Self:
        """Read a YAML or JSON file. One ``ClusterError`` lists every problem, with key path and line."""
        path = FilePath(path)
        document = read_document(path)
        if isinstance(document.data, dict):
            document.data.setdefault("name", path.stem or "cluster")
        return cls._from_document(document, str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "<dict>") -> Self:
        """Make a cluster of plain data in the vocabulary of a file."""
        return cls._from_document(Document(data), source)

    @classmethod
    def _from_document(cls, document: Document, source: str) -> Self:
        data = document.data
        if not isinstance(data, Mapping):
            raise ClusterError(f"{source} has 1 problem", [str(expected("a mapping with nodes", data))])
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise cluster_error(cls, document, source) from error

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> Self:
        """Make a cluster of ``nodes`` machines of a kind (``dgx-h100``), joined by that machine's own network cards."""
        if name not in MACHINES:
            raise ClusterError(
                f'there is no machine preset "{name}"{did_you_mean(name, MACHINES)}',
                [_WHERE_LISTED],
                [f'for devices in one machine: ClusterSpec.parse("{name}:8")'] if name in DEVICES else [],
            )
        _check_count(nodes, "nodes")
        data: dict[str, Any] = {
            "name": f"{name}:{nodes}",
            "nodes": [{"name": bare_name(name), "preset": name, "replicas": nodes}],
        }
        if nodes > 1:
            data["network"] = MACHINE_NETWORKS[name]
        return cls.from_dict(data, source=f"{name}:{nodes}")

    @classmethod
    def one_node(cls, device: str, count: int) -> Self:
        """Make a cluster of ``count`` devices of a kind (``H100-80GB``) in one machine, joined as they usually are."""
        if device not in DEVICES:
            raise ClusterError(
                f'there is no device preset "{device}"{did_you_mean(device, DEVICES)}', [_WHERE_LISTED]
            )
        _check_count(count, "devices")
        node = {"name": "node", "count": count, "device": device, "links": DEVICE_LINKS[device]}
        return cls.from_dict({"name": f"{device}:{count}", "nodes": [node]}, source=f"{device}:{count}")

    @classmethod
    def local(cls, workers: int, memory: str | int | None = None) -> Self:
        """Make a cluster of ``workers`` CPU processes on this machine, over Gloo.

        Each has ``memory``, or an equal part of the machine's; with more workers than cores, also a part of a core.
        Rates are those of this machine's calibration where there is one (``cost_models.measure``).
        """
        _check_count(workers, "workers")
        share = host.memory_bytes() // workers if memory is None else parse_bytes(memory)
        slowdown = max(1.0, workers / host.core_count())
        base = DeviceSpec.model_validate(DEVICES["cpu-worker"])
        assert base.flops is not None
        assert base.memory_bandwidth is not None
        device = {
            "preset": "cpu-worker",
            "memory": share,
            # The interpreter with torch and Gloo loaded takes about 0.4 GiB; never more than a quarter of it all.
            "memory_reserved": min(2**29, share // 4) if memory is None else 0,
            "memory_bandwidth": base.memory_bandwidth / slowdown,
            "flops": {dtype: rate / slowdown for dtype, rate in base.flops.items()},
        }
        node = {
            "name": "local",
            "host": "localhost",
            "count": workers,
            "device": device,
            "links": "Gloo-local",
        }
        cluster = cls.from_dict({"name": f"local:{workers}", "nodes": [node]}, source=f"local:{workers}")
        stored = stored_calibration()
        if stored is None:
            return cluster
        calibration, path = stored
        provenance = f"calibration of {calibration.date} with {calibration.workers} workers ({path})"
        return cluster.with_device_rates(worker_rates(calibration, workers), provenance)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a command line's words: a file, machines (``dgx-h100:8``, ``aws:p5.48xlarge:4``), devices or ``local:2``.

        ``H100-80GB:4`` is four devices in one machine.
        """
        name, colon, count_text = text.rpartition(":")
        if not colon or text in MACHINES:
            name, count_text = text, "" if text == "local" else "1"
        if name == "local" or name in MACHINES or name in DEVICES:
            if not (count_text.isascii() and count_text.isdecimal() and len(count_text) < 9):
                raise ClusterError(
                    f'cannot read the cluster "{text}"', [f'expected a number, as in "{name}:2"']
                )
            count = int(count_text)
            if name == "local":
                return cls.local(count)
            return cls.preset(name, count) if name in MACHINES else cls.one_node(name, count)
        if FilePath(text).suffix in (".yaml", ".yml", ".json") or os.path.exists(text):
            return cls.load(text)
        raise ClusterError(
            f'there is no cluster "{text}"{did_you_mean(name, [*DEVICES, *MACHINES, "local"])}',
            ["it is neither a file nor a preset"],
            [
                "a machine or cloud instance, with how many of them: dgx-h100:2, aws:p5.48xlarge:4",
                "a device, with how many in one machine: H100-80GB:8, RTX4090:2",
                "local:2 for CPU workers on this machine, or the path of a YAML or JSON file",
                _WHERE_LISTED,
            ],
        )

    # ----------------------------------------------------------------------------------------------
    # Out again

    def to_dict(self) -> dict[str, Any]:
        """Return plain data in the vocabulary of a file, with human units where they are exact."""
        data: dict[str, Any] = self.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        return {"version": self.version, **data}

    def save(self, path: str | FilePath) -> None:
        """Write YAML, or JSON where the name ends in ``.json``."""
        path = FilePath(path)
        if path.suffix == ".json":
            text = json.dumps(self.to_dict(), indent=2) + "\n"
        else:
            text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"cannot write {path}", [error.strerror or str(error)]) from error

    @model_validator(mode="after")
    def _joined(self) -> Self:
        if found := cluster_problems(list(self.nodes), self.network):
            raise problems_error(found)
        return self

    def __hash__(self) -> int:
        return self._hash

    def contention(self, ranks: Iterable[int]) -> float:
        """Factor by which computes of these ranks slow down while transfers of theirs are under way."""
        if self.host_costs.contention is not None:
            return self.host_costs.contention
        return GPU_CONTENTION if any(self.devices[rank].counted_as == "cuda" for rank in ranks) else 1.0

    @cached_property
    def _hash(self) -> int:
        return hash(self.model_dump_json())

    # ----------------------------------------------------------------------------------------------
    # What it is made of

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices; ``devices[r].rank == r``, in file order."""
        found: list[Device] = []
        node_index = 0
        for entry in self.nodes:
            full = entry.resolved()
            like = _device(full)
            for node_name, host_name in zip(entry.names(), entry.hosts(), strict=True):
                found += [
                    replace(like, rank=len(found) + i, node=node_index, node_name=node_name, host=host_name)
                    for i in range(full.count or 1)
                ]
                node_index += 1
        return tuple(found)

    @cached_property
    def _alone(self) -> tuple[Device, ...]:
        """The device of each rank without its place and memory: one object for all that compute alike."""
        known: dict[Device, Device] = {}
        return tuple(known.setdefault(alone, alone) for alone in (d.speed_alone for d in self.devices))

    def unlike(self, ranks: Iterable[int]) -> tuple[Device, ...]:
        """Return one device of each kind that computes unlike the others among ``ranks``, without place and memory."""
        alone = self._alone
        return tuple({id(alone[rank]): alone[rank] for rank in ranks}.values())

    @property
    def world_size(self) -> int:
        """The number of devices, which is the number of ranks."""
        return len(self.devices)

    @cached_property
    def ranks_per_node(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, nodes in file order."""
        ranks: dict[int, list[int]] = {}
        for device in self.devices:
            ranks.setdefault(device.node, []).append(device.rank)
        return tuple(tuple(group) for group in ranks.values())

    @cached_property
    def _topology(self) -> Topology:
        wirings = []
        first_rank = 0
        for entry in self.nodes:
            full = entry.resolved()
            for node_name in entry.names():
                wirings.append(NodeWiring(node_name, first_rank, full.count or 1, full.links))
                first_rank += full.count or 1
        return Topology(wirings, self.network)

    @property
    def links(self) -> Mapping[str, Link]:
        """All that transfers compete for, by name (``cost_models.topology`` lists the names)."""
        return self._topology.links

    def path(self, a: int, b: int) -> Path:
        """Return the way from rank ``a`` to rank ``b``; kept, so asking again is a dictionary look-up."""
        count = len(self.devices)
        if not (0 <= a < count and 0 <= b < count):
            raise ClusterError(
                f"there is no path from rank {a} to rank {b}",
                [f"{self.name} has ranks 0 to {self.world_size - 1}"],
            )
        return self._topology.path(a, b)

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all nodes; None if that of one is not known."""
        prices = [(entry.resolved().usd_per_hour, len(entry.names())) for entry in self.nodes]
        known = [price * count for price, count in prices if price is not None]
        return math.fsum(known) if len(known) == len(prices) else None

    @property
    def calibrated(self) -> bool:
        """True if the rates were measured on these devices."""
        return self.provenance != DEFAULTS

    def origin(self, ranks: Collection[int] | None = None) -> RateOrigin:
        """Return the origin of the rates of ``ranks``, all if None: which presets, software, file or calibration."""
        return origin_of(self.nodes, self.provenance, ranks)

    def with_device_rates(self, rates: MeasuredRates, provenance: str, device: str | None = None) -> Self:
        """Return a copy whose devices and links have measured rates; what was not measured stays.

        ``device`` restricts it to one model (``"H100-80GB"``). ``provenance`` names the measurement.
        """
        nodes = tuple(
            with_rates(node, rates) if device in (None, _model_of(node)) else node for node in self.nodes
        )
        if all(new is old for new, old in zip(nodes, self.nodes, strict=True)):
            has = ", ".join(sorted({d.model for d in self.devices}))
            raise ClusterError(f'cannot apply measured rates to "{device}"', [f"{self.name} has {has}"])
        update: dict[str, Any] = {"nodes": nodes, "provenance": provenance}
        if rates.host_costs is not None:
            update["host_costs"] = rates.host_costs
        data = self.model_copy(update=update).to_dict()
        return type(self).from_dict(data, source=f"{self.name} with measured rates")

    def describe(self) -> str:
        """Write a few lines for people: devices by kind, links, what the numbers rest on."""
        lines = [
            f"{self.name}: {self.world_size} devices on {len(self.ranks_per_node)} nodes ({self.origin().text})"
        ]
        kinds = Counter((d.model, d.memory_bytes, d.memory_bandwidth_bytes_per_second) for d in self.devices)
        for (model, memory, bandwidth), count in kinds.items():
            device = next(d for d in self.devices if d.model == model and d.memory_bytes == memory)
            best = max(device.flops_per_second, key=lambda name: device.flops_per_second[name])
            lines.append(
                f"  {count} × {model}: {format_bytes(memory)} usable at {format_bandwidth(bandwidth)}, "
                f"{format_flops_rate(device.flops_per_second[best])} {best}"
            )
        first = self.ranks_per_node[0]
        if len(first) > 1:
            lines.append(f"  inside a node: {_path_text(self.path(first[0], first[1]))}")
        if len(self.ranks_per_node) > 1:
            last = self.ranks_per_node[-1]
            lines.append(f"  between nodes: {_path_text(self.path(first[0], last[0]))}")
        if self.usd_per_hour is not None:
            lines.append(f"  {self.usd_per_hour:,.2f} USD per hour")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.name

    def _repr_html_(self) -> str:
        return as_html(self.describe())


def _path_text(path: Path) -> str:
    return f"{format_bandwidth(path.bandwidth_bytes_per_second)}, {format_seconds(path.latency_seconds)}"


def _check_count(count: int, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 65536:
        raise ClusterError(f"cannot make a cluster of {count} {what}", ["expected 1 to 65536, as in NAME:2"])


def _model_of(node: NodeSpec) -> str:
    device = node.resolved().device
    assert device is not None  # validated
    return device.name or device.preset or "custom"


def _device(node: NodeSpec) -> Device:
    """Make a device of ``node``, as rank 0 of a node without a name."""
    assert node.device is not None  # validated
    full = node.device.resolved()
    kind: DeviceKind = full.kind or "cuda"
    assert full.memory is not None
    assert full.memory_bandwidth is not None
    assert full.flops is not None
    return Device(
        rank=0,
        node=0,
        node_name="",
        host=None,
        model=_model_of(node),
        kind=kind,
        memory_bytes=full.memory - (full.memory_reserved or 0),
        memory_bandwidth_bytes_per_second=full.memory_bandwidth,
        flops_per_second=Rates(full.flops),
        launch_overhead_seconds=full.launch_overhead or 0.0,
        kernel_overhead_seconds=full.kernel_overhead or 0.0,
        efficiency=Rates({**DEFAULT_EFFICIENCY[counted_kind(kind)], **(full.efficiency or {})}),
        op_times=full.op_times,
        context_bytes=full.beside_tensors,
        communicators=full.communicators,
    )
