"""The differences between two plans, in the order in which a plan is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cost_models.units import counted, format_bytes, format_seconds
from partitioner.record.modules import shorten
from partitioner.report.intervals import allowed_text, chance_cell
from partitioner.report.sharding import mesh_text
from passes.graph.blocks import GATHERS, SELECTIVE

if TYPE_CHECKING:
    from partitioner.record.data import PlanData
    from partitioner.record.sharding import StageSharding


def diff_plans(old: PlanData, new: PlanData) -> str:
    """Write lines "what: old -> new"; "" if the plans say the same."""
    lines = [
        f"{label}: {before} -> {after}"
        for label, before, after in (
            ("model", old.model.name, new.model.name),
            ("fingerprint", old.model.fingerprint[:12], new.model.fingerprint[:12]),
            ("cluster", old.cluster.name, new.cluster.name),
            ("strategy", old.strategy, new.strategy),
            ("batch size", old.batch_size, new.batch_size),
            ("micro-batches", old.microbatches, new.microbatches),
            ("schedule", old.schedule, new.schedule),
            ("optimizer memory", old.optimizer_memory, new.optimizer_memory),
            ("precision", str(old.precision), str(new.precision)),
            ("loss reduction", old.loss_reduction, new.loss_reduction),
            ("recompute", _recompute(old), _recompute(new)),
            ("risk", _risk(old), _risk(new)),
            ("stages", len(old.stages), len(new.stages)),
            ("mesh", _mesh(old), _mesh(new)),
            ("ops in blocks", _blocks(old), _blocks(new)),
            ("inputs", _inputs(old), _inputs(new)),
        )
        if before != after
    ]
    lines += _placement_lines(old, new)
    lines += _layout_lines(old, new)
    lines += _prediction_lines(old, new)
    return "\n".join(lines or _detail_lines(old, new))


def _detail_lines(old: PlanData, new: PlanData) -> list[str]:
    """Name fields that differ although nothing above does. The time that the search took is no difference."""
    ignored = ("certificate", "partitioner_version")
    fields = [f for f in type(old).model_fields if f not in ignored and getattr(old, f) != getattr(new, f)]
    return [f"in detail: {', '.join(fields)}"] if fields else []


def _recompute(plan: PlanData) -> str:
    """Write what is recomputed: "auto, 3 blocks"."""
    blocks = [name for stage in plan.stages for name in stage.recomputed_blocks]
    for name, done in ((GATHERS, "gathered"), (SELECTIVE, "attentions computed")):
        if name in blocks:
            return f"{plan.recompute}, {done} again in {counted(blocks.count(name), 'stage')}"
    return f"{plan.recompute}, {counted(len(blocks), 'block')}"


def _risk(plan: PlanData) -> str:
    """Write the chance of not fitting that was allowed: "5%"."""
    return "not said" if plan.risk is None else allowed_text(plan.risk.allowed)


def _blocks(plan: PlanData) -> str:
    """Write the ops in blocks: "linear 60+40, linear_2 60+40"."""
    blocks = [f"{split.op} {'+'.join(map(str, split.sizes))}" for split in plan.splits]
    return shorten(blocks, 70) if blocks else "none"


def _per_stage(plan: PlanData, text: Callable[[StageSharding], str]) -> str:
    """Write what ``text`` says of the one stage, "outer 2 × inner 2", or of several, "stage 1: 4; stage 2: 2"."""
    texts = {i: text(stage.sharding) for i, stage in enumerate(plan.stages) if stage.sharding is not None}
    if len(plan.stages) == 1:
        return "".join(texts.values())
    return "; ".join(f"stage {index}: {said}" for index, said in texts.items() if said)


def _mesh(plan: PlanData) -> str:
    return _per_stage(plan, mesh_text) or "none"


def _inputs(plan: PlanData) -> str:
    """Write how inputs arrive: "ids S0, mask R"."""
    return _per_stage(plan, _arrivals) or "whole"


def _arrivals(sharding: StageSharding) -> str:
    """Write how inputs of a stage arrive; "" if every one arrives whole."""
    if not any("S" in text for text in sharding.batch.values()):
        return ""
    return ", ".join(f"{name} {text}" for name, text in sharding.batch.items())


def _layouts(plan: PlanData, field: str) -> dict[str, tuple[str, ...]]:
    """Return layouts by the name of a parameter or op: those of every stage that has it, one after the other."""
    found: dict[str, tuple[str, ...]] = {}
    for stage in plan.stages:
        layouts = {} if stage.sharding is None else getattr(stage.sharding, field)
        for name, layout in layouts.items():
            found[name] = (*found.get(name, ()), *((layout,) if isinstance(layout, str) else layout))
    return found


def _layout_lines(old: PlanData, new: PlanData) -> list[str]:
    """Name parameters that two sharded plans keep, and ops that they run, in different ways."""
    if not all(any(stage.sharding is not None for stage in plan.stages) for plan in (old, new)):
        return []
    lines = []
    for what, field, word in (
        ("stored otherwise", "stored", "parameter"),
        ("gradients and optimizer state otherwise", "state", "parameter"),
        ("run otherwise", "choices", "op"),
    ):
        before, after = _layouts(old, field), _layouts(new, field)
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if names:
            examples = f"{names[0]}: {_text(before.get(names[0]))} -> {_text(after.get(names[0]))}"
            more = " …" if len(names) > 1 else ""
            lines.append(f"{what}: {counted(len(names), word)} ({examples}{more})")
    return lines


def _text(layouts: tuple[str, ...] | None) -> str:
    """Write layouts; None for what is not listed: it is as it is elsewhere."""
    return "not listed" if layouts is None else "; ".join(layouts)


def _placement_lines(old: PlanData, new: PlanData) -> list[str]:
    moved = [op for op, ranks in new.placements.items() if old.placements.get(op, ranks) != ranks]
    only_old = [op for op in old.placements if op not in new.placements]
    only_new = [op for op in new.placements if op not in old.placements]
    lines = []
    if moved:
        lines.append(f"moved to another device: {counted(len(moved), 'op')} ({shorten(moved, 60)})")
    if only_old:
        lines.append(f"only in the first: {counted(len(only_old), 'op')} ({shorten(only_old, 60)})")
    if only_new:
        lines.append(f"only in the second: {counted(len(only_new), 'op')} ({shorten(only_new, 60)})")
    return lines


def _prediction_lines(old: PlanData, new: PlanData) -> list[str]:
    a, b = old.prediction, new.prediction
    lines = []
    if a.step_seconds != b.step_seconds:
        change = b.step_seconds / a.step_seconds - 1
        lines.append(
            f"predicted step: {format_seconds(a.step_seconds)} -> {format_seconds(b.step_seconds)} ({change:+.1%})"
        )
    peak_a, peak_b = max(a.peak_memory_bytes.values()), max(b.peak_memory_bytes.values())
    if peak_a != peak_b:
        lines.append(
            f"largest peak memory: {format_bytes(peak_a)} -> {format_bytes(peak_b)} ({peak_b / peak_a - 1:+.1%})"
        )
    chances = [chance_cell(plan.intervals.chance_of_not_fitting) for plan in (old, new)]
    if chances[0] != chances[1]:
        lines.append(f"chance of not fitting: {chances[0]} -> {chances[1]}")
    if a.communication_bytes != b.communication_bytes:
        lines.append(
            f"communication per step: {format_bytes(a.communication_bytes)} -> {format_bytes(b.communication_bytes)}"
        )
    return lines
