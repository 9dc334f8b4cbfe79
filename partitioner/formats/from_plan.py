"""The parallelism of a plan, as far as it is the one that training frameworks have: equal groups of data × tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cost_models.errors import UsageError
from cost_models.units import counted
from partitioner.formats.parallelism import Parallelism, Zero, is_block, units_of
from partitioner.record.data import PlanData
from partitioner.record.records import Stage
from passes.graph.blocks import GATHERS, SELECTIVE
from passes.search.words import RecomputeMode
from runtime.schedules import SCHEDULES

SAMPLES = "S0"
"""The placement of a batch whose samples are divided."""
POSITIONS = "S1"
"""The placement of activations whose positions are divided: samples × positions × neurons."""


def parallelism_of(plan: PlanData) -> Parallelism:
    """Return the degrees of a plan. Raises UsageError with every reason why it has none that frameworks share."""
    problems = list(_problems(plan))
    if problems:
        raise UsageError(
            "this plan has no degrees that other tools know",
            problems,
            ["plan with --strategy hybrid --fix 'pipeline=… tensor=… data=…'"],
        )
    groups = len({tuple(stage.devices) for stage in plan.stages})
    data, tensor = _degrees(plan.stages[0])
    return Parallelism(
        pipeline=groups,
        chunks=len(plan.stages) // groups,
        tensor=tensor,
        sequence=tensor > 1 and any(map(_divides_positions, plan.stages)),
        data=data,
        zero=next(iter(_zeros(plan)), 0),
        microbatch=plan.batch_size // plan.microbatches // data,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        recompute=recompute_of(plan),
        layers=tuple(sum(map(is_block, modules)) for modules in stage_modules(plan)) if groups > 1 else (),
    )


def _problems(plan: PlanData) -> Iterator[str]:
    groups = list(dict.fromkeys(tuple(stage.devices) for stage in plan.stages))
    if plan.splits:
        yield "ops run in blocks of neurons, each on its own device"
    if len({len(group) for group in groups}) > 1:
        yield f"groups have unequal numbers of devices: {', '.join(str(len(group)) for group in groups)}"
    if sorted(rank for group in groups for rank in group) != list(plan.used_devices):
        yield "a device belongs to several groups"
    if plan.schedule in SCHEDULES:
        positions = SCHEDULES[plan.schedule].positions(len(plan.stages), len(groups))
        if [groups[position] for position in positions] != [tuple(stage.devices) for stage in plan.stages]:
            yield f"stages are not placed as schedule {plan.schedule} numbers them"
    shapes = {_degrees(stage) for stage in plan.stages}
    if len(shapes) > 1:
        yield "stages are not divided alike: " + ", ".join(
            f"data {d} × tensor {t}" for d, t in sorted(shapes)
        )
    if any(sum(size > 1 for size in _tensor_axes(stage)) > 1 for stage in plan.stages):
        yield "ops are split over two axes of a mesh"
    if len(_zeros(plan)) > 1:
        yield "ZeRO differs from stage to stage"
    if plan.batch_size % plan.microbatches:
        yield f"micro-batches are of unequal size: {plan.batch_size} samples in {plan.microbatches}"
    parts = _shared_blocks(plan)
    if parts:
        yield f"{counted(len(parts), 'block')} in parts of several stages: {', '.join(parts[:3])}"


def _axes(stage: Stage) -> Iterator[tuple[int, int, bool]]:
    """Yield the index and the size of each axis of a stage's mesh, and whether it divides samples."""
    sharding = stage.sharding
    for index, size in enumerate(sharding.axes.values() if sharding is not None else ()):
        assert sharding is not None
        given = [*sharding.batch.values(), *(text.split("~")[0] for text in sharding.values.values())]
        yield index, size, any(text.split()[index] == SAMPLES for text in given)


def _tensor_axes(stage: Stage) -> list[int]:
    return [size for _, size, samples in _axes(stage) if not samples]


def _degrees(stage: Stage) -> tuple[int, int]:
    """Return the replicas and the shards of a stage."""
    data = tensor = 1
    for _, size, samples in _axes(stage):
        data, tensor = (data * size, tensor) if samples else (data, tensor * size)
    return data, tensor


def _divides_positions(stage: Stage) -> bool:
    """Tell whether shards hold parts of the positions between products: most ops with parameters that all have whole do."""
    shards = [index for index, _, samples in _axes(stage) if not samples]
    taken = [
        [row.takes[0].split()[index] for index in shards]
        for row in (stage.sharding.layouts if stage.sharding is not None else ())
        if row.takes and row.taken and all(row.taken.split()[index] == "R" for index in shards)
    ]
    return sum(POSITIONS in placements for placements in taken) * 2 > len(taken)


def _zeros(plan: PlanData) -> set[Zero]:
    """Return what replicas divide in the stages that have parameters."""
    return {_zero(stage) for stage in plan.stages if stage.parameter_bytes}


def _zero(stage: Stage) -> Zero:
    """Return what replicas divide: the state of most parameters' bytes counts."""
    if stage.sharding is None:
        return 0
    data = [index for index, _, samples in _axes(stage) if samples]
    bytes_at: dict[Zero, int] = {}
    for row in stage.sharding.layouts:
        if row.stored:
            level = _zero_of(row.stored, row.state, data)
            bytes_at[level] = bytes_at.get(level, 0) + row.size_bytes
    return max(bytes_at, key=lambda level: bytes_at[level], default=0)


def _zero_of(stored: str, state: str, data: Sequence[int]) -> Zero:
    if any(stored.split()[index] != "R" for index in data):
        return 3
    return 1 if state and any(state.split()[index] != "R" for index in data) else 0


def recompute_of(plan: PlanData) -> RecomputeMode:
    """Return what backward computes again; ``auto`` for some blocks of some stages."""
    kinds = {block for stage in plan.stages for block in stage.recomputed_blocks}
    if not kinds:
        return "none"
    if kinds <= {GATHERS, SELECTIVE}:
        return "gathers" if GATHERS in kinds else "selective"
    whole = zip(plan.stages, stage_modules(plan), strict=True)
    every = all(set(filter(is_block, modules)) <= set(stage.recomputed_blocks) for stage, modules in whole)
    return "full" if every else "auto"


def stage_modules(plan: PlanData) -> list[list[str]]:
    """Return the modules of every stage, in the model's order: blocks, else modules with ops of their own."""
    if plan.outline is None:
        return [[] for _ in plan.stages]
    of_modules = units_of(plan.outline.modules)
    unit_of = {op: of_modules[n] for op, n in zip(plan.outline.names, plan.outline.module_of, strict=True)}
    return [
        [unit for unit in dict.fromkeys(unit_of.get(op, "") for op in stage.ops) if unit]
        for stage in plan.stages
    ]


def _shared_blocks(plan: PlanData) -> list[str]:
    """Return the blocks whose ops are in several stages."""
    stages_of: dict[str, set[int]] = {}
    for index, modules in enumerate(stage_modules(plan)):
        for name in modules:
            stages_of.setdefault(name, set()).add(index)
    return [name for name, found in stages_of.items() if len(found) > 1 and is_block(name)]
