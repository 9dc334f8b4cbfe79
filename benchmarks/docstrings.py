"""Docstrings of modules, classes, functions and attributes, and what must not be in them.

elliptical opening    the first word hides what is spoken of: "Of the time limit: …", "Whether it fits". The first word
                      is the thing for an attribute or a class, the verb for a function
slid legend           a legend whose lines were filled like prose: its columns no longer stand below each other
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

ELLIPTICAL = frozenset(
    (
        "Of",
        "What",
        "Which",
        "How",
        "Whether",
        "Where",
        "When",
        "Who",
        "Whose",
        "Why",
        "By",
        "As",
        "With",
        "From",
        "For",
    )
) | {"In", "On", "To", "That", "If"}
"""First words that are no thing and no verb."""


@dataclass(frozen=True)
class Docstring:
    """One docstring, as written, and the line it begins on."""

    text: str
    line: int


def docstrings(tree: ast.Module) -> list[Docstring]:
    """Return every docstring of a module in the order of its lines; an attribute's stands below its assignment."""
    found = (text for node in ast.walk(tree) for text in _docstrings_in(node))
    return sorted(found, key=lambda text: text.line)


def _docstrings_in(node: ast.AST) -> Iterator[Docstring]:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for index, entry in enumerate(node.body):
        if not isinstance(entry, ast.Expr) or not isinstance(entry.value, ast.Constant):
            continue
        documents = index == 0 or isinstance(node.body[index - 1], ast.Assign | ast.AnnAssign)
        if documents and isinstance(entry.value.value, str):
            yield Docstring(entry.value.value, entry.lineno)


def is_elliptical(text: str) -> bool:
    """Tell whether a docstring begins with one of ELLIPTICAL."""
    words = text.split(maxsplit=1)
    return bool(words) and words[0].rstrip(",:;") in ELLIPTICAL
