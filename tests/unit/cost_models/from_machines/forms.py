"""Outputs of tools in their real forms, kept small: written after public ones, which are named."""

from __future__ import annotations

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def matrix(
    rows: list[str],
    affinity: str = "CPU Affinity\tNUMA Affinity\tGPU NUMA ID",
    cards: tuple[str, ...] = (),
    tail: str = LEGEND,
) -> str:
    """Write a matrix of cells in rows of words; GPUs have affinities behind their cells, cards have none."""
    gpus = [f"GPU{i}" for i in range(len(rows) - len(cards))]
    names = [*gpus, *cards]
    behind = "\t".join(["0-47", *["0", "N/A"][: affinity.count("\t")]])
    lines = ["\t" + "\t".join([*names, affinity])]
    for name, row in zip(names, rows, strict=True):
        cells = [" X " if cell == "X" else cell for cell in row.split()]
        lines.append("\t".join([name, *cells, behind if name in gpus else ""]))
    return "\n".join(lines) + "\n" + tail


def full(word: str, count: int) -> list[str]:
    """Write the rows of GPUs that all reach each other by one word."""
    return [" ".join("X" if i == j else word for j in range(count)) for i in range(count)]


CUBE = [
    "X NV1 NV1 NV2 NV2 SYS SYS SYS",
    "NV1 X NV2 NV1 SYS NV2 SYS SYS",
    "NV1 NV2 X NV2 SYS SYS NV1 SYS",
    "NV2 NV1 NV2 X SYS SYS SYS NV1",
    "NV2 SYS SYS SYS X NV1 NV1 NV2",
    "SYS NV2 SYS SYS NV1 X NV2 NV1",
    "SYS SYS NV1 SYS NV1 NV2 X NV2",
    "SYS SYS SYS NV1 NV2 NV1 NV2 X",
]
"""The hybrid cube mesh of a DGX-1 with V100."""

TOPO: dict[str, tuple[str, str, str]] = {
    # sgl-project/sglang#13973: eight H100 with a card near each
    "h100 and cards": (
        matrix(
            [
                *(
                    f"{row} {' '.join('PIX' if i == j else 'NODE' for j in range(4))}"
                    for i, row in enumerate(full("NV18", 4))
                )
            ]
            + [
                " ".join(
                    ["PIX" if i == j else "NODE" for j in range(4)]
                    + ["X" if i == j else "NODE" for j in range(4)]
                )
                for i in range(4)
            ],
            cards=("NIC0", "NIC1", "NIC2", "NIC3"),
            tail=LEGEND
            + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n  NIC2: mlx5_2\n  NIC3: mlx5_bond_0\n",
        ),
        "H100-80GB",
        "NVSwitch",
    ),
    # NVIDIA/nccl#933: eight A800, eight of its links
    "a800": (matrix(full("NV8", 8), "CPU Affinity\tNUMA Affinity"), "A800-80GB", "NVLink3-A800"),
    # NVIDIA/nccl#1505: DGX A100
    "dgx a100": (matrix(full("NV12", 8), "CPU Affinity\tNUMA Affinity"), "A100-80GB", "NVLink3"),
    # the four GPUs of an HGX A100 without switch
    "a100 mesh": (matrix(full("NV4", 4)), "A100-40GB", "mesh"),
    # HugeCTR's test environment: V100, with cards by their own names
    "v100 cube": (
        matrix([*(f"{row} NODE" for row in CUBE), "NODE " * 8 + "X"], "CPU Affinity", cards=("mlx5_0",)),
        "V100-32GB",
        "pairs",
    ),
    # kubernetes/kubernetes#53497 (2017): eight cards on PCIe, SYS and only one column of affinity
    "pcie 2017": (
        matrix(["X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PIX", "SYS SYS PIX X"], "CPU Affinity"),
        "P100-PCIE-16GB",
        "PCIe3",
    ),
    # drivers before 384 say SOC
    "pcie 2016": (matrix(["X PHB SOC", "PHB X SOC", "SOC SOC X"], "CPU Affinity"), "TitanX-12GB", "PCIe3"),
    # noonghunna/club-3090#1229: two RTX 5090
    "two 5090": (matrix(full("PHB", 2)), "RTX5090", "PCIe5-host"),
    # deepseek-ai/DeepEP#128: a terminal wrote blanks for tabs
    "blanks": (matrix(full("SYS", 3)).expandtabs(8), "L40S", "PCIe4"),
    # Princeton's pages of A100 PCIe with bridges between pairs
    "bridges": (
        matrix(["X NV12 SYS SYS", "NV12 X SYS SYS", "SYS SYS X NV12", "SYS SYS NV12 X"]),
        "A100-PCIE-80GB",
        "pairs",
    ),
    # deepseek-ai/DeepEP#60: with a prompt before it, and colours of the terminal
    "prompt": (
        "root@f51fec68bf55:~# nvidia-smi topo -m\n"
        + matrix(full("NV18", 2))
        .replace("\tGPU0\tGPU1", "\t\x1b[4mGPU0\tGPU1")
        .replace("ID\n", "ID\x1b[0m\n"),
        "H200-141GB",
        "NVSwitch",
    ),
    # a GB10 has one GPU
    "one": (matrix(["X"], tail=""), "GH200-96GB", "none"),
    # a link of one of three is down
    "a link is down": (matrix(["X NV18 NV17", "NV18 X NV18", "NV17 NV18 X"]), "H100-80GB", "scaled"),
}
"""By name: what `nvidia-smi topo -m` printed, the device, and what joins its GPUs."""

GPUS: dict[str, tuple[str, list[str]]] = {
    "units": (
        "index, name, memory.total [MiB], pcie.link.gen.max, pcie.link.width.max\n"
        "0, NVIDIA H100 80GB HBM3, 81559 MiB, 5, 16\n1, NVIDIA H100 80GB HBM3, 81559 MiB, 5, 16\n",
        ["H100-80GB"] * 2,
    ),
    "no units": ("name, memory.total [MiB]\nNVIDIA A100-SXM4-80GB, 81920\n", ["A100-80GB"]),
    "smaller": ("name, memory.total [MiB]\nNVIDIA A100-SXM4-40GB, 40960 MiB\n", ["A100-40GB"]),
    "pcie": ("gpu_name, memory.total [MiB]\nNVIDIA A100 80GB PCIe, 81920 MiB\n", ["A100-PCIE-80GB"]),
    "volta": ("index, name\n1, Tesla V100-SXM2-32GB\n0, Tesla V100-SXM2-32GB\n", ["V100-32GB"] * 2),
    "nvl": ("name, memory.total [MiB]\nNVIDIA H100 NVL, 95830 MiB\n", ["H100-NVL-94GB"]),
    "h200": (
        "name, memory.total [MiB], mig.mode.current\nNVIDIA H200, 143771 MiB, Disabled\n",
        ["H200-141GB"],
    ),
    "geforce": (
        "name, memory.total [MiB], mig.mode.current\nNVIDIA GeForce RTX 4090, 24564 MiB, [N/A]\n",
        ["RTX4090"],
    ),
    "a prompt before it": (
        "$ nvidia-smi …\nname, uuid, memory.total [MiB]\nTesla T4, GPU-1, 15360 MiB\n",
        ["T4"],
    ),
    "listed": (
        "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-e04968e9-3302)\nGPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-11)\n",
        ["A100-80GB"] * 2,
    ),
    "listed without uuid": ("GPU 0: NVIDIA H100 80GB HBM3\n", ["H100-80GB"]),
    "not told": ("name, pcie.link.gen.max\nNVIDIA L40S, [N/A]\n", ["L40S"]),
    "carriage returns": ("name, memory.total [MiB]\r\nNVIDIA A40, 46068 MiB\r\n", ["A40"]),
}
"""By name: what nvidia-smi printed of the GPUs, and their presets."""
