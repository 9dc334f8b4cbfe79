"""The text on a sharded stage: the mesh, how inputs arrive, layouts by class, what is sent and what it takes.

Layouts are written as everywhere: R whole, S0 split along dimension 0, P a part of a sum; one per axis of the mesh.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cost_models.conversion import AxisLinks, CollectiveKind, group_links
from cost_models.units import counted, format_bytes, format_seconds, percent, runs
from partitioner.record.modules import common_parent, shorten
from partitioner.report.text import columns, labelled
from passes.lower.step import sum_bytes
from runtime.mesh.ranks_along import JOINT, all_ranks_along

if TYPE_CHECKING:
    from cost_models.layout import Mesh
    from partitioner.record.data import PlanData
    from partitioner.record.records import Stage
    from partitioner.record.sharding import LayoutRow, StageSharding

MOST_ROWS = 14
"""The most classes of layouts that are shown; the largest ones."""
WIDEST_NAME = 44
WIDEST_CALL = 40
NEARLY_ALL = 0.9995
SHORTER = {"scaled_dot_product_attention": "attention", "cross_entropy_loss": "cross_entropy"}
"""Shorter names of ops that are as clear."""


def sharding_sections(plan: PlanData) -> list[str]:
    """Describe every sharded stage: its layouts, and what its devices send. Named where the plan has several stages.

    A stage like one before it is not described again.
    """
    sections: list[str] = []
    first: dict[tuple[str, ...], int] = {}
    for index, stage in enumerate(plan.stages):
        if stage.sharding is None or len(stage.devices) == 1:
            continue
        about, tables = _about(plan, stage, stage.sharding), (_layouts(stage.sharding), _sent(plan, stage))
        where = _where_all(plan, stage, stage.sharding)
        like = first.setdefault((mesh_text(stage.sharding), *where, *about, *tables), index)
        if like < index:
            text = f"{devices_text(stage.devices)}: mesh, layouts and what is sent as in stage {like}"
            sections.append(labelled(f"stage {index}", text))
            continue
        own = [labelled(f"stage {index}", devices_text(stage.devices))] if len(plan.stages) > 1 else []
        own.append(labelled("mesh", "; ".join((_rows(stage, stage.sharding), *where))))
        sections += ["\n".join([*own, *about]), *filter(None, tables)]
    return sections


def mesh_text(sharding: StageSharding) -> str:
    """Write a mesh as "outer 8 × inner 8", one of one axis as "16"."""
    if len(sharding.axes) == 1:
        return str(*sharding.axes.values())
    return " × ".join(f"{name} {size}" for name, size in sharding.axes.items())


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Write ranks: (0, 1, 2, 3, 5) -> "0-3,5"; unordered ones one by one."""
    return runs(ranks) if list(ranks) == sorted(set(ranks)) else ",".join(map(str, ranks))


def devices_text(ranks: tuple[int, ...]) -> str:
    """Name the devices of a stage: "rank 3", "ranks 0-7"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranks_text(ranks)}"


def named_devices(plan: PlanData, ranks: tuple[int, ...]) -> str:
    """Name the devices of a plan, one by its node and model too: "rank 3 (node1 H100-80GB)", "ranks 0-7"."""
    if len(ranks) > 1:
        return devices_text(ranks)
    device = plan.cluster.devices[ranks[0]]
    return f"{devices_text(ranks)} ({device.node_name} {device.model})"


# --------------------------------------------------------------------------------------------------
# The mesh, and what is true of the whole stage


def _rows(stage: Stage, sharding: StageSharding) -> str:
    """Say how the devices stand on the mesh."""
    inner = list(sharding.axes)[-1]
    if len(sharding.axes) == 1:
        return f"{mesh_text(sharding)} devices in a row, called {inner}"
    first = all_ranks_along(sharding.mesh(stage.devices), (inner,))[0]
    return f"{mesh_text(sharding)}, ranks row by row: {ranks_text(first)} are the first along {inner}"


def _about(plan: PlanData, stage: Stage, sharding: StageSharding) -> list[str]:
    """Write the lines on the whole stage: its inputs, its state, what is computed more than once."""
    lines: list[str] = []
    arrivals: dict[str, list[str]] = {}
    for name, text in sharding.batch.items():
        arrivals.setdefault(text, []).append(name)
    inputs = ", ".join(f"{shorten(names, 40)} {text}" for text, names in arrivals.items())
    if inputs:
        lines.append(labelled("inputs", f"{inputs} ({_legend(sharding)})"))
    lines += _state_line(sharding)
    lines.append(labelled("replicated", _replicated(plan, sharding)))
    models = {plan.cluster.devices[rank].model for rank in stage.devices}
    if len(models) > 1:
        kinds = ", ".join(sorted(models))
        lines.append(
            labelled("pace", f"all devices have equal parts, so the slowest of {kinds} sets the pace")
        )
    return lines


def _legend(sharding: StageSharding) -> str:
    axes = " and ".join(sharding.axes) if len(sharding.axes) < 3 else ", ".join(sharding.axes)
    return f"along {axes}: R whole, S0 split along dimension 0, P part of a sum"


def _where_all(plan: PlanData, stage: Stage, sharding: StageSharding) -> list[str]:
    """Say of each axis of the mesh whether its ranks are of one node."""
    mesh = sharding.mesh(stage.devices)
    return list(filter(None, (_where(plan, mesh, axis) for axis in mesh.axes)))


def _where(plan: PlanData, mesh: Mesh, axis: str) -> str:
    """Say whether the ranks along ``axis`` are of one node; nothing where all are."""
    node_of = [device.node for device in plan.cluster.devices]
    if len({node_of[rank] for rank in mesh.ranks}) == 1:
        return ""
    spans = {len({node_of[rank] for rank in group}) for group in all_ranks_along(mesh, (axis,))}
    if spans == {1}:
        return f"{axis} inside a node"
    return f"{axis} across {max(spans)} nodes"


def _state_line(sharding: StageSharding) -> list[str]:
    """Describe ZeRO: state that is split further than its parameters, and parameters that are gathered to be used."""
    parts = []
    if sharding.state:
        kept = _axes_of(sharding, ((sharding.stored.get(n, ""), text) for n, text in sharding.state.items()))
        parts.append(
            f"gradients and optimizer state of {counted(len(sharding.state), 'parameter')} split along {kept} "
            "(ZeRO-1, 2)"
        )
    gathered = [
        row for row in sharding.layouts if row.taken and row.taken != row.stored and "S" in row.stored
    ]
    if gathered:
        along = _axes_of(sharding, ((row.taken, row.stored) for row in gathered))
        number = sum(row.count for row in gathered)
        parts.append(
            f"{counted(number, 'parameter')} stored split along {along}, gathered to be used (ZeRO-3)"
        )
    return [labelled("state", "; ".join(parts))] if parts else []


def _axes_of(sharding: StageSharding, pairs: Iterator[tuple[str, str]]) -> str:
    """Name the axes on which the second layout of a pair is split and the first is not."""
    found = {
        axis
        for whole, split in pairs
        for axis, (before, after) in enumerate(
            zip(whole.split() or ["R"] * len(sharding.axes), split.split(), strict=False)
        )
        if after.startswith("S") and before != after
    }
    names = list(sharding.axes)
    return " and ".join(names[axis] for axis in sorted(found) if axis < len(names)) or "no axis"


def _replicated(plan: PlanData, sharding: StageSharding) -> str:
    share = sharding.replicated_matmul_share
    some = "that not every axis splits" if len(sharding.axes) > 1 else "that every device runs whole"
    texts = [
        f"{'all' if share > NEARLY_ALL else percent(share)} of the FLOPs of products, convolutions and attention are in "
        f"ops {some}"
        if share
        else "no product, convolution or attention"
    ]
    if sharding.replicated_ops:
        cost = sharding.replicated_seconds
        names = shorten(list(sharding.replicated_ops), 40)
        texts.append(
            f"{counted(len(sharding.replicated_ops), 'op')} run whole on every device for want of a rule, "
            f"{format_seconds(cost)} or {percent(cost / plan.prediction.step_seconds)} of a step ({names})"
        )
    if sharding.discovered_ops:
        texts.append(
            f"how to split {counted(sharding.discovered_ops, 'op')} without a rule was found by trying"
        )
    return "; ".join(texts)


# --------------------------------------------------------------------------------------------------
# Layouts


def _layouts(sharding: StageSharding) -> str:
    """Write large parameters and products, one row per class; parameters of one module that are kept alike in one row."""
    rows = _siblings(sharding.layouts)
    if not rows:
        return ""
    shown = sorted(sorted(range(len(rows)), key=lambda i: (-_weight(rows[i]), i))[:MOST_ROWS])
    parent = _parent([rows[i].name for i in shown])
    title = f"layouts of {parent[:-1]}" if parent else "layouts"
    header = (title, "", "on a device", "stored", "state", "taken", "runs as")
    table = []
    for row in (rows[i] for i in shown):
        name = row.name.removeprefix(parent)
        name = name if len(name) <= WIDEST_NAME else f"…{name[1 - WIDEST_NAME :]}"
        count = f"x{row.count:,}" if row.count > 1 else ""
        taken = row.taken if row.taken != row.stored else ""
        size = format_bytes(row.size_bytes) if row.stored else "-"
        table.append([name, count, size, row.stored or "-", row.state, taken, _reads(row)])
    hidden = [row for i, row in enumerate(rows) if i not in shown]
    if hidden:
        size = format_bytes(sum(row.size_bytes for row in hidden))
        table.append(
            [f"({len(hidden):,} more)", f"x{sum(row.count for row in hidden):,}", size, *_common(hidden)]
        )
    keep = [c for c in range(len(header)) if c < 2 or any(row[c] for row in table)]
    return columns(
        [header[c] for c in keep],
        [[row[c] for c in keep] for row in table],
        left=(title, "stored", "state", "taken", "runs as"),
    )


def _parent(names: Sequence[str]) -> str:
    """Find what most names begin with, unless it is the module of a parameter."""
    parent = common_parent([names])
    return (
        parent if all("." in name.removeprefix(parent) for name in names if name.startswith(parent)) else ""
    )


def _common(rows: Sequence[LayoutRow]) -> tuple[str, str, str, str]:
    """Return the layouts, stored and of the state, that all rows have in common."""
    ways = {(row.stored, row.state) for row in rows}
    stored, state = ways.pop() if len(ways) == 1 else ("various", "")
    return stored, state, "", ""


def _siblings(rows: Sequence[LayoutRow]) -> list[LayoutRow]:
    """Join a module's weight and bias that are alike: "norm.weight, bias"."""
    found: dict[object, LayoutRow] = {}
    for row in rows:
        module, _, name = row.name.rpartition(".")
        key: object = (module, row.count, row.stored, row.state, row.taken, row.op, row.takes, row.makes)
        if not row.stored or not module:
            key = row
        known = found.get(key)
        found[key] = (
            row
            if known is None
            else known.model_copy(
                update={"name": f"{known.name}, {name}", "size_bytes": known.size_bytes + row.size_bytes}
            )
        )
    return list(found.values())


def _weight(row: LayoutRow) -> float:
    """Weigh what is worth showing: large parameters, and products of activations before small ones."""
    return row.size_bytes if row.stored else math.inf


def _reads(row: LayoutRow) -> str:
    """Write how an op reads: "linear R -> S2"."""
    if not row.op:
        return "not used"
    op = SHORTER.get(row.op, row.op)
    text = f"{op} {' · '.join(dict.fromkeys(row.takes))}".rstrip()
    text = f"{text} -> {row.makes}" if row.makes else text
    return text if len(text) <= WIDEST_CALL else f"{text[: WIDEST_CALL - 1]}…"


# --------------------------------------------------------------------------------------------------
# What is sent


class SentAlongAxis(NamedTuple):
    """The collectives of one kind along one axis in a step, of one device."""

    when: str
    kind: CollectiveKind
    axis: str
    times: int
    bytes: float
    seconds: float


def sent_by_a_device(plan: PlanData, stage: Stage) -> tuple[SentAlongAxis, ...]:
    """Sum up what a device sends per step, most seconds first.

    Seconds: the collectives one after the other, with the links of all groups of the axis in use.
    """
    sharding = stage.sharding
    assert sharding is not None
    mesh = sharding.mesh(stage.devices)
    links: dict[str, AxisLinks] = {}

    def seconds(kind: CollectiveKind, axis: str, size_bytes: float) -> float:
        if axis not in links:
            links[axis] = group_links(all_ranks_along(mesh, axis.split(JOINT)), plan.cluster)
        return links[axis].seconds(kind, size_bytes)

    found: dict[tuple[str, CollectiveKind, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])

    def add(when: str, kind: CollectiveKind, axis: str, count: int, sent_bytes: float, taken: float) -> None:
        entry = found[when, kind, axis]
        entry[0] += count
        entry[1] += sent_bytes
        entry[2] += taken

    m = plan.microbatches
    for item in sharding.collectives:
        when = "backward" if item.backward else "forward"
        taken = seconds(item.kind, item.axis, item.size_bytes)
        add(when, item.kind, item.axis, m, item.sent_bytes * m, taken * m)
    for summed in sharding.sums:
        ranks = math.prod(sharding.axes[axis] for axis in summed.axes)
        sent = sum_bytes(sum(summed.size_bytes), ranks, summed.scattered)
        kind: CollectiveKind = "reduce_scatter" if summed.scattered else "all_reduce"
        add("gradients", kind, JOINT.join(summed.axes), 1, sent, summed.seconds)
    for gather in sharding.gathers:
        size = sharding.axes[gather.axis]
        count = len(gather.parameters)
        add(
            "updated", "all_gather", gather.axis, count, (size - 1) / size * gather.size_bytes, gather.seconds
        )
    rows = [SentAlongAxis(*key, int(count), sent, taken) for key, (count, sent, taken) in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _sent(plan: PlanData, stage: Stage) -> str:
    rows = sent_by_a_device(plan, stage)
    if not rows:
        return ""
    header = ("sent in a step", "kind", "along", "times", "by a device", "takes", "of the step")
    table = [
        [
            row.when,
            collective_name(row.kind),
            row.axis.replace(JOINT, " and "),
            f"{row.times:,}",
            format_bytes(int(row.bytes)),
            format_seconds(row.seconds),
            percent(row.seconds / plan.prediction.step_seconds),
        ]
        for row in rows
    ]
    return columns(header, table, left=("sent in a step", "kind", "along"))


def collective_name(kind: str) -> str:
    """Name a collective as people write it: all-gather."""
    return kind.replace("_", "-")


def communication_share(plan: PlanData) -> float:
    """Return what collectives of sharded stages take, over the step's seconds; what runs beside computing counts too.

    Stages on other devices run at the same time, so it is that of the devices that communicate longest.
    """
    seconds: dict[tuple[int, ...], float] = defaultdict(float)
    for stage in plan.stages:
        if stage.sharding is not None:
            seconds[stage.devices] += sum(row.seconds for row in sent_by_a_device(plan, stage))
    return max(seconds.values(), default=0.0) / plan.prediction.step_seconds
