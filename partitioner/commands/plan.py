"""``partitioner plan``: from a model and a cluster to a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from cost_models.cluster import ClusterSpec
from cost_models.errors import TimeLimitError
from partitioner.api import as_graph, check_choices, check_microbatches, partition
from partitioner.commands.options import emit, microbatch_count, pins, progress, settings
from partitioner.workloads import load_workload


def plan(
    model: str,
    /,
    *,
    cluster: str,
    batch_size: int,
    strategy: str = "layer",
    microbatches: str = "auto",
    schedule: str = "auto",
    optimizer_memory: str = "adamw",
    master: bool = False,
    max_stages: int | None = None,
    pin: tuple[str, ...] = (),
    time_limit: float = 60.0,
    seq: int | None = None,
    dtype: str | None = None,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = (),
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Plan how MODEL trains on a cluster.

    Parameters
    ----------
    model
        file.py:factory, package.module:factory, hf:PATH/config.json, or a bundled name (gpt2, llama-70b, …).
    cluster
        A cluster file, PRESET[:NODES] such as dgx-h100:8, or local:N for CPU workers on this machine.
    batch_size
        Samples per optimizer step.
    strategy
        layer.
    microbatches
        auto, or into how many pieces the batch is cut.
    schedule
        auto, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v or list.
    optimizer_memory
        Whose state is budgeted: none, sgd, momentum, adam or adamw.
    master
        Budget 32-bit master copies as well.
    max_stages
        Use at most this many stages.
    pin
        GLOB=STAGE over module paths or op names; may be repeated.
    time_limit
        Seconds for the search; the best plan so far is kept.
    seq
        Sequence length of a bundled or hf: model.
    dtype
        Data type of a bundled or hf: model, such as bfloat16.
    set_
        key=value for the factory's arguments; may be repeated.
    output
        Where to write the plan.
    json
        Print the plan as one JSON object.
    """
    check_choices(strategy=strategy, schedule=schedule, optimizer_memory=optimizer_memory)
    count: Any = microbatch_count(microbatches)
    check_microbatches(batch_size, count)
    pinned = pins(pin)
    machines = ClusterSpec.parse(cluster)
    with progress(f"loading {model}"):
        workload = load_workload(model, settings=settings(set_), seq=seq, dtype=dtype)
    with progress(f"tracing {model}"):
        traced = as_graph(workload)
    with progress("searching"):
        made = partition(
            traced,
            machines,
            batch_size=batch_size,
            optimizer_memory=optimizer_memory,
            master=master,
            strategy=strategy,
            schedule=schedule,
            microbatches=count,
            pins=pinned,
            max_stages=max_stages,
            time_limit_seconds=time_limit,
        )
    if output is not None:
        made.save(output)
    emit(str(made), made.to_dict(), json)
    if made.certificate.solver_status == "time limit":
        raise TimeLimitError(
            f"the search stopped after {time_limit:g} s",
            because=[f"the proved gap is {made.certificate.gap:.1%}"],
            suggestions=["the plan is good as it is; a larger --time-limit may find a better one"],
        )
    return 0
