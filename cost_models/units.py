"""Quantities as people write them, and back: files and flags speak human units, code speaks SI base units.

Bytes, bytes per second, seconds and floating-point operations per second. ``b`` is a bit and ``B`` a byte
(``400Gb/s`` = ``50GB/s``); ``k M G T P E`` are powers of 1000 and ``Ki Mi Gi Ti Pi Ei`` of 1024. A bare number is
already in base units. Parsing is exact (decimal, not binary, arithmetic) up to the final float.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import TypeVar

from cost_models.errors import UsageError

SIZE_EXPECTED = 'a size such as "80GiB"'
BANDWIDTH_EXPECTED = 'a bandwidth such as "400Gb/s" or "50GB/s"'
SECONDS_EXPECTED = 'a time such as "5us"'
FLOPS_EXPECTED = 'a rate such as "989TFLOPS"'

_DECIMAL_PREFIXES = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_BINARY_PREFIXES = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_PREFIXES: dict[str, Decimal] = {p: Decimal(1000) ** n for p, n in _DECIMAL_PREFIXES.items()} | {
    p: Decimal(1024) ** n for p, n in _BINARY_PREFIXES.items()
}
_BITS_PER_BYTE = Decimal(8)

_BYTE_UNITS = {f"{p}B": scale for p, scale in _PREFIXES.items()}
_BANDWIDTH_UNITS = {f"{p}B/s": scale for p, scale in _PREFIXES.items()} | {
    f"{p}{bit}": scale / _BITS_PER_BYTE for p, scale in _PREFIXES.items() for bit in ("b/s", "bit/s", "bps")
}
_SECOND_UNITS = {
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
}
_FLOPS_UNITS = {
    f"{p}{unit}": Decimal(1000) ** n
    for p, n in _DECIMAL_PREFIXES.items()
    for unit in ("", "FLOPS", "FLOP/s", "FLOPs")
    if p or unit
}

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(\S*)\s*")

Number = TypeVar("Number", int, float)


class UnitError(UsageError, ValueError):
    """A quantity that cannot be read."""


def parse_bytes(value: str | int | float) -> int:
    """Read bytes: ``"80GiB"``, ``"80GB"`` or a number of bytes → bytes."""
    return round(_parse(value, _BYTE_UNITS, SIZE_EXPECTED))


def parse_bandwidth(value: str | int | float) -> float:
    """Read a bandwidth: ``"400Gb/s"`` (bits), ``"50GB/s"`` (bytes) or a number → bytes per second."""
    return float(_parse(value, _BANDWIDTH_UNITS, BANDWIDTH_EXPECTED))


def parse_seconds(value: str | int | float) -> float:
    """Read a time: ``"5us"``, ``"1.5ms"`` or a number of seconds → seconds."""
    return float(_parse(value, _SECOND_UNITS, SECONDS_EXPECTED))


def parse_flops(value: str | int | float) -> float:
    """Read a rate: ``"989TFLOPS"``, ``"989T"`` or a number → floating-point operations per second."""
    return float(_parse(value, _FLOPS_UNITS, FLOPS_EXPECTED))


def _parse(value: object, units: Mapping[str, Decimal], expected: str) -> Decimal:
    number = _number_of(value, units)
    if number is None or not number.is_finite() or number < 0 or number > Decimal("1e30"):
        raise UnitError(f"expected {expected}, got {show(value)}")
    return number


def _number_of(value: object, units: Mapping[str, Decimal]) -> Decimal | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return Decimal(repr(value))  # repr, so that 0.1 stays 0.1
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) and len(value) <= 64 else None
    if match is None:
        return None
    scale = units.get(match[2]) if match[2] else Decimal(1)
    return None if scale is None else Decimal(match[1]) * scale


def show(value: object, limit: int = 60) -> str:
    """Quote a value as an error message does: short, text in double quotes, nothing for what is absent."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        text = '"' + value.replace("\n", "\\n") + '"'
    elif isinstance(value, Mapping):
        text = "a mapping with " + ", ".join(map(str, list(value)[:6])) if value else "an empty mapping"
    elif isinstance(value, list | tuple):
        text = f"a list of {len(value)}" if value else "an empty list"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --------------------------------------------------------------------------------------------------
# Back to people. ``format_*`` rounds, for tables; ``*_text`` is exact, for files.


def format_bytes(size_bytes: float) -> str:
    """Write bytes: ``85899345920`` → ``"80.0 GiB"``."""
    return _scaled(size_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def format_bandwidth(bytes_per_second: float) -> str:
    """Write a bandwidth in bytes per second: ``5e10`` → ``"50.0 GB/s"``."""
    return _scaled(bytes_per_second, 1000.0, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s", "EB/s"))


def format_flops(flops: float) -> str:
    """Write a count of operations: ``2.5e12`` → ``"2.50 TFLOP"``."""
    return _scaled(flops, 1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"))


def format_flops_rate(flops_per_second: float) -> str:
    """Write a rate of operations per second: ``9.89e14`` → ``"989 TFLOP/s"``."""
    return f"{format_flops(flops_per_second)}/s"


def format_seconds(seconds: float) -> str:
    """Write seconds: ``0.00123`` → ``"1.23 ms"``. Two hours are ``"2.00 h"``; shorter ones stay in seconds or below."""
    if abs(seconds) >= 3600 and seconds not in (float("inf"), float("-inf")):
        return f"{_three_digits(seconds / 3600)} h"
    return _scaled(seconds * 1e9, 1000.0, ("ns", "us", "ms", "s"))


def seconds_between(seconds: float, low: float, high: float) -> str:
    """Write seconds with the range they lie in: ``"584 ms (520–670)"``."""
    return _between(format_seconds(seconds), low, high)


def bytes_between(size_bytes: float, low: float, high: float) -> str:
    """Write bytes with the range they lie in: ``"71.0 GiB (68–74)"``."""
    return _between(format_bytes(size_bytes), low, high)


def _between(text: str, low: float, high: float) -> str:
    """Add the range to a text, in the text's unit; a value of nothing or of infinity has none."""
    if not 0 < low <= high < math.inf:
        return text
    unit = float({**_BYTE_UNITS, **_SECOND_UNITS, "h": Decimal(3600)}[text.rpartition(" ")[2]])
    return f"{text} ({_two_digits(low / unit)}–{_two_digits(high / unit)})"


def _two_digits(value: float) -> str:
    """Write two significant digits, three where the first is a 1: 0.0973 -> "0.097", 1.234 -> "1.23", 668 -> "670"."""
    power = math.floor(math.log10(value))
    decimals = (1 if value >= 2 * 10**power else 2) - power
    return f"{round(value, decimals):.{max(0, decimals)}f}"


def counted(number: int, word: str) -> str:
    """Write a count in words: 1, "stage" → "1 stage"; 2,000 → "2,000 stages"."""
    ending = "" if number == 1 else "es" if word.endswith(("s", "ch", "x")) else "s"
    return f"{number:,} {word}{ending}"


def listed(items: Iterable[object], most: int | None = None, *, count_rest: bool = False) -> str:
    """Name the first ``most`` of ``items``: 3, 4, 5 with 2 -> "3, 4, …", or "3, 4, and 1 more" with ``count_rest``."""
    words = [str(item) for item in items]
    shown = words[:most]
    rest = len(words) - len(shown)
    if rest:
        shown.append(f"and {rest:,} more" if count_rest else "…")
    return ", ".join(shown)


def percent(part: float) -> str:
    """Write a share: 0 → "0%", 0.0004 → "0.04%", 0.123 → "12.3%"."""
    return "0%" if part == 0 else f"{part:.1%}" if abs(part) >= 0.001 else f"{part:.2%}"


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return f"{value} {units[0]}"
    index = 0
    # 0.9995 and not 1: a value that would round up to four digits belongs to the next unit.
    while abs(value) >= base * 0.9995 and index < len(units) - 1:
        value, index = value / base, index + 1
    whole_units = units[0] in ("B", "FLOP") and index == 0 and value == int(value)
    return f"{int(value)} {units[0]}" if whole_units else f"{_three_digits(value)} {units[index]}"


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if value else "0"


def bytes_text(size_bytes: int) -> str | int:
    """Write bytes in the shortest exact text: ``85899345920`` → ``"80GiB"``; a number where no unit is exact."""
    return _exact(
        size_bytes, ("PiB", "TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB"), parse_bytes, _BYTE_UNITS
    )


def bandwidth_text(bytes_per_second: float) -> str | float:
    """Write a bandwidth exactly: ``5e10`` → ``"50GB/s"``."""
    return _exact(bytes_per_second, ("TB/s", "GB/s", "MB/s", "kB/s"), parse_bandwidth, _BANDWIDTH_UNITS)


def seconds_text(seconds: float) -> str | float:
    """Write seconds exactly: ``5e-6`` → ``"5us"``."""
    return _exact(seconds, ("s", "ms", "us", "ns"), parse_seconds, _SECOND_UNITS)


def flops_text(flops_per_second: float) -> str | float:
    """Write a rate of operations exactly: ``9.89e14`` → ``"989TFLOPS"``."""
    return _exact(flops_per_second, ("TFLOPS", "GFLOPS", "MFLOPS"), parse_flops, _FLOPS_UNITS)


def _exact(
    value: Number, names: tuple[str, ...], parse: Callable[[str], Number], units: Mapping[str, Decimal]
) -> str | Number:
    for name in names:
        number = Decimal(repr(value)) / units[name]
        text = f"{number.normalize():f}{name}"
        # Read back rather than trusted: what is saved must load as the same number.
        if 1 <= number < 10000 and len(text) <= 20 and parse(text) == value:
            return text
    return value


def runs(numbers: Iterable[int]) -> str:
    """Write numbers as runs: [0, 1, 2, 5] -> "0-2,5"."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)
