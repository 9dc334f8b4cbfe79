"""The GPUs of a machine as `nvidia-smi` lists them: a CSV of ``--query-gpu``, or the lines of ``-L``.

index, name, memory.total [MiB], pcie.link.gen.max, pcie.link.width.max
0, NVIDIA H100 80GB HBM3, 81559 MiB, 5, 16                                  units or none

GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-…)                                  no memory, no PCIe
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cost_models.from_machines.seen import Gpu, ToolText

QUERY = "index,name,uuid,memory.total,pcie.link.gen.max,pcie.link.width.max,mig.mode.current"
MAKE = f"nvidia-smi --query-gpu={QUERY} --format=csv > gpus.csv"
_LISTED = re.compile(r"GPU (\d{1,3}): (.+?)(?: \(UUID: [^)]*\))?\s*")
_MIG = re.compile(r"\s*MIG \S+\s+Device\s+\d+:.*")
_UNIT = re.compile(r"(.*?)(?: \[.*\])?")
_UNKNOWN = re.compile(r"\[?(?:N/A|Not Supported|Not Available|Insufficient Permissions)\]?|")
"""Texts in the place of a value that the driver does not tell; others in brackets are errors of the card."""
_NAME = ("name", "gpu_name")
_MOST = 64


def read_gpus(text: ToolText) -> tuple[Gpu, ...]:
    """Read the GPUs in order of their index; ``ClusterError`` names the line of what is none."""
    lines = [(number, line) for number, line in enumerate(text.lines, start=1) if line.strip()]
    if not lines:
        raise text.wrong(None, "it is empty", MAKE)
    found = _listed(text, lines) if _LISTED.fullmatch(lines[0][1]) else _table(text, lines)
    if len(found) > _MOST:
        raise text.wrong(None, f"it lists {len(found)} GPUs, no machine has so many", MAKE)
    if len({index for index, _ in found}) < len(found):
        raise text.wrong(
            None, "an index is there twice: the GPUs are of several machines", "one file for each kind"
        )
    return tuple(gpu for _, gpu in sorted(found, key=lambda pair: pair[0]))


def _listed(text: ToolText, lines: list[tuple[int, str]]) -> list[tuple[int, Gpu]]:
    found: list[tuple[int, Gpu]] = []
    for number, line in lines:
        match = _LISTED.fullmatch(line)
        if match is None:
            if _MIG.fullmatch(line):
                raise _cut(text, number, found[-1][0])
            raise text.wrong(number, f'expected "GPU 0: NAME (UUID: …)", got {line.strip()!r}', MAKE)
        found.append((int(match[1]), Gpu(match[2], text.at(number))))
    return found


def _table(text: ToolText, lines: list[tuple[int, str]]) -> list[tuple[int, Gpu]]:
    """Read the rows below the first line that names columns."""
    at = next((i for i, (_, line) in enumerate(lines) if set(_names(line)) & set(_NAME)), None)
    if at is None:
        cause = f"expected a line of column names with name among them, got {lines[0][1].strip()[:80]!r}"
        raise text.wrong(lines[0][0], cause, f"with the names, without noheader: {MAKE}")
    columns = _names(lines[at][1])
    if at + 1 == len(lines):
        raise text.wrong(lines[at][0], "no GPU is below the names of columns", MAKE)
    found: list[tuple[int, Gpu]] = []
    for i, (number, line) in enumerate(lines[at + 1 :]):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(columns):
            raise text.wrong(number, f"expected {len(columns)} values, got {len(cells)}", MAKE)
        row = dict(zip(columns, cells, strict=True))
        index = _number(text, number, row, "index")
        found.append((i if index is None else index, _gpu(text, number, row, i if index is None else index)))
    return found


def _names(line: str) -> list[str]:
    """Read column names without units: ``"name, memory.total [MiB]"`` -> name, memory.total."""
    matches = (_UNIT.fullmatch(cell.strip()) for cell in line.split(","))
    return [match[1] if match else "" for match in matches]


def _gpu(text: ToolText, number: int, row: Mapping[str, str], index: int) -> Gpu:
    name = next(row[key] for key in _NAME if key in row)
    if _UNKNOWN.fullmatch(name) or name.startswith(("[", "ERR!")):
        raise text.wrong(
            number,
            f"GPU {index} has no name but {name!r}: the driver does not reach it",
            "mend it, or leave its line out",
        )
    if row.get("mig.mode.current", "").lower() == "enabled":
        raise _cut(text, number, index)
    mebibytes = _number(text, number, row, "memory.total")
    return Gpu(
        name,
        text.at(number),
        None if mebibytes is None else mebibytes * 2**20,
        _number(text, number, row, "pcie.link.gen.max"),
        _number(text, number, row, "pcie.link.width.max"),
    )


def _cut(text: ToolText, number: int, index: int) -> Exception:
    return text.wrong(
        number,
        f"GPU {index} is cut into MIG instances, which cannot talk to each other",
        f"plan for whole GPUs: sudo nvidia-smi -i {index} -mig 0",
    )


def _number(text: ToolText, number: int, row: Mapping[str, str], column: str) -> int | None:
    """Read a whole number, with MiB behind it or not; None if the column is not there or its value is not told."""
    cell = row.get(column, "")
    if _UNKNOWN.fullmatch(cell):
        return None
    match = re.fullmatch(r"(\d{1,9})(?: MiB)?", cell)
    if match is None:
        raise text.wrong(number, f"{column}: expected a number, got {cell!r}", MAKE)
    return int(match[1])
