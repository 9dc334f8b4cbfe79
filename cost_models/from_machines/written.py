"""A cluster file as text, each number with its source in a comment: what is ``Sourced`` stands on one line.

# missing: …
nodes:
  - name: node
    count: 8                # topo.txt, line 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from cost_models.from_machines.seen import Missing, Sourced
from cost_models.shown import printable

_HEAD = "# Written by `partitioner cluster`: behind each value where it comes from."


def cluster_yaml(document: Mapping[str, Any], missing: Sequence[Missing]) -> str:
    """Write the file."""
    head = [_HEAD, *(f"# missing: {_comment(str(each))}" for each in missing)]
    return "\n".join([*head, *_lines(document, 0)]) + "\n"


def plain(document: Any) -> Any:
    """Return the document without sources."""
    if isinstance(document, Sourced):
        return plain(document.value)
    if isinstance(document, Mapping):
        return {key: plain(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [plain(value) for value in document]
    return document


def sources(document: Any, at: str = "") -> dict[str, str]:
    """Return the sources by key path: ``{"nodes[0].count": "topo.txt, line 1"}``."""
    if isinstance(document, Sourced):
        return {at: document.source}
    if isinstance(document, Mapping):
        inner = [(f"{at}.{key}" if at else str(key), value) for key, value in document.items()]
    elif isinstance(document, list | tuple):
        inner = [(f"{at}[{i}]", value) for i, value in enumerate(document)]
    else:
        inner = []
    return {key: source for path, value in inner for key, source in sources(value, path).items()}


def _lines(document: Mapping[str, Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, depth + 1)
        elif isinstance(value, list | tuple):
            yield f"{indent}{key}:"
            for item in value:
                if isinstance(item, Mapping):
                    first, *others = _lines(item, depth + 2)
                    yield f"{indent}  - {first.lstrip()}"
                    yield from others
                else:
                    yield f"{indent}  - {_one(item)}"
        else:
            yield f"{indent}{key}: {_one(value)}"


def _one(value: Any) -> str:
    """Write a value on one line, its source behind it."""
    source = f"  # {_comment(value.source)}" if isinstance(value, Sourced) else ""
    text = yaml.safe_dump(
        plain(value), default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...") + source


def _comment(text: str) -> str:
    """Return a text that YAML takes behind "#": one line, nothing of a hostile file that a terminal would obey."""
    return printable(" ".join(text.split()))
