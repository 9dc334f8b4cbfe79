"""Bridges: wherever a producer's layout differs from what a consumer needs, the value is converted.

With one rank per op the only bridge is a send/recv pair; its conjugate in backward sends the gradient the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.layout import Layout
from passes.graph.graph import OpGraph


@dataclass(frozen=True)
class Bridge:
    """Conversion of ``value`` from the layout it is produced in to one that a consumer needs."""

    value: str
    source: Layout
    target: Layout
    needs_grad: bool
    """True if the conjugate bridge runs in backward."""

    @property
    def kind(self) -> str:
        """The field's name of the conversion."""
        return "send_recv"

    def __str__(self) -> str:
        back = " (gradient back)" if self.needs_grad else ""
        return f"{self.kind}({self.value}: {self.source} -> {self.target}){back}"


def bridges(graph: OpGraph, layouts: Mapping[str, Layout]) -> tuple[Bridge, ...]:
    """One bridge per value and distinct target layout, in the order in which values are produced.

    ``layouts`` has an entry for every placed op; ops without one are recomputed where they are needed
    (``passes.graph.recomputed``) and never cross.
    """
    found: dict[tuple[str, Layout], Bridge] = {}
    for node in graph.ops:
        source = layouts.get(node.name)
        if source is None:
            continue
        for user in node.users:
            target = layouts.get(user.name)
            if target is not None and target != source:
                needs_grad = node.name in graph.needs_grad
                found.setdefault((node.name, target), Bridge(node.name, source, target, needs_grad))
    return tuple(found.values())
