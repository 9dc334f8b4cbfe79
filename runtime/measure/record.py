"""Notes of what every op computed, in order: by them a verification finds the first op that differs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor, fx

from runtime.segment.code import SegmentCode

Note = tuple[float, float]
"""The (sum, 2-norm) of a tensor."""

_notes: dict[str, list[Note]] = defaultdict(list)


def note(name: str, value: Tensor) -> None:
    """Remember ``value`` as the next micro-batch's result of op ``name``."""
    _notes[name].append(summarized(value))


def summarized(value: Tensor) -> Note:
    """Return what is noted of a tensor. Two tensors that differ almost never agree in both numbers."""
    with torch.no_grad():
        wide = value.detach().to(torch.complex128 if value.is_complex() else torch.float64)
        total = wide.sum()
        return float(total.real + total.imag if wide.is_complex() else total), float(wide.norm())


def take_notes() -> dict[str, list[Note]]:
    """Return all notes since the last call, by op: one for each forward."""
    taken = dict(_notes)
    _notes.clear()
    return taken


def with_notes(code: SegmentCode, tensors: frozenset[str]) -> SegmentCode:
    """Return ``code`` with a note after each op in ``tensors`` (the ops whose result is one tensor).

    No block is computed again, so that each op is noted once.
    """
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for node in code.module.graph.nodes:
        environment[node] = graph.node_copy(node, environment.__getitem__)
        if node.op == "call_function" and node.name in tensors:
            graph.call_function(note, (node.name, environment[node]))
    return replace(code, module=fx.GraphModule(torch.nn.Module(), graph), recomputed=())
