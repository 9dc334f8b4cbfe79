"""ClusterSpec: ways in, ways out, ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from cost_models import host
from cost_models.cluster import ClusterSpec, MeasuredRates
from cost_models.devices import DEFAULT_EFFICIENCY
from cost_models.errors import ClusterError
from cost_models.spec.presets import NEWEST, STACKS

TWO_KINDS = {
    "nodes": [
        {"name": "a", "count": 2, "device": "A100-80GB", "links": "NVLink3", "host_memory": "1TiB"},
        {"name": "b[0-1]", "device": "V100-32GB", "host": "10.0.0.[5-6]"},
        {"name": "c", "replicas": 2, "device": {"preset": "V100-32GB", "memory_reserved": "2GiB"}},
    ],
    "network": {"bandwidth": "100Gb/s", "latency": "10us"},
}


def test_rank_r_is_the_rth_device_in_file_order() -> None:
    cluster = ClusterSpec.from_dict(TWO_KINDS)
    assert [d.rank for d in cluster.devices] == [0, 1, 2, 3, 4, 5]
    assert [d.node_name for d in cluster.devices] == ["a", "a", "b0", "b1", "c-0", "c-1"]
    assert [d.node for d in cluster.devices] == [0, 0, 1, 2, 3, 4]
    assert [d.host for d in cluster.devices] == [None, None, "10.0.0.5", "10.0.0.6", None, None]
    assert [d.model for d in cluster.devices] == ["A100-80GB"] * 2 + ["V100-32GB"] * 4
    assert cluster.ranks_per_node == ((0, 1), (2,), (3,), (4,), (5,))
    assert cluster.nodes[0].resolved().host_memory == 2**40
    assert cluster.devices[3].memory_bytes - cluster.devices[4].memory_bytes == 2 * 2**30


def test_prices_add_up_where_all_are_known() -> None:
    node = {"name": "b[0-2]", "device": "V100-32GB", "usd_per_hour": 3.5}
    data = {
        "nodes": [{"name": "a", "device": "V100-32GB", "usd_per_hour": 0}, node],
        "network": "Ethernet-25G",
    }
    assert ClusterSpec.from_dict(data).usd_per_hour == 10.5
    assert ClusterSpec.from_dict(TWO_KINDS).usd_per_hour is None


def test_the_machines_of_the_command_line() -> None:
    cluster = ClusterSpec.parse("dgx-h100:8")
    assert cluster == ClusterSpec.preset("dgx-h100", nodes=8)
    assert cluster.world_size == 64
    assert cluster.name == str(cluster) == "dgx-h100:8"
    assert not cluster.calibrated
    assert ClusterSpec.parse("dgx-a100").world_size == 8
    four = ClusterSpec.parse("H100-80GB:4")
    assert four.world_size == 4
    assert four.ranks_per_node == ((0, 1, 2, 3),)
    assert four.path(0, 3).bandwidth_bytes_per_second == 365e9
    assert ClusterSpec.parse("local:3").world_size == 3


def test_cloud_instances_of_the_command_line() -> None:
    cluster = ClusterSpec.parse("aws:p5.48xlarge:4")
    assert cluster.world_size == 32
    assert cluster.usd_per_hour == 4 * 55.04
    assert cluster.describe().endswith("\n  220.16 USD per hour")
    assert [device.node_name for device in cluster.devices[::8]] == [f"p5.48xlarge-{i}" for i in range(4)]
    assert ClusterSpec.from_dict(cluster.to_dict()) == cluster
    assert ClusterSpec.parse("gcp:a3-highgpu-8g").world_size == 8
    assert ClusterSpec.parse("azure:ND_H100_v5:2").usd_per_hour == 2 * 100.20
    assert ClusterSpec.parse("RTX4090:2").usd_per_hour is None


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("H100:4", 'did you mean "H100-80GB", "H100-PCIE-80GB", "H100-NVL-94GB" or "dgx-h100"?'),
        ("p5.48xlarge:2", 'did you mean "aws:p5.48xlarge"?'),
        ("rtx 4090", 'did you mean "RTX4090"?'),
        ("azure:ND96isr_H100_v5:2", 'did you mean "azure:ND_H100_v5"?'),
        ("dgx-h100:many", 'cannot read the cluster "dgx-h100:many"'),
        ("local", 'as in "local:2"'),
    ],
)
def test_names_that_there_are_not(text: str, near: str) -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.parse(text)
    assert near in str(caught.value)


def test_accelerators_of_all_makers_are_counted_as_cuda_devices() -> None:
    for name, kind in (
        ("MI300X", "rocm"),
        ("Gaudi2", "hpu"),
        ("TPUv5p", "tpu"),
        ("Max1550", "xpu"),
        ("M1-16GB", "mps"),
    ):
        (device,) = ClusterSpec.parse(f"{name}:1").devices
        assert (device.kind, device.counted_as) == (kind, "cuda")
    assert ClusterSpec.parse("local:1").devices[0].counted_as == "cpu"


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.yml", "cluster.json", "no-suffix"])
@pytest.mark.parametrize("make", [lambda: ClusterSpec.from_dict(TWO_KINDS), lambda: ClusterSpec.local(3)])
def test_what_is_saved_loads_as_the_same(tmp_path: Path, name: str, make: type) -> None:
    cluster: ClusterSpec = make()
    cluster.save(tmp_path / name)
    loaded = ClusterSpec.parse(str(tmp_path / name))
    assert loaded.devices == cluster.devices
    assert loaded.links == cluster.links
    assert loaded.network == cluster.network


def test_a_file_gives_its_name(tmp_path: Path) -> None:
    ClusterSpec.from_dict(TWO_KINDS).save(tmp_path / "lab.yaml")
    assert ClusterSpec.load(tmp_path / "lab.yaml").name == "lab"


@pytest.mark.parametrize(
    "cluster",
    [ClusterSpec.from_dict(TWO_KINDS), ClusterSpec.preset("dgx-v100", 2), ClusterSpec.local(2)],
    ids=str,
)
def test_it_travels_inside_other_models(cluster: ClusterSpec) -> None:
    class Holder(BaseModel):
        cluster: ClusterSpec

    text = Holder(cluster=cluster).model_dump_json()
    again = Holder.model_validate_json(text).cluster
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert again.devices == cluster.devices
    assert ClusterSpec.from_dict(cluster.to_dict()) == cluster
    assert pickle.loads(pickle.dumps(cluster)) == cluster  # noqa: S301 - our own bytes


def test_files_keep_human_units() -> None:
    saved = ClusterSpec.from_dict(TWO_KINDS).to_dict()
    assert saved["network"] == {"bandwidth": "12.5GB/s", "latency": "10us"}
    assert saved["nodes"][0]["host_memory"] == "1TiB"
    assert saved["nodes"][2]["device"] == {"preset": "V100-32GB", "memory_reserved": "2GiB"}


def test_it_is_frozen() -> None:
    cluster = ClusterSpec.local(1)
    with pytest.raises(ValidationError):
        cluster.name = "other"


def test_a_json_schema_exists() -> None:
    schema = ClusterSpec.model_json_schema()
    assert schema["properties"]["nodes"]["minItems"] == 1
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["DeviceSpec"]["properties"]["memory"]["anyOf"][0]["examples"] == ["80GiB"]
    json.dumps(schema)


def test_machine_presets_can_be_changed_key_by_key() -> None:
    node = {"preset": "dgx-h100", "device": {"memory_reserved": "4GiB"}, "count": 4}
    cluster = ClusterSpec.from_dict({"nodes": [node]})
    plain = ClusterSpec.preset("dgx-h100")
    assert cluster.world_size == 4
    assert cluster.devices[0].model == "H100-80GB"
    assert plain.devices[0].memory_bytes - cluster.devices[0].memory_bytes == 4 * 2**30
    other = ClusterSpec.from_dict({"nodes": [{"preset": "dgx-h100", "device": "H200-141GB"}]})
    assert other.devices[7].model == "H200-141GB"
    assert other.devices[7].node_name == "dgx-h100"


def test_flops_replace_the_presets_and_efficiency_adds_to_it() -> None:
    device = {"preset": "H100-80GB", "flops": {"bfloat16": "700T"}, "efficiency": {"matmul": 0.9}}
    rank = ClusterSpec.from_dict({"nodes": [{"device": device}]}).devices[0]
    assert dict(rank.flops_per_second) == {"bfloat16": 700e12}
    assert dict(rank.efficiency) == {
        **DEFAULT_EFFICIENCY["cuda"],
        **STACKS[NEWEST]["H100-80GB"],
        "matmul": 0.9,
    }
    one_number = ClusterSpec.from_dict({"nodes": [{"device": {"preset": "H100-80GB", "efficiency": 0.5}}]})
    assert set(one_number.devices[0].efficiency.values()) == {0.5}


def test_a_stack_says_how_fast_the_software_of_a_time_was() -> None:
    def attention(**keys: str) -> float:
        device = ClusterSpec.from_dict({"nodes": [{"device": {"preset": "H100-80GB", **keys}}]}).devices[0]
        return device.efficiency["attention_backward"]

    assert attention() == attention(stack=NEWEST) == STACKS[NEWEST]["H100-80GB"]["attention_backward"]
    assert attention(stack="2023") < attention()
    with pytest.raises(ClusterError, match="a stack"):
        attention(stack="1999")
    machine = {"nodes": [{"preset": "dgx-h100", "device": {"stack": "2023"}}]}
    assert ClusterSpec.from_dict(machine).devices[0].efficiency["attention_backward"] == attention(
        stack="2023"
    )
    own = {"memory": "8GiB", "memory_bandwidth": "1TB/s", "flops": {"float32": "1T"}, "stack": "2023"}
    with pytest.raises(ClusterError, match="expected a preset beside it"):
        ClusterSpec.from_dict({"nodes": [{"device": own}]})


def test_local_workers_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: 16 * 2**30)
    monkeypatch.setattr(host, "core_count", lambda: 2)
    two, four = ClusterSpec.local(2), ClusterSpec.local(4)
    assert two.devices[0].kind == "cpu"
    assert two.devices[0].host == "localhost"
    assert two.devices[0].memory_bytes == 8 * 2**30 - 2**29
    assert four.devices[0].memory_bytes == 4 * 2**30 - 2**29
    # Two cores for four workers: half the rates.
    assert four.devices[0].flops_per_second["float32"] == two.devices[0].flops_per_second["float32"] / 2
    assert ClusterSpec.local(2, memory="1GiB").devices[1].memory_bytes == 2**30
    # Both directions of a worker's traffic compete: the cores copy.
    assert set(two.path(0, 1).links) == set(two.path(1, 0).links)


def test_this_machine_has_memory_and_cores() -> None:
    assert host.memory_bytes() > 2**28
    assert host.core_count() >= 1


def test_measured_rates_replace_defaults() -> None:
    measured = MeasuredRates(
        flops_per_second={"float32": 8.123456789e10},
        memory_bandwidth_bytes_per_second=1.5e10,
        efficiency={"attention": 0.4},
        launch_overhead_seconds=3e-6,
        link_bandwidth_bytes_per_second=1.25e9,
        link_latency_seconds=5.5e-5,
    )
    cluster = ClusterSpec.local(2)
    calibrated = cluster.with_device_rates(measured, "calibration local.json")
    assert (calibrated.calibrated, calibrated.provenance) == (True, "calibration local.json")
    device = calibrated.devices[1]
    assert device.flops_per_second["float32"] == 8.123456789e10
    assert device.flops_per_second["float64"] == cluster.devices[1].flops_per_second["float64"]
    assert device.memory_bandwidth_bytes_per_second == 1.5e10
    assert device.efficiency["attention"] == 0.4
    assert device.efficiency["matmul"] == cluster.devices[1].efficiency["matmul"]
    assert device.launch_overhead_seconds == 3e-6
    assert device.model == "cpu-worker"
    assert calibrated.path(0, 1).bandwidth_bytes_per_second == 1.25e9
    assert calibrated.path(0, 1).latency_seconds == pytest.approx(5.5e-5)
    assert not cluster.calibrated  # a copy
    assert ClusterSpec.from_dict(calibrated.to_dict()) == calibrated


def test_measured_rates_of_one_model() -> None:
    cluster = ClusterSpec.from_dict(TWO_KINDS)
    faster = cluster.with_device_rates(MeasuredRates({"float16": 1e14}), "calibration x", device="V100-32GB")
    assert faster.devices[0] == cluster.devices[0]
    assert {d.flops_per_second["float16"] for d in faster.devices[2:]} == {1e14}
    with pytest.raises(ClusterError, match="has A100-80GB, V100-32GB"):
        cluster.with_device_rates(MeasuredRates({"float16": 1e14}), "x", device="H100-80GB")


def test_describe_says_what_is_there() -> None:
    assert ClusterSpec.preset("dgx-h100", nodes=8).describe() == (
        "dgx-h100:8: 64 devices on 8 nodes (presets, stack 2025)\n"
        "  64 × H100-80GB: 79.1 GiB usable at 3.35 TB/s, 1.98 PFLOP/s float8\n"
        "  inside a node: 365 GB/s, 3.40 us\n"
        "  between nodes: 50.0 GB/s, 9.60 us"
    )
