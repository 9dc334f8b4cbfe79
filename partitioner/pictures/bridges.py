"""Bridges as arrows of the placement graph: from the op that makes a value to the op that reads it in another layout.

    between stages   what the plan's transfers send, and the gradients that come back
    inside of one    what its devices' collectives move: one arrow each, as the plan counts them

Slices move nothing and have no arrow. A gradient's arrow goes from the reader back to the maker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cost_models.units import runs
from partitioner.record.data import PlanData
from partitioner.record.outline import ModelOutline
from partitioner.report.sharding import collective_name
from passes.shard.sent import StageCollective

_BEFORE_OP = "__"
"""The mark between value and op in a bridge's name, as ``passes.shard.shard`` makes it: add_1__all_gather_tensor."""
_NEVER_BACK = ("all_gather", "reduce_scatter")
"""Bridges whose gradients never go by the same kind: such a one in backward is for what is computed again there."""


class _StageReaders:
    """The ops that read a value, by stage. Values are numbered as in the outline: op n, or input -1 - n."""

    def __init__(self, plan: PlanData, outline: ModelOutline) -> None:
        self.number = {name: op for op, name in enumerate(outline.names)}
        stage_of = {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}
        self._found: dict[tuple[int, int], int] = {}
        for op, reads in enumerate(outline.reads_of()):
            for read in reads:
                self._found.setdefault((read, stage_of.get(outline.names[op], -1)), op)
        self._inputs = {re.sub(r"\W", "_", given.name): -1 - i for i, given in enumerate(outline.inputs)}

    def first(self, value: int, stages: tuple[int, ...]) -> int | None:
        """Return the first op of these stages that reads a value, or one that every stage computes for itself."""
        found = [self._found[value, stage] for stage in (*stages, -1) if (value, stage) in self._found]
        return min(found, default=None)

    def named(self, name: str) -> int | None:
        """Return the value of a node: an op, or an input, whose node is called after it (p_model_a_weight: a.weight)."""
        if name in self.number:
            return self.number[name]
        ends = (name[at:] for at in range(len(name)) if at == 0 or name[at - 1] == "_")
        return next((self._inputs[end] for end in ends if end in self._inputs), None)


def bridges_data(plan: PlanData, outline: ModelOutline) -> list[dict[str, Any]]:
    """Return every bridge as the page draws it. Bytes are of a micro-batch."""
    readers = _StageReaders(plan, outline)
    return [*_between_stages(plan, readers), *_inside(plan, readers)]


def _between_stages(plan: PlanData, readers: _StageReaders) -> Iterator[dict[str, Any]]:
    values = {value.name: value for value in plan.values}
    for transfer in plan.transfers:
        value, made = values.get(transfer.value), readers.number.get(transfer.value)
        if value is None or made is None:
            continue
        there = tuple(s for s in value.consumers if transfer.target in plan.stages[s].devices)
        reader = readers.first(made, there)
        if reader is None:
            continue
        stages = f"stage{'' if len(there) == 1 else 's'} {runs(there)}"
        yield _bridge(
            made, reader, "send/recv", transfer.size_bytes, False,
            f"stage {value.producer} sends {transfer.value} to {stages}",
        )  # fmt: skip
        if transfer.gradient:
            yield _bridge(
                reader, made, "send/recv", transfer.size_bytes, True,
                f"{stages} sends the gradient of {transfer.value} back to stage {value.producer}",
            )  # fmt: skip


def _inside(plan: PlanData, readers: _StageReaders) -> Iterator[dict[str, Any]]:
    for index, stage in enumerate(plan.stages):
        for item in () if stage.sharding is None else stage.sharding.collectives:
            found = _ends(item, index, readers)
            if found is None:
                continue
            made, reader, again = found
            gradient = item.backward and not again
            text = f"over {item.axis}, among the devices of stage {index}"
            if again:
                text += ", a second time: backward computes what reads it again"
            ends = (reader, made) if gradient else (made, reader)
            yield _bridge(*ends, collective_name(item.kind), item.size_bytes, gradient, text, item.seconds)


def _ends(item: StageCollective, stage: int, readers: _StageReaders) -> tuple[int, int, bool] | None:
    """Return the op that makes what a collective moves, the one that reads it, and whether it is moved a second time.

    Both are one op where an op talks by itself, where a parameter is gathered for it, and where a value leaves the stage.
    """
    if item.value in readers.number:
        own = readers.number[item.value]
        return own, own, False
    source, _, op = item.value.rpartition(_BEFORE_OP)
    value = readers.named(source)
    if value is None:
        return None
    again = item.backward and item.kind in _NEVER_BACK and op.startswith(item.kind)
    reader = readers.first(value, (stage,))
    made = value if value >= 0 else reader
    if made is None:
        return None
    return made, made if reader is None else reader, again


def _bridge(
    source: int, target: int, kind: str, size: int, gradient: bool, text: str, seconds: float | None = None
) -> dict[str, Any]:
    """Make an arrow. ``seconds``: None for messages, which take as long as the network lets them."""
    return {
        "from": source,
        "to": target,
        "kind": kind,
        "size_bytes": size,
        "gradient": gradient,
        "text": text,
        "seconds": None if seconds is None else float(f"{seconds:.3g}"),
    }
