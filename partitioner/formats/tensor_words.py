"""Each weight of a product or lookup as a plan's shards divide it: by columns or rows of [out, in], as other tools say it.

model.layers.*.self_attn.q_proj   its output stays divided                         column
model.layers.*.self_attn.o_proj   its input is divided, its output summed          row
transformer.h.*.attn.c_attn       its output is gathered for what reads it         column, gathered
transformer.h.*.attn.c_proj       what it reads comes from whole products alone    row, splits its input
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from partitioner.record.data import PlanData
from partitioner.record.outline import ModelOutline

TENSOR = "tensor"
"""The name of the axis of shards."""
_VIEWS = re.compile(r"(view|reshape|transpose|permute|contiguous|split|chunk|getitem|unsqueeze)(_\d+)?")
_PRODUCTS = ("linear", "addmm", "embedding")


@dataclass(frozen=True)
class Division:
    """The way in which shards divide a module's weight."""

    direction: Literal["column", "row", "whole"]
    op: str
    """Its use: linear; addmm, of a weight that is kept as [in, out]; embedding, also where a head is tied to it."""
    gathered: bool = False
    """True if its divided output is gathered for what reads it."""
    splits: bool = False
    """True if it takes its part of an input that is whole."""


def divisions_of(plan: PlanData) -> dict[str, Division]:
    """Return how shards divide the weights of products and lookups, by module; * stands for the blocks' numbers."""
    if plan.outline is None:
        return {}
    readers = _readers(plan.outline)
    tables = {
        _starred(path) for path, name in plan.outline.class_names().items() if name.endswith("Embedding")
    }
    found: dict[str, Division] = {}
    for stage in plan.stages:
        sharding = stage.sharding
        if sharding is None or TENSOR not in sharding.axes:
            continue
        axis = list(sharding.axes).index(TENSOR)
        ends = f"__all_gather_{TENSOR}"
        gathers = {c.value.removesuffix(ends) for c in sharding.collectives if not c.backward}
        for row in sharding.layouts:
            name = row.name.removesuffix(".weight")
            if row.op not in _PRODUCTS or name == row.name or not row.taken or name in found:
                continue
            taken = row.taken.split()[axis]
            is_column = taken == ("S1" if row.op == "addmm" else "S0")
            is_row = taken == ("S0" if row.op == "addmm" else "S1")
            reader = readers.get(name, "")
            found[name] = Division(
                "column" if is_column else "row" if is_row else "whole",
                "embedding" if name in tables else row.op,
                gathered=is_column and not gathers.isdisjoint(_views(plan.outline, reader)),
            )
    return {name: _with_split(plan.outline, readers, found, name) for name in found}


def _readers(outline: ModelOutline) -> Mapping[str, str]:
    """Return the op that reads each weight, of the first of equal blocks."""
    found: dict[str, str] = {}
    for op, reads in zip(outline.names, outline.reads_of(), strict=True):
        for read in reads:
            if read < 0 and outline.inputs[-1 - read].name.endswith(".weight") and op.startswith(_PRODUCTS):
                name = outline.inputs[-1 - read].name.removesuffix(".weight")
                found.setdefault(_starred(name), op)
    return found


def _starred(name: str) -> str:
    """Write * for the blocks' numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _views(outline: ModelOutline, op: str) -> Iterator[str]:
    """Yield an op and the views of what it makes."""
    seen = {op}
    yield op
    for name, reads in zip(outline.names, outline.reads_of(), strict=True):
        if _VIEWS.fullmatch(name) and any(read >= 0 and outline.names[read] in seen for read in reads):
            seen.add(name)
            yield name


def _with_split(
    outline: ModelOutline, readers: Mapping[str, str], found: Mapping[str, Division], name: str
) -> Division:
    """Add whether all products whose outputs reach it are whole."""
    own = found[name]
    if own.direction != "row" or own.op == "embedding":
        return own
    module_of = {op: module for module, op in readers.items()}
    above = [
        found[module_of[op]]
        for op in _products_above(outline, readers.get(name, ""))
        if module_of.get(op) in found
    ]
    whole = all(division.direction != "column" or division.gathered for division in above)
    return Division(own.direction, own.op, splits=bool(above) and whole)


def _products_above(outline: ModelOutline, op: str) -> set[str]:
    """Return the nearest products and lookups that an op's input is computed from."""
    at = {name: index for index, name in enumerate(outline.names)}
    reads, found, seen = outline.reads_of(), set(), set()
    todo = [read for read in reads[at[op]] if read >= 0] if op in at else []
    while todo:
        index = todo.pop()
        if index in seen:
            continue
        seen.add(index)
        if outline.names[index].startswith(_PRODUCTS):
            found.add(outline.names[index])
        else:
            todo += [read for read in reads[index] if read >= 0]
    return found
