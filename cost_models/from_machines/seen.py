"""Facts that files and outputs of tools say of machines, each with the file and line that says it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cost_models.errors import ClusterError
from cost_models.files import text_of

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class ToolText:
    """A file, or what a command printed, as lines. Colours of a terminal are gone."""

    name: str
    lines: tuple[str, ...]

    @classmethod
    def of(cls, name: str, text: str) -> ToolText:
        """Make it of a text."""
        lines = re.split(r"\r\n|\r|\n", _COLOURS.sub("", text))
        return cls(name, tuple(lines[:-1] if lines[-1] == "" else lines))

    @classmethod
    def load(cls, path: Path) -> ToolText:
        """Read a file; UsageError if it is none, too long or no text."""
        return cls.of(str(path), text_of(path))

    def at(self, line: int) -> str:
        """Name a line, counted from 1: ``"topo.txt, line 3"``."""
        return f"{self.name}, line {line}"

    def wrong(self, line: int | None, cause: str, *tries: str) -> ClusterError:
        """Make the error of a line, or of the whole text: where, why, and what to try."""
        return ClusterError(
            f"cannot read {self.name if line is None else self.at(line)}", [cause], list(tries)
        )


@dataclass(frozen=True)
class Sourced:
    """A value of a cluster file, with where it comes from."""

    value: Any
    source: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver names it. None: not said."""

    name: str
    source: str
    memory_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    preset: str | None = None
    """The preset that it is, where numbers name it and not a driver's words."""


@dataclass(frozen=True)
class BestWay:
    """The best way between two GPUs of a machine: ``NV12`` for 12 NVLinks, ``XGMI1``, or a word of ``PCIE_WORDS``."""

    word: str
    source: str

    @property
    def nvlinks(self) -> int:
        """Return the number of NVLinks; 0 where it is PCIe."""
        return int(self.word[2:]) if self.word.startswith("NV") else 0


PCIE_WORDS: Mapping[str, str] = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host bridge of a CPU",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between CPUs",
}
"""The words of `nvidia-smi topo -m` for ways over PCIe, from near to far, and what each passes."""


@dataclass(frozen=True)
class NetworkCard:
    """A port of a network card. ``near``: the GPUs that reach it without the CPU; None where nothing says it."""

    name: str
    source: str
    near: tuple[int, ...] | None = None
    bits_per_second: float | None = None
    is_infiniband: bool | None = None


@dataclass(frozen=True)
class GpuWiring:
    """The GPUs of one machine, what is between them, and its network cards."""

    count: int
    source: str
    wires: Mapping[tuple[int, int], BestWay] = field(default_factory=dict)
    """The ways by pairs of GPUs, the lower one first."""
    cards: Sequence[NetworkCard] = ()

    def first(self, count: int) -> GpuWiring:
        """Return the first GPUs of the machine, where not all take part."""
        wires = {pair: wire for pair, wire in self.wires.items() if max(pair) < count}
        return replace(self, count=count, wires=wires)


@dataclass(frozen=True)
class Missing:
    """A thing that no file says: what stands in its place, and what would say it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"
