"""Cluster files: text → plain data with line numbers, and every problem of the data as one ``ClusterError``.

nodes:                                  error[cluster]: cluster.yaml has 2 problems
  - name: a                  →            because: nodes[0].memory: unknown key; expected one of … (line 3)
    memory: eighty                        because: nodes[0].device: expected a device such as …, got nothing (line 2)
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from cost_models.cluster_checks import cluster_problems
from cost_models.cluster_fields import Problem, did_you_mean
from cost_models.cluster_schema import NetworkSpec, NodeSpec
from cost_models.errors import ClusterError
from cost_models.units import show

Key: TypeAlias = str | int
Location: TypeAlias = tuple[Key, ...]

MAX_VALUES = 200_000
"""Values a file may hold with its aliases written out: a few lines of YAML can otherwise stand for billions."""


@dataclass
class Document:
    """The data of a file, and on which line each key is."""

    data: object
    lines: dict[Location, int] = field(default_factory=dict)


def read_document(path: Path) -> Document:
    """Read a YAML or JSON file. Files that are missing, unreadable or malformed raise ``ClusterError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ClusterError(
            f"cannot read {path}", [reason], ["give the path of a YAML or JSON cluster file"]
        ) from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"cannot read {path}", [f"it is not UTF-8 text (byte {error.start})"]) from error
    return _parse_json(text, path) if path.suffix == ".json" else _parse_yaml(text, path)


def _parse_json(text: str, path: Path) -> Document:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ClusterError(
                f"{path} is not valid", [f'the key "{twice[0]}" is given twice in one mapping']
            )
        return dict(pairs)

    try:
        return Document(json.loads(text, object_pairs_hook=unique))
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ClusterError(f"{path} is not valid JSON", [reason]) from error
    except RecursionError as error:
        raise ClusterError(f"{path} is not valid", ["it is nested too deeply"]) from error


def _parse_yaml(text: str, path: Path) -> Document:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return Document(None)
        document = Document(None)
        problems: list[str] = []
        _walk(root, (), document.lines, problems, [MAX_VALUES])
        if problems:
            raise ClusterError(f"{path} is not valid", problems)
        document.data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is not valid YAML", [_yaml_reason(error)]) from error
    except (ValueError, RecursionError) as error:  # such as the date 2024-99-99, or a thousand brackets
        raise ClusterError(f"{path} is not valid YAML", [str(error) or "it is nested too deeply"]) from error
    return document


def _yaml_reason(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    what = ", ".join(part for part in (error.context, error.problem) if part)
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}" if mark is not None else what


def _walk(
    node: yaml.Node, at: Location, lines: dict[Location, int], problems: list[str], budget: list[int]
) -> None:
    """Note the line of every key; find keys given twice, and aliases that explode or contain themselves."""
    budget[0] -= 1
    if budget[0] < 0 or len(at) > 64:
        raise yaml.YAMLError("its aliases stand for too many values, or for themselves")
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _walk(item, (*at, i), lines, problems, budget)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name, line = str(key.value) if isinstance(key, yaml.ScalarNode) else "?", key.start_mark.line + 1
            if name in seen and name != "<<":
                problems.append(f'{key_path((*at, name))}: "{name}" is given twice (line {line})')
            seen.add(name)
            lines.setdefault((*at, name), line)
            _walk(value, (*at, name), lines, problems, budget)


# --------------------------------------------------------------------------------------------------
# Problems


def key_path(location: Sequence[Key]) -> str:
    """``("nodes", 1, "device")`` → ``"nodes[1].device"``."""
    text = ""
    for key in location:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


def cluster_error(
    error: ValidationError, root: type[BaseModel], document: Document, source: str
) -> ClusterError:
    """Everything that is wrong with ``document``, as one error."""
    problems = _section_problems(error, root)
    if not any(details["type"] == "problems" and not details["loc"] for details in error.errors()):
        problems += _problems_between_sections(document.data)
    listed = list(dict.fromkeys(_render(path, text, document.lines) for path, text in problems))
    count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
    return ClusterError(
        f"{source} has {count}",
        listed,
        ["correct the lines above; docs/01-hardware.md describes every key"],
    )


def _render(path: str, text: str, lines: Mapping[Location, int]) -> str:
    by_path = {key_path(location): line for location, line in lines.items()}
    where = path
    while where and where not in by_path:  # what is absent is reported on the line of its section
        where = where[: max(where.rfind("."), where.rfind("["), 0)]
    line = by_path.get(where)
    prefix = f"{path}: " if path else ""
    return f"{prefix}{text} (line {line})" if line is not None else f"{prefix}{text}"


def _section_problems(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    found: list[Problem] = []
    for details in error.errors(include_url=False):
        location = details["loc"]
        if details["type"] == "too_short" and details["input"]:
            continue  # pydantic counts the items that could be read; those that could not are reported themselves
        if details["type"] == "problems":
            for below, text in details["ctx"]["problems"]:
                joiner = "." if location and below and not below.startswith("[") else ""
                found.append((f"{key_path(location)}{joiner}{below}", text))
        else:
            found.append((key_path(location), _text(details, root)))
    return found


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
    """One of pydantic's errors in the words of the file."""
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
    """The keys that the section at ``location`` may have."""
    model: type[BaseModel] | None = root
    for key in location:
        if model is not None and isinstance(key, str):
            model = _section_in(model.model_fields[key].annotation) if key in model.model_fields else None
    return list(model.model_fields) if model is not None else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section inside ``Annotated[X, …] | None`` or ``tuple[X, ...]``."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    inner: Iterable[Any] = typing.get_args(annotation)
    return next((found for part in inner if (found := _section_in(part)) is not None), None)


def _problems_between_sections(data: object) -> list[Problem]:
    """The checks of the whole file on those sections that can be read, when others cannot."""
    if not isinstance(data, Mapping) or not isinstance(data.get("nodes"), list | tuple):
        return []
    nodes = [_readable(NodeSpec, node) for node in data["nodes"]]
    written = data.get("network")
    network = _readable(NetworkSpec, {"preset": written} if isinstance(written, str) else written)
    if network is None and written is not None:
        return []  # a network is there but cannot be read: nothing more is known about it
    return cluster_problems(nodes, network)


Spec = typing.TypeVar("Spec", bound=BaseModel)


def _readable(model: type[Spec], data: object) -> Spec | None:
    try:
        return TypeAdapter(model).validate_python(data)
    except ValidationError:
        return None
