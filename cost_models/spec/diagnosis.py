"""Every problem of a cluster file at once, as one ``ClusterError``.

    nodes:                                  error[cluster]: cluster.yaml has 2 problems
      - name: a                  →            because: nodes[0].memory: unknown key; expected one of … (line 3)
        memory: eighty                        because: nodes[0].device: expected a device such as …, got nothing (line 2)

Validation checks a section as a whole only once each of its values can be read, so one bad value would hide other
problems. Therefore what was reported is taken out and the rest validated again, until nothing new is found; reports
that only follow from the taking out are dropped.
"""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cost_models.errors import ClusterError
from cost_models.spec.checks import cluster_problems
from cost_models.spec.document import Document, Location, key_path
from cost_models.spec.fields import FIELDS_ONLY, Problem, did_you_mean
from cost_models.spec.sections import NodeSpec
from cost_models.spec.wiring import NetworkSpec
from cost_models.units import show

_ROUNDS = 10


def cluster_error(root: type[BaseModel], document: Document, source: str) -> ClusterError:
    """Make one error of everything that is wrong with ``document``."""
    by_path = {key_path(location): line for location, line in document.lines.items()}
    listed = [_render(path, text, by_path) for path, text in find_problems(root, document.data)]
    count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
    return ClusterError(
        f"{source} has {count}", listed, ["correct the lines above; docs/01-hardware.md describes every key"]
    )


def _render(path: str, text: str, lines: Mapping[str, int]) -> str:
    where = path
    while where and where not in lines:  # what is absent is reported on the line of its section
        where = where[: max(where.rfind("."), where.rfind("["), 0)]
    line = lines.get(where)
    prefix = f"{path}: " if path else ""
    return f"{prefix}{text} (line {line})" if line is not None else f"{prefix}{text}"


def find_problems(root: type[BaseModel], data: object) -> list[Problem]:
    """Find all problems of ``data``, each once, in the order in which they are found."""
    found: dict[Problem, None] = {}
    removed: set[str] = set()
    rest = copy.deepcopy(data)
    for _ in range(_ROUNDS):
        problems, bad = _validate(root, rest)
        found.update(dict.fromkeys(p for p in problems if not _follows(p, removed)))
        taken: set[Location] = set()
        for location in bad:
            # What is still bad after it was taken out is required: then its section goes.
            while key_path(location) in removed and len(location) > 1:
                location = location[:-1]
            taken |= {location} | {out for out in [_take_out(rest, location)] if out is not None}
        paths = {key_path(location) for location in taken}
        if paths <= removed:
            break
        removed |= paths
    between = _problems_between_sections(rest, removed)
    found.update(dict.fromkeys(p for p in between if not _follows(p, removed)))
    return list(found)


def _follows(problem: Problem, removed: set[str]) -> bool:
    """Tell whether a report only says that something is gone which was reported and taken out before."""
    path, text = problem
    section = path[: max(path.rfind("."), 0)]
    if "got nothing" in text and any(f"{s}.preset".lstrip(".") in removed for s in _prefixes(section)):
        return True
    return any(prefix in removed for prefix in _prefixes(path))


def _prefixes(path: str) -> list[str]:
    """List a path and everything around it: ``a[0].b`` → ``a[0].b``, ``a[0]``, ``a``."""
    return [path[:i] for i in range(len(path), 0, -1) if i == len(path) or path[i] in ".["]


def _validate(root: type[BaseModel], data: object) -> tuple[list[Problem], list[Location]]:
    """Return (problems, locations of values that could not be read)."""
    try:
        root.model_validate(data)
    except ValidationError as error:
        problems: list[Problem] = []
        bad: list[Location] = []
        for details in error.errors(include_url=False):
            location = details["loc"]
            if details["type"] == "too_short" and details["input"]:
                continue  # pydantic counts the items that could be read; the others are reported themselves
            if details["type"] in ("problems", "unknown_keys"):
                for below, text in details["ctx"]["problems"]:
                    joiner = "." if location and below and not below.startswith("[") else ""
                    problems.append((f"{key_path(location)}{joiner}{below}", text))
                    bad += [(*location, below)] if details["type"] == "unknown_keys" else []
            elif details["type"] == "invalid_key":
                problems.append(
                    (key_path(location[:-1]), f"expected texts as keys, got {show(location[-1])}")
                )
                bad.append(location)
            else:
                problems.append((key_path(location), _text(details, root)))
                bad.append(location)
        return problems, bad
    return [], []


def _take_out(data: object, location: Location) -> Location | None:
    """Remove what is at ``location``, or what is around it if that is an item of a list or an empty mapping.

    Returns the location of what was removed.
    """
    holders: list[tuple[Any, Location]] = []
    at = data
    for i, key in enumerate(location):
        if isinstance(at, dict) and key in at:
            holders.append((at, location[: i + 1]))
            at = at[key]
        elif isinstance(at, list) and isinstance(key, int) and key < len(at):
            at = at[key]
        else:
            break  # the short form: a text where the location goes on inside a mapping, or a key that is missing
    else:
        i = len(location)
    missing = i < len(location) and isinstance(at, dict)
    if missing or not holders:
        return None
    holder, taken = holders.pop()
    # An entry of ``nodes`` stays: taking it out would renumber the others.
    if taken == ("nodes",):
        return None
    del holder[taken[-1]]
    while not holder and len(holders) > 1 and len(holders[-1][1]) == len(taken) - 1:
        holder, taken = holders.pop()
        del holder[taken[-1]]
    return taken


def _problems_between_sections(data: object, removed: set[str]) -> list[Problem]:
    """Check the file as a whole on those sections that can be read, when others cannot."""
    if not isinstance(data, Mapping) or not isinstance(data.get("nodes"), list | tuple):
        return []
    named = ("name", "host", "replicas", "preset")
    nodes = [
        None if any(f"nodes[{i}].{key}" in removed for key in named) else _readable(NodeSpec, node)
        for i, node in enumerate(data["nodes"])
    ]
    written = data.get("network")
    network = _readable(NetworkSpec, {"preset": written} if isinstance(written, str) else written)
    if network is None and written is not None:
        return []  # a network is there but cannot be read: nothing more is known about it
    return cluster_problems(nodes, network)


Spec = typing.TypeVar("Spec", bound=BaseModel)


def _readable(model: type[Spec], data: object) -> Spec | None:
    try:
        return model.model_validate(data, context=FIELDS_ONLY)
    except ValidationError:
        return None


# --------------------------------------------------------------------------------------------------
# Pydantic's errors in the words of the file

_EXPECTED_TYPES = {
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "string_too_long": "a text of at most 200 characters",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "less_than_equal": ("le", "at most"),
}


def _text(details: ErrorDetails, root: type[BaseModel]) -> str:
    """Say one of pydantic's errors in the words of the file."""
    kind, got, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        names = _keys_at(root, details["loc"][:-1])
        return f"unknown key{did_you_mean(details['loc'][-1], names)}; expected one of {', '.join(names)}"
    if kind == "missing":
        return "expected a value, got nothing"
    if kind == "literal_error":
        return f"expected {context['expected']}, got {show(got)}".replace("'", '"')
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"expected a number of {words} {context[name]:g}, got {show(got)}"
    if kind == "too_short":
        return f"expected a list of at least {context['min_length']}, got {show(got)}"
    if kind in _EXPECTED_TYPES:
        return f"expected {_EXPECTED_TYPES[kind]}, got {show(got)}"
    return details["msg"]


def _keys_at(root: type[BaseModel], location: Location) -> list[str]:
    """List the keys that the section at ``location`` may have."""
    model: type[BaseModel] | None = root
    for key in location:
        if model is not None and isinstance(key, str):
            model = _section_in(model.model_fields[key].annotation) if key in model.model_fields else None
    return list(model.model_fields) if model is not None else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Find the section inside ``Annotated[X, …] | None`` or ``tuple[X, ...]``."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    inner: Iterable[Any] = typing.get_args(annotation)
    return next((found for part in inner if (found := _section_in(part)) is not None), None)
