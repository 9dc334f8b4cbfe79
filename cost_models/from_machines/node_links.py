"""The ``links`` of a node from what is between its GPUs: rates are those of the presets, as they are reached.

    all pairs by NV18, which no card has links for: a switch      default: NVSwitch
    all pairs by NV4, which a card has links for: wires           default: {mesh: true, bandwidth: …, rings: …}
    some pairs by NV1 and NV2, the others by PCIe                 pairs of their own bandwidth, PCIe as default
    no pair by NVLink                                             the PCIe of the card, by generation and lanes

A link preset says what all links of a card reach together (``LINK_WIRES`` of them); n of them reach n parts of that.
PIX, PXB, PHB, NODE and SYS have one rate here: eight cards behind switches reach 39.4 to 41.1 GB/s, on two sockets 37.6
([P2P5] in docs/presets.md).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.from_machines.seen import Gpu, GpuWiring, Missing, Sourced
from cost_models.spec.presets import DEVICE_LINKS, LINK_WIRES, LINKS
from cost_models.units import bandwidth_text, parse_bandwidth

_LANES = 16
_BRIDGES = {
    "A100-PCIE-40GB": "NVLink-bridge-A100",
    "A100-PCIE-80GB": "NVLink-bridge-A100",
    "H100-PCIE-80GB": "NVLink-bridge-H100",
    "H100-NVL-94GB": "NVLink-bridge-H100",
}
"""The NVLink of cards that are joined by PCIe where they have no bridge."""
_PCIE_BESIDE = {"NVLink2": 3, "NVLink3": 4, "NVLink4": 5, "NVSwitch": 5, "NVLink5": 5, "NVSwitch5": 5}
"""The generation of PCIe beside NVLinks, where no file says it: data sheets of V100, A100, H100; 5 is the last there is."""


def links_of(
    machine: GpuWiring, gpus: Sequence[Gpu], device: str, missing: list[Missing]
) -> dict[str, Any] | None:
    """Return ``links``, None for one GPU; what no file says goes to ``missing``."""
    pairs = machine.wires
    if machine.count == 1:
        return None
    if not pairs:
        missing.append(
            Missing(
                "what is between the GPUs of a node: as such cards are usually joined",
                "--topo FILE says it, the output of: nvidia-smi topo -m",
            )
        )
        return {"default": Sourced(DEVICE_LINKS[device], f"as several {device} are usually joined")}
    source = next(iter(pairs.values())).source
    if DEVICE_LINKS[device].startswith("xGMI"):
        return {"default": _xgmi(device, machine, source, missing)}
    by_wire = {pair: wire for pair, wire in pairs.items() if wire.nvlinks or wire.word.startswith("XGMI")}
    nvlink = _nvlink(device)
    if by_wire and (nvlink is None or not all(wire.nvlinks for wire in by_wire.values())):
        missing.append(
            Missing(
                f"the rate of {_words(by_wire.values())} between {device}: PCIe stands in its place",
                "links.pairs of the file takes it, once it is measured",
            )
        )
        by_wire = {}
    if not by_wire:
        if nvlink is not None and device not in _BRIDGES:
            missing.append(
                Missing(
                    f"NVLinks between {device}, which such cards have: {source} shows none",
                    "`nvidia-smi topo -mp` and GPUs cut by MIG leave them out; ask with: nvidia-smi topo -m",
                )
            )
        return {"default": _pcie(device, gpus, _words(pairs.values()), source, missing)}
    assert nvlink is not None
    most = max(by_wire.values(), key=lambda wire: wire.nvlinks)
    if most.nvlinks > LINK_WIRES[nvlink]:
        missing.append(
            Missing(
                f"why {most.word} is between {device}, which has {LINK_WIRES[nvlink]} NVLinks: these count",
                "another name of the GPUs in --gpus or --device may be theirs",
            )
        )
    counts = {wire.nvlinks for wire in by_wire.values()}
    if len(by_wire) == len(pairs) and (
        machine.count == 2 or min(counts) * (machine.count - 1) > LINK_WIRES[nvlink]
    ):
        return {"default": _switched(nvlink, by_wire, missing)}
    if len(by_wire) == len(pairs) and len(counts) == 1:
        return {"default": _mesh(nvlink, counts.pop(), machine.count, source)}
    return _own_wires(machine, by_wire, nvlink, _pcie(device, gpus, "the other ways", source, missing))


def _xgmi(device: str, machine: GpuWiring, source: str, missing: list[Missing]) -> Sourced:
    """Return the mesh of AMD's GPUs, which is between all of them or was not seen."""
    joined = [wire for wire in machine.wires.values() if wire.word.startswith("XGMI")]
    if len(joined) < len(machine.wires):
        missing.append(
            Missing(
                f"xGMI between {len(machine.wires) - len(joined)} of {len(machine.wires)} pairs: as if all had it",
                "links.pairs of the file takes wires of unlike rates",
            )
        )
    words = _words(machine.wires.values())
    return Sourced(DEVICE_LINKS[device], f"{source}: {words}; rates of the preset")


def _nvlink(device: str) -> str | None:
    usual = DEVICE_LINKS[device]
    return usual if usual in LINK_WIRES else _BRIDGES.get(device)


def _words(wires: Any) -> str:
    """Name the ways, the most frequent first: "SYS and PIX"."""
    names = [word for word, _ in Counter(wire.word for wire in wires).most_common()]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _switched(nvlink: str, by_wire: Mapping[tuple[int, int], Any], missing: list[Missing]) -> Sourced:
    counts = Counter(wire.nvlinks for wire in by_wire.values())
    total = LINK_WIRES[nvlink]
    least = min(counts)
    first = next(wire for wire in by_wire.values() if wire.nvlinks == least)
    if len(counts) > 1:
        missing.append(
            Missing(
                f"why some pairs have {max(counts)} NVLinks and others {least}: the least counts for all",
                "`nvidia-smi nvlink --status` names links that are down",
            )
        )
    source = f"{first.source}: NV{least} between all; rates of the preset"
    if least >= total:
        return Sourced(nvlink, source)
    part = {
        key: _part(LINKS[nvlink][key], least, total)
        for key in ("bandwidth", "in_network")
        if key in LINKS[nvlink]
    }
    return Sourced({"preset": nvlink, **part}, f"{source}, {least} of {total} links")


def _mesh(nvlink: str, count: int, devices: int, source: str) -> Sourced:
    """Make wires between all pairs: those of a ring's own devices add up."""
    wire = _part(LINKS[nvlink]["bandwidth"], count, LINK_WIRES[nvlink])
    rings = {2: wire, devices: _part(LINKS[nvlink]["bandwidth"], count * (devices - 1), LINK_WIRES[nvlink])}
    return Sourced(
        {"bandwidth": wire, "latency": LINKS[nvlink]["latency"], "mesh": True, "rings": rings},
        f"{source}: NV{count} between all, wires without a switch; {count} of the {LINK_WIRES[nvlink]} links of {nvlink}",
    )


def _own_wires(
    machine: GpuWiring, by_wire: Mapping[tuple[int, int], Any], nvlink: str, other: Sourced
) -> dict[str, Any]:
    """Write the pairs that have NVLinks. Where every card uses all of its links, rings of all cards take these alone."""
    total = LINK_WIRES[nvlink]
    latency = LINKS[nvlink]["latency"]
    pairs = [
        Sourced(
            {
                "between": list(pair),
                "bandwidth": _part(LINKS[nvlink]["bandwidth"], min(wire.nvlinks, total), total),
                "latency": latency,
            },
            f"{wire.source}: {wire.word}, {wire.nvlinks} of the {total} links of {nvlink}",
        )
        for pair, wire in sorted(by_wire.items())
    ]
    used = [
        sum(wire.nvlinks for pair, wire in by_wire.items() if gpu in pair) for gpu in range(machine.count)
    ]
    every = len(by_wire) == len(list(itertools.combinations(range(machine.count), 2)))
    if min(used) == total and machine.count > 2:
        value = other.value if isinstance(other.value, dict) else {"preset": other.value}
        rings = {machine.count: LINKS[nvlink]["bandwidth"]}
        other = Sourced({**value, "rings": rings}, f"{other.source}; rings of all take NVLinks alone")
    return {**({} if every else {"default": other}), "pairs": pairs}


def _pcie(device: str, gpus: Sequence[Gpu], words: str, source: str, missing: list[Missing]) -> Sourced:
    """Return the PCIe of a card by its generation and lanes, the least of all cards."""
    usual = DEVICE_LINKS[device]
    known = [gpu.pcie_generation for gpu in gpus if gpu.pcie_generation]
    lanes = [gpu.pcie_width for gpu in gpus if gpu.pcie_width]
    if not known:
        missing.append(
            Missing(
                f"generation and lanes of PCIe: those usual for {device}, {_LANES} lanes",
                "--gpus FILE says it, with pcie.link.gen.max and pcie.link.width.max",
            )
        )
    preset = _pcie_preset(usual, min(known, default=None))
    where = f"{source}: {words}"
    if known:
        where += f"; {gpus[0].source}: PCIe {min(known)}" + (f" with {min(lanes)} lanes" if lanes else "")
    where += "; rates of the preset"
    if not lanes or min(lanes) >= _LANES:
        return Sourced(preset, where)
    row = LINKS[preset]
    part: dict[str, Any] = {"bandwidth": _part(row["bandwidth"], min(lanes), _LANES)}
    if "rings" in row:
        part["rings"] = {int(n): _part(rate, min(lanes), _LANES) for n, rate in row["rings"].items()}
    return Sourced({"preset": preset, **part}, f"{where}, {min(lanes)} of {_LANES} lanes")


def _pcie_preset(usual: str, generation: int | None) -> str:
    """Return the preset of a generation, through the host's memory where the usual one goes through it."""
    if usual.startswith("PCIe"):
        number, _, way = usual.removeprefix("PCIe").partition("-")
        if generation is None or generation >= int(number):
            return usual
        host = "-host" if way.startswith("host") else ""
    else:
        family = usual.partition("-")[0]
        generation = generation or _PCIE_BESIDE.get(family, 4)
        host = ""
    offered = [
        int(name.removeprefix("PCIe").removesuffix("-host"))
        for name in LINKS
        if name.startswith("PCIe")
        and name.endswith(host)
        and name.removeprefix("PCIe").removesuffix(host).isdecimal()
    ]
    return f"PCIe{max((g for g in offered if g <= generation), default=min(offered))}{host}"


def _part(rate: str, count: int, total: int) -> str | float:
    """Return ``count`` of ``total`` parts of a bandwidth, in GB/s with one decimal."""
    return bandwidth_text(round(parse_bandwidth(rate) * count / total, -8))
