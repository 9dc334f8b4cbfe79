"""Hardware files of AIConfigurator and Primus: numbers into a cluster, and one error with its line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cost_models.errors import ClusterError
from cost_models.from_machines.combine import Chosen, FoundCluster, Readings, found_cluster
from cost_models.from_machines.hardware_files import read_hardware
from tests.unit.cost_models.from_machines.hardware_forms import FILES, PRIMUS, system


def found(folder: Path, name: str, text: str, **chosen: object) -> FoundCluster:
    file = folder / name
    file.write_text(text)
    return found_cluster(Readings(hardware=read_hardware(file)), Chosen(**chosen))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read(tmp_path: Path, name: str) -> None:
    text, model, count, inside = FILES[name]
    spec = found(tmp_path, name, text).spec
    assert (spec.devices[0].model, len(spec.ranks_per_node[0])) == (model, count)
    if count > 1:
        assert spec.path(0, 1).bandwidth_bytes_per_second == pytest.approx(inside, rel=1e-3)


def test_a_system_of_aiconfigurator_says_rates_memory_and_network(tmp_path: Path) -> None:
    text, *_ = FILES["h200_sxm_halfbw.yaml"]
    spec = found(tmp_path, "h200_sxm_halfbw.yaml", text, nodes=2).spec
    device = spec.devices[0]
    assert device.memory_bandwidth_bytes_per_second == 2.4e12
    assert device.efficiency["memory"] == 0.8
    assert device.context_bytes == 3758096384 + 411041792
    assert device.flops_per_second["float32"] == 67e12
    assert spec.path(0, 8).bandwidth_bytes_per_second == 12.5e9
    assert spec.path(0, 8).latency_seconds == pytest.approx(1e-5)


def test_a_mesh_of_primus_has_wires(tmp_path: Path) -> None:
    cluster = found(tmp_path, "mi355x.yaml", PRIMUS, nodes=2)
    rings = cluster.spec.links["node0/wire0-1/out"].rings
    assert rings is not None
    assert rings.reached(8) == pytest.approx(537.6e9)
    assert cluster.spec.path(0, 1).latency_seconds == pytest.approx(0.45e-6)
    assert cluster.spec.path(0, 8).bandwidth_bytes_per_second == 50e9
    assert "      cards: 8  #" not in str(cluster)
    assert "  cards: 8  #" in str(cluster)


def test_a_card_without_a_preset_has_the_numbers_of_the_file_alone(tmp_path: Path) -> None:
    cluster = found(tmp_path, "gb10.yaml", FILES["gb10.yaml"][0])
    assert any("rates of gb10 in other types than bfloat16, float8" in str(each) for each in cluster.missing)


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        (
            "- a\n",
            "line 1",
            "expected gpu and node (AIConfigurator) or hardware_config (Primus), got a list of 1",
        ),
        ("gpu: 3\nnode: {}\n", "line 1", "expected a mapping, got 3"),
        (
            system("h100_sxm").replace("mem_bw: 3350000000000", "mem_bw: fast"),
            "line 3",
            'mem_bw: expected a number, got "fast"',
        ),
        (
            system("h100_sxm").replace("per_node: 8", "per_node: 0"),
            "line 10",
            "num_gpus_per_node: expected a number above 0, got 0",
        ),
        (
            system("h100_sxm").replace("per_node: 8", "per_node: 2.5"),
            "line 10",
            "num_gpus_per_node: expected a whole number",
        ),
        ("target_cluster:\n  hardware_config: mi355x.yaml\n", "line 1", "got the name of another file"),
        ("hardware_config:\n  gpu_memory_gb: 192\n", "line 1", "expected node_bw with node_lat"),
        (
            "hardware_config:\n  node_bw: -1\n  node_lat: 1\n",
            "line 2",
            "node_bw: expected a number above 0, got -1",
        ),
    ],
)
def test_what_is_no_hardware_file_is_refused_with_its_line(
    tmp_path: Path, text: str, where: str, cause: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        found(tmp_path, "h100_sxm.yaml", text)
    assert caught.value.what.endswith(f"h100_sxm.yaml, {where}")
    assert cause in caught.value.because[0]
    assert caught.value.suggestions
