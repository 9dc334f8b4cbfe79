"""What the house is made of, counted, so that two commits can be compared.

    python -m benchmarks.house                    counts of this checkout
    python -m benchmarks.house --root DIR         of another one, whatever its folders
    python -m benchmarks.house --json             everything that was counted by name

Everything is read from the source (``benchmarks.rooms``); nothing of the checkout is imported or run.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.docstrings import docstrings, is_elliptical
from benchmarks.rooms import FLOORS, ROOT, House, circles, knots, layers, read_house, upward

LONG_FILE_LINES = 300
STRATEGIES = ("layer", "feature", "free", "hybrid")
STRATEGY_CLASS = re.compile(r"(Layer|Feature|Free|Hybrid)(Request|Result|Outcome)")
SEARCH_FILES = re.compile(
    r"passes/(search/|(layer|feature|free|placement|place)_|(coarsen|certificate|candidates|baselines)$)"
)
"""The files of the searches: a room today; before there were rooms, the beginnings of file names."""
Number = int | float


@dataclass(frozen=True)
class Floor:
    """Counts of one floor. Arrows and layers are those between the children of the floor's folder, as one opens it."""

    files: int
    lines: int
    folders: int
    children: int
    arrows: int
    layers: int
    module_layers: int
    """Modules on the longest chain of imports within the floor."""


@dataclass(frozen=True)
class Counts:
    """Everything that is counted of one checkout. Places are written ``path:line``."""

    files: int
    lines: int
    folders: int
    fullest_folder: str
    fullest_modules: int
    long_files: int
    floors: dict[str, Floor]
    upward_imports: list[str]
    file_circles: list[tuple[str, ...]]
    room_circles: dict[str, list[tuple[str, ...]]]
    """By folder, the children that import each other in a circle."""
    homonyms: dict[str, list[str]]
    """By name, the modules that define a class of that name, where the definitions differ."""
    strategy_dispatches: list[str]
    """Places that ask which strategy it is, or whether something is the request or the result of one."""
    tuning_constants: list[str]
    """Numbers with a name in the searches."""
    constants: int
    """Numbers with a name on all floors."""
    docstrings: int
    elliptical: list[str]
    """Docstrings that begin with a word such as "Of" or "Whether"."""


def count_house(house: House) -> Counts:
    """Count everything."""
    folders = Counter(path[:-1] for path in house.files.values() if path[-1] != "__init__")
    fullest, modules = max(folders.items(), key=lambda entry: entry[1])
    lines = {module: len(source.splitlines()) for module, source in house.sources.items()}
    texts = [
        (f"{_path(house, module)}:{text.line}", text.text)
        for module, tree in house.trees.items()
        for text in docstrings(tree)
    ]
    numbers = list(_constants(house))
    rooms: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for circle in circles(house):
        rooms[circle.folder].append(circle.children)
    return Counts(
        files=len(house.sources),
        lines=sum(lines.values()),
        folders=len({path[:-1] for path in house.files.values()}),
        fullest_folder="/".join(fullest),
        fullest_modules=modules,
        long_files=sum(count > LONG_FILE_LINES for count in lines.values()),
        floors={floor: _count_floor(house, floor, lines) for floor in FLOORS},
        upward_imports=[str(entry) for entry in upward(house)],
        file_circles=knots(frozenset((entry.importer, entry.imported) for entry in house.imports)),
        room_circles=dict(rooms),
        homonyms=homonyms(house),
        strategy_dispatches=list(_dispatches(house)),
        tuning_constants=[place for place in numbers if SEARCH_FILES.match(place.partition(".py")[0])],
        constants=len(numbers),
        docstrings=len(texts),
        elliptical=[place for place, text in texts if is_elliptical(text)],
    )


def _count_floor(house: House, floor: str, lines: dict[str, int]) -> Floor:
    modules = {module for module, path in house.files.items() if path[0] == floor}
    arrows = frozenset(house.arrows(floor))
    within = frozenset(
        (entry.importer, entry.imported)
        for entry in house.imports
        if entry.importer in modules and entry.imported in modules
    )
    return Floor(
        files=len(modules),
        lines=sum(lines[module] for module in modules),
        folders=len({house.files[module][:-1] for module in modules}),
        children=len({house.files[module][1] for module in modules} - {"__init__"}),
        arrows=len(arrows),
        layers=layers(arrows),
        module_layers=layers(within),
    )


def _path(house: House, module: str) -> str:
    return "/".join(house.files[module]) + ".py"


def homonyms(house: House) -> dict[str, list[str]]:
    """Find class names, also of type aliases, with several definitions that differ in more than their place."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, tree in house.trees.items():
        for name, definition in _definitions(tree):
            found[name][definition].append(_path(house, module))
    return {
        name: sorted(path for paths in definitions.values() for path in paths)
        for name, definitions in sorted(found.items())
        if len(definitions) > 1
    }


def _definitions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the syntax of every class at a module's top, and of every name given to a type.

    Leading underscores are left out: ``_Machine`` beside ``Machine`` is the same word for two things.
    """
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), ast.dump(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and re.fullmatch(r"_*([A-Z][a-z0-9]+)+", target.id):
                    yield target.id.lstrip("_"), ast.dump(node.value)


def _dispatches(house: House) -> Iterator[str]:
    """Yield where control flow depends on which strategy it is."""
    for module, tree in house.trees.items():
        asked = (node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.Call | ast.Match))
        for line in sorted(node.lineno for node in asked if _asks_for_strategy(node)):
            yield f"{_path(house, module)}:{line}"


def _asks_for_strategy(node: ast.Compare | ast.Call | ast.Match) -> bool:
    if isinstance(node, ast.Match):
        return _is_strategy(node.subject)
    if isinstance(node, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        return called == "isinstance" and any(STRATEGY_CLASS.fullmatch(name) for name in _names(node))
    sides = [node.left, *node.comparators]
    words = {entry.value for side in sides for entry in ast.walk(side) if isinstance(entry, ast.Constant)}
    return any(_is_strategy(side) for side in sides) and any(isinstance(word, str) for word in words)


def _is_strategy(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_") == "strategy"


def _names(node: ast.AST) -> Iterator[str]:
    for entry in ast.walk(node):
        if isinstance(entry, ast.Name | ast.Attribute):
            yield entry.id if isinstance(entry, ast.Name) else entry.attr


def _constants(house: House) -> Iterator[str]:
    """Yield every number with a name: capitals at a module's top, and fields with a number in a class of tunings."""
    for module, tree in house.trees.items():
        for node in tree.body:
            tuning = isinstance(node, ast.ClassDef) and node.name.endswith("Tuning")
            for entry in node.body if isinstance(node, ast.ClassDef) and tuning else [node]:
                if not isinstance(entry, ast.Assign | ast.AnnAssign) or not _is_number(entry.value):
                    continue
                for target in entry.targets if isinstance(entry, ast.Assign) else [entry.target]:
                    if isinstance(target, ast.Name) and (tuning or target.id.isupper()):
                        yield f"{_path(house, module)}:{entry.lineno} {target.id}"


def _is_number(node: ast.expr | None) -> bool:
    """Tell whether an expression is made of numbers only, as ``1e-9``, ``64 << 20`` and ``(0.5, 2.0)`` are."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, Number) and not isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Tuple | ast.List) and bool(node.elts) and all(map(_is_number, node.elts))


def show(counts: Counts) -> str:
    """Write the counts as a table, and below it the names of what is meant to become none."""
    columns = ("files", "lines", "folders", "children", "arrows", "layers", "module_layers")
    head = f"{'':12}" + "".join(f"{name.replace('_', ' '):>{len(name) + 2}}" for name in columns)
    rows = [
        f"{floor:12}" + "".join(f"{getattr(counted, name):{len(name) + 2},}" for name in columns)
        for floor, counted in counts.floors.items()
    ]
    figures = {
        "fullest folder": f"{counts.fullest_folder}, {counts.fullest_modules} modules",
        f"files over {LONG_FILE_LINES} lines": str(counts.long_files),
        "imports up a floor": str(len(counts.upward_imports)),
        "circles of files": _sizes(counts.file_circles),
        "circles in folders": "; ".join(
            f"{folder or 'floors'}: {_sizes(found)}" for folder, found in counts.room_circles.items()
        )
        or "none",
        "homonyms": f"{len(counts.homonyms)} ({', '.join(counts.homonyms)})",
        "asks which strategy": str(len(counts.strategy_dispatches)),
        "constants": f"{counts.constants}, in the searches {len(counts.tuning_constants)}",
        "docstrings": f"{counts.docstrings:,}, elliptical {len(counts.elliptical):,}",
    }
    total = f"{'all':12}{counts.files:7,}{counts.lines:7,}{counts.folders:9,}"
    return "\n".join((head, *rows, total, "", *(f"{name:22} {value}" for name, value in figures.items())))


def _sizes(found: Iterable[tuple[str, ...]]) -> str:
    return ", ".join(f"{len(circle)}" for circle in found) or "none"


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.house", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--json", action="store_true", help="everything that was counted, by name")
    options = parser.parse_args()
    counts = count_house(read_house(options.root))
    print(json.dumps(asdict(counts), indent=1) if options.json else show(counts))


if __name__ == "__main__":
    main()
