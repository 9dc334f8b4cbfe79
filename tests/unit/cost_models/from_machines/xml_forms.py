"""Topologies as NCCL and RCCL write them, kept small: written after public ones, which are named."""

from __future__ import annotations

from collections.abc import Sequence

SPEED = 'link_speed="32.0 GT/s PCIe" link_width="16"'


def gpu(
    dev: int, card: str, links: Sequence[str], busid: str = "", speed: str = SPEED, sm: str = 'sm="90"'
) -> str:
    """Write a GPU behind its place on the PCI bus."""
    maker, number = card.split(":")
    inside = "".join(f"\n<{link}/>" for link in links)
    return (
        f'<pci busid="{busid or f"0000:{dev:x}8:00.0"}" class="0x030200" vendor="0x{maker}" device="0x{number}" {speed}>\n'
        f'<gpu dev="{dev}" {sm} rank="{dev}" gdr="1"'
        + (f">{inside}\n</gpu>" if inside else "/>")
        + "\n</pci>\n"
    )


def net(name: str, speed: int, kind: str = "0x020700", behind: str = "pci") -> str:
    """Write a network card, behind its place on the PCI bus or below a CPU."""
    card = f'<nic>\n<net name="{name}" dev="0" speed="{speed}" port="1" latency="0.000000" guid="0x1" gdr="1"/>\n</nic>\n'
    return (
        f'<pci busid="0000:{name[-1]}9:00.0" class="{kind}" vendor="0x15b3" device="0x1021">\n{card}</pci>\n'
        if behind
        else card
    )


def switch(*inside: str, at: str = "01") -> str:
    """Write a PCI switch."""
    return f'<pci busid="0000:{at}:00.0" class="0x060400" {SPEED}>\n{"".join(inside)}</pci>\n'


def system(*cpus: str, version: int = 1, host: str = "") -> str:
    """Write the whole file, one text for each CPU."""
    inside = "".join(f'<cpu {host}numaid="{i}" arch="x86_64">\n{cpu}</cpu>\n' for i, cpu in enumerate(cpus))
    return f'<system version="{version}">\n{inside}</system>\n'


def nvswitch(*counts: int) -> list[str]:
    return [
        f'nvlink target="0000:0{i}:00.0" count="{count}" tclass="0x068000"' for i, count in enumerate(counts)
    ]


def nvlink(*to: tuple[str, int]) -> list[str]:
    return [f'nvlink target="{target}" count="{count}" tclass="0x030200"' for target, count in to]


def xgmi(*targets: int) -> list[str]:
    return [f'xgmi target="0000:{target:x}8:00.0" count="1" tclass="0x120000"' for target in targets]


FABRIC = ['nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"']
MI300 = 'sm="94" gcn="gfx942" arch="38911"'

NCCL: dict[str, tuple[str, str, object, dict[str, object]]] = {
    # aliyun/SimAI#128
    "h100": (
        system(
            *(
                switch(net(f"mlx5_{i}", 400_000), gpu(i, "10de:2330", nvswitch(4, 5, 5, 4)), at=f"0{i + 1}")
                for i in range(4)
            )
        ),
        "H100-80GB",
        "NVSwitch",
        {"preset": "InfiniBand-NDR", "per": "device"},
    ),
    # a dump of an HGX H200 with RoCE
    "h200 and roce": (
        system(
            switch(
                *(
                    net(f"mlx5_{i}", 400_000, "0x020000") + gpu(i, "10de:2335", nvswitch(5, 5, 4, 4))
                    for i in range(3)
                )
            )
        ),
        "H200-141GB",
        "NVSwitch",
        {"bandwidth": "400Gb/s", "latency": "9.6us", "per": "device"},
    ),
    # NVIDIA/nccl#1505: six switches with two links each, a card for two GPUs
    "a100": (
        system(
            switch(
                gpu(0, "10de:20b2", nvswitch(*[2] * 6), sm='sm="80"'),
                gpu(1, "10de:20b2", nvswitch(*[2] * 6)),
                net("mlx5_0", 200_000),
            ),
            switch(
                gpu(2, "10de:20b2", nvswitch(*[2] * 6)),
                gpu(3, "10de:20b2", nvswitch(*[2] * 6)),
                net("mlx5_1", 200_000),
                at="02",
            ),
        ),
        "A100-80GB",
        "NVLink3",
        {"preset": "InfiniBand-HDR", "cards": 2},
    ),
    # a rented B200: the switches are not seen, a socket below each CPU
    "b200 in a container": (
        system(*(gpu(i, "10de:2901", FABRIC) + net("eth0", 10_000, behind="") for i in range(4))),
        "B200",
        "NVSwitch5",
        {"bandwidth": "10Gb/s", "latency": "9.6us", "cards": 1},
    ),
    # aws p5: four EFA cards of 100 Gb/s for each GPU
    "p5": (
        system(
            *(
                switch(
                    *(net(f"rdmap{4 * i + j}", 100_000, "0x020000") for j in range(4)),
                    gpu(i, "10de:2330", nvswitch(18)),
                    at=f"0{i + 1}",
                )
                for i in range(2)
            )
        ),
        "H100-80GB",
        "NVSwitch",
        {"bandwidth": "400Gb/s", "latency": "9.6us", "per": "device"},
    ),
    # NVIDIA/nccl#820: V100 with wires of their own
    "v100": (
        system(
            gpu(0, "10de:1db5", nvlink(("0000:18:00.0", 2), ("0000:28:00.0", 1))),
            gpu(1, "10de:1db5", nvlink(("0000:08:00.0", 2)))
            + gpu(2, "10de:1db5", nvlink(("0000:08:00.0", 1))),
        ),
        "V100-32GB",
        "pairs",
        {},
    ),
    # NVIDIA/nccl#428: two T4 on two CPUs
    "t4": (
        system(gpu(0, "10de:1eb8", [], speed='link_speed="8 GT/s" link_width="16"'), gpu(1, "10de:1eb8", [])),
        "T4",
        "PCIe3",
        {},
    ),
    # four L40S behind two switches, no speeds known (link_width 0 in virtual machines)
    "virtual": (
        system(
            switch(*(gpu(i, "10de:26b9", [], speed='link_speed="Unknown" link_width="0"') for i in range(4)))
        ),
        "L40S",
        "PCIe4",
        {},
    ),
    # RCCL's version 2: eight MI300X
    "mi300x": (
        system(
            *(
                switch(
                    gpu(i, "1002:74a1", xgmi(*(j for j in range(4) if j != i)), sm=MI300),
                    net(f"bnxt_re{i}", 400_000, "0x020000"),
                    at=f"0{i + 1}",
                )
                for i in range(4)
            ),
            version=2,
        ),
        "MI300X",
        "xGMI-MI300X",
        {"bandwidth": "400Gb/s", "latency": "9.6us", "per": "device"},
    ),
    # RCCL with old numbers for gcn
    "mi250x": (
        system(
            *(gpu(i, "1002:7408", xgmi(1 - i), sm='sm="90" gcn="910" arch="39"') for i in range(2)), version=2
        ),
        "MI250X",
        "xGMI-MI250X",
        {},
    ),
    # a tray of GB300 with its CPU's links, as one host
    "gb300": (
        system(
            *(gpu(i, "10de:31c2", [*FABRIC, 'c2c bw="44712" count="5"']) for i in range(4)),
            host='host_hash="0x8393" ',
        ),
        "GB300",
        "NVLink5",
        {},
    ),
    # a file written by hand, with a declaration and a comment
    "by hand": (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!-- a node -->\n'
        + system(gpu(0, "10de:20f1", []) + gpu(1, "10de:20f1", [])),
        "A100-PCIE-40GB",
        "PCIe4",
        {},
    ),
    # one GPU
    "one": (system(gpu(0, "10de:2342", [])), "GH200-96GB", None, {}),
}
"""By name: the file, the device, what joins its GPUs, and the network where it says the speed of cards."""
