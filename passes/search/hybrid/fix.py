"""The parts of a hybrid plan that a user fixes: named degrees, device groups, stage borders. Data only.

pipeline=8 interleave=5 tensor=4 zero=1 microbatch=1 recompute=full        64 devices: 8 groups of 2 x 4, 40 stages
groups=1,3 borders=layers.2                                                one device, then three
data=128 zero=3 microbatch=2 recompute=full                                fully sharded data parallelism
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import get_args

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from passes.search.words import RecomputeMode

MOST = 1 << 20
"""The largest degree: a larger number is a typing error."""
RECOMPUTE: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
ZERO = (0, 1, 3)
QUEUES = ("one", "several")


@dataclass(frozen=True)
class Fix:
    """Everything that was fixed; None: left to the searches. Degrees count devices unless said otherwise."""

    pipeline: int | None = None
    """Device groups, one behind the other."""
    interleave: int | None = None
    """Stages that each group runs, round and round."""
    tensor: int | None = None
    """Devices that share each op's neurons: products by columns, then by rows."""
    sequence: int | None = None
    """The same devices, between products each with its part of the positions."""
    data: int | None = None
    """Replicas in a group: each has its part of the samples."""
    zero: int | None = None
    """0: replicas keep everything; 1: each a part of the optimizer's state; 3: of the parameters too."""
    microbatch: int | None = None
    """Samples of a micro-batch on each replica."""
    recompute: RecomputeMode | None = None
    """none, full or auto: blocks whose activations backward computes again."""
    groups: tuple[int, ...] | None = None
    """Devices of each group, where they are unequal."""
    borders: tuple[str, ...] | None = None
    """Modules whose first ops begin the second stage, the third, and so on."""
    queues: str | None = None
    """one: a device may have one queue for messages and collectives, more is not promised by NCCL; several: each makes
    progress. None: one on GPUs."""

    def one_queue(self, cluster: ClusterSpec) -> bool:
        """Tell whether devices may have one queue each for all that they communicate."""
        on_gpus = any(device.counted_as == "cuda" for device in cluster.devices)
        return on_gpus if self.queues is None else self.queues == "one"

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{name}={_text(value)}" for name, value in given if value is not None)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


NAMES = tuple(f.name for f in fields(Fix))


def read_fix(given: str | Mapping[str, object] | Fix | None) -> Fix:
    """Read ``"pipeline=8 tensor=4"``, or the same as a mapping. Raises UsageError with everything that is wrong."""
    if given is None or isinstance(given, Fix):
        return given or Fix()
    problems: list[str] = []
    if isinstance(given, str):
        words = given.split()
        pairs = [word.partition("=") for word in words]
        problems += [f"{word!r} is not NAME=VALUE" for word, (_, sign, value) in zip(words, pairs, strict=True)
                     if not (sign and value)]  # fmt: skip
        names = [name for name, _, _ in pairs]
        problems += [f"{name} is fixed twice" for name in dict.fromkeys(names) if names.count(name) > 1]
        given = {name: value for name, _, value in pairs}
    elif not isinstance(given, Mapping):
        raise UsageError(f"cannot read what is fixed: {given!r}", [f"a text such as {EXAMPLE!r} is expected"])
    found: dict[str, object] = {}
    for name, value in given.items():
        if name not in NAMES:
            near = "".join(f" (did you mean {n}?)" for n in get_close_matches(str(name), NAMES, n=1))
            problems.append(f"{name!r} cannot be fixed{near}: there are {', '.join(NAMES)}")
        elif value is not None:
            try:
                found[name] = _READERS.get(name, _degree)(value)
            except ValueError as error:
                problems.append(f"{name}={_text(value)}: {error}")
    if problems:
        raise UsageError("cannot read what is fixed", problems, [f"write it as {EXAMPLE!r}"])
    return Fix(**found)  # type: ignore[arg-type]


EXAMPLE = "pipeline=8 tensor=4 zero=1 microbatch=1"


def _degree(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ValueError(f"expected a number from 1 to {MOST:,}")
    return value


def _zero(value: object) -> int:
    if str(value) == "2":
        raise ValueError(
            "gradients are kept whole until the step's end: zero=1 splits what is summed, zero=3 all"
        )
    if isinstance(value, bool) or str(value) not in map(str, ZERO):
        raise ValueError(f"expected one of {', '.join(map(str, ZERO))}")
    return int(str(value))


def _recompute(value: object) -> RecomputeMode:
    for mode in RECOMPUTE:
        if value == mode:
            return mode
    raise ValueError(f"expected one of {', '.join(RECOMPUTE)}")


def _queues(value: object) -> str:
    if value not in QUEUES:
        raise ValueError(f"expected one of {', '.join(QUEUES)}")
    return str(value)


def _list(value: object) -> list[object]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items:
        raise ValueError("expected several, with commas between them")
    return list(items)


def _groups(value: object) -> tuple[int, ...]:
    return tuple(map(_degree, _list(value)))


def _borders(value: object) -> tuple[str, ...]:
    found = _list(value)
    if not all(isinstance(name, str) and name for name in found):
        raise ValueError("expected names of modules, with commas between them")
    return tuple(map(str, found))


_READERS = {"zero": _zero, "recompute": _recompute, "groups": _groups, "borders": _borders, "queues": _queues}


_STAGE = re.compile(r"stage (\d{1,6}):(.*)", re.DOTALL)


def pins_of_stages(pins: Mapping[str, str], stages: int) -> list[dict[str, str]]:
    """Per stage its pins: those of all stages, and its own before them. Raises UsageError."""
    found: list[dict[str, str]] = [{} for _ in range(stages)]
    problems = []
    for own in (False, True):
        for glob, text in pins.items():
            read = _STAGE.fullmatch(glob)
            if bool(read) != own:
                continue
            if read is None:
                for each in found:
                    each[glob] = text
            elif int(read[1]) >= stages or not read[2]:
                problems.append(
                    f"{glob!r}: the plan has stages 0 to {stages - 1}" if read[2] else f"{glob!r}: no glob"
                )
            else:
                found[int(read[1])][read[2]] = text
    if problems:
        raise UsageError("cannot use these pins", problems, ["write them as 'stage 0:*.mlp.*': layout"])
    return found
