"""Drawings as DOT text for Graphviz: boxes that are open as clusters, bridges as thick arrows with their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from partitioner.pictures.drawing import Drawing, Edge, Node
from partitioner.pictures.svg import PALETTE, tint

LEGEND_ROWS = 10
"""The most entries of the legend in a column."""


def to_dot(drawing: Drawing) -> str:
    """Write DOT. Colours are of stages, and each box says its stage too."""
    lines = [
        f"digraph {_quote(drawing.title)} {{",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="Helvetica", fontsize=11];',
        '  edge [fontname="Helvetica", fontsize=10, color="#59636e"];',
        '  graph [fontname="Helvetica", fontsize=12, style=rounded, color="#8a939c"];',
    ]
    numbers = count()
    for node in drawing.nodes:
        lines += _box(node, "  ", numbers)
    everywhere = {
        leaf.id for node in drawing.nodes for leaf in node.leaves() if drawing.legend and not leaf.stages
    }
    lines += [_arrow(edge, edge.source in everywhere) for edge in drawing.edges]
    lines += _legend(drawing)
    return "\n".join([*lines, "}"])


def _box(node: Node, indent: str, numbers: Iterator[int]) -> Iterator[str]:
    text = _quote("\n".join([*node.lines, *([node.stage_text] if node.stage_text else [])]))
    if not node.children:
        yield f"{indent}{node.id} [label={text}{_look(node)}];"
        return
    yield f"{indent}subgraph cluster_{next(numbers)} {{"
    line = f", color={_quote(PALETTE[node.stages[0] % len(PALETTE)])}" if len(node.stages) == 1 else ""
    looks = {"fold": f'style="rounded,bold"{line}', "stage": f"style=rounded{line}"}
    yield f"{indent}  graph [label={text}, {looks.get(node.kind, f'style=rounded{line}')}];"
    for child in node.children:
        yield from _box(child, indent + "  ", numbers)
    yield f"{indent}}}"


def _look(node: Node) -> str:
    if node.bridge:
        return ", shape=hexagon, style=filled, fillcolor=orange"
    if len(node.stages) != 1:
        return ""
    stage = node.stages[0]
    again = f", peripheries={1 + stage // len(PALETTE)}" if stage >= len(PALETTE) else ""
    return f", fillcolor={_quote(tint(stage))}, color={_quote(PALETTE[stage % len(PALETTE)])}{again}"


def _arrow(edge: Edge, faint: bool) -> str:
    """Draw an arrow. ``faint``: from what every stage computes for itself, which much reads."""
    parts = [f"label={_quote(chr(10).join(f' {line} ' for line in edge.lines))}"] if edge.bridges else []
    if edge.bridges:
        parts += ["penwidth=2.5", 'color="#b04a00"', 'fontcolor="#8a3a00"']
    elif faint:
        parts.append('color="#c3cad1"')
    if edge.again:
        parts += ["style=dashed", "constraint=false"]
        parts += [] if edge.bridges else ['label="next"']
    attributes = f" [{', '.join(parts)}]" if parts else ""
    return f"  {edge.source} -> {edge.target}{attributes};"


def _legend(drawing: Drawing) -> Iterator[str]:
    if not drawing.legend:
        return
    yield "  subgraph cluster_legend {"
    yield '    graph [label="stages", style=dotted];'
    for number, (stage, text) in enumerate(drawing.legend):
        look = _look(Node("", "stage", (), (stage,) if stage >= 0 else ()))
        yield f"    legend_{number} [label={_quote(text)}{look}];"
        if number % LEGEND_ROWS:  # below the one before
            yield f"    legend_{number - 1} -> legend_{number} [style=invis];"
    yield "  }"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
