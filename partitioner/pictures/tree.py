"""The modules of a model as a tree, with equal neighbours folded into one.

    layers.0 … layers.79, all alike and on stage 0         ->   one node "layers.0-79 ×80" with 80 members
    layers.0-39 on stage 0, layers.40-79 on stage 1        ->   two folds of 40

Nodes are as the page reads them. Neighbours are alike if their modules are of one class and called alike
inside, and their ops do the same to tensors of the same shapes, run on the same stages and in the same layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partitioner.record.outline import ModelOutline


@dataclass
class _Module:
    path: str
    label: str
    kind: str
    children: dict[str, _Module] = field(default_factory=dict)
    ops: list[int] = field(default_factory=list)


def module_tree(
    outline: ModelOutline, stage_of: Mapping[str, int], layout_of: Mapping[str, int]
) -> dict[str, Any]:
    """Return the model's tree. ``stage_of``: the stage of each op; ops that every stage computes for itself have none.

    ``layout_of``: a number of the layouts in which an op runs, for those that several devices share.
    """
    classes = outline.class_names()
    root = _Module("", "model", classes.get("", ""))
    modules = [_placed(root, path, classes) for path in outline.modules]
    for op, module in enumerate(outline.module_of):
        modules[module].ops.append(op)
    # What ops cost is left out: a model's first block, which owes no gradient to what is before it, is alike all the same.
    alike = [(kind.op, kind.shape, kind.dtype) for kind in outline.kinds]
    traits = [
        (alike[kind], stage_of.get(name, -1), layout_of.get(name, -1))
        for kind, name in zip(outline.kind_of, outline.names, strict=True)
    ]
    numbers: dict[Hashable, int] = {}
    tree, _ = _drawn(root, traits, numbers)
    return tree


def _placed(root: _Module, path: str, classes: Mapping[str, str]) -> _Module:
    at = root
    for label in path.split(".") if path else ():
        inner = f"{at.path}.{label}".lstrip(".")
        at = at.children.setdefault(label, _Module(inner, label, classes.get(inner, "")))
    return at


def _drawn(
    module: _Module, traits: Sequence[Hashable], numbers: dict[Hashable, int]
) -> tuple[dict[str, Any], int]:
    """Return a module's node, and a number that modules of equal content share."""
    drawn = [_drawn(child, traits, numbers) for child in module.children.values()]
    order = sorted(range(len(drawn)), key=lambda i: drawn[i][0]["first"])
    inside = tuple(
        (None if node["label"].isdigit() else node["label"], number)
        for node, number in (drawn[i] for i in order)
    )
    content = module.kind, inside, tuple(traits[op] for op in module.ops)
    children = [drawn[i] for i in order]
    firsts = [*(node["first"] for node, _ in children), *module.ops[:1]]
    node = {
        "name": module.path,
        "label": module.label,
        "class": module.kind,
        "children": _folded(module.path, children),
        "ops": module.ops,
        "first": min(firsts, default=0),
        "count": len(module.ops) + sum(child["count"] for child, _ in children),
        "times": 1,
    }
    return node, numbers.setdefault(content, len(numbers))


def _folded(parent: str, children: Sequence[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    """Put runs of numbered neighbours with equal content into one node each."""
    found = []
    numbered = [
        (node, number if node["label"].isdigit() else -1 - i) for i, (node, number) in enumerate(children)
    ]
    for _, run in itertools.groupby(numbered, key=lambda item: item[1]):
        members = [node for node, _ in run]
        if len(members) == 1:
            found += members
            continue
        span = f"{members[0]['label']}–{members[-1]['label']}"
        found.append(
            {
                **members[0],
                "label": f"{span} ×{len(members)}",
                "name": f"{parent}.{span}".lstrip("."),
                "count": sum(member["count"] for member in members),
                "times": len(members),
                "members": members,
            }
        )
    return found
