"""``partitioner plan --graph``: from a cost graph in a file to a placement. Needs no model, no cluster and no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, get_args

from cyclopts import Parameter

from cost_models.errors import TimeLimitError, UsageError
from cost_models.units import percent
from partitioner.commands.options import (
    JsonFlag,
    OutputFile,
    QuietFlag,
    WholeNumber,
    check_output,
    emit,
    progress,
    report,
)
from partitioner.cost_graphs.plan import GraphStrategy, check_options, plan_graph
from partitioner.cost_graphs.plan_layouts import plan_feature_wise
from partitioner.cost_graphs.read import read_graph


def plan(
    *model: Annotated[str, Parameter(show=False)],
    graph: Path,
    strategy: str = "free",
    contiguous: bool = False,
    devices: WholeNumber | None = None,
    objective: str = "throughput",
    bandwidth: float | None = None,
    time_limit: float = 60.0,
    cluster: Annotated[str | None, Parameter(show=False)] = None,
    batch_size: Annotated[str | None, Parameter(show=False)] = None,
    output: OutputFile = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Place the nodes of a cost graph on accelerators and CPUs.

    Parameters
    ----------
    graph
        JSON of the device-placement benchmark, a PipeDream graph.txt, or our own JSON.
    strategy
        free: any node on any device. feature: every op on all devices, by samples, features or inputs (PipeDream profiles).
    contiguous
        Ask that devices pass the forward graph on in one direction: its quotient over devices has no circle.
    devices
        How many accelerators, instead of what the file says; a PipeDream profile says nothing.
    objective
        throughput: least load of the busiest device. latency: least makespan of one batch.
    bandwidth
        Bytes per second between devices, for a PipeDream profile (1e9 if not given).
    time_limit
        Seconds for the search; the best placement so far is kept.
    output
        The file to write the plan to; without it nothing is written.
    """
    given = {"MODEL": model, "--cluster": cluster, "--batch-size": batch_size}
    excess = [name for name, value in given.items() if value]
    if excess:
        raise UsageError(
            f"{', '.join(excess)} cannot be given with --graph",
            [f"{graph} says itself what its nodes cost and which devices there are"],
            [f"leave {'it' if len(excess) == 1 else 'them'} out, or leave out --graph to plan a model"],
        )
    if strategy not in get_args(GraphStrategy):
        raise UsageError(
            f"a cost graph cannot be planned by strategy {strategy!r}",
            ["it has nodes and costs, but no model whose programs could be made"],
            [
                "use --strategy free, with --contiguous for one run of the graph per device",
                "use --strategy feature for a PipeDream profile",
            ],
        )
    check_options(contiguous, objective, time_limit, strategy)
    check_output(output)
    with progress(f"reading {graph}", quiet=quiet):
        read = read_graph(graph, devices=devices, bytes_per_second=bandwidth)
    with progress("searching", quiet=quiet):
        if strategy == "feature":
            made = plan_feature_wise(read, time_limit)
        else:
            made = plan_graph(read, contiguous=contiguous, objective=objective, time_limit_seconds=time_limit)
    if output is not None:
        made.save(output)
    emit(made, made.to_dict(), json)
    if made.certificate.solver_status != "time limit" or not math.isfinite(time_limit):
        return 0
    return report(
        TimeLimitError(
            f"the search stopped after {time_limit:g} s with a placement that fits",
            because=[f"it is within {percent(made.certificate.gap)} of the proved bound"],
            suggestions=["use the plan as it is, or search on with a larger --time-limit"],
        )
    )
