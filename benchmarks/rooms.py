"""The house as a graph: which module imports which, read from the source without importing anything.

    read_house(root) ─► House: modules, imports ─► circles(house)         children of a folder that import each other
                                                 ─► upward(house)          imports from a floor above
                                                 ─► heights(edges)         how many layers of imports lie below each

A *floor* is a package directly below the root, a *room* a folder. A room's children are its modules and its subfolders;
an import between two modules is an arrow between the two children of every folder that holds both. Imports inside
functions and below ``if TYPE_CHECKING`` count like all others.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("cost_models", "runtime", "passes", "partitioner")
"""The four floors, lowest first. Imports go down only."""

Edges = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Import:
    """One name that one module imports from another, both in the house and not the same."""

    importer: str
    imported: str
    name: str
    line: int

    def __str__(self) -> str:
        """Say where it stands, such as ``passes.compile:12 imports OpGraph from passes.graph.graph``."""
        return f"{self.importer}:{self.line} imports {self.name} from {self.imported}"


@dataclass(frozen=True, eq=False)
class House:
    """All modules of the floors, by dotted name, and what they import from each other.

    ``passes/search/__init__.py`` is the module ``passes.search``; inside its folder it is the child ``__init__``.
    """

    sources: Mapping[str, str]
    files: Mapping[str, tuple[str, ...]]
    """The path of every module below the root, without ``.py``: ``("passes", "search", "__init__")``."""

    @cached_property
    def trees(self) -> Mapping[str, ast.Module]:
        """The syntax tree of every module."""
        return {module: ast.parse(source) for module, source in self.sources.items()}

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import from module to module."""
        found = (
            Import(module, imported, name, line)
            for module, tree in self.trees.items()
            for imported, name, line in self._imported(module, tree)
        )
        return tuple(entry for entry in found if entry.importer != entry.imported)

    def _imported(self, module: str, tree: ast.Module) -> Iterator[tuple[str, str, int]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.sources:
                        yield alias.name, alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                folder = self.files[module][: -node.level] if node.level else ()
                source = ".".join((*folder, node.module) if node.module else folder)
                for alias in node.names:
                    target = f"{source}.{alias.name}"
                    if target in self.sources:
                        yield target, alias.name, node.lineno
                    elif source in self.sources:
                        yield source, alias.name, node.lineno

    def docstring(self, module: str) -> str:
        """Return the docstring of a module or room, empty if there is none."""
        tree = self.trees.get(module)
        return (ast.get_docstring(tree) or "") if tree else ""

    @cached_property
    def folders(self) -> tuple[str, ...]:
        """Every folder with Python files below it, as a path such as ``passes/search``; the root is the empty text."""
        found = {path[:depth] for path in self.files.values() for depth in range(len(path))}
        return tuple("/".join(folder) for folder in sorted(found))

    def modules_in(self, folder: str) -> list[str]:
        """Return the names of the modules directly in a folder, without its ``__init__``."""
        within = tuple(folder.split("/"))
        return sorted(
            path[-1] for path in self.files.values() if path[:-1] == within and path[-1] != "__init__"
        )

    def child(self, module: str, folder: str) -> str | None:
        """Return the child of ``folder`` that holds ``module``, or None if the module lies elsewhere."""
        within, path = tuple(folder.split("/")) if folder else (), self.files[module]
        return path[len(within)] if path[: len(within)] == within else None

    def arrows(self, folder: str) -> dict[tuple[str, str], list[Import]]:
        """Return the imports between every two children of ``folder``."""
        found: dict[tuple[str, str], list[Import]] = defaultdict(list)
        for entry in self.imports:
            one, other = self.child(entry.importer, folder), self.child(entry.imported, folder)
            if one is not None and other is not None and one != other:
                found[one, other].append(entry)
        return dict(found)


@cache
def read_house(root: Path = ROOT, floors: tuple[str, ...] = FLOORS) -> House:
    """Read every Python file of the floors below ``root``, once in a process."""
    paths = [path for floor in floors for path in sorted((root / floor).rglob("*.py"))]
    return make_house({str(path.relative_to(root)): path.read_text() for path in paths})


def make_house(sources: Mapping[str, str]) -> House:
    """Make a house of sources by path, such as ``{"passes/compile.py": "import passes.graph.graph"}``."""
    files = {path: tuple(path.removesuffix(".py").split("/")) for path in sources}
    names = {path: ".".join(parts).removesuffix(".__init__") for path, parts in files.items()}
    return House(
        {names[path]: source for path, source in sources.items()},
        {names[path]: parts for path, parts in files.items()},
    )


@dataclass(frozen=True)
class Circle:
    """Children of one folder that import each other in a circle."""

    folder: str
    children: tuple[str, ...]
    imports: tuple[Import, ...]
    """Every import between two of them, from the thinnest arrow to the thickest: the first are the easiest to break."""

    def __str__(self) -> str:
        """Name the folder, its children and the imports."""
        head = f"{self.folder or 'the floors'}: {', '.join(self.children)} import each other"
        return "\n    ".join((head, *map(str, self.imports)))


def circles(house: House) -> list[Circle]:
    """Find, in every folder, the children that import each other in a circle."""
    found = []
    for folder in house.folders:
        arrows = house.arrows(folder)
        for children in knots(frozenset(arrows)):
            inside = [
                entries for (one, other), entries in arrows.items() if one in children and other in children
            ]
            imports = tuple(entry for entries in sorted(inside, key=len) for entry in entries)
            found.append(Circle(folder, children, imports))
    return found


def upward(house: House) -> list[Import]:
    """Find the imports from a floor above."""
    number = {floor: index for index, floor in enumerate(FLOORS)}
    return [
        entry
        for entry in house.imports
        if number[house.files[entry.importer][0]] < number[house.files[entry.imported][0]]
    ]


def knots(edges: Edges) -> list[tuple[str, ...]]:
    """Return the sets of nodes that reach each other, largest first; a node alone is none."""
    found = nx.strongly_connected_components(nx.DiGraph(edges))
    return sorted(
        (tuple(sorted(knot)) for knot in found if len(knot) > 1), key=lambda knot: (-len(knot), knot)
    )


def heights(edges: Edges) -> dict[str, int]:
    """Return the longest chain of arrows below each node, 0 for one without arrows; a circle counts as one node."""
    condensed = nx.condensation(nx.DiGraph(edges))
    found: dict[int, int] = {}
    for knot in reversed(list(nx.topological_sort(condensed))):
        found[knot] = max((found[below] + 1 for below in condensed.successors(knot)), default=0)
    return {node: found[knot] for node, knot in condensed.graph["mapping"].items()}


def layers(edges: Edges) -> int:
    """Count the nodes on the longest chain of arrows, a circle taken as one node; without arrows there is one layer."""
    return max(heights(edges).values(), default=0) + 1
