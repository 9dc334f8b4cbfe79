"""Measured rates in place of a preset's: what a calibration hands to ``ClusterSpec.with_device_rates``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.op_profile import OpTimes
from cost_models.spec.sections import HostSpec, NodeSpec
from cost_models.spec.wiring import LinkSpec


@dataclass(frozen=True)
class MeasuredRates:
    """Rates that were measured; what is ``None`` or has no key was not, and stays as it is.

    ``flops_per_second`` and ``efficiency`` are merged key by key. The link rates are those inside a node
    (``links.default``).
    """

    flops_per_second: Mapping[str, float] | None = None
    memory_bandwidth_bytes_per_second: float | None = None
    efficiency: Mapping[str, float] | None = None
    launch_overhead_seconds: float | None = None
    kernel_overhead_seconds: float | None = None
    link_bandwidth_bytes_per_second: float | None = None
    link_latency_seconds: float | None = None
    op_times: OpTimes | None = None
    host_costs: HostSpec | None = None
    """Overheads of the hosts, for the cluster as a whole."""


def with_rates(node: NodeSpec, rates: MeasuredRates) -> NodeSpec:
    """Return the node with ``rates`` written over its device's and its default link's."""
    full = node.resolved()
    assert full.device is not None  # validated
    device = full.device.resolved()
    new = _given(
        memory_bandwidth=rates.memory_bandwidth_bytes_per_second,
        launch_overhead=rates.launch_overhead_seconds,
        kernel_overhead=rates.kernel_overhead_seconds,
        op_times=rates.op_times,
    )
    if rates.flops_per_second is not None:
        new["flops"] = {**(device.flops or {}), **rates.flops_per_second}
    if rates.efficiency is not None:
        new["efficiency"] = {**(device.efficiency or {}), **rates.efficiency}
    update: dict[str, Any] = {"device": full.device.model_copy(update=new)}
    link = _given(bandwidth=rates.link_bandwidth_bytes_per_second, latency=rates.link_latency_seconds)
    if link and full.links is not None and full.links.default is not None:
        default: LinkSpec = full.links.default.model_copy(update=link)
        update["links"] = full.links.model_copy(update={"default": default})
    return node.model_copy(update=update)


def _given(**values: object) -> dict[str, object]:
    return {key: value for key, value in values.items() if value is not None}
