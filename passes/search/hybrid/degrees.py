"""Degrees on a cluster: which devices form each group, how they are arranged inside, and the pattern on each axis.

    8 devices, pipeline=2 tensor=2        group 0: ranks 0-3, group 1: ranks 4-7        each a mesh data 2 x tensor 2

Ranks follow the cluster's order: groups are outermost and tensor parallelism is innermost, where links are fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.errors import UsageError
from cost_models.units import counted, listed
from passes.search.hybrid.fix import Fix

DATA_PATTERNS = {0: "data", 1: "zero1", 3: "zero3"}
"""ZeRO's stage -> the pattern (``passes.search.feature.presets``) on the axis of replicas."""


@dataclass(frozen=True)
class Degrees:
    """The device groups of a pipeline, and how each arranges its devices."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group."""
    chunks: int
    """Stages that each group runs."""
    tensor: int | None
    """Devices of a group that share each op's neurons; None: how a group shares its stage is searched."""
    sequence: bool

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.groups) * self.chunks

    def replicas(self, group: int) -> int | None:
        """Count the replicas in a group; None where that is searched."""
        return None if self.tensor is None else len(self.groups[group]) // self.tensor

    @property
    def all_replicas(self) -> int | None:
        """The number of replicas in every group; None where it is searched, or where groups differ."""
        found = {self.replicas(group) for group in range(len(self.groups))}
        return found.pop() if len(found) == 1 else None

    def axes(self, group: int, zero: int) -> tuple[tuple[str, int, str], ...] | None:
        """Return (name, size, pattern) of the axes of a group's mesh; None where they are searched."""
        replicas = self.replicas(group)
        if replicas is None or self.tensor is None:
            return None
        inner = "sequence" if self.sequence else "column_row"
        axes = (("data", replicas, DATA_PATTERNS[zero]), ("tensor", self.tensor, inner))
        return tuple(axis for axis in axes if axis[1] > 1)


def degrees_of(fix: Fix, world: int) -> Degrees:
    """Arrange ``world`` devices as ``fix`` says. Raises UsageError for what cannot be."""
    problems: list[str] = []
    tensor = fix.tensor
    sequence = fix.sequence is not None and fix.sequence > 1
    if sequence:
        if tensor not in (None, fix.sequence):
            problems.append(f"sequence={fix.sequence}, tensor={tensor}: they are the same devices")
        tensor = fix.sequence
    sizes = _sizes(fix, tensor, world, problems)
    if problems:
        raise UsageError(
            f"cannot arrange {counted(world, 'device')} so", problems,
            ["pipeline x data x tensor = devices; what is left out follows from the others"],
        )  # fmt: skip
    searched = fix.data is None and tensor is None and fix.zero is None
    if tensor is None and not searched:
        tensor = 1 if fix.data is None else sizes[0] // fix.data
    ends = list(itertools.accumulate(sizes))
    groups = tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))
    return Degrees(groups, fix.interleave or 1, None if searched else tensor, sequence)


def _sizes(fix: Fix, tensor: int | None, world: int, problems: list[str]) -> tuple[int, ...]:
    """Count the devices of each group."""
    inside = (tensor or 1) * (fix.data or 1)
    if fix.groups is not None:
        sizes: tuple[int, ...] = fix.groups
        if fix.pipeline not in (None, len(sizes)):
            problems.append(f"groups={listed(list(sizes))} are {len(sizes)}, pipeline={fix.pipeline}")
    elif fix.data is not None and (tensor is not None or fix.pipeline is None):
        sizes = (inside,) * (fix.pipeline or max(1, world // inside))
    else:
        groups = fix.pipeline or 1
        if world % groups:
            problems.append(f"{world} devices are not {groups} equal groups: groups= gives unequal ones")
        sizes = (world // groups,) * groups
    if sum(sizes) > world or (fix.groups is None and fix.pipeline is None and sum(sizes) != world):
        problems.append(f"{_product(sizes, fix, tensor)} = {sum(sizes)} devices, there are {world}")
    for size in dict.fromkeys(sizes):
        if size % inside:
            parts = " x ".join(f"{n}={d}" for n, d in (("data", fix.data), ("tensor", tensor)) if d)
            problems.append(f"a group of {counted(size, 'device')} is not {parts}")
        elif fix.data and tensor and size != inside:
            problems.append(f"a group of {counted(size, 'device')} is not data={fix.data} x tensor={tensor}")
    return sizes


def _product(sizes: Sequence[int], fix: Fix, tensor: int | None) -> str:
    if fix.groups is not None:
        return " + ".join(map(str, sizes))
    parts = (("pipeline", len(sizes)), ("data", fix.data), ("tensor", tensor))
    return " x ".join(f"{name} {degree}" for name, degree in parts if degree)


def microbatch_counts(fix: Fix, degrees: Degrees, batch_size: int, wanted: int | str) -> list[int]:
    """Numbers of micro-batches to try: the fixed one, or a few for every stage. Raises UsageError.

    A pipeline of p stages idles (p - 1)/(m + p - 1) of the time with m micro-batches (GPipe, 2019), so m goes from p to 8p.
    """
    replicas = degrees.all_replicas
    if fix.microbatch is not None:
        if replicas is None:
            raise UsageError(
                f"cannot make micro-batches of {counted(fix.microbatch, 'sample')} on each replica",
                ["groups have unlike numbers of replicas, or theirs is searched"],
                ["give the number of micro-batches instead, or fix tensor= and data="],
            )
        together = fix.microbatch * replicas
        size = f"{fix.microbatch} x {counted(replicas, 'replica')} = {counted(together, 'sample')}"
        if batch_size % together:
            raise UsageError(
                f"cannot cut a batch of {batch_size} into micro-batches of {size}",
                [f"{together} does not divide {batch_size}"],
                [f"a multiple of {together} as the batch size"],
            )
        if wanted not in ("auto", batch_size // together):
            raise UsageError(
                f"cannot cut a batch of {batch_size} into {wanted} micro-batches of {size}",
                [f"that makes {batch_size // together}"],
                ["fix microbatch= or the number of micro-batches, not both"],
            )
        return [batch_size // together]
    unit = replicas or 1
    fitting = [m for m in range(1, batch_size + 1) if batch_size % m == 0 and batch_size // m % unit == 0]
    if isinstance(wanted, int):
        if wanted not in fitting:
            closest = sorted(sorted(fitting, key=lambda m: abs(m - wanted))[:3])
            raise UsageError(
                f"cannot cut a batch of {batch_size} into {wanted} micro-batches",
                [f"each has equally many samples, a multiple of {unit}"],
                [f"{' or '.join(map(str, closest))} micro-batches"] if closest else [f"a batch size that {unit} divides"],
            )  # fmt: skip
        return [wanted]
    if not fitting:
        raise UsageError(
            f"cannot cut a batch of {batch_size} for {counted(unit, 'replica')}",
            ["every replica needs a sample"],
            [f"a batch size that {unit} divides"],
        )
    if degrees.stages == 1:
        return fitting
    groups = len(degrees.groups)
    near = {min(fitting, key=lambda m: (abs(math.log(m / (k * groups))), m)) for k in (1, 2, 4, 8)}
    return sorted(near)
