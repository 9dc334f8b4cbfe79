"""The matrix of `nvidia-smi topo -m`: what is between the GPUs of a machine, and which network cards are near.

        GPU0  GPU1  NIC0  CPU Affinity  NUMA Affinity  GPU NUMA ID          newer drivers
GPU0     X    NV18  PIX   0-55          0              N/A
GPU1    NV18   X    SYS   0-55          0              N/A
NIC0    PIX   SYS    X                                                      no affinity behind a card's cells

Older drivers name cards themselves (``mlx5_0``), have fewer columns behind them, and say SOC for SYS. Columns are parted
by tabs, or by blanks where a terminal wrote them; what stands before and after the matrix is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cost_models.from_machines.seen import PCIE_WORDS, BestWay, GpuWiring, NetworkCard, ToolText

MAKE = "nvidia-smi topo -m > topo.txt"
_OLD_WORDS = {"SOC": "SYS"}
"""The words of drivers before 384 beside today's."""
_NEAR = ("PIX", "PXB")
_AFFINITY = re.compile(r"\b(CPU|NUMA|GPU NUMA) (Affinity|ID)\b")
_GPU = re.compile(r"GPU(\d{1,3})")
_CELL = re.compile(r"X|NV[1-9]\d?|SOC|" + "|".join(PCIE_WORDS))
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)\s*")
_EXPECTED = f"X, NV#, {', '.join(PCIE_WORDS)}"


def read_topo(text: ToolText) -> GpuWiring:
    """Read the matrix; ``ClusterError`` names the line of what is no matrix."""
    header, columns = _header(text)
    rows = _rows(text, header, columns)
    gpus = [name for name in columns if _GPU.fullmatch(name)]
    for name in gpus:
        if name not in rows:
            raise text.wrong(header, f"{name} has a column but no row", f"save the whole output: {MAKE}")
    wires = {}
    for j, second in enumerate(gpus):
        for i, first in enumerate(gpus[:j]):
            wires[i, j] = _wire(text, rows, first, second)
    legend = _legend(text)
    cards = tuple(
        NetworkCard(
            legend.get(name, name),
            text.at(rows[name].line if name in rows else header),
            tuple(i for i, gpu in enumerate(gpus) if rows[gpu].cells[name] in _NEAR),
        )
        for name in columns
        if name not in gpus
    )
    return GpuWiring(len(gpus), text.at(header), wires, cards)


class _MatrixRow:
    """The cells of a row by column, and its line."""

    def __init__(self, line: int, cells: Mapping[str, str]) -> None:
        self.line = line
        self.cells = cells


def _header(text: ToolText) -> tuple[int, list[str]]:
    """Find the line of the header, counted from 1, and its columns without those of affinity."""
    for number, line in enumerate(text.lines, start=1):
        match = _AFFINITY.search(line)
        columns = line[: match.start() if match else None].split()
        if columns and _GPU.fullmatch(columns[0]) and not any(map(_CELL.fullmatch, columns)):
            if twice := [name for name in columns if columns.count(name) > 1]:
                raise text.wrong(number, f"the column {twice[0]} is there twice", f"save it anew: {MAKE}")
            return number, columns
    raise text.wrong(
        None, "no line begins with GPU0, as the header of the matrix does", f"save it with: {MAKE}"
    )


def _rows(text: ToolText, header: int, columns: list[str]) -> dict[str, _MatrixRow]:
    rows: dict[str, _MatrixRow] = {}
    for number, line in enumerate(text.lines[header:], start=header + 1):
        name, *cells = line.split() or [""]
        if name not in columns:
            if _GPU.fullmatch(name):
                cause = "a second matrix begins here" if _header_again(cells) else f"{name} has no column"
                raise text.wrong(
                    number, cause, "give one file for machines that are alike: that of one of them"
                )
            continue
        if name in rows or _header_again(cells):
            raise text.wrong(
                number,
                "a second matrix begins here" if _header_again(cells) else f"{name} has two rows",
                "give one file for machines that are alike: that of one of them",
            )
        rows[name] = _MatrixRow(number, _cells(text, number, name, cells, columns))
    return rows


def _header_again(cells: list[str]) -> bool:
    return bool(cells) and (_GPU.fullmatch(cells[0]) is not None or cells[0] in ("CPU", "NUMA"))


def _cells(text: ToolText, number: int, name: str, cells: list[str], columns: list[str]) -> dict[str, str]:
    if len(cells) < len(columns):
        raise text.wrong(
            number,
            f"{name} has {len(cells)} cells, the header {len(columns)} columns",
            f"save the whole output, no line broken: {MAKE}",
        )
    found = {}
    for column, cell in zip(columns, cells, strict=False):
        if _CELL.fullmatch(cell) is None or (cell == "X") != (column == name):
            raise text.wrong(
                number,
                f"the way from {name} to {column}: expected {'X' if column == name else _EXPECTED}, got {cell!r}",
                "GPUs cut by MIG or by a hypervisor have no such ways: ask on the host, with MIG off"
                if cell in ("N/A", "?")
                else f"save it anew: {MAKE}",
            )
        found[column] = _OLD_WORDS.get(cell, cell)
    return found


def _wire(text: ToolText, rows: Mapping[str, _MatrixRow], first: str, second: str) -> BestWay:
    there, back = rows[first].cells[second], rows[second].cells[first]
    if there != back:
        raise text.wrong(
            rows[second].line,
            f"{second} reaches {first} by {back}, but {first} reaches {second} by {there} (line {rows[first].line})",
            f"save it anew: {MAKE}",
        )
    return BestWay(there, text.at(rows[first].line))


def _legend(text: ToolText) -> dict[str, str]:
    """Read the names behind NIC0, NIC1, …"""
    matches = map(_LEGEND.fullmatch, text.lines)
    return {match[1]: match[2] for match in matches if match}
