"""The presets of GPUs by the number of their maker and their own on the PCI bus.

Source: the PCI ID database, https://github.com/pciutils/pciids (2026-11). Left out are cards that no preset is of.
"""

from __future__ import annotations

from collections.abc import Mapping

PRESET_OF: Mapping[tuple[int, int], str] = {
    (maker, card): preset
    for maker, cards in (
        (
            0x10DE,
            {
                "P100-PCIE-16GB": (0x15F8,),
                "V100-16GB": (0x1DB1, 0x1DF5),
                "V100-32GB": (0x1DB5, 0x1DB8),
                "V100-PCIE-16GB": (0x1DB4,),
                "T4": (0x1EB8,),
                "A100-40GB": (0x20B0,),
                "A100-80GB": (0x20B2,),
                "A100-PCIE-40GB": (0x20F1, 0x20B1),
                "A100-PCIE-80GB": (0x20B5,),
                "A800-80GB": (0x20F3,),
                "A800-PCIE-80GB": (0x20F5,),
                "A30": (0x20B7,),
                "A10": (0x2236,),
                "A10G": (0x2237,),
                "A40": (0x2235,),
                "A6000": (0x2230,),
                "RTX6000Ada": (0x26B1,),
                "RTXPRO6000": (0x2BB1, 0x2BB5),
                "L4": (0x27B8,),
                "L40": (0x26B5,),
                "L40S": (0x26B9,),
                "H100-80GB": (0x2330,),
                "H100-PCIE-80GB": (0x2331,),
                "H100-NVL-94GB": (0x2321,),
                "H800-80GB": (0x2324,),
                "H20-96GB": (0x2329,),
                "H200-141GB": (0x2335,),
                "GH200-96GB": (0x2342,),
                "B200": (0x2901,),
                "GB200": (0x2941,),
                "B300": (0x3182,),
                "GB300": (0x31C2, 0x31C3),
                "RTX3090": (0x2204,),
                "RTX4090": (0x2684,),
                "RTX5090": (0x2B85,),
            },
        ),
        (
            0x1002,
            {
                "MI210": (0x740F,),
                "MI250X": (0x7408, 0x740C),
                "MI300X": (0x74A1, 0x74B5),
                "MI325X": (0x74A5, 0x74B9),
                "MI350X": (0x75A0,),
                "MI355X": (0x75A3,),
            },
        ),
    )
    for preset, ids in cards.items()
    for card in ids
}
