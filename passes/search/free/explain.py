"""Explanation of a free placement: the step with some ops on each other device, simulated, everything else as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from passes.graph.state import owning_units
from passes.lower.candidate import anywhere
from passes.search.free.judge import ListJudge
from passes.search.outcome import PlacedWay
from runtime.simulate.simulation import Simulation

MOST_DEVICES = 32
"""Devices of a cluster that are tried: each is a simulation or two. By hand: a table of more is not read."""


def moved_together(judge: ListJudge, ops: Collection[str]) -> set[str]:
    """Return the placed ones of ``ops``, with all ops that share their device in every placement."""
    unit_of = owning_units(judge.graph, judge.recomputed)
    units = {unit_of[op] for op in ops if op in unit_of}
    return {op for op, unit in unit_of.items() if unit in units}


def ways_elsewhere(
    judge: ListJudge,
    rank_of: Mapping[str, int],
    microbatches: int,
    moved: Collection[str],
    planned: Simulation,
) -> tuple[PlacedWay, ...]:
    """Simulate the step with ``moved`` on each device, fastest first. ``planned``: the step as it is."""
    devices = judge.cluster.devices
    here = sorted({rank_of[op] for op in moved})
    ways = []
    for rank, device in enumerate(devices[:MOST_DEVICES]):
        chosen = here == [rank]
        elsewhere = anywhere({**rank_of, **dict.fromkeys(moved, rank)}, len(devices), microbatches)
        simulation = planned if chosen else judge.finished(elsewhere).realized.simulation
        ways.append(
            PlacedWay(
                layout=f"rank {rank} ({device.model})",
                step_seconds=simulation.step_seconds,
                computes_seconds=_computes_seconds(judge, moved, rank, microbatches),
                sends_seconds=_sends_seconds(simulation),
                memory_bytes=simulation.peak_bytes[rank],
                chosen=chosen,
            )
        )
    if len(here) > 1:  # a module's ops, or a parameter's readers, on several devices
        seconds = sum(
            _computes_seconds(judge, [op for op in moved if rank_of[op] == rank], rank, microbatches)
            for rank in here
        )
        spread = f"ranks {', '.join(map(str, here))}, as planned"
        peak = max(planned.peak_bytes)
        ways.append(PlacedWay(spread, planned.step_seconds, seconds, _sends_seconds(planned), peak, True))
    return tuple(sorted(ways, key=lambda way: way.step_seconds))


def _sends_seconds(simulation: Simulation) -> float:
    return sum(transfer.end_seconds - transfer.start_seconds for transfer in simulation.transfers)


def _computes_seconds(judge: ListJudge, ops: Collection[str], rank: int, microbatches: int) -> float:
    """Sum the seconds of ``ops`` on a device in a step."""
    size = judge.job.sizes(microbatches)[0]
    indices = np.array([i for i, name in enumerate(judge.costs.ops) if name in ops], dtype=np.int64)
    seconds = judge.costs.segment_seconds(indices, size, judge.cluster.devices[rank])
    return microbatches * (seconds.forward + seconds.backward_input + seconds.backward_weight)
