"""Docstrings of modules, classes, functions and attributes, and what must not be in them.

elliptical opening    the first word hides what is spoken of: "Of the time limit: …", "Whether it fits". The first word
                      is the thing for an attribute or a class, the verb for a function
slid legend           a legend that was filled like prose, so that what a row goes on with stands at the row's beginning:

                          work    the busiest device is busy for the sum over its ops, and the step takes at least
                          that
                                  long
foreign word          a word that the glossary (docs/glossary.md) gives up for another one
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.rooms import ROOT

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
GLOSSARY = ROOT / "docs" / "glossary.md"
FULL_LINE = 90
"""Characters of a line that may have been broken because it was full."""
ROW = re.compile(r"(\s*\S(?:.*?\S)?? {2,})\S")
"""A row of a legend: a symbol, two spaces at least, and what it means. The group ends where the meaning begins."""

QUOTED = re.compile(r'``[^`]*``|"[^"]*"')


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


@cache
def foreign_words() -> dict[str, str]:
    """Return the words that the glossary's tables give up, each with the word to use."""
    rows = [line.strip("| \n").split("|") for line in GLOSSARY.read_text(encoding="utf-8").splitlines()]
    return {
        foreign.strip(): row[0].strip()
        for row in rows
        if len(row) == 3
        for foreign in row[2].split(",")
        if foreign.strip() not in ("", "not", "---")
    }


def foreign_in(text: str) -> list[str]:
    """Return the foreign words of a text, names in double backticks and quotations left out, each with the word to use."""
    prose = " ".join(QUOTED.sub("", text).split())
    return [
        f"{foreign} ({word})"
        for foreign, word in foreign_words().items()
        if re.search(rf"(?<![\w-]){re.escape(foreign)}s?(?![\w-])", prose, re.IGNORECASE)
    ]


def slid_lines(text: str) -> list[str]:
    """Return the lines of a docstring that an automatic line break tore from the row before them.

    Two signs, both of lines that begin where the row before begins:
        the next line stands below the meaning in the row before, so this one belongs there as well
        it is a line of one or two words in an indented block, and the line before is full
    """
    first, *others = text.split("\n")
    closing = [len(others[-1])] if others and not others[-1].strip() else []  # where the closing quotes stand
    base = min((*closing, *(_indent(line) for line in others if line.strip())), default=0)
    lines = [" " * base + first, *others, ""]
    found = []
    for row, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if not row.strip() or not line.strip() or _indent(line) != _indent(row) or ROW.match(line):
            continue
        meaning = ROW.match(row)
        belongs = meaning is not None and after.strip() and _indent(after) == len(meaning[1])
        rest = _indent(line) > base and len(line.split()) <= 2 and len(row) >= FULL_LINE
        if belongs or rest:
            found.append(line.strip())
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
