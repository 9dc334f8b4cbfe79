"""Hardware files of other planners: AIConfigurator's ``systems/*.yaml`` and Primus' ``hardware_config``.

AIConfigurator (bytes, seconds; per GPU and direction)      in the file
gpu.mem_bw, gpu.bfloat16_tc_flops, fp8_tc_flops             device: memory_bandwidth, flops
gpu.mem_bw_empirical_scaling_factor                         device: efficiency of memory
gpu.mem_capacity                                            device: the memory of the preset if it is near, else this
misc.other_mem + misc.nccl_mem[num_gpus_per_node]           device: memory_process
node.intra_node_bw, inter_node_bw, p2p_latency              links, network (a card for each device)

Primus (GB/s, us)
node_bw, node_lat, node_size, node_topology                 links; of a mesh node_bw is that of all wires of a GPU
pod_bw, pod_lat, nics_per_node                              network, of one card
bw_eff                                                      part of both bandwidths that is reached
target_cluster: num_nodes, gpus_per_node, gpu_arch          nodes, GPUs of each, their preset
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cost_models.errors import ClusterError
from cost_models.from_machines.seen import Gpu, Sourced
from cost_models.spec.document import Document, read_document
from cost_models.units import bandwidth_text, bytes_text, flops_text, seconds_text, show

_HELP = "the keys are in docs/how-to/clusters-from-machines.md, Hardware files of other planners"
_RATES = {"bfloat16": "bfloat16_tc_flops", "float16": "float16_tc_flops", "float8": "fp8_tc_flops"}
_CARDS = 65536


@dataclass(frozen=True)
class HardwareFile:
    """The parts of a cluster that a hardware file says. Empty or None: not said."""

    card: Gpu
    """The card by its name and memory, so far as the file names it."""
    device: Mapping[str, Sourced] = field(default_factory=dict)
    count: Sourced | None = None
    nodes: int | None = None
    links: Mapping[str, Sourced] = field(default_factory=dict)
    network: Mapping[str, Sourced] = field(default_factory=dict)


def read_hardware(path: Path) -> HardwareFile:
    """Read a file of one of the two; ``ClusterError`` names the line of what is wrong."""
    try:
        document = read_document(path)
    except ClusterError as error:
        raise ClusterError(error.what, error.because, error.suggestions or [_HELP]) from error
    reader = _Keys(path, document)
    data = document.data if isinstance(document.data, dict) else {}
    if "gpu" in data and "node" in data:
        return _aiconfigurator(reader)
    if "hardware_config" in data or "target_cluster" in data:
        return _primus(reader)
    raise ClusterError(
        f"cannot read {path}, line 1",
        [f"expected gpu and node (AIConfigurator) or hardware_config (Primus), got {show(document.data)}"],
        [_HELP],
    )


class _Keys:
    """Numbers of a YAML file by their keys, with the line that says each."""

    def __init__(self, path: Path, document: Document) -> None:
        self.path = path
        self.document = document

    def at(self, *keys: str | int) -> str:
        """Name the place of a key."""
        return f"{self.path}, line {self.document.lines.get(keys, 1)}"

    def value(self, *keys: str | int) -> Any:
        """Return what stands behind keys; None if nothing does."""
        found: Any = self.document.data
        for i, key in enumerate(keys):
            if found is None:
                return None
            if not isinstance(found, Mapping):
                raise self.wrong(f"expected a mapping, got {show(found)}", *keys[:i])
            found = found.get(key)
        return found

    def number(self, *keys: str | int, most: float = 1e18) -> float | None:
        """Return a number above 0; None if the key is not there."""
        found = self.value(*keys)
        if found is None:
            return None
        if isinstance(found, str):  # "157e12" is a text in YAML 1.1
            try:
                found = float(found)
            except ValueError:
                raise self.wrong(f"{keys[-1]}: expected a number, got {show(found)}", *keys) from None
        if (
            isinstance(found, bool)
            or not isinstance(found, int | float)
            or not 0 < found <= most
            or math.isinf(found)
        ):
            raise self.wrong(f"{keys[-1]}: expected a number above 0, got {show(found)}", *keys)
        return float(found)

    def count(self, *keys: str | int) -> int | None:
        """Return a whole number from 1; None if the key is not there."""
        found = self.number(*keys, most=_CARDS)
        if found is not None and found != int(found):
            raise self.wrong(f"{keys[-1]}: expected a whole number, got {found:g}", *keys)
        return None if found is None else int(found)

    def wrong(self, cause: str, *keys: str | int) -> ClusterError:
        """Make the error of a key."""
        return ClusterError(f"cannot read {self.at(*keys)}", [cause], [_HELP])


def _aiconfigurator(keys: _Keys) -> HardwareFile:
    name = str(keys.value("data_dir") or keys.path.stem).rstrip("/").rpartition("/")[2]
    capacity = keys.number("gpu", "mem_capacity")
    device: dict[str, Sourced] = {}
    if (bandwidth := keys.number("gpu", "mem_bw")) is not None:
        device["memory_bandwidth"] = Sourced(bandwidth_text(bandwidth), keys.at("gpu", "mem_bw"))
    flops = {
        rate: flops_text(number)
        for rate, key in _RATES.items()
        if (number := keys.number("gpu", key, most=1e21)) is not None
    }
    if flops:
        device["flops"] = Sourced(flops, f"{keys.at('gpu')}: tensor cores")
    if (part := keys.number("gpu", "mem_bw_empirical_scaling_factor", most=1.0)) is not None:
        device["efficiency"] = Sourced({"memory": part}, keys.at("gpu", "mem_bw_empirical_scaling_factor"))
    count = keys.count("node", "num_gpus_per_node")
    if (process := _process_bytes(keys, count)) is not None:
        device["memory_process"] = process
    latency = keys.number("node", "p2p_latency", most=60)
    links, network = (
        _rates(keys, ("node", key), 1.0, None if latency is None else ("node", "p2p_latency"), 1.0)
        for key in ("intra_node_bw", "inter_node_bw")
    )
    if network:
        network["per"] = Sourced("device", f"{network['bandwidth'].source}, for each GPU")
    return HardwareFile(
        Gpu(name.replace("_", " "), keys.at("data_dir"), None if capacity is None else int(capacity)),
        device,
        None if count is None else Sourced(count, keys.at("node", "num_gpus_per_node")),
        None,
        links,
        network,
    )


def _process_bytes(keys: _Keys, count: int | None) -> Sourced | None:
    """Return what a process holds beside tensors: NCCL's buffers for a node's GPUs, and all else."""
    other = keys.number("misc", "other_mem")
    if other is None:
        return None
    nccl = keys.value("misc", "nccl_mem")
    sizes = (
        [size for size in nccl if isinstance(size, int) and size <= (count or 1)]
        if isinstance(nccl, Mapping)
        else []
    )
    most = max(sizes, default=None)
    buffers = 0 if most is None or not nccl[most] else keys.number("misc", "nccl_mem", most) or 0
    return Sourced(
        bytes_text(int(other + buffers)),
        f"{keys.at('misc', 'other_mem')}: other_mem + nccl_mem of {most or 1}",
    )


def _primus(keys: _Keys) -> HardwareFile:
    target: tuple[str, ...] = ("target_cluster",) if keys.value("target_cluster") is not None else ()
    top = (
        (*target, "hardware_config")
        if target and isinstance(keys.value(*target, "hardware_config"), Mapping)
        else ("hardware_config",)
    )
    if keys.value(*top) is None or isinstance(keys.value(*top), str):
        raise keys.wrong("expected hardware_config with its keys, got the name of another file", *target)
    reached = keys.number(*top, "bw_eff", most=1.0) or 1.0
    size = (*top, "node_size") if keys.count(*top, "node_size") else (*top, "gpus_per_node")
    if target and keys.count(*target, "gpus_per_node"):
        size = (*target, "gpus_per_node")
    count = keys.count(*size)
    links = _rates(keys, (*top, "node_bw"), 1e9 * reached, (*top, "node_lat"), 1e-6)
    if links and count and count > 1 and keys.value(*top, "node_topology") == "mesh":
        whole = keys.number(*top, "node_bw") or 0.0
        source = links["bandwidth"].source
        every = _text(whole * 1e9 * reached)
        wire = _text(whole * 1e9 * reached / (count - 1))
        links["bandwidth"] = Sourced(wire, f"{source}, by {count - 1} wires of a mesh")
        links["mesh"] = Sourced(True, keys.at(*top, "node_topology"))
        links["rings"] = Sourced({2: wire, count: every} if count > 2 else {2: wire}, source)
    network = _rates(keys, (*top, "pod_bw"), 1e9 * reached, (*top, "pod_lat"), 1e-6)
    if network and (cards := keys.count(*top, "nics_per_node")):
        network["cards"] = Sourced(cards, keys.at(*top, "nics_per_node"))
    if not links and not network:
        raise keys.wrong("expected node_bw with node_lat, or pod_bw with pod_lat", *top)
    arch = keys.value(*target, "gpu_arch") if target else None
    return HardwareFile(
        Gpu(
            str(arch or keys.path.stem).replace("_", " "),
            keys.at(*target, "gpu_arch") if arch else f"{keys.path}, its name",
        ),
        {},
        None if count is None else Sourced(count, keys.at(*size)),
        keys.count(*target, "num_nodes") if target else None,
        links,
        network,
    )


def _rates(
    keys: _Keys, bandwidth: tuple[str, ...], unit: float, latency: tuple[str, ...] | None, seconds: float
) -> dict[str, Sourced]:
    """Return bandwidth and latency of a link; nothing where the file has no bandwidth or no latency of it."""
    rate = keys.number(*bandwidth)
    lasts = keys.number(*latency) if latency is not None else None
    if rate is None or lasts is None or latency is None:
        return {}
    return {
        "bandwidth": Sourced(_text(rate * unit), f"{keys.at(*bandwidth)}, {bandwidth[-1]}"),
        "latency": Sourced(seconds_text(round(lasts * seconds, 12)), f"{keys.at(*latency)}, {latency[-1]}"),
    }


def _text(rate: float) -> str | float:
    """Write bytes per second, to the MB/s."""
    return bandwidth_text(round(rate, -6))
