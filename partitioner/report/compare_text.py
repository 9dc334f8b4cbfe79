"""A comparison of a profile with its plan, as a person reads it."""

from __future__ import annotations

from collections.abc import Callable

from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.report.comparison import RANK_PARTS, Beside, Comparison
from partitioner.report.text import columns, labelled

MOST_ROWS = 64
"""The most rows of a table; --json has all."""


def render_comparison(found: Comparison) -> str:
    """Write the text of ``partitioner compare``. Residuals are measured / predicted."""
    facts = found.trace.facts
    head = [
        labelled(
            "compared",
            f"{found.plan.model.name}, step {facts.shown + 1} of {counted(len(facts.step_seconds), 'profiled step')} "
            f"({counted(facts.samples, 'sample')}) beside the plan's prediction; residual = measured / predicted",
        )
    ]
    if facts.clock_error_seconds:
        head.append(
            labelled(
                "clocks",
                f"of ranks may be {format_seconds(facts.clock_error_seconds)} apart; so may links' seconds",
            )
        )
    return "\n\n".join(
        ["\n".join(head), _step(found), _segments(found), _ranks(found), *_links(found), _verdict(found)]
    )


def residual_text(beside: Beside) -> str:
    """Write 1.25x, or - where nothing was predicted."""
    return "-" if beside.residual is None else f"{beside.residual:.2f}x"


def _cells(beside: Beside, shown: Callable[[float], str] = format_seconds) -> list[str]:
    return [shown(beside.measured), shown(beside.predicted), residual_text(beside)]


def _step(found: Comparison) -> str:
    rows = [["step", *_cells(found.step)], ["bubble", *_cells(found.bubble, percent)]]
    for name in RANK_PARTS:
        parts = [getattr(rank, name) for rank in found.ranks]
        mean = Beside(*(sum(column) / len(parts) for column in zip(*parts, strict=True)))
        if any(mean):
            rows.append([f"{name}, a rank", *_cells(mean)])
    other = sum(rank.other_seconds for rank in found.ranks) / len(found.ranks)
    rows.append(["other, a rank", format_seconds(other), "-", "-"])
    return columns(("", "measured", "predicted", "residual"), rows, left=("",))


def _segments(found: Comparison) -> str:
    rows = [[str(s.segment), s.kind, str(s.computes), *_cells(s.seconds)] for s in found.segments[:MOST_ROWS]]
    header = ("segment", "a micro-batch's", "computes", "measured", "predicted", "residual")
    return columns(header, rows, left=("a micro-batch's",)) + _left_out(len(found.segments))


def _ranks(found: Comparison) -> str:
    rows = []
    for rank in found.ranks[:MOST_ROWS]:
        waits = rank.waiting
        cells = [
            residual_text(rank.computing),
            residual_text(rank.optimizer),
            f"{format_seconds(waits.measured)} ({format_seconds(waits.predicted)})",
        ]
        rows.append([str(rank.rank), str(rank.device), rank.model, *cells])
    header = ("rank", "device", "model", "computing", "optimizer", "waiting (predicted)")
    return columns(header, rows, left=("model",)) + _left_out(len(found.ranks))


def _links(found: Comparison) -> list[str]:
    if not found.links:
        return []
    rows = []
    for link in found.links[:MOST_ROWS]:
        where = "network" if link.between_nodes else "node"
        size = format_bytes(link.size_bytes)
        rows.append(
            [f"{link.source} -> {link.target}", where, str(link.messages), size, *_cells(link.seconds)]
        )
    header = ("link", "in", "messages", "bytes", "measured", "predicted", "residual")
    return [columns(header, rows, left=("link", "in")) + _left_out(len(found.links))]


def _left_out(rows: int) -> str:
    return f"\nand {rows - MOST_ROWS} more: --json" if rows > MOST_ROWS else ""


def _verdict(found: Comparison) -> str:
    """Write what a recalibration would change, and whether the plan would still be chosen."""
    factors = found.factors
    changes = [f"{model} takes {factor:.2f}x the time" for model, factor in factors.devices.items()]
    for name, factor in (
        ("optimizer steps", factors.optimizer),
        ("links inside nodes", factors.node_links),
        ("the network", factors.network),
    ):
        if factor is not None:
            changes.append(f"{name} {factor:.2f}x")
    step = found.step
    lines = [
        labelled("corrected", "; ".join(changes)),
        labelled(
            "",
            f"so the plan simulates to {format_seconds(found.corrected_seconds)} "
            f"(predicted {format_seconds(step.predicted)}, measured {format_seconds(step.measured)}: "
            f"{step.measured / found.corrected_seconds:.2f}x of it)",
        ),
        *(labelled("", f"not corrected: {text}") for text in found.uncorrected),
        labelled("choice", _choice(found)),
        labelled("for sure", f"write the corrected cluster with -o FILE, then {found.command}"),
    ]
    return "\n".join(lines)


def _choice(found: Comparison) -> str:
    choice = found.choice
    if choice.rival_seconds is None:
        return "the plan holds no alternative that fits, so only planning anew tells"
    least, most = map(format_seconds, choice.rival_seconds)
    rival = f"{choice.rival} would take {least}" + (f" to {most}" if most != least else "")
    own = format_seconds(found.corrected_seconds)
    return {
        "stays": f"the plan would still be chosen over its alternatives: {own}; the next, {rival}",
        "changes": f"another would be chosen: this plan takes {own}; {rival}",
        "open": f"it cannot be told: this plan takes {own}; {rival}, as its parts are off by one factor or another",
    }[choice.verdict]
