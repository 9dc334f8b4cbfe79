"""Bridges: wherever a producer's layout differs from what a consumer needs, the value is converted.

Between device groups that is a send/recv pair for each piece (``runtime.mesh.cross_mesh``); its conjugate in backward sends
the gradient the other way. Bridges inside a group are ops of its graph (``passes.shard.bridges``).
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.layout import Layout
from passes.lower.crossing import Crossings


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


def bridges(crossings: Crossings) -> tuple[Bridge, ...]:
    """One bridge per value and group of ranks that takes it from another, in the order in which values are produced."""
    found, graph, ranks = [], crossings.graph, crossings.segmentation.ranks
    for name, consumers in crossings.consumers.items():
        source = crossings.layout(name, crossings.segmentation.segment_of[name])
        for group in dict.fromkeys(ranks[consumer] for consumer in consumers):
            if group != source.ranks:
                target = crossings.arriving(name, group)
                found.append(Bridge(name, source, target, name in graph.needs_grad))
    return tuple(found)
