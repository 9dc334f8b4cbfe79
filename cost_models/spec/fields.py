"""The field types of a cluster file: each parses human units, keeps SI base units and writes human units again.

A wrong value raises a ``PydanticCustomError`` that already says expected and got; ``cost_models.spec.diagnosis``
adds the key path.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from cost_models.devices import EFFICIENCY_NAMES, RATE_NAMES
from cost_models.units import (
    BANDWIDTH_EXPECTED,
    FLOPS_EXPECTED,
    SECONDS_EXPECTED,
    SIZE_EXPECTED,
    UnitError,
    bandwidth_text,
    bytes_text,
    flops_text,
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_seconds,
    seconds_text,
    show,
)

Problem = tuple[str, str]
"""(key path below the section, text): one thing that is wrong."""


class Section(BaseModel):
    """A mapping of a cluster file: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


FIELDS_ONLY: Mapping[str, bool] = {"fields_only": True}
"""Validation context under which sections check each value but not the section as a whole."""


def whole(info: ValidationInfo) -> bool:
    """Tell whether to check the section as a whole."""
    return not (info.context or {}).get("fields_only", False)


def problems_error(problems: Iterable[Problem], kind: str = "problems") -> PydanticCustomError:
    """Make one error of several problems of a section; the diagnosis takes it apart again."""
    listed = [list(problem) for problem in problems]
    text = "; ".join(f"{path}: {message}" if path else message for path, message in listed)
    # Braces are pydantic's template characters.
    return PydanticCustomError(kind, "{text}", {"text": text, "problems": listed})


def expected(what: str, got: object) -> PydanticCustomError:
    return PydanticCustomError("expected", "{text}", {"text": f"expected {what}, got {show(got)}"})


MOST_NEAR = 4
"""Names that an error offers in the place of one that there is not."""
MOST_LISTED = 20
"""Names that an error lists; of more it offers those that are near."""


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return ``' (did you mean "H100-80GB" or "H100-PCIE-80GB"?)'``, or nothing where no name is close.

    Names that go on as ``name`` begins come first, then those that contain it, without regard to case and separators;
    else the one that differs least.
    """
    by_letters: dict[str, str] = {}
    for each in names:
        by_letters.setdefault(_letters(each), each)
    wanted = _letters(str(name))
    inside = [letters for letters in by_letters if len(wanted) > 1 and wanted in letters]
    near = sorted(inside, key=lambda letters: not letters.startswith(wanted))[:MOST_NEAR]
    near = near or difflib.get_close_matches(wanted, by_letters, n=1, cutoff=0.5)
    return f" (did you mean {listed_or([by_letters[letters] for letters in near])}?)" if near else ""


def _letters(name: str) -> str:
    """Return a name's letters and digits, in lower case."""
    return "".join(character for character in name.lower() if character.isalnum())


def listed_or(names: Sequence[str]) -> str:
    """Write ``"a", "b" or "c"``."""
    *first, last = (f'"{name}"' for name in names)
    return f"{', '.join(first)} or {last}" if first else last


def _reader(
    parse: Callable[[Any], float], what: str, smallest: float, largest: float, hint: str
) -> Callable[[object], float]:
    def read(value: object) -> float:
        try:
            number = parse(value)
        except UnitError:
            raise expected(what, value) from None
        if not smallest <= number <= largest:
            raise PydanticCustomError(
                "range", "{text}", {"text": f"expected {what} {hint}, got {show(value)}"}
            )
        return number

    return read


def _schema(example: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}], "examples": [example]})


# The bounds catch a forgotten unit ("memory: 80"), not an unusual machine.
SizeField = Annotated[
    int,
    BeforeValidator(_reader(parse_bytes, SIZE_EXPECTED, 2.0**20, 1e18, "of at least 1 MiB")),
    PlainSerializer(bytes_text),
    _schema("80GiB"),
]
ReservedSize = Annotated[
    int,
    BeforeValidator(_reader(parse_bytes, SIZE_EXPECTED, 0, 1e18, "")),
    PlainSerializer(bytes_text),
    _schema("1GiB"),
]
Bandwidth = Annotated[
    float,
    BeforeValidator(_reader(parse_bandwidth, BANDWIDTH_EXPECTED, 1e3, 1e18, "of at least 1 kB/s")),
    PlainSerializer(bandwidth_text),
    _schema("400Gb/s"),
]
Seconds = Annotated[
    float,
    BeforeValidator(_reader(parse_seconds, SECONDS_EXPECTED, 0, 60, "of at most a minute")),
    PlainSerializer(seconds_text),
    _schema("5us"),
]
Rate = Annotated[
    float,
    BeforeValidator(_reader(parse_flops, FLOPS_EXPECTED, 1e6, 1e21, "of at least 1 MFLOPS")),
    PlainSerializer(flops_text),
    _schema("989TFLOPS"),
]


def _known_keys(names: tuple[str, ...], what: str) -> Callable[[object], object]:
    """Reject other keys, all at once, before the values are read."""

    def check(value: object) -> object:
        if not isinstance(value, Mapping) or not value:
            raise expected(what, value)
        unknown = [key for key in value if key not in names]
        if unknown:
            listed = ", ".join(names)
            hints = ((str(key), did_you_mean(key, names)) for key in unknown)
            raise problems_error(
                ((key, f"unknown key{hint}; expected one of {listed}") for key, hint in hints),
                kind="unknown_keys",
            )
        return dict(value)

    return check


Flops = Annotated[
    dict[str, Rate],
    BeforeValidator(
        _known_keys(RATE_NAMES, 'a mapping from dtypes to rates such as {bfloat16: "989TFLOPS"}')
    ),
]


def _efficiency(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return dict.fromkeys(EFFICIENCY_NAMES, _fraction(value))
    what = "a number in (0, 1], or a mapping of matmul, attention, conv, memory to such numbers"
    return _known_keys(EFFICIENCY_NAMES, what)(value)


def _fraction(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise expected("a number in (0, 1]", value)
    return float(value)


Efficiency = Annotated[
    dict[str, Annotated[float, BeforeValidator(_fraction)]],
    BeforeValidator(_efficiency),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "object"}], "examples": [0.6]}),
]
UsdPerHour = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
TextField = Annotated[str, Field(min_length=1, max_length=200)]
CountField = Annotated[int, Field(strict=True, ge=1, le=65536)]
IndexField = Annotated[int, Field(strict=True, ge=0, le=65535)]


def short_form(key: str) -> BeforeValidator:
    """Let a text stand for ``{key: text}`` where a mapping is expected."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def known_name(names: Iterable[str], what: str) -> BeforeValidator:
    """Accept one of ``names``; raise an error that lists them, or those near, for anything else."""
    listed = tuple(names)

    def check(value: object) -> object:
        if value is not None and value not in listed:
            hint = did_you_mean(value, listed) if isinstance(value, str) else ""
            known = ", ".join(listed) if len(listed) <= MOST_LISTED else "docs/presets.md lists them"
            raise PydanticCustomError(
                "preset", "{text}", {"text": f"expected {what} preset ({known}), got {show(value)}{hint}"}
            )
        return value

    return BeforeValidator(check)


# --------------------------------------------------------------------------------------------------
# Names with ranges: ``dgx[00-63]`` is 64 names, ``r[0-1]n[1,4-6]`` is eight

MAX_NAMES = 65536
"""More names than any cluster has nodes: a range beyond it is a slip of the keyboard."""

_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_LITERAL = re.compile(r"[A-Za-z0-9_.\-]*")


def expand_names(text: str) -> tuple[str, ...]:
    """List all names that ``text`` stands for, in order; zeros in front are kept. ``ValueError`` if it is malformed."""
    parts = _BRACKET.split(text)  # literal, range, literal, range, …, literal
    literals, ranges = parts[0::2], parts[1::2]
    for literal in literals:
        if not _LITERAL.fullmatch(literal):
            raise ValueError('a name of letters, digits, "_", "-" and ".", with ranges such as "dgx[00-63]"')
    if not text:
        raise ValueError('a name such as "dgx[00-63]"')
    spans = [_spans(r) for r in ranges]
    total = math.prod(sum(last - first + 1 for first, last, _ in span) for span in spans)
    if total > MAX_NAMES:
        raise ValueError(f"a range of at most {MAX_NAMES} names")
    numbers = [
        [f"{n:0{width}d}" for first, last, width in span for n in range(first, last + 1)] for span in spans
    ]
    return tuple(
        literals[0] + "".join(number + literal for number, literal in zip(chosen, literals[1:], strict=True))
        for chosen in itertools.product(*numbers)
    )


def _spans(text: str) -> list[tuple[int, int, int]]:
    """Read ranges as (first, last, width): ``"00-03,7"`` → ``[(0, 3, 2), (7, 7, 1)]``."""
    spans = []
    for piece in text.split(","):
        match = _SPAN.fullmatch(piece.strip())
        if match is None:
            raise ValueError('a range such as "[00-63]" or "[0,4-7]"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError("a range that counts up")
        spans.append((first, last, len(match[1])))
    return spans


def _names(value: object) -> object:
    if not isinstance(value, str):
        hint = " (quote it)" if isinstance(value, int | float | bool) else ""
        raise expected(f"a name{hint}", value)
    try:
        expand_names(value)
    except ValueError as error:
        raise expected(str(error), value) from None
    return value


NodeNames = Annotated[str, BeforeValidator(_names)]
