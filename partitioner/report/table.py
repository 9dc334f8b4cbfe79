"""The plan as a person reads it: what was chosen, stage by stage, what was proved, compared and left out.

Everything fits into the width of ``text_within``; the full texts of the certificate and the proof are in the JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cost_models.precision import NAMES, WORDS, ParameterPrecision
from cost_models.shown import printable
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.record.modules import common_parent, compress, shorten
from partitioner.report.intervals import (
    chance_cell,
    chance_text,
    peak_text,
    rates_text,
    risk_text,
    step_text,
)
from partitioner.report.sharding import communication_share, mesh_text, ranks_text, sharding_sections
from partitioner.report.text import columns, labelled, rate_text, text_width
from passes.graph.blocks import GATHERS, SELECTIVE
from passes.search.words import BY_HAND, STRATEGY_WORDS
from passes.split.values import block_name

if TYPE_CHECKING:
    from partitioner.record.data import PlanData
    from partitioner.record.records import Stage
    from passes.search.certificate import Alternative

MAX_ROWS = 16
"""The most rows of stages; plans with more show the first and last half of this many."""
PROVED = 5e-5
"""The gap below which a bound is reached: less is rounding."""
MODULES_BESIDE = 24
"""The least characters of a column of modules; with fewer they stand below the stages."""

MOST_BLOCKS = 4
"""The most kinds of blocks that are listed."""


def render_plan(plan: PlanData) -> str:
    """Write the text of ``print(plan)``."""
    sections = [_heading(plan), _stage_table(plan), *sharding_sections(plan)]
    sections += [_evidence(plan), _alternatives(plan), _remarks(plan)]
    return printable("\n\n".join(section for section in sections if section))


def _model_text(plan: PlanData) -> str:
    """Name the model with its data type, which is easily another than one thinks, unless a line of its own tells of it."""
    in_type = f" in {plan.model.dtype}" if plan.model.dtype and not precision_line(plan) else ""
    return f"{plan.model.name}, {plan.model.parameters:,} parameters{in_type}"


def _heading(plan: PlanData) -> str:
    p = plan.prediction
    rates = [f"{step_text(plan)} a step", *_rates(plan)]
    whole = _is_one_sharded_stage(plan)
    rates += [] if whole else [f"bubble {percent(p.bubble_fraction)}"]
    shared = any(stage.sharding is not None for stage in plan.stages)
    rates += [f"communication {percent(communication_share(plan))}"] if shared else []
    batch = f"batch {plan.batch_size:,} = {microbatch_text(plan.batch_size, plan.microbatches)}"
    one_by_one = ", one after the other" if plan.microbatches > 1 else ""
    schedule = f"{batch}{one_by_one}" if whole else f"{plan.schedule}, {batch}"
    assumed = [f"optimizer {plan.optimizer_memory}"]
    assumed += [f"{plan.attention_backend} attention"] if plan.attention_backend else []
    ways = [counted(p.messages, "message")] if p.messages else []
    ways += [counted(p.collectives, "collective")] if p.collectives else []
    sent = f"{format_bytes(p.communication_bytes)} in {' and '.join(ways)} a step"
    return "\n".join(
        [
            *_risk(plan),
            labelled("model", _model_text(plan)),
            labelled("plan", _placed(plan)),
            labelled("schedule", schedule),
            *precision_line(plan),
            *recompute_line(plan),
            *blocks_line(plan),
            *_reduction_line(plan),
            labelled("predicted", ", ".join(rates)),
            labelled("rates", rates_text(plan)),
            labelled("sent", sent if ways else "nothing"),
            labelled("budgeted", f"{', '.join(assumed)}; {_memory(plan)}"),
        ]
    )


def _risk(plan: PlanData) -> list[str]:
    """Say first of all that a plan is not safe, and what would be."""
    said = risk_text(plan)
    if not said or plan.risk is None:
        return []
    return [labelled("not safe", said), *(labelled("try", way) for way in plan.risk.ways)]


def summary_rows(plan: PlanData) -> list[tuple[str, str]]:
    """Return the few facts that one looks for first, by name: for a notebook, above the text."""
    return [
        *([("not safe", said)] if (said := risk_text(plan)) else []),
        ("model", _model_text(plan)),
        ("plan", _placed(plan)),
        ("step", step_text(plan)),
        ("throughput", ", ".join(_rates(plan))),
        ("memory", _memory(plan)),
    ]


def _rates(plan: PlanData) -> list[str]:
    p = plan.prediction
    rates = [f"{rate_text(p.samples_per_second)} samples/s"]
    rates += [f"{rate_text(p.tokens_per_second)} tokens/s"] if p.tokens_per_second is not None else []
    return [*rates, f"MFU {percent(p.mfu)}"] if p.mfu is not None else rates


def _placed(plan: PlanData) -> str:
    """Write "layer-wise, 4 stages on 4 of 8 devices of dgx-h100:1"."""
    used, world = plan.world_size, plan.cluster.world_size
    devices = counted(world, "device") if used == world else f"{used} of {counted(world, 'device')}"
    return f"{strategy_text(plan)}, {shape_text(plan)} on {devices} of {plan.cluster.name}"


def strategy_text(plan: PlanData) -> str:
    """Name the strategy: "layer-wise", "feature-wise", "hybrid"; "free", with the number of ops in blocks."""
    words = STRATEGY_WORDS.get(plan.strategy)
    name = plan.strategy if words is None else words.adverb
    return f"{name} ({counted(len(plan.splits), 'op')} in blocks of neurons)" if plan.splits else name


def _is_one_sharded_stage(plan: PlanData) -> bool:
    """Tell whether there is no pipeline: no order of stages, no bubble, no message."""
    return len(plan.stages) == 1 and plan.stages[0].sharding is not None


def shape_text(plan: PlanData) -> str:
    """Write "4 stages", "3 stages (2 on mesh 4, 1 on one device)", or the mesh of the only stage if it is sharded."""
    stages = counted(len(plan.stages), "stage")
    meshes = [None if stage.sharding is None else mesh_text(stage.sharding) for stage in plan.stages]
    if not any(meshes):
        return stages
    if len(meshes) == 1:
        return f"mesh {meshes[0]}" if plan.world_size > 1 else "nothing to split"
    groups = Counter("one device" if mesh is None else f"mesh {mesh}" for mesh in meshes)
    return f"{stages} ({', '.join(f'{count} on {group}' for group, count in groups.items())})"


def precision_line(plan: PlanData) -> list[str]:
    """Say what is computed, summed and updated in which type, unless all of it is the model's own."""
    own = WORDS.get(plan.model.dtype or "")
    if own is None:
        return []
    types = plan.precision.of(own)
    if types == ParameterPrecision.plain(own):
        return []
    text = f"{NAMES[types.leaf]} compute, {NAMES[types.gradient]} gradients, {NAMES[types.owner]} updates"
    text += ", dynamic loss scale" if plan.precision.loss_scale else ""
    return [labelled("precision", f"{text} (the model is in {NAMES[own]})")]


def _reduction_line(plan: PlanData) -> list[str]:
    """Say how the batch's loss is made, unless micro-batches count by their samples."""
    texts = {"sum": "summed over micro-batches", "token_mean": "mean over the whole batch's valid labels"}
    text = texts.get(plan.loss_reduction)
    return [] if text is None else [labelled("loss", f"{text} ({plan.loss_reduction})")]


def recompute_line(plan: PlanData) -> list[str]:
    """Say which blocks backward computes again, and what that costs; nothing if there is none."""
    stages = [stage for stage in plan.stages if stage.recomputed_blocks]
    if not stages and plan.recompute == "selective":
        return [labelled("recompute", "nothing: no attention here keeps scores; one fused op keeps none")]
    if not stages:
        return []
    blocks = list(dict.fromkeys(name for stage in stages for name in stage.recomputed_blocks))
    where = f"in {len(stages)} of {counted(len(plan.stages), 'stage')}"
    if blocks == [GATHERS]:
        return [labelled("recompute", f"parameters {where} are gathered again in backward")]
    if blocks == [SELECTIVE]:
        return [labelled("recompute", f"attentions {where} run forward again in backward")]
    names = shorten(compress(blocks), 50)
    return [
        labelled(
            "recompute", f"{counted(len(blocks), 'block')} {where} run forward again in backward: {names}"
        )
    ]


def blocks_line(plan: PlanData) -> list[str]:
    """Say which ops run in blocks of which sizes, alike ones together, and on which ranks the blocks lie."""
    alike: dict[str, list[str]] = {}
    placements = plan.placements
    for split in plan.splits:
        ranks = [placements.get(block_name(split.op, number), ()) for number in range(len(split.sizes))]
        where = ", ".join(ranks_text(group) or "-" for group in ranks)
        sizes = " + ".join(map(str, split.sizes))
        alike.setdefault(f"{sizes} on {'rank' if len(ranks) == 1 else 'ranks'} {where}", []).append(split.op)
    texts = [f"{shorten(compress(ops), 40)}: {blocks}" for blocks, ops in alike.items()]
    more = [f"… and {len(texts) - MOST_BLOCKS} more kinds"] if len(texts) > MOST_BLOCKS else []
    return [labelled("in blocks", "; ".join([*texts[:MOST_BLOCKS], *more]))] if texts else []


def _memory(plan: PlanData) -> str:
    """Write "the fullest device (rank 0) holds 71.2 GiB (68–74) of 79.1 GiB, 90.0%: context 527 MiB, communicators 1.1 GiB,
    else tensors; 3% chance of not fitting"."""
    fullest = plan.fullest_device
    device = plan.cluster.devices[fullest]
    used = plan.prediction.peak_memory_bytes[str(fullest)]
    holds = (
        f"the fullest device (rank {fullest}) holds {peak_text(plan)} of {format_bytes(device.memory_bytes)}, "
        f"{percent(used / device.memory_bytes)}"
    )
    beside = [
        f"{part} {format_bytes(size)}"
        for part, size in plan.prediction.memory_parts(fullest).items()
        if part != "tensors" and size
    ]
    holds += f": {', '.join(beside)}, else tensors" if beside else ""
    return "; ".join(filter(None, [holds, chance_text(plan)]))


def microbatch_text(batch_size: int, microbatches: int) -> str:
    """Write 8, 2 as "2 micro-batches of 4"; an uneven 9, 2 as "1 micro-batch of 5 + 1 of 4"."""
    small, larger = divmod(batch_size, microbatches)
    sizes = [(count, size) for count, size in ((larger, small + 1), (microbatches - larger, small)) if count]
    first, *rest = sizes
    parts = [f"{counted(first[0], 'micro-batch')} of {first[1]:,}"]
    return " + ".join([*parts, *(f"{count:,} of {size:,}" for count, size in rest)])


# --------------------------------------------------------------------------------------------------
# Stages


def _stage_table(plan: PlanData) -> str:
    """Write a row per stage; its modules stand in a line below it where there is no room for a column."""
    parent = common_parent([stage.modules for stage in plan.stages])
    header = ["stage", "rank", *_device_header(plan), "parameters", "forward", "backward"]
    header += ["in flight", "peak memory", "used"]
    place = header.index("parameters")
    shown = _shown(len(plan.stages))
    rows = [_stage_row(plan, index) for index in shown]
    names = [[name.removeprefix(parent) for name in plan.stages[index].modules] for index in shown]
    hidden = len(plan.stages) - len(shown)
    others = sum(max(len(header[c]), *(len(row[c]) for row in rows)) + 2 for c in range(len(header)))
    indent = max(len(header[0]), len(str(shown[-1]))) + 2
    beside = text_width() - others >= MODULES_BESIDE
    room = text_width() - (others if beside else indent)
    modules = [_listed(stage, room) for stage in names]
    if hidden:
        rows.insert(len(shown) // 2, ["…", *[""] * (len(header) - 1)])
        modules.insert(len(shown) // 2, f"({counted(hidden, 'more stage')})")
    heading = f"modules of {parent[:-1]}" if parent and len(parent) + 10 < room else "modules"
    left = ("device", "node")
    if not beside:
        return columns(header, rows, left, under=(heading, *modules))
    for row, text in zip((header, *rows), (heading, *modules), strict=True):
        row.insert(place, text)
    return columns(header, rows, (*left, heading))


def _listed(modules: Sequence[str], room: int) -> str:
    text = shorten(modules, room) or "-"
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _shown(stages: int) -> list[int]:
    half = MAX_ROWS // 2
    every = list(range(stages))
    return every if stages <= MAX_ROWS else [*every[:half], *every[-half:]]


def _device_header(plan: PlanData) -> list[str]:
    """Choose the columns that say which device a rank is: none where all are alike, its node, or its node and model."""
    devices = [plan.cluster.devices[rank] for stage in plan.stages for rank in stage.devices]
    if len({device.model for device in devices}) > 1:
        return ["device"]
    return ["node"] if len({device.node_name for device in devices}) > 1 else []


def _stage_row(plan: PlanData, index: int) -> list[str]:
    stage = plan.stages[index]
    device = plan.cluster.devices[stage.devices[0]]
    nodes = {plan.cluster.devices[rank].node_name for rank in stage.devices}
    models = {plan.cluster.devices[rank].model for rank in stage.devices}
    node = device.node_name if len(nodes) == 1 else counted(len(nodes), "node")
    model = device.model if len(models) == 1 else counted(len(models), "kind")
    columns_of = {"device": f"{node} {model}", "node": node}
    return [
        str(index),
        ranks_text(stage.devices),
        *(columns_of[name] for name in _device_header(plan)),
        format_bytes(stage.parameter_bytes),
        format_seconds(stage.forward_seconds),
        format_seconds(stage.backward_seconds),
        str(stage.in_flight),
        *_peak(plan, index, stage),
    ]


def _peak(plan: PlanData, index: int, stage: Stage) -> tuple[str, str]:
    """Write the device's peak memory, at the first of its stages only: memory belongs to the device."""
    first = next(i for i, other in enumerate(plan.stages) if set(other.devices) & set(stage.devices))
    if first < index:
        return f"see {first}", ""
    rank = max(stage.devices, key=lambda rank: plan.prediction.peak_memory_bytes[str(rank)])
    peak = plan.prediction.peak_memory_bytes[str(rank)]
    return format_bytes(peak), f"{peak / plan.cluster.devices[rank].memory_bytes:.0%}"


# --------------------------------------------------------------------------------------------------
# Evidence


def _evidence(plan: PlanData) -> str:
    c, p = plan.certificate, plan.prediction
    seconds = format_seconds(c.search_seconds)
    if c.solver_status == BY_HAND:
        quality = f"{BY_HAND}, the rest filled in, in {seconds}"
    elif c.gap < PROVED:
        quality = f"optimal for the surrogate of the step time, in {seconds}"
    elif c.solver_status in ("time limit", "interrupted"):
        quality = f"stopped after {seconds} within {percent(c.gap)} of what the surrogate allows at best"
    else:
        quality = f"within {percent(c.gap)} of the surrogate's proved optimum, in {seconds}"
    lines = [
        labelled("search", f"{quality}, over {c.space}"),
        labelled(
            "bound",
            _bounds(c.simulated_lower_bound_seconds, c.whole_ops_bound_seconds, p.step_seconds),
        ),
        labelled(
            "checked",
            f"{counted(plan.proof.instructions, 'instruction')} and {counted(plan.proof.messages, 'message')}: all "
            "matched, in order, free of deadlock"
            if not _is_one_sharded_stage(plan)
            else f"{counted(plan.proof.instructions, 'instruction')} of {counted(plan.world_size, 'device')}: the same "
            "in the same order, every gradient summed, free of deadlock",
        ),
    ]
    return "\n".join(lines)


def _bounds(any_plan: float, whole_ops: float, step_seconds: float) -> str:
    """Say below which times no plan simulates, of all and of those of whole ops, and how far this one is from them."""
    said = [
        f"no {kind} simulates below {format_seconds(seconds)}; this one takes {step_seconds / seconds:.2f}x that"
        for kind, seconds in (("plan", any_plan), ("plan of whole ops", whole_ops))
        if seconds > 0 and (kind == "plan" or seconds > any_plan)
    ]
    return "; ".join(said) or "none"


def _alternatives(plan: PlanData) -> str:
    if not plan.alternatives:
        return ""
    known = any(other.chance_of_not_fitting is not None for other in plan.alternatives)
    rows = [_alternative_row(other, plan.prediction.step_seconds, known) for other in plan.alternatives]
    header = ("compared with", "step", "to plan", "peak memory", *(("risk",) if known else ()), "")
    return columns(header, rows, left=("compared with", ""))


def _alternative_row(other: Alternative, step_seconds: float, with_chance: bool) -> list[str]:
    known = other.step_seconds is not None
    return [
        other.strategy,
        format_seconds(other.step_seconds) if other.step_seconds is not None else "-",
        f"{(other.step_seconds or 0.0) / step_seconds:.2f}x" if known else "-",
        format_bytes(other.peak_memory_bytes) if other.peak_memory_bytes is not None else "-",
        *([chance_cell(other.chance_of_not_fitting)] if with_chance else []),
        other.reason,
    ]


def _remarks(plan: PlanData) -> str:
    lines = [labelled("not tried", "; ".join(plan.not_considered))] if plan.not_considered else []
    lines += [labelled("note", note) for note in plan.notes]
    idle = plan.cluster.world_size - plan.world_size
    if idle and plan.strategy == "layer":
        left = f"this plan leaves {counted(idle, 'device')} idle"
        lines.append(labelled("try", f"strategy auto, which shares layers out as well: {left}"))
    return "\n".join(lines)
