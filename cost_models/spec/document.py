"""Cluster files: text → plain data with line numbers. Its problems: ``cost_models.spec.diagnosis``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

from cost_models.errors import ClusterError

PathKey: TypeAlias = str | int
Location: TypeAlias = tuple[PathKey, ...]

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


def key_path(location: Sequence[PathKey]) -> str:
    """Write a path of keys: ``("nodes", 1, "device")`` → ``"nodes[1].device"``."""
    text = ""
    for key in location:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


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
