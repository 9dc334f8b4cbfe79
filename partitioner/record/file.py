"""Records and their files: data that cannot change and admits nothing unknown, written atomically, read from anyone.

    bytes ─► text (at most MOST_BYTES) ─► JSON (bounded numbers and depth) ─► Plan (types, then consistency)

Whatever is wrong is a PlanError that names the key path. Nothing is evaluated, imported or unpickled.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    WrapSerializer,
)

from cost_models.errors import PlanError
from cost_models.files import replace_file
from cost_models.shown import ShownInNotebooks
from cost_models.spec.document import key_path
from cost_models.units import show
from passes.search.certificate import Certificate

Natural = NonNegativeInt
"""A number of things, a size in bytes, a rank or a stage."""
Amount = NonNegativeFloat
"""Seconds, or a cost."""
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
"""A function from the data of one version of a file to that of the next."""


class Record(BaseModel):
    """A part of a plan."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True
    )


def _without_absent_terms(certificate: Certificate, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
    data: dict[str, Any] = handler(certificate)
    return data if certificate.terms is not None else {k: v for k, v in data.items() if k != "terms"}


CertificateField = Annotated[Certificate, WrapSerializer(_without_absent_terms)]
"""The search's certificate, in JSON without the terms of searches that have none."""


def package_version() -> str:
    """Return the installed version; "source" when run from a checkout that is not installed."""
    try:
        return version("partitioner")
    except PackageNotFoundError:
        return "source"


MOST_BYTES = 1 << 28
"""The largest file: a plan of 100,000 ops has some 20 MB."""
MOST_DEPTH = 40
LARGEST = 1 << 63
"""The largest number: no count, size in bytes or time in seconds is as large."""
MOST_PROBLEMS = 20

ANEW = "make the plan anew with `partitioner plan … -o plan.json`"
_OTHER_KINDS = {"graph": "a plan of a cost graph, not of a model"}
"""Other kinds of plan files by their field ``kind``, which plans of models do not have."""
_NO_MODEL = "it says which node goes where, and holds no model, no cluster and no programs"
_SHOW_INSTEAD = "`partitioner show`, `partitioner graph` and `partitioner report` take it"
CUT_OFF = "the file ends there: it was cut off"
_UNFINISHED = re.compile(r"|-|\.|[eE][-+]?|u[0-9a-fA-F]{0,4}|t|tr|tru|f|fa|fal|fals|n|nu|nul")
"""The rest of a JSON text from where it was not understood, if it ends within a number, a word or an escaped character."""
GIVE_PLAN = "give the file that `partitioner plan … -o plan.json` wrote"


class PlanFile(ShownInNotebooks, Record):
    """A record with a file of its own."""

    _called: ClassVar[str] = "plan"
    _anew: ClassVar[str] = f"{ANEW}; plans are not meant to be edited"
    """The words of errors: what the file should be, and where to get one."""

    _version: ClassVar[int] = 1
    _upgrades: ClassVar[Mapping[int, Upgrade]] = {}
    """Earlier versions that are read, and what makes them the next one."""

    schema_version: int

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Atomic: a crash leaves the previous file, never half of a new one."""
        write_text(Path(path), self.to_json())

    def to_json(self) -> str:
        """Return the text of the plan's file."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan file; safe with files from anyone. Raises PlanError with every problem found."""
        return cls.from_json(read_text(path), source=str(path))

    @classmethod
    def from_json(cls, text: str, *, source: str = "<text>") -> Self:
        """Parse a plan; ``source`` names it in errors."""
        data = read_json(text, source, (*cls._upgrades, cls._version))
        if data["schema_version"] != cls._version:
            while data["schema_version"] != cls._version:
                data = cls._upgrades[data["schema_version"]](data)
            text = json.dumps(data)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            kind = data.get("kind")
            if isinstance(kind, str) and kind in _OTHER_KINDS and "kind" not in cls.model_fields:
                raise PlanError(f"{source} is {_OTHER_KINDS[kind]}", [_NO_MODEL], [_SHOW_INSTEAD]) from error
            raise PlanError(
                f"{source} is not a valid {cls._called}", validation_problems(error), [cls._anew]
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON data."""
        data: dict[str, Any] = json.loads(self.model_dump_json())
        return data


def write_text(target: Path, text: str) -> None:
    """Replace ``target`` by ``text``. Atomic: a crash leaves the previous file, never half of a new one."""
    try:
        replace_file(target, text)
    except OSError as error:
        raise PlanError(f"cannot write the plan to {target}", because=[_reason(error)]) from error


def read_text(path: str | os.PathLike[str]) -> str:
    """Read the file's text."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read the plan {path}", [_reason(error)], [GIVE_PLAN]) from error
    if len(data) > MOST_BYTES:
        raise PlanError(
            f"cannot read the plan {path}", [f"it is larger than {MOST_BYTES:,} bytes"], [GIVE_PLAN]
        )
    if not data.strip():
        raise PlanError(f"cannot read the plan {path}", ["it is empty"], [GIVE_PLAN])
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(
            f"cannot read the plan {path}", [f"byte {error.start} is not UTF-8 text"], [GIVE_PLAN]
        ) from error


def was_cut_off(error: json.JSONDecodeError) -> bool:
    """Tell if the text was JSON as far as it went, and ended too early."""
    rest = error.doc[error.pos :].rstrip()
    return error.pos > 0 and (
        error.msg.startswith("Unterminated string") or bool(_UNFINISHED.fullmatch(rest))
    )


def read_json(text: str, source: str, versions: Sequence[int]) -> dict[str, Any]:
    """Read a JSON object of one of these schema versions; raise PlanError for others, and for insane numbers and depth."""
    try:
        data = json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        because = [f"line {error.lineno}, column {error.colno}: {error.msg}"]
        if was_cut_off(error):
            because.append(CUT_OFF)
        raise PlanError(f"{source} is not JSON", because, [GIVE_PLAN]) from error
    except RecursionError as error:
        raise PlanError(f"{source} is not a plan", ["it is nested too deeply"], [ANEW]) from error
    if not isinstance(data, dict):
        raise PlanError(f"{source} is not a plan", [f"expected an object, got {show(data)}"], [GIVE_PLAN])
    number = data.get("schema_version")
    if "schema_version" not in data:
        raise PlanError(
            f"{source} is not a plan",
            [f"it has no schema_version; its keys are {', '.join(map(show, list(data)[:6])) or 'none'}"],
            [GIVE_PLAN],
        )
    if type(number) is not int or number not in versions:
        newer = isinstance(number, int) and number > max(versions)
        raise PlanError(
            f"{source} is a plan of another version",
            [
                f"its schema_version is {show(number)}, this partitioner reads {' and '.join(map(str, versions))}"
            ],
            ["update partitioner, or " + ANEW if newer else ANEW],
        )
    problems = [problem for problem, _ in zip(_insane(data, "", 0), range(MOST_PROBLEMS), strict=False)]
    if problems:
        raise PlanError(f"{source} is not a valid plan", problems, [ANEW])
    return data


def validation_problems(error: ValidationError) -> list[str]:
    """Write "stages[0].ops: expected …", one per problem, the root ones as they are."""
    entries = error.errors(include_url=False)
    lines = []
    for entry in entries[:MOST_PROBLEMS]:
        message = entry["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        got = entry["input"]
        if entry["type"] == "missing":
            message = "is missing"
        elif entry["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of models, of dataclasses
            message = "is no key of a plan"
        elif isinstance(got, str | int | float | bool | None):
            message += f", got {show(got)}"
        path = key_path(entry["loc"])
        lines += [f"{path}: {part}" if path else part for part in message.split("\n")]
    if len(entries) > MOST_PROBLEMS:
        lines.append(f"and {len(entries) - MOST_PROBLEMS} more problems")
    return lines


def _insane(data: Any, path: str, depth: int) -> Iterator[str]:
    """Yield problems with numbers and nesting, before anything is built from them."""
    if depth > MOST_DEPTH:
        yield f"{path[:80]}: nested more than {MOST_DEPTH} deep"
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from _insane(value, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _insane(value, f"{path}[{index}]", depth + 1)
    elif isinstance(data, float) and not math.isfinite(data):
        yield f"{path}: {data} is no finite number"
    elif isinstance(data, int | float) and abs(data) >= LARGEST:
        yield f"{path}: {float(data):.3g} is too large"


def _integer(text: str) -> int | float:
    """Read an integer. Python refuses to read thousands of digits; here they are merely too large."""
    return int(text) if len(text) <= 40 else math.inf


def _reason(error: Exception) -> str:
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
