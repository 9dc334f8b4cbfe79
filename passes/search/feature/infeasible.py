"""Reasons why no feature-wise plan can be had, with numbers, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from cost_models.errors import InfeasibleError, UsageError
from cost_models.memory import state_bytes
from cost_models.units import counted, format_bytes
from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph
from passes.graph.least_samples import least_samples
from passes.search.beside_tensors import least_communicators
from passes.search.feature.graph import FeatureGraph
from passes.search.feature.setting import Setting
from passes.search.infeasible import held_whole, room_text


def least_saved_bytes(space: FeatureGraph, ranks: int, samples: int) -> float:
    """Bytes that autograd saves of a micro-batch on one rank at least: nothing is split into more than all ranks."""
    costs = space.costs.exact(samples)
    sizes = costs.storage_bytes(samples)
    stored = space.again.storages(samples)
    return sum(sizes[name] for name in stored if costs.ops[costs.maker[name]] in space.unit_of) / ranks


def does_not_fit(
    space: FeatureGraph, setting: Setting, least_bytes: float, most_microbatches: int
) -> InfeasibleError:
    """``least_bytes``: what every sharding needs of one device at least; infinite where it is only known to be too much.

    That is proved where several ways are known for every op; what is known of none but one may yet be split in others.
    ``most_microbatches``: into how many the batch was cut.
    """
    graph = space.graph
    whole = held_whole(graph, (name for unit in space.units if unit.only_whole for name in unit.members))
    devices = setting.sharing
    smallest = min(devices, key=lambda device: device.room_bytes)
    world = len(devices)
    beside = smallest.context_bytes + least_communicators(setting.cluster, [d.rank for d in devices])
    capacity = smallest.room_bytes - beside
    held = [
        (spec.elements, graph.types_of(name, setting.job.precision), name in graph.trained)
        for name, spec in (*graph.parameters.items(), *graph.buffers.items())
    ]
    state = state_bytes(held, setting.job.optimizer).total
    because = [
        f"rank {smallest.rank} ({smallest.model}) has {room_text(smallest)}, and every sharding "
        f"{'that is known ' if whole else ''}needs "
        + ("more" if math.isinf(least_bytes) else f"at least {format_bytes(int(least_bytes))} of each device")
        + ("" if whole or math.isinf(least_bytes) else " (proved)"),
        *whole,
        f"parameters, gradients and {setting.job.optimizer} state are {format_bytes(state)}: "
        f"{format_bytes(state // world)} a device where all of it is split",
    ]
    if setting.reserved_bytes:
        because.append(
            f"{format_bytes(int(setting.reserved_bytes))} of each device are left for what only simulating a step shows"
        )
    if beside:
        because.append(
            f"{format_bytes(beside)} of each device are the driver's context and communicators at least"
        )
    because.append(f"that is counted with {_kept_for_backward(setting)}")
    largest = max(devices, key=lambda device: device.room_bytes)
    if largest.room_bytes > smallest.room_bytes:
        because.append(f"all devices have equal parts: of the largest, {room_text(largest)}, no more is used")
    if state / world > capacity:
        ways = [
            f"{math.ceil(state / capacity):,} or more devices of this size, or an optimizer with less state"
        ]
    else:
        ways = [
            f"a smaller batch: it was tried in up to {counted(most_microbatches, 'micro-batch')}",
            "more devices",
        ]
    return InfeasibleError(
        f"{graph.model_name} does not fit feature-wise on {setting.cluster.name}",
        because,
        [*ways, *_recompute(graph, setting), 'strategy "layer", whose stages need not be alike'],
    )


def _kept_for_backward(setting: Setting) -> str:
    """Say for which kind of plan the count holds."""
    if not setting.again:
        return "activations and gathered parameters kept until backward"
    if _gathers_alone(setting):
        return "activations kept until backward, and parameters gathered again"
    return f"the activations of {counted(len(setting.again), 'block')} computed again in backward"


def _gathers_alone(setting: Setting) -> bool:
    return all(len(names) == 1 for names in setting.again)


def _recompute(graph: OpGraph, setting: Setting) -> list[str]:
    """Advise to compute blocks again where there are some, and that was not done."""
    if not _gathers_alone(setting) or not block_of(graph):
        return []
    return ['recompute the activations of blocks in backward (recompute "auto")']


def equal_counts(graph: OpGraph, batch_size: int, wanted: int | Literal["auto"]) -> list[int]:
    """Micro-batch counts: divisors of the batch size, so that all micro-batches are alike, fewest first."""
    least, _ = least_samples(graph)
    possible = [m for m in range(1, batch_size + 1) if batch_size % m == 0 and batch_size // m >= least]
    counts = possible if wanted == "auto" else [m for m in possible if m == wanted]
    if not counts:
        raise _no_such_microbatches(graph, batch_size, wanted, possible)
    return counts


def _no_such_microbatches(
    graph: OpGraph, batch_size: int, wanted: object, possible: Sequence[int]
) -> UsageError:
    """The batch cannot be cut into ``wanted`` equal pieces, but into ``possible`` ones."""
    least, reason = least_samples(graph)
    because = []
    if isinstance(wanted, int) and batch_size % wanted:
        because.append(
            f"its micro-batches have equally many samples, and {wanted} does not divide {batch_size}"
        )
    elif reason:
        because.append(f"a micro-batch has at least {least} samples, for {reason}")
    near = sorted(possible, key=lambda m: abs(m - wanted) if isinstance(wanted, int) else m)[:3]
    ways = [f"{' or '.join(map(str, sorted(near)))} micro-batches"] if near else ["a larger batch size"]
    pieces = f" in {wanted} micro-batches" if isinstance(wanted, int) else ""
    return UsageError(
        f"cannot train {graph.model_name} feature-wise on {batch_size} samples{pieces}", because, ways
    )
