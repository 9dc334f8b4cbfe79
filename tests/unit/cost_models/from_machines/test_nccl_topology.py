"""NCCL's and RCCL's topology: GPUs by their PCI numbers, links, cards with speeds; all else refused with its line."""

from __future__ import annotations

import pytest

from cost_models.errors import ClusterError
from cost_models.from_machines.combine import Chosen, Readings, found_cluster
from cost_models.from_machines.nccl_topology import read_nccl_topology
from cost_models.from_machines.pci_ids import PRESET_OF
from cost_models.from_machines.seen import ToolText
from cost_models.from_machines.topo_matrix import read_topo
from cost_models.from_machines.written import plain
from cost_models.spec.presets import DEVICES
from tests.unit.cost_models.from_machines.forms import full, matrix
from tests.unit.cost_models.from_machines.xml_forms import NCCL, gpu, net, nvswitch, switch, system


def read(text: str) -> Readings:
    return Readings(nccl=read_nccl_topology(ToolText.of("topo.xml", text)))


@pytest.mark.parametrize("name", NCCL)
def test_a_topology_is_read(name: str) -> None:
    text, device, joined, network = NCCL[name]
    found = found_cluster(read(text), Chosen(nodes=2 if network else 1))
    (node,) = plain(found.document["nodes"])
    assert node["device"] == device
    links = node.get("links", {})
    default = links.get("default")
    assert joined == (
        "pairs" if "pairs" in links else default["preset"] if isinstance(default, dict) else default
    )
    assert plain(found.document.get("network", {})) == network


def test_gpus_are_near_by_the_switches_that_both_are_behind() -> None:
    text = system(
        switch(
            switch(gpu(0, "10de:26b9", []), gpu(1, "10de:26b9", []), at="02"),
            switch(gpu(2, "10de:26b9", []), at="03"),
            net("mlx5_0", 1),
        ),
        gpu(3, "10de:26b9", []) + gpu(4, "10de:26b9", []),
    )
    wiring, gpus = read_nccl_topology(ToolText.of("topo.xml", text))
    words = {pair: wire.word for pair, wire in wiring.wires.items()}
    assert [words[pair] for pair in ((0, 1), (0, 2), (0, 3), (3, 4))] == ["PIX", "PXB", "SYS", "PHB"]
    assert wiring.cards[0].near == (0, 1, 2)
    assert (gpus[0].pcie_generation, gpus[0].pcie_width) == (5, 16)


def test_every_pci_number_is_a_preset() -> None:
    assert set(PRESET_OF.values()) <= set(DEVICES)


def test_nvidia_smi_joins_and_nccl_says_how_fast_cards_are() -> None:
    text, _, _, _ = NCCL["h100"]
    machine = read_topo(ToolText.of("topo.txt", matrix(full("NV18", 4))))
    found = found_cluster(Readings(machine, nccl=read(text).nccl), Chosen(nodes=2))
    assert "default: NVSwitch  # topo.txt, line 2" in str(found)
    assert "preset: InfiniBand-NDR  # topo.xml, line 6: mlx5_0 at 400 Gb/s" in str(found)
    with pytest.raises(ClusterError, match=r"topo.txt, line 1 has 3 GPUs, topo.xml, line 10 4"):
        found_cluster(
            Readings(read_topo(ToolText.of("topo.txt", matrix(full("NV18", 3)))), nccl=read(text).nccl),
            Chosen(),
        )


GOOD = system(gpu(0, "10de:2330", nvswitch(18)))


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("", "line 1", "it is no XML: no element found"),
        ("<system version='1'>\n<cpu>\n</system>", "line 3", "it is no XML: mismatched tag"),
        ("<graphs version='1'/>", "line 1", "expected <system>, got <graphs>"),
        (
            GOOD.replace('version="1"', 'version="3"'),
            "line 1",
            "version: expected 1 (NCCL) or 2 (RCCL), got 3",
        ),
        ('<!DOCTYPE a [<!ENTITY b "c">]>\n' + GOOD, "line 1", "it has a DOCTYPE"),
        (
            '<system version="1"><cpu numaid="0"><pci busid="0000:00:1b.0"/></cpu></system>',
            "line 1",
            "it has no <gpu> behind a <pci>",
        ),
        (
            '<system version="1">\n<cpu>\n<gpu dev="0"/></cpu></system>',
            "line 3",
            "a <gpu> stands in no <pci> with a busid",
        ),
        (
            system(gpu(0, "10de:2330", [], "0:1") + gpu(1, "10de:2330", [], "0:1")),
            "line 7",
            "a second <gpu> is at 0:1",
        ),
        (GOOD.replace('dev="0"', 'dev="first"'), "line 4", "dev of <gpu>: expected a number, got 'first'"),
        (
            system(gpu(0, "10de:2330", nvswitch(18)) + gpu(1, "10de:2330", nvswitch(18))).replace(
                'count="18"', 'count="-1"'
            ),
            "line 5",
            "count of <nvlink>",
        ),
        (
            GOOD.replace("</pci>", f"</pci>{net('eth0', 1)}").replace('speed="1"', 'speed="fast"'),
            "line 9",
            "speed of <net>: expected a number",
        ),
        (
            GOOD.replace("<cpu ", '<cpu host_hash="0x1" ').replace("</cpu>", '</cpu><cpu host_hash="0x2"/>'),
            "line 1",
            "it is of 2 hosts",
        ),
        ("<a>" * 70 + "</a>" * 70, "line 1", "nested deeper"),
    ],
)
def test_what_is_no_topology_is_refused_with_its_line(text: str, where: str, cause: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read(text)
    assert caught.value.what == f"cannot read topo.xml, {where}"
    assert cause in caught.value.because[0]
    assert caught.value.suggestions


def test_a_card_that_no_preset_is_of_needs_its_name() -> None:
    hygon = system(gpu(0, "1d94:55b7", [], sm='sm="90" gcn="21943" arch="38911"'), version=2)
    with pytest.raises(ClusterError, match='no preset is called "PCI 0x1d94:0x55b7, 21943"'):
        found_cluster(read(hygon), Chosen())
    assert found_cluster(read(hygon), Chosen("MI210")).spec.world_size == 1


def test_links_of_another_kind_than_the_card_has_are_named() -> None:
    missing = found_cluster(read(NCCL["mi250x"][0]), Chosen("H100-80GB")).missing
    assert "the rate of XGMI1 between H100-80GB: PCIe stands in its place" in str(missing[0])
