"""The modules of a model as a tree, with equal neighbours folded into one.

    layers.0 … layers.79, all alike and on stage 0         ->   one node "layers.0-79 ×80" with 80 members
    layers.0-39 on stage 0, layers.40-79 on stage 1        ->   two folds of 40

Nodes are as the page reads them. Neighbours are alike if their modules are of one class and called alike
inside, and their ops do the same to tensors of the same shapes, run on the same stages and in the same layouts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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
    tree, _ = _node(root, traits, {})
    return tree


def tree_node(
    name: str, label: str, children: list[dict[str, Any]], ops: list[int], class_name: str = ""
) -> dict[str, Any]:
    """Return a module as the page reads it. ``ops``: those that are in none of its children, ascending."""
    return {
        "name": name,
        "label": label,
        "class": class_name,
        "children": children,
        "ops": ops,
        "first": min([*(child["first"] for child in children), *ops[:1]], default=0),
        "count": len(ops) + sum(child["count"] for child in children),
        "times": 1,
    }


def _placed(root: _Module, path: str, classes: Mapping[str, str]) -> _Module:
    at = root
    for label in path.split(".") if path else ():
        inner = f"{at.path}.{label}".lstrip(".")
        at = at.children.setdefault(label, _Module(inner, label, classes.get(inner, "")))
    return at


def _node(
    module: _Module, traits: Sequence[Hashable], numbers: dict[Hashable, int]
) -> tuple[dict[str, Any], int]:
    """Return a module's node, and a number that modules of equal content share."""
    inside = [_node(child, traits, numbers) for child in module.children.values()]
    inside.sort(key=lambda item: int(item[0]["first"]))
    called = tuple((None if node["label"].isdigit() else node["label"], number) for node, number in inside)
    content = module.kind, called, tuple(traits[op] for op in module.ops)
    node = tree_node(module.path, module.label, list(_folded(module.path, inside)), module.ops, module.kind)
    return node, numbers.setdefault(content, len(numbers))


def _folded(parent: str, inside: Sequence[tuple[dict[str, Any], int]]) -> Iterator[dict[str, Any]]:
    """Put runs of numbered neighbours with equal content into one node each."""
    content = [
        number if node["label"].isdigit() else -1 - place for place, (node, number) in enumerate(inside)
    ]
    for _, run in groupby(range(len(inside)), key=content.__getitem__):
        members = [inside[place][0] for place in run]
        if len(members) == 1:
            yield members[0]
            continue
        span = f"{members[0]['label']}–{members[-1]['label']}"
        yield {
            **members[0],
            "label": f"{span} ×{len(members)}",
            "name": f"{parent}.{span}".lstrip("."),
            "count": sum(member["count"] for member in members),
            "times": len(members),
            "members": members,
        }
