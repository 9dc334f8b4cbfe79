"""The part of an explanation that a plan knows by itself, without its model: where ops run, why, and what is sent for them.

The command and the report page say it in these words. What else an op could have been, and at which price, takes the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cost_models.units import format_bytes, format_seconds, percent
from partitioner.record.modules import shorten
from partitioner.report.sharding import devices_text
from partitioner.report.table import PROVED
from passes.search.words import FIXED, STRATEGY_WORDS

if TYPE_CHECKING:
    from partitioner.record.data import PlanData
    from partitioner.record.records import StageValue

COMPUTED_EVERYWHERE = (
    "it is cheap and depends on inputs only, so every stage that reads it computes it itself"
)
MOST_NAMED = 4
"""The most stages, or values, that a line names."""


def runs_in(plan: PlanData, index: int) -> str:
    """Say what a stage is and what it takes."""
    stage = plan.stages[index]
    return (
        f"stage {index} on {devices_text(stage.devices)} ({shorten(stage.modules, 40)}), "
        f"{format_seconds(_seconds(plan, index))} a micro-batch"
    )


def slowest(plan: PlanData) -> str:
    """Name the stage that takes longest."""
    index = max(range(len(plan.stages)), key=lambda i: _seconds(plan, i))
    return f"stage {index}, {format_seconds(_seconds(plan, index))} a micro-batch"


def sent(values: Iterable[StageValue]) -> str:
    """Say what goes to other stages."""
    return ", ".join(
        f"{value.name} ({format_bytes(value.size_bytes)}) to stage {','.join(map(str, value.consumers))}"
        for value in values
    )


def why(plan: PlanData) -> str:
    """Say why an op that one stage runs is there."""
    words = STRATEGY_WORDS.get(plan.strategy)
    if words is not None and words.stages == "pieces":
        return "the search chose it for all ops together; the model is needed to try other devices"
    if len(plan.stages) == 1 and plan.stages[0].sharding is not None:
        return (
            "the layouts of all ops were chosen together; the model is needed to tell what others would cost"
        )
    return _why_cut(plan)


def other_stage(plan: PlanData, name: str | None, stage: int) -> str | None:
    """Say how to learn what another stage would cost, for plans that may be pinned to stages and have several.

    ``name``: of an op or module; None for a parameter, which goes with its module.
    """
    other = stage + 1 if stage + 1 < len(plan.stages) else max(stage - 1, 0)
    if other == stage or plan.strategy != "layer":
        return None
    if name is None:
        return f"plan again with its module pinned to stage {other} to see what that would cost"
    return f"plan again with pins={{{name!r}: {other}}} to see what stage {other} would cost"


def with_model(plan: PlanData) -> str | None:
    """Say what an explanation tells beyond this if it has the model; None if nothing."""
    words = STRATEGY_WORDS.get(plan.strategy)
    if words is not None and words.stages == "pieces":
        return "how long the step is with it on each other device"
    if any(stage.sharding is not None for stage in plan.stages):
        return "every other layout that it could have, and what each would cost"
    return None


def _why_cut(plan: PlanData) -> str:
    certificate = plan.certificate
    if FIXED in certificate.space:
        return "groups and degrees were fixed by hand; the rest, cuts among it, was decided for all pieces together"
    text = "each device has one contiguous run of the program; where runs are cut was decided for all ops together: "
    if certificate.gap < PROVED:
        return f"{text}no other cuts of the space searched cost less by the surrogate"
    return f"{text}other cuts could cost up to {percent(certificate.gap)} less by the surrogate"


def _seconds(plan: PlanData, index: int) -> float:
    stage = plan.stages[index]
    return stage.forward_seconds + stage.backward_seconds
