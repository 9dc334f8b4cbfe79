"""The plan as a person reads it: one table of stages, then what was proved, compared and left out."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cost_models.units import format_bytes, format_seconds
from partitioner.modules import shorten

if TYPE_CHECKING:
    from partitioner.plan import Plan

WIDTH = 118
MAX_ROWS = 16
"""Plans with more stages show the first and last half of this many."""


def render_plan(plan: Plan) -> str:
    """The text of ``print(plan)``."""
    sections = [_heading(plan), _stage_table(plan), _certificate(plan), _alternatives(plan), _remarks(plan)]
    return "\n".join(section for section in sections if section)


def _heading(plan: Plan) -> str:
    p = plan.prediction
    rates = [f"{p.samples_per_second:,.1f} samples/s"]
    if p.tokens_per_second is not None:
        rates.append(f"{p.tokens_per_second:,.0f} tokens/s")
    if p.mfu is not None:
        rates.append(f"MFU {p.mfu:.1%}")
    ranks = sorted({rank for stage in plan.stages for rank in stage.devices})
    sizes = microbatch_text(plan.batch_size, plan.microbatches)
    return "\n".join(
        [
            f"{plan.model.name} ({plan.model.parameters:,} parameters) on {plan.cluster.name}: {plan.strategy}-wise, "
            f"{len(plan.stages)} stages on {len(ranks)} of {plan.cluster.world_size} devices",
            f"schedule {plan.schedule}, batch {plan.batch_size} = {sizes}, optimizer memory {plan.optimizer_memory}, "
            f"attention {plan.attention_backend or 'none'}",
            f"predicted step {format_seconds(p.step_seconds)}, {', '.join(rates)}, bubble {p.bubble_fraction:.1%}, "
            f"{format_bytes(p.communication_bytes)} sent in {p.messages:,} messages (rests on {p.confidence})",
        ]
    )


def microbatch_text(batch_size: int, microbatches: int) -> str:
    """ "8 x 4" or, for an uneven last one, "2 x 4 + 1 x 3"."""
    small, larger = divmod(batch_size, microbatches)
    parts = [(larger, small + 1), (microbatches - larger, small)]
    return " + ".join(f"{count} x {size}" for count, size in parts if count)


def _stage_table(plan: Plan) -> str:
    table = Table(box=None, pad_edge=False, header_style="")
    for column, justify in (
        ("stage", "right"),
        ("rank", "right"),
        ("device", "left"),
        ("modules", "left"),
        ("parameters", "right"),
        ("forward", "right"),
        ("backward", "right"),
        ("in flight", "right"),
        ("peak memory", "right"),
    ):
        table.add_column(column, justify="left" if justify == "left" else "right", no_wrap=True)
    hidden = range(0)
    if len(plan.stages) > MAX_ROWS:
        hidden = range(MAX_ROWS // 2, len(plan.stages) - MAX_ROWS // 2)
    for index, stage in enumerate(plan.stages):
        if index in hidden:
            if index == hidden[0]:
                table.add_row("…", "", "", f"({len(hidden)} more stages)", "", "", "", "", "")
            continue
        device = plan.cluster.devices[stage.devices[0]]
        peak = max(plan.prediction.peak_memory_bytes[str(rank)] for rank in stage.devices)
        table.add_row(
            str(index),
            ",".join(map(str, stage.devices)),
            f"{device.node_name} {device.model}",
            shorten(stage.modules, 44),
            format_bytes(stage.parameter_bytes),
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds),
            str(stage.in_flight),
            f"{format_bytes(peak)} / {format_bytes(device.memory_bytes)}",
        )
    return render(table)


def _certificate(plan: Plan) -> str:
    c = plan.certificate
    return "\n".join(
        [
            f"certificate: {c.objective} = {format_seconds(c.objective_seconds)}, proved bound "
            f"{format_seconds(c.bound_seconds)}, gap {c.gap:.2%} ({c.solver_status}, {c.method}, {c.search_seconds:.2f} s)",
            f"  over {c.space}",
            f"  no plan of this space simulates below {format_seconds(c.simulated_lower_bound_seconds)}",
            f"proof: {plan.proof.instructions:,} instructions and {plan.proof.messages:,} messages matched; "
            f"no deadlock ({'; '.join(plan.proof.rules)})",
        ]
    )


def _alternatives(plan: Plan) -> str:
    if not plan.alternatives:
        return ""
    table = Table(box=None, pad_edge=False, header_style="", title_justify="left")
    for column in ("compared with", "step", "peak memory", ""):
        table.add_column(
            column, justify="right" if column in ("step", "peak memory") else "left", no_wrap=True
        )
    for other in plan.alternatives:
        table.add_row(
            other.strategy,
            format_seconds(other.step_seconds) if other.step_seconds is not None else "-",
            format_bytes(other.peak_memory_bytes) if other.peak_memory_bytes is not None else "-",
            other.reason if other.feasible else f"does not fit: {other.reason}",
        )
    return render(table)


def _remarks(plan: Plan) -> str:
    lines = [f"not considered: {', '.join(plan.not_considered)}"] if plan.not_considered else []
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def render(table: Table) -> str:
    """A rich table as plain text, without colours or trailing blanks."""
    file = io.StringIO()
    Console(file=file, width=WIDTH + 60, no_color=True, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
