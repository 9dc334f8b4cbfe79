"""A saved profile on its way back: the trace that ``engine.profile(...).save(FILE)`` wrote, safe to read from anyone.

    FILE ─► bytes (unpacked, at most MOST_BYTES) ─► JSON ─► facts (what the trace is of) and measured spans and messages

Only slices of the processes "rank N measured" are read; what a viewer shows beside them is not looked at.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from cost_models.errors import UsageError
from cost_models.units import format_seconds
from partitioner.record.file import CUT_OFF, MOST_BYTES, validation_problems, was_cut_off
from runtime.measure.measured_step import RankTimes

KEY = "partitioner_profile"
"""The key of the facts in the trace's ``otherData``, which viewers show as they are."""
MOST_RANKS = 1 << 16
_MICRO = 1e-6
"""Seconds of the unit in which traces count."""
_CUT_SECONDS = 1e-5
"""The most that a rank's compute in the slices may differ from what its facts say: a hundred times what rounding to
nanoseconds takes from a hundred slices."""
_PROFILE_AGAIN = "profile the plan again: engine.profile(batches).save(FILE)"

Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class ProfileFacts:
    """The facts of a profile beside its timelines. Sequences are per rank."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    format: Literal[1] = 1
    model: str
    fingerprint: str
    """The fingerprint of the model's graph, as in the plan."""
    devices: Annotated[tuple[int, ...], Field(min_length=1, max_length=MOST_RANKS)]
    """The device of the plan that each rank plays."""
    step_seconds: Annotated[tuple[Time, ...], Field(min_length=1)]
    """The time of every step: the slowest rank's ``train_step``. Ranks do not begin at one moment, so all of them together
    may take longer."""
    shown: Annotated[int, Field(ge=0)]
    """The number of the step that the rest describes: the median of the full batches, without the first step."""
    samples: Annotated[int, Field(ge=1)]
    """The samples in that step."""
    clock_error_seconds: Time
    """The most that ranks' times may be shifted against each other: 0 on one machine."""
    times: tuple[RankTimes, ...]

    def __post_init__(self) -> None:
        if self.shown >= len(self.step_seconds):
            raise ValueError(f"step {self.shown + 1} is shown of {len(self.step_seconds)}")
        if len(self.times) != len(self.devices):
            raise ValueError(f"times of {len(self.times)} ranks, devices of {len(self.devices)}")
        if len(set(self.devices)) != len(self.devices) or min(self.devices) < 0:
            raise ValueError("every rank plays a device of its own")
        if not all(math.isfinite(n) and n >= 0 for times in self.times for n in vars(times).values()):
            raise ValueError("times are seconds from 0 up")


FACTS = TypeAdapter(ProfileFacts)
"""The reader and writer of the facts."""


class Beside(NamedTuple):
    """Amounts measured and predicted of the same thing, seconds mostly."""

    measured: float
    predicted: float

    @property
    def residual(self) -> float | None:
        """Return measured / predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted > 0.0 else None

    @property
    def residual_text(self) -> str:
        """Write 1.25x, or - where nothing was predicted."""
        return "-" if self.residual is None else f"{self.residual:.2f}x"

    def cells(self, shown: Callable[[float], str] = format_seconds) -> list[str]:
        """Write the cells of a table: measured, predicted, residual."""
        return [shown(self.measured), shown(self.predicted), self.residual_text]


class Slice(NamedTuple):
    """An instruction that occupied its rank; ``name`` is its text."""

    start_seconds: float
    end_seconds: float
    name: str


class SentMessage(NamedTuple):
    """A message on its way from a rank to another one; ``name`` is its label."""

    start_seconds: float
    end_seconds: float
    name: str
    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True)
class MeasuredTrace:
    """The measured step of a saved profile. ``slices``: by rank, by start."""

    facts: ProfileFacts
    slices: tuple[tuple[Slice, ...], ...]
    messages: tuple[SentMessage, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds from the first instruction of any rank to the last one's end."""
        return max((s.end_seconds for slices in self.slices for s in slices), default=0.0)


def read_profile(path: Path) -> MeasuredTrace:
    """Read a saved profile. Raises UsageError that says what is wrong with the file."""
    data = _json(path)
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise _wrong(path, ["expected a trace: an object with a list of traceEvents"])
    other = data.get("otherData")
    if not isinstance(other, Mapping) or KEY not in other:
        raise _wrong(
            path,
            [f"it has no otherData.{KEY}, which tells what was measured"],
            ["a trace of `partitioner simulate` is a prediction: there is nothing measured in it"],
        )
    try:
        facts = FACTS.validate_json(json.dumps(other[KEY]))
    except ValidationError as error:
        raise _wrong(path, [f"otherData.{KEY}: {text}" for text in validation_problems(error)]) from error
    found = _measured(path, facts, events)
    _refuse_cut(path, found)
    return found


def _json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if data[:2] == b"\x1f\x8b":
            unpack = zlib.decompressobj(wbits=31)
            data = unpack.decompress(data, MOST_BYTES + 1)
            if len(data) <= MOST_BYTES and not unpack.eof:
                raise _wrong(path, ["it is packed, and its end is missing: it was cut off"])
    except OSError as error:
        raise _wrong(path, [(error.strerror or str(error)).lower()]) from error
    except zlib.error as error:
        raise _wrong(path, [f"it cannot be unpacked: {error}"]) from error
    if len(data) > MOST_BYTES:
        raise _wrong(path, [f"it is larger than {MOST_BYTES:,} bytes"])
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        because = [f"it is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"]
        raise _wrong(path, because + [CUT_OFF] * was_cut_off(error)) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, endless digits, endless depth
        raise _wrong(path, [f"it is not JSON: {error}"]) from error


def _measured(path: Path, facts: ProfileFacts, events: Sequence[Any]) -> MeasuredTrace:
    """Collect the slices and messages of the measured ranks."""
    rank_of: dict[Any, int] = {}
    for event in events:
        if isinstance(event, dict) and event.get("name") == "process_name":
            name = event["args"].get("name") if isinstance(event.get("args"), dict) else None
            match = re.fullmatch(r"rank ([0-9]{1,6}) measured", name) if isinstance(name, str) else None
            if match and isinstance(event.get("pid"), int):
                rank_of[event["pid"]] = int(match[1])
    world = len(facts.devices)
    if sorted(rank_of.values()) != list(range(world)):
        raise _wrong(path, [f"expected processes of ranks 0 to {world - 1}, each once"])
    slices: defaultdict[int, list[Slice]] = defaultdict(list)
    messages = []
    for number, event in enumerate(events):
        pid = event.get("pid") if isinstance(event, dict) else None
        if not isinstance(pid, int) or event.get("ph") != "X" or pid not in rank_of:
            continue
        start, lasts, name, args = (event.get(key) for key in ("ts", "dur", "name", "args"))
        if not _time(start) or not _time(lasts) or not isinstance(name, str):
            raise _wrong(path, [f"traceEvents[{number}]: expected a name, and ts and dur from 0 up"])
        begin, end = start * _MICRO, (start + lasts) * _MICRO
        if args is None:
            slices[rank_of[pid]].append(Slice(begin, end, name))
        elif isinstance(args, dict) and "to" in args:
            target, size = args["to"], args.get("bytes")
            if type(target) is not int or not 0 <= target < world or type(size) is not int or size < 0:
                raise _wrong(path, [f"traceEvents[{number}]: expected a rank that it goes to, and bytes"])
            messages.append(SentMessage(begin, end, name, rank_of[pid], target, size))
    return MeasuredTrace(
        facts, tuple(tuple(sorted(slices[rank])) for rank in range(world)), tuple(sorted(messages))
    )


def _time(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < 1e15  # type: ignore[operator]


def _refuse_cut(path: Path, trace: MeasuredTrace) -> None:
    """Raise UsageError where slices do not add up to what the profile said of each rank: some are missing, or changed."""
    for rank, (slices, times) in enumerate(zip(trace.slices, trace.facts.times, strict=True)):
        computes = sum(s.end_seconds - s.start_seconds for s in slices if re.match(r"[0-9]+[FBIW]", s.name))
        if abs(computes - times.forward - times.backward) > _CUT_SECONDS + 1e-6 * computes:
            raise _wrong(
                path,
                [
                    f"the computes of rank {rank} add up to {computes:.6f} s, "
                    f"it was {times.forward + times.backward:.6f} s when it was measured: slices are missing or changed"
                ],
            )


def _wrong(path: Path, because: list[str], more: Sequence[str] = ()) -> UsageError:
    return UsageError(f"cannot read the profile {path}", because, [*more, _PROFILE_AGAIN])
