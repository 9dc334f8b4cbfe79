"""One program per rank of the world, made from those of the groups."""

from __future__ import annotations

from typing import Any

from runtime.program.order import build_group_programs
from runtime.program.program import ComputeOrder, Program, SegmentGraph


def build_programs(
    graph: SegmentGraph, orders: ComputeOrder, microbatches: int, **options: Any
) -> tuple[Program, ...]:
    """Build the programs; ranks without segments get an empty one. Options are those of ``build_group_programs``."""
    return build_group_programs(graph, orders, microbatches, **options).all()
