"""Schedules: the orders in which ranks run their segments' forwards and backwards over micro-batches.

Pure functions without torch: (segment DAG, micro-batches) -> the compute instructions of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from runtime.schedules.held import Moment, peak_bytes
from runtime.schedules.list_scheduler import (
    ListSchedule,
    inference_order,
    limits_within,
    list_order,
)
from runtime.schedules.pipelines import gpipe, interleaved, one_f_one_b
from runtime.schedules.schedule import PipelineSchedule, Schedule
from runtime.schedules.zero_bubble import zb_h1, zb_h2, zb_v

__all__ = [
    "SCHEDULES",
    "Moment",
    "Schedule",
    "inference_order",
    "limits_within",
    "list_order",
    "peak_bytes",
]

_ALL: tuple[Schedule, ...] = (
    PipelineSchedule(
        name="gpipe",
        title="GPipe: all forwards, then all backwards",
        source="Huang et al. 2019, arXiv 1811.06965",
        generate=gpipe,
    ),
    PipelineSchedule(
        name="1f1b",
        title="1F1B: one forward, one backward",
        source="Narayanan et al. 2019 (PipeDream); Fan et al. 2021 (DAPPLE), arXiv 2007.01045",
        generate=one_f_one_b,
        settles="always",
    ),
    PipelineSchedule(
        name="interleaved",
        title="Interleaved 1F1B: several chunks per rank, round and round",
        source="Narayanan et al. 2021 (Megatron-LM), arXiv 2104.04473",
        chunks=None,
        minimum_chunks=2,
        generate=interleaved,
        settles="in groups",
    ),
    PipelineSchedule(
        name="zb-h1",
        title="ZB-H1: weight gradients fill a part of 1F1B's bubble, in 1F1B's memory",
        source="Qi et al. 2024, arXiv 2401.10241",
        splits_backward=True,
        generate=zb_h1,
        settles="always",
    ),
    PipelineSchedule(
        name="zb-h2",
        title="ZB-H2: no bubble, in up to twice 1F1B's memory",
        source="Qi et al. 2024, arXiv 2401.10241",
        splits_backward=True,
        generate=zb_h2,
        settles="always",
    ),
    PipelineSchedule(
        name="zb-v",
        title="ZB-V: no bubble, in 1F1B's memory, two chunks per rank placed as a V",
        source="Qi et al. 2024, arXiv 2405.15362",
        splits_backward=True,
        chunks=2,
        folded=True,
        generate=zb_v,
        settles="always",
    ),
    ListSchedule(
        name="list",
        title="List scheduler: any segments, any placement",
        source="Graham 1969; limits by Little 1961",
        chunks=None,
    ),
    ListSchedule(
        name="list-split",
        title="List scheduler with backward in halves: weight gradients fill the gaps",
        source="Graham 1969; limits by Little 1961; halves by Qi et al. 2024, arXiv 2401.10241",
        splits_backward=True,
        chunks=None,
    ),
)

SCHEDULES: Mapping[str, Schedule] = MappingProxyType({schedule.name: schedule for schedule in _ALL})
