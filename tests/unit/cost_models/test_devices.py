"""Devices: rates by dtype, and being a cache key."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from cost_models.cluster import ClusterSpec
from cost_models.devices import Rates
from cost_models.errors import ClusterError


def test_a_dtype_without_a_rate_is_refused() -> None:
    device = ClusterSpec.one_node("V100-32GB", 1).devices[0]
    assert device.peak_flops(torch.float16) == 125e12
    assert not device.supports(torch.bfloat16)
    with pytest.raises(ClusterError) as caught:
        device.peak_flops(torch.bfloat16)
    assert caught.value.render() == (
        "error[cluster]: V100-32GB (rank 0, node node) does not support bfloat16\n"
        "  because: flops has no rate for bfloat16; it has float64, float32, float16\n"
        "  try: use one of these dtypes for the model\n"
        '  try: add "bfloat16: <rate>" to device.flops in the cluster file'
    )
    with pytest.raises(ClusterError, match="does not support int64"):
        device.peak_flops(torch.int64)


def test_tf32_only_when_allowed_and_there() -> None:
    a100 = ClusterSpec.one_node("A100-80GB", 1).devices[0]
    assert a100.peak_flops(torch.float32) == 19.5e12
    assert a100.peak_flops(torch.float32, allow_tf32=True) == 156e12
    v100 = ClusterSpec.one_node("V100-32GB", 1).devices[0]
    assert v100.peak_flops(torch.float32, allow_tf32=True) == 15.7e12


def test_a_device_is_a_cache_key() -> None:
    first = ClusterSpec.one_node("A100-80GB", 2).devices
    again = ClusterSpec.one_node("A100-80GB", 2).devices
    assert {device: device.rank for device in first} == {device: device.rank for device in again}
    assert hash(first[0]) == hash(replace(first[1], rank=0))
    assert pickle.loads(pickle.dumps(first[0])) == first[0]  # noqa: S301 - our own bytes, as spawned workers get


def test_rates_are_a_frozen_mapping() -> None:
    rates = Rates({"b": 2.0, "a": 1.0})
    assert rates == {"a": 1.0, "b": 2.0}
    assert rates != {"a": 1.0}
    assert list(rates) == ["a", "b"]
    assert hash(rates) == hash(Rates({"a": 1.0, "b": 2.0}))
    with pytest.raises(KeyError):
        rates["c"]
    with pytest.raises(TypeError):
        rates["a"] = 3.0  # type: ignore[index]
