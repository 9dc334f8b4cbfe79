"""How an op is split into blocks of its output neurons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """``op``: a node's name. ``dim``: of its output. ``sizes``: elements of each block along it, even or not."""

    op: str
    dim: int
    sizes: tuple[int, ...]
