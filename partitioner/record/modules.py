"""Stages in the user's words: the modules of the model that lie in each stage.

ops of stage 0: embed, layers.0.*, layers.1.*, most of layers.2   ->   ("embed", "layers.0-1", "layers.2 (part)")
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from cost_models.units import runs

MOST_BLOCKS = 100_000
FEW = 2
"""The most pieces of a split block that are named one by one; more become "block (part)"."""


def modules_of_stages(
    module_path_of: Mapping[str, str], stage_of: Mapping[str, int], stages: int
) -> list[tuple[str, ...]]:
    """Name the outermost module paths that lie wholly inside each stage; what is split is marked "(part)".

    ``module_path_of``: op name -> innermost module path, "" at the root. Order of first use is kept. A numbered block
    (``layers.2``) that is split is named once, not by its pieces, unless these are few. The own ops of a module whose
    children are elsewhere as well (masks, reshapes) are named only where a stage has nothing else.
    """
    stages_of: dict[str, set[int]] = defaultdict(set)
    containers: set[str] = set()
    for op, stage in stage_of.items():
        prefixes = _prefixes(module_path_of.get(op, ""))
        containers.update(prefixes[:-1])
        for prefix in prefixes:
            stages_of[prefix].add(stage)
    names_of: list[dict[str, str]] = [
        {} for _ in range(stages)
    ]  # name -> the split block it is a piece of, or ""
    glue: list[dict[str, str]] = [{} for _ in range(stages)]
    for op, stage in stage_of.items():
        path = module_path_of.get(op, "")
        prefixes = _prefixes(path)
        whole = next((prefix for prefix in prefixes if stages_of[prefix] == {stage}), None)
        block = next((prefix for prefix in prefixes if prefix.rpartition(".")[2].isdigit()), "")
        block = block if whole is None or whole.startswith(f"{block}.") else ""
        if whole is not None:
            names_of[stage].setdefault(whole, block)
        elif path in containers:
            glue[stage].setdefault(f"{path} (part)", block)
        elif path:
            names_of[stage].setdefault(f"{path} (part)", block)
    return [tuple(compress(_fold_blocks(names or rest))) for names, rest in zip(names_of, glue, strict=True)]


def _fold_blocks(names: Mapping[str, str]) -> list[str]:
    """Replace more than a few pieces of one split block by that block's name."""
    pieces = list(names.values())
    folded = {
        n: f"{block} (part)" if block and pieces.count(block) > FEW else n for n, block in names.items()
    }
    return list(dict.fromkeys(folded.values()))


def compress(names: Iterable[str]) -> list[str]:
    """Put numbered siblings into one word, where the first stands: layers.0, norm, layers.1 -> layers.0-1, norm."""
    numbers: dict[str, list[int]] = {}
    order: list[str] = []
    for name in names:
        match = re.fullmatch(r"(.*\.)(\d+)", name)
        key = match[1] if match else name
        if match and key in numbers:
            numbers[key].append(int(match[2]))
            continue
        if match:
            numbers[key] = [int(match[2])]
        order.append(key)
    return [f"{key}{runs(numbers[key])}" if key in numbers else key for key in order]


def range_of(names: Sequence[str]) -> str:
    """Write names that differ in numbers as one: h.0.w, h.1.w, h.3.w -> h.0-1,3.w; "" if they differ in more."""
    columns = [set(parts) for parts in zip(*(name.split(".") for name in names), strict=False)]
    alike = len({name.count(".") for name in names}) == 1
    if not alike or not all(len(parts) == 1 or all(part.isdigit() for part in parts) for parts in columns):
        return ""
    return ".".join(next(iter(c)) if len(c) == 1 else runs([int(part) for part in c]) for c in columns)


def shorten(names: Sequence[str], width: int) -> str:
    """List names: all if they fit into ``width`` characters, else numbered blocks as runs, else a count of the rest.

    wte, wpe, drop, h.0-3, ln_f                   ->   wte, h.0-3 +3 more
    layers.1.mlp, layers.2, layers.3.norm         ->   layers.1-3 (part)
    """
    if len(", ".join(names)) > width:
        names = _fold_runs(names)
    by_weight = sorted(range(len(names)), key=lambda i: (not re.search(r"\d-\d", names[i]), i))
    shown: set[int] = set()
    for index in by_weight:
        trial = sorted(shown | {index})
        if shown and len(_listing(names, trial)) > width:
            break
        shown = set(trial)
    return _listing(names, sorted(shown))


def _fold_runs(names: Sequence[str]) -> list[str]:
    """Put blocks of one parent into one word; "(part)" if some of them lie in another stage as well."""
    numbers: dict[str, list[int]] = {}
    parts: set[str] = set()
    order: dict[str, None] = {}
    for name in names:
        match = re.fullmatch(r"((?:[^.\d][^.]*\.)*)(\d+(?:[-,]\d+)*)(.*)", name)
        if match is None:
            order.setdefault(name)
            continue
        order.setdefault(match[1])
        numbers.setdefault(match[1], []).extend(_expanded(match[2]))
        if match[3]:
            parts.add(match[1])
    return [
        f"{key}{runs(numbers[key])}{' (part)' if key in parts else ''}" if key in numbers else key
        for key in order
    ]


def _expanded(runs: str) -> list[int]:
    """Read runs: "0-2,5" -> [0, 1, 2, 5]; what a file says is not counted up without bound."""
    numbers: list[int] = []
    for run in runs.split(","):
        first, _, last = run.partition("-")
        low, high = int(first[:9]), int((last or first)[:9])
        numbers += range(low, min(high, low + MOST_BLOCKS) + 1)
    return numbers


def _listing(names: Sequence[str], shown: Sequence[int]) -> str:
    rest = len(names) - len(shown)
    return ", ".join(names[index] for index in shown) + (f" +{rest} more" if rest else "")


def common_parent(stages: Sequence[Sequence[str]]) -> str:
    """Find the dotted prefix that most of the names share ("transformer."); "" if leaving it out would not help."""
    names = [name for stage in stages for name in stage]
    first = [name.partition(".")[0] for name in names if "." in name]
    if not first:
        return ""
    parent = max(dict.fromkeys(first), key=first.count)
    return f"{parent}." if first.count(parent) * 2 > len(names) and len(parent) > 2 else ""


def _prefixes(path: str) -> list[str]:
    """List the prefixes of a path, outermost first: "a.b.c" -> ["a", "a.b", "a.b.c"]; nothing for the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[: length + 1]) for length in range(len(parts))]
