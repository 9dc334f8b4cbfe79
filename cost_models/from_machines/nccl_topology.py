"""The topology that NCCL found, as it writes it with ``NCCL_TOPO_DUMP_FILE`` (version 1), and RCCL (version 2).

    <system version="1">
      <cpu numaid="0" arch="x86_64" …>
        <pci busid="0000:0f:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">     a switch
          <pci busid="0000:10:00.0" class="0x030200" vendor="0x10de" device="0x20b2" …>
            <gpu dev="0" sm="80" rank="0" gdr="1">                           RCCL: also gcn and arch
              <nvlink target="0000:c4:00.0" count="12" tclass="0x068000"/>   to a switch; RCCL: <xgmi …/>, to a GPU
            </gpu>
          </pci>
          <pci busid="0000:11:00.0" class="0x020700" …><nic><net name="mlx5_0" speed="200000" …/></nic></pci>   Mbit/s

Two GPUs are as near as the switches that both are behind: one (PIX), several (PXB), one CPU (PHB), none (SYS).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from cost_models.from_machines.pci_ids import PRESET_OF
from cost_models.from_machines.seen import BestWay, Gpu, GpuWiring, NetworkCard, ToolText
from cost_models.from_machines.xml_tree import XmlElement, read_xml

MAKE = "NCCL writes it where a run starts with NCCL_TOPO_DUMP_FILE=topo.xml"
_VERSIONS = ("1", "2")
_SWITCH, _INFINIBAND = "0x0680", "0x0207"
"""The first digits of PCI classes: a bridge that is no PCI bridge (NVSwitch), and InfiniBand."""
_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""The generation of PCIe by its transfers, GT/s."""
_MOST_GPUS = 64


def read_nccl_topology(text: ToolText) -> tuple[GpuWiring, tuple[Gpu, ...]]:
    """Read what joins the GPUs of a machine, its network cards, and the GPUs; ``ClusterError`` names the line."""
    system = read_xml(text, MAKE)
    if system.tag != "system":
        raise text.wrong(system.line, f"expected <system>, got <{system.tag}>", MAKE)
    if system.attributes.get("version") not in _VERSIONS:
        got = system.attributes.get("version", "nothing")
        raise text.wrong(system.line, f"version: expected 1 (NCCL) or 2 (RCCL), got {got}", MAKE)
    hosts = {cpu.attributes.get("host_hash", "") for cpu in system.every("cpu")}
    if len(hosts) > 1:
        raise text.wrong(
            system.line,
            f"it is of {len(hosts)} hosts that NVLink joins; one host is read",
            "run on one of them, and plan with a preset such as gb200-tray",
        )
    gpus = sorted(_gpus(text, system), key=lambda gpu: _number(text, gpu, "dev"))
    if not gpus:
        raise text.wrong(system.line, "it has no <gpu> behind a <pci>", MAKE)
    if len(gpus) > _MOST_GPUS:
        raise text.wrong(system.line, f"it has {len(gpus)} GPUs, no machine has so many", MAKE)
    wires = {
        (i, j): BestWay(_way(text, gpus[i], gpus[j]), text.at(gpus[i].line))
        for i, j in itertools.combinations(range(len(gpus)), 2)
    }
    wiring = GpuWiring(len(gpus), text.at(gpus[0].line), wires, _cards(text, system, gpus))
    return wiring, tuple(_gpu(text, gpu) for gpu in gpus)


def _gpus(text: ToolText, system: XmlElement) -> list[XmlElement]:
    """List the GPUs; each is behind a place of its own on the PCI bus."""
    found: dict[str, XmlElement] = {}
    for gpu in system.every("gpu"):
        place = gpu.parent
        if place is None or place.tag != "pci" or "busid" not in place.attributes:
            raise text.wrong(gpu.line, "a <gpu> stands in no <pci> with a busid", MAKE)
        if found.setdefault(place.attributes["busid"], gpu) is not gpu:
            raise text.wrong(gpu.line, f"a second <gpu> is at {place.attributes['busid']}", MAKE)
    return list(found.values())


def _gpu(text: ToolText, gpu: XmlElement) -> Gpu:
    assert gpu.parent is not None
    place = gpu.parent.attributes
    maker, card = (_hexadecimal(place.get(key, "")) for key in ("vendor", "device"))
    known = None if maker is None or card is None else PRESET_OF.get((maker, card))
    arch = gpu.attributes.get("gcn") or f"sm {gpu.attributes.get('sm', '?')}"
    speed = re.match(r"(\d{1,3}(?:\.\d)?) GT/s", place.get("link_speed", ""))
    width = place.get("link_width", "")
    return Gpu(
        f"PCI {place.get('vendor', '?')}:{place.get('device', '?')}, {arch}",
        text.at(gpu.line),
        pcie_generation=_GENERATION.get(float(speed[1])) if speed else None,
        pcie_width=int(width) if re.fullmatch(r"[1-9]\d?", width) else None,
        preset=known,
    )


def _hexadecimal(value: str) -> int | None:
    return int(value, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", value) else None


def _number(text: ToolText, element: XmlElement, name: str) -> int:
    value = element.attributes.get(name, "")
    if re.fullmatch(r"\d{1,9}", value) is None:
        got = f"{value!r}" if name in element.attributes else "nothing"
        raise text.wrong(element.line, f"{name} of <{element.tag}>: expected a number, got {got}", MAKE)
    return int(value)


def _way(text: ToolText, first: XmlElement, second: XmlElement) -> str:
    """Name the best way between two GPUs."""
    for tag, word in (("nvlink", "NV"), ("xgmi", "XGMI")):
        count = max(_direct(text, first, second, tag), _direct(text, second, first, tag))
        count = count or min(_switched(text, first, tag), _switched(text, second, tag))
        if count:
            return f"{word}{count}"
    return _pcie(first, second)


def _direct(text: ToolText, gpu: XmlElement, other: XmlElement, tag: str) -> int:
    """Count the links from one GPU to another."""
    assert other.parent is not None
    place = other.parent.attributes["busid"].lower()
    return sum(
        _number(text, link, "count")
        for link in gpu.every(tag)
        if link.attributes.get("target", "").lower() == place
    )


def _switched(text: ToolText, gpu: XmlElement, tag: str) -> int:
    """Count the links of a GPU to switches."""
    return sum(
        _number(text, link, "count")
        for link in gpu.every(tag)
        if link.attributes.get("tclass", "").startswith(_SWITCH)
    )


def _pcie(first: XmlElement, second: XmlElement) -> str:
    """Say how near two devices are on the PCI bus."""
    above, others = first.above()[1:], second.above()[1:]
    shared = next((element for element in above if element in others), None)
    if shared is None or shared.tag == "system":
        return "SYS"
    if shared.tag == "cpu":
        return "PHB"
    return "PIX" if above[0] is others[0] else "PXB"


def _cards(text: ToolText, system: XmlElement, gpus: Sequence[XmlElement]) -> tuple[NetworkCard, ...]:
    """List the network cards, each once: a card without a place is named below every CPU."""
    found: dict[str, NetworkCard] = {}
    for net in system.every("net"):
        name = net.attributes.get("name") or f"net {net.attributes.get('dev', '?')}"
        place = next((element for element in net.above() if element.tag == "pci"), None)
        near = () if place is None else tuple(i for i, gpu in enumerate(gpus) if _is_near(place, gpu))
        speed = _number(text, net, "speed") if net.attributes.get("speed", "-1") not in ("-1", "0") else 0
        found.setdefault(
            name,
            NetworkCard(
                name,
                text.at(net.line),
                near,
                speed * 1e6 or None,
                place is not None and place.attributes.get("class", "").startswith(_INFINIBAND),
            ),
        )
    return tuple(found.values())


def _is_near(place: XmlElement, gpu: XmlElement) -> bool:
    """Tell whether a PCI switch has both a network card and a GPU behind it."""
    shared = [element for element in place.above() if element in gpu.above()[1:]]
    return bool(shared) and shared[0].tag == "pci"
