"""One cluster of several files: rates by preset and number of links, sources behind them, what no file says."""

from __future__ import annotations

import pytest
import yaml

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError
from cost_models.from_machines.combine import Chosen, FoundCluster, Readings, found_cluster
from cost_models.from_machines.gpu_table import read_gpus
from cost_models.from_machines.seen import ToolText
from cost_models.from_machines.topo_matrix import read_topo
from tests.unit.cost_models.from_machines.forms import GPUS, TOPO, full, matrix


def found(topo: str | None, gpus: str | None = None, **chosen: object) -> FoundCluster:
    seen = Readings(
        read_topo(ToolText.of("topo.txt", topo)) if topo else None,
        read_gpus(ToolText.of("gpus.csv", gpus)) if gpus else (),
    )
    return found_cluster(seen, Chosen(**chosen))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TOPO)
def test_a_matrix_becomes_the_links_of_a_node(name: str) -> None:
    text, device, joined = TOPO[name]
    cluster = found(text, device=device)
    (node,) = cluster.spec.nodes
    links = node.links
    if joined == "none":
        assert links is None
    elif joined == "pairs":
        assert links is not None
        assert links.pairs
        assert links.default is not None
    elif joined == "mesh":
        assert links is not None
        assert links.default is not None
        assert links.default.mesh
    elif joined == "scaled":
        assert links is not None
        assert links.default is not None
        assert links.default.bandwidth == pytest.approx(365e9 * 17 / 18, rel=1e-3)
    else:
        assert links is not None
        assert links.default is not None
        assert links.default.preset == joined
    assert ClusterSpec.from_dict(yaml.safe_load(str(cluster))) == cluster.spec


def test_the_cube_of_a_dgx_has_the_rates_of_its_preset() -> None:
    """Wires in proportion to their links, and rings of all GPUs that take wires alone."""
    ours, preset = found(TOPO["v100 cube"][0], device="V100-32GB").spec, ClusterSpec.preset("dgx-v100")
    assert ours.links["node/port0/out"].rings == preset.links["dgx-v100/port0/out"].rings
    one, two = (ours.path(0, gpu).bandwidth_bytes_per_second for gpu in (1, 3))
    assert two == pytest.approx(2 * one, rel=1e-2)
    assert ours.path(0, 7).bandwidth_bytes_per_second == preset.path(0, 7).bandwidth_bytes_per_second


def test_wires_without_a_switch_add_up_to_what_a_card_reaches() -> None:
    rings = found(TOPO["a100 mesh"][0], device="A100-40GB").spec.links["node/wire0-1/out"].rings
    assert rings is not None
    assert rings.reached(4) == 235e9
    assert rings.reached(2) == pytest.approx(235e9 / 3, rel=1e-2)


def test_pcie_has_the_generation_and_lanes_that_the_driver_tells() -> None:
    table = "name, pcie.link.gen.max, pcie.link.width.max\n" + "NVIDIA GeForce RTX 4090, 3, 8\n" * 2
    cluster = found(matrix(full("PHB", 2)), table)
    (node,) = cluster.spec.nodes
    assert node.links is not None
    assert node.links.default is not None
    assert node.links.default.preset == "PCIe3-host"
    assert node.links.default.bandwidth == 6e9
    assert not cluster.missing


@pytest.mark.parametrize(
    ("topo", "device", "what"),
    [
        (matrix(full("SYS", 2)), "H100-80GB", "NVLinks between H100-80GB, which such cards have"),
        (matrix(full("NV4", 2)), "A6000", "the rate of NV4 between A6000: PCIe stands in its place"),
        (matrix(full("NV18", 4)), "A100-80GB", "why NV18 is between A100-80GB, which has 12 NVLinks"),
        (matrix(full("PIX", 2)), "L40S", "generation and lanes of PCIe"),
        (TOPO["a link is down"][0], "H100-80GB", "why some pairs have 18 NVLinks and others 17"),
    ],
)
def test_what_no_file_says_is_named_at_the_top(topo: str, device: str, what: str) -> None:
    assert f"# missing: {what}" in str(found(topo, device=device)).partition("version:")[0]


def test_several_machines_need_a_network() -> None:
    topo, gpus = TOPO["h100 and cards"][0], GPUS["units"][0].replace("1, NV", "1, NV").splitlines()
    table = "\n".join([gpus[0], *(gpus[1].replace("0, ", f"{i}, ", 1) for i in range(4))])
    cluster = found(topo, table, nodes=3, network="InfiniBand-NDR")
    assert cluster.spec.world_size == 12
    assert "  per: device  # topo.txt, line 6: 4 near a GPU, mlx5_0 …" in str(cluster)
    with pytest.raises(ClusterError, match="cannot tell how fast the nodes reach each other"):
        found(topo, table, nodes=3)
    with pytest.raises(ClusterError, match="did you mean"):
        found(topo, table, nodes=3, network="InfiniBand-NDX")


def test_fewer_cards_than_gpus_and_none() -> None:
    text = matrix(["X SYS PXB", "SYS X PXB", "PXB PXB X"], cards=("mlx5_0",))
    assert (
        found(text, device="L40S", nodes=2, network="InfiniBand-HDR").document["network"]["cards"].value == 1
    )
    cluster = found(matrix(full("SYS", 2)), device="L40S", nodes=2, network="Ethernet-25G")
    assert cluster.document["network"]["per"].value == "node"
    assert "network cards of a node: one for all its GPUs" in str(cluster)


def test_files_that_differ_are_refused() -> None:
    with pytest.raises(ClusterError) as caught:
        found(matrix(full("SYS", 3)), GPUS["units"][0])
    assert caught.value.because == ("topo.txt, line 1 has 3 GPUs, gpus.csv, line 2 2",)
    with pytest.raises(ClusterError, match="cannot tell what the GPUs are"):
        found(matrix(full("SYS", 3)))


def test_nothing_of_a_hostile_file_reaches_a_terminal_or_the_next_line() -> None:
    text = str(found(matrix(full("PIX", 2)), "name\n" + "NVIDIA L40S \x07 \u2028 x: y\n" * 2))
    assert "\x07" not in text
    assert yaml.safe_load(text)["nodes"][0]["count"] == 2
