"""The output of nccl-tests and rccl-tests: of each run the rates of its largest message.

    # nThread 1 nGpus 8 minBytes 8 maxBytes 8589934592 …
    # Using devices
    #  Rank  0 Group  0 Pid  24351 on  host-a device  0 [0x07] NVIDIA A100-SXM4-80GB
    #       size         count      type   redop    root     time   algbw   busbw #wrong   time   algbw   busbw #wrong
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
      8589934592    2147483648     float     sum      -1    64250  133.70  233.97      0    64271  133.65  233.89      0

The second half of a row is in place. Older versions have the columns "redop" and "root" only where the collective has
them, and say "error" for "#wrong"; launchers write words before each line, and NCCL lines between them. Bus bandwidth is
algorithm bandwidth times a factor of the collective
(``FACTORS``), to be compared with links: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cost_models.from_machines.seen import Gpu, ToolText

MAKE = "run it anew up to a large message: all_reduce_perf -b 1M -e 8G -f 2 -g 8"
FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "sendrecv": lambda n: 1.0,
}
"""Bus bandwidth by algorithm bandwidth of n ranks."""
_NAME = re.compile(rf"\b({'|'.join(FACTORS)})_perf")
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+ on\s+(\S+) device\s+\d+ \[[^\]]*\]\s+(.*)"
)
_HEADER = re.compile(r"#\s+(size\s+count\s+type\s.*\bbusbw\b.*)")
_ROW = re.compile(r"(?:^|\s)(\d+\s+\d+\s+[a-z]+[a-z0-9_]*\s.*)")
_ROUNDING = 0.005
"""Rates have two decimals."""


@dataclass(frozen=True)
class MeasuredRate:
    """The rates of the largest message of a run, bytes per second; means of out of place and in place."""

    collective: str
    ranks: int
    per_host: tuple[int, ...]
    """Ranks on each host; one entry with all where no line names hosts."""
    size_bytes: int
    algorithm_rate: float
    bus_rate: float
    source: str
    gpus: tuple[Gpu, ...] = ()
    """The GPUs of the first host."""
    hosts: tuple[str, ...] = ()


@dataclass
class _TestRun:
    """One run as far as it is read."""

    collective: str | None = None
    ranks: list[tuple[str, Gpu]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    best: tuple[int, int, list[str]] | None = None
    """(size, line, cells) of the largest message."""


def read_nccl_tests(text: ToolText) -> tuple[MeasuredRate, ...]:
    """Read every run of a file; ``ClusterError`` names the line of what is none."""
    found: list[MeasuredRate] = []
    run = _TestRun()
    for number, line in enumerate(text.lines, start=1):
        if "Using devices" in line or (run.best is not None and "nThread" in line):
            if run.best is not None:
                found.append(_rate(text, run))
                run = _TestRun()
            run.ranks = []
        if name := _NAME.search(line):
            if run.best is not None and "concluded" not in line:
                found.append(_rate(text, run))
                run = _TestRun()
            run.collective = run.collective if run.best is not None else name[1]
        elif rank := _RANK.search(line):
            run.ranks.append((rank[2], Gpu(rank[3].strip(), text.at(number))))
        elif header := _HEADER.search(line):
            run.columns = header[1].split()
        elif run.columns and (row := _ROW.search(line)) and "NCCL" not in line:
            _read_row(text, number, row[1].split(), run)
    if run.best is not None:
        found.append(_rate(text, run))
    if not found:
        raise text.wrong(None, "it has no row below a line with size, count, type and busbw", MAKE)
    return tuple(found)


def _read_row(text: ToolText, number: int, cells: list[str], run: _TestRun) -> None:
    operation = run.columns.index("redop") if "redop" in run.columns else len(cells)
    if operation < len(cells) == len(run.columns) - 1 and not cells[operation].isalpha():
        cells.insert(operation, "none")  # the old all-to-all leaves it blank
    if len(cells) != len(run.columns):
        raise text.wrong(number, f"expected {len(run.columns)} values, got {len(cells)}", MAKE)
    for column, cell in zip(run.columns, cells, strict=True):
        if column in ("algbw", "busbw") and re.fullmatch(r"\d{1,6}(\.\d{1,4})?", cell) is None:
            raise text.wrong(number, f"{column}: expected GB/s, got {cell!r}", MAKE)
        if column in ("#wrong", "error") and cell not in ("0", "N/A") and float(_plain(cell)) > 1e-3:
            raise text.wrong(
                number, f"{column} is {cell}: the results were wrong", "mend what computes wrongly first"
            )
    size = int(cells[0][:18])
    if run.best is None or size >= run.best[0]:
        run.best = size, number, cells


def _plain(cell: str) -> str:
    """Return a number as it is, of other words one that is too large."""
    return cell if re.fullmatch(r"\d{1,9}(\.\d{1,9})?(e[+-]?\d{1,2})?", cell) else "1"


def _rate(text: ToolText, run: _TestRun) -> MeasuredRate:
    assert run.best is not None
    size, line, cells = run.best
    algorithm, bus = (_mean(run.columns, cells, name) for name in ("algbw", "busbw"))
    if not algorithm or not bus:
        raise text.wrong(line, "the largest message has a bandwidth of 0", MAKE)
    hosts = Counter(host for host, _ in run.ranks)
    collective = run.collective or _guessed(cells, run.columns, bus / algorithm, len(run.ranks))
    if collective is None:
        raise text.wrong(
            line,
            "no line names the collective, and several have such a factor",
            "write the command into the file, such as: # all_gather_perf",
        )
    ranks = len(run.ranks) or _ranks_of(collective, bus / algorithm)
    if ranks is None or ranks < 2:
        raise text.wrong(
            line, "no line before it says how many ranks took part", "keep the lines of `Using devices`"
        )
    slack = _ROUNDING / algorithm + _ROUNDING / bus
    factor = FACTORS[collective](ranks)
    if abs(bus / algorithm / factor - 1) > slack + 1e-3:
        raise text.wrong(
            line,
            f"busbw is {bus / algorithm:.3f} of algbw, but {factor:.3f} for {collective} of {ranks} ranks",
            "keep the lines of `Using devices` of the same run",
        )
    first = run.ranks[0][0] if run.ranks else ""
    return MeasuredRate(
        collective,
        ranks,
        tuple(hosts.values()) or (ranks,),
        size,
        algorithm * 1e9,
        bus * 1e9,
        text.at(line),
        tuple(gpu for host, gpu in run.ranks if host == first),
        tuple(hosts),
    )


def _mean(columns: list[str], cells: list[str], name: str) -> float:
    found = [float(cell) for column, cell in zip(columns, cells, strict=True) if column == name]
    return sum(found) / len(found)


def _guessed(cells: list[str], columns: list[str], factor: float, ranks: int) -> str | None:
    """Name the collective by its columns in old versions, else by its factor and whether it sums."""
    if "error" in columns:
        if "redop" not in columns:
            return "broadcast" if "root" in columns else "all_gather"
        if "root" in columns:
            return "reduce"
        if cells[columns.index("redop")] == "none":
            return "alltoall"
    row = dict(zip(columns, cells, strict=True))
    sums = row.get("redop", "none") != "none" and row.get("root", "-1") == "-1"
    if (
        sums
        and ranks > 1
        and abs(factor - FACTORS["all_reduce"](ranks)) < abs(factor - FACTORS["reduce_scatter"](ranks))
    ):
        return "all_reduce"
    if sums and ranks == 0 and factor > 1.01:
        return "all_reduce"
    return "reduce_scatter" if sums and ranks else None


def _ranks_of(collective: str, factor: float) -> int | None:
    """Return n from 2 (n - 1) / n or (n - 1) / n; None where the factor says nothing of it."""
    part = factor / 2 if collective == "all_reduce" else factor
    return round(1 / (1 - part)) if FACTORS[collective](2) != FACTORS[collective](3) and part < 0.99 else None
