"""The preset of a GPU by the driver's name and its memory: "NVIDIA H100 80GB HBM3" with 81,559 MiB is an "H100-80GB"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from cost_models.errors import ClusterError
from cost_models.from_machines.seen import Gpu, Sourced
from cost_models.spec.fields import did_you_mean, listed_or
from cost_models.spec.presets import DEVICES, is_called
from cost_models.units import format_bytes, parse_bytes

SIZE_DIFFERS = 0.1
"""The part by which the driver's size may differ from the preset's, which is torch's: a few percent (8,192 MiB of an
RTX 3070 against 7.78 GiB). Of the presets' cards those nearest in size, of one name, differ by 18% (80 and 94 GB)."""
_SIZE = re.compile(r"(\d{1,4}) ?GB\b")


def device_of(gpus: Sequence[Gpu], chosen: str | None) -> Sourced:
    """Return the one preset of a machine's GPUs; ``chosen`` is the one that the user names."""
    if chosen is not None:
        if chosen not in DEVICES:
            raise ClusterError(
                f'there is no device preset "{chosen}"{did_you_mean(chosen, DEVICES)}',
                suggestions=["docs/presets.md lists them"],
            )
        return Sourced(chosen, "--device")
    if not gpus:
        raise ClusterError(
            "cannot tell what the GPUs are",
            ["the files say how they are joined, not what they are called"],
            ["--gpus FILE, the output of: nvidia-smi -L", "--device PRESET, such as H100-80GB"],
        )
    found = {_preset(gpu): gpu for gpu in reversed(gpus)}
    if len(found) > 1:
        (first, gpu), (second, other) = sorted(found.items(), key=lambda item: gpus.index(item[1]))[:2]
        raise ClusterError(
            "cannot write a machine with unlike GPUs",
            [f"{gpu.source} is of {first}, {other.source} of {second}"],
            ["docs/how-to/unlike-devices.md describes such a machine: one node for each kind"],
        )
    (name,) = found
    return Sourced(name, f"{gpus[0].source}: {_called(gpus[0])}; rates of the preset")


def _preset(gpu: Gpu) -> str:
    if gpu.preset is not None:
        return gpu.preset
    called = [preset for preset in DEVICES if is_called(preset, gpu.name)]
    most = max((_words(preset) for preset in called), default=0)
    alike = [preset for preset in called if _words(preset) == most]
    fitting = [preset for preset in alike if _fits(preset, gpu)]
    if len(fitting) == 1:
        return fitting[0]
    where = f"cannot tell what computes behind {gpu.source}"
    if fitting:
        raise ClusterError(
            where,
            [f"{_called(gpu)} can be {listed_or(fitting)}"],
            [f"--device {fitting[0]}", "a CSV with memory.total in --gpus"],
        )
    near = f"; {listed_or(alike)} has another size" if alike else did_you_mean(_short(gpu.name), DEVICES)
    raise ClusterError(
        where,
        [f"no preset is called {_called(gpu)}{near}"],
        [
            "--device PRESET, one that computes alike (docs/presets.md)",
            "docs/how-to/cluster-files.md, a device without a preset",
        ],
    )


def _words(preset: str) -> int:
    """Count the words of a preset's name beside its size: 2 of "A100-PCIE-80GB"."""
    return sum(not word.endswith("GB") for word in preset.split("-"))


def _fits(preset: str, gpu: Gpu) -> bool:
    """Tell whether the size that the driver reports, else that of the name, is the preset's. True if there is none."""
    size = gpu.memory_bytes or next((int(size) * 10**9 for size in _SIZE.findall(gpu.name)), None)
    return size is None or abs(size / parse_bytes(DEVICES[preset]["memory"]) - 1) < SIZE_DIFFERS


def _called(gpu: Gpu) -> str:
    size = "" if gpu.memory_bytes is None else f" with {format_bytes(gpu.memory_bytes)}"
    return f'"{gpu.name}"{size}'


def _short(name: str) -> str:
    """Leave out of a name what most have: "NVIDIA GeForce RTX 4050 Laptop GPU" -> "RTX 4050"."""
    kept: Iterable[str] = (
        word
        for word in name.split()
        if word.lower() not in ("nvidia", "amd", "geforce", "tesla", "laptop", "gpu")
    )
    return " ".join(kept)
