"""Files, folders, modules and definitions that a text names, and those of them that do not exist.

passes/graph/graph.py · passes/shard/rules/ · tests/unit/passes/split/test_*.py · docs/09     paths from the root
graph.py · graph/graph.py                                                           a file whose path ends so
passes.graph.graph.OpGraph.ops                                  a module, a definition in it, a member of that
``needs_grad``                                                  a name of the code, see ``unknown``
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from benchmarks.rooms import FLOORS, ROOT, House

FOLDERS = "|".join((*FLOORS, "benchmarks", "examples", "tests", "docs"))
PATH = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/.*-]*\w/?)")
FILE = re.compile(rf"(?<![\w/.\"'\[-])(?!(?:{FOLDERS})/|modeling_)(\w[\w/]*\.py)\b")
"""Files of ours, that is: transformers' begin with ``modeling_``."""
NAME = re.compile(r"``([a-z]\w*_\w*)``")
SHORT_TEXT = 60
"""Characters of the longest text that is taken for names, such as a key or the target of an op."""
DOTTED = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})(?:\.[A-Za-z_]\w*)+)")


def missing(text: str, house: House) -> list[str]:
    """Return what ``text`` names and ``house`` does not hold, as ``line: name``."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [f"{number}: {path}" for path in PATH.findall(line) if not _is_path(path)]
        found += [f"{number}: {file}" for file in FILE.findall(line) if not _is_file(file, house)]
        found += [f"{number}: {name}" for name in DOTTED.findall(line) if not _is_name(name, house)]
    return found


def unknown(text: str, house: House) -> list[str]:
    """Return the words of a docstring that are written as names of the code and are none."""
    return [word for word in NAME.findall(text) if word not in _names(house)]


@cache
def _names(house: House) -> frozenset[str]:
    """Collect every name in the code: modules, definitions, variables, arguments, attributes, short texts."""
    found = {path[-1] for path in house.files.values()}
    for node in (node for tree in house.trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < SHORT_TEXT:
            found.update(re.findall(r"\w+", node.value))
    return frozenset(found)


def _is_path(path: str) -> bool:
    """Tell whether a path exists, some file fits its stars, or a page of docs/ begins with its number."""
    pattern = f"{path}-*" if re.fullmatch(r"docs/\d+\w?", path) else path
    return (ROOT / path).exists() or any(ROOT.glob(pattern))


def _is_file(end: str, house: House) -> bool:
    return end.removesuffix(".py") in _ends(house)


@cache
def _ends(house: House) -> frozenset[str]:
    """Collect the ends of all paths: b, a/b of a/b.py."""
    return frozenset("/".join(path[i:]) for path in house.files.values() for i in range(len(path)))


def _is_name(name: str, house: House) -> bool:
    parts = name.split(".")
    if parts[-1] == "py":
        return True  # the end of a path, or a file name
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if module in house.trees:
            return _defines(house.trees[module].body, parts[length:])
    return False


def _defines(body: list[ast.stmt], names: list[str]) -> bool:
    """Tell whether ``names[0]`` is defined in ``body``, ``names[1]`` in that if it is a class, and so on."""
    if not names:
        return True
    for name, inner in _definitions(body):
        if name == names[0]:
            return inner is None or _defines(inner, names[1:])
    return False


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt] | None]]:
    """Yield every name that a module or class defines or imports, and the body of it if it is a class."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, None if node.bases else node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, None) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((leaf.id, None) for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
