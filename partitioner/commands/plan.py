"""``partitioner plan``: from a model and a cluster to a plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter

from cost_models.cluster import ClusterSpec
from cost_models.errors import TimeLimitError
from cost_models.units import percent
from partitioner.api import partition
from partitioner.commands import options
from partitioner.commands.options import (
    Dims,
    JsonFlag,
    Settings,
    Whole,
    block_sizes,
    check_output,
    emit,
    mesh_shape,
    microbatch_count,
    pins,
    progress,
    read_precision,
    report,
    settings,
)
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.planning.options import PlanOptions
from partitioner.report.timings import pass_table
from passes.search.free.request import Objective
from passes.search.layer.options import RecomputeMode
from passes.search.words import STRATEGY_WORDS
from passes.timings import pass_times
from passes.trace.loss.reduction import checked_reduction


def plan(
    model: str,
    /,
    *,
    cluster: str,
    batch_size: Whole,
    strategy: str = "layer",
    microbatches: str = "auto",
    schedule: str = "auto",
    optimizer_memory: str = "adamw",
    precision: str | None = None,
    loss_reduction: str | None = None,
    min_stages: Whole | None = None,
    max_stages: Whole | None = None,
    recompute: str | None = None,
    pin: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    mesh: str | None = None,
    objective: str | None = None,
    split: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    batch_dims: Dims = (),
    dynamic_dims: Dims = (),
    time_limit: float = 60.0,
    seq: Whole | None = None,
    dtype: str | None = None,
    set_: Settings = (),
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    timings: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: JsonFlag = False,
) -> int:
    """Plan how MODEL trains on a cluster.

    A cost graph instead of a model: partitioner plan --graph FILE --strategy free (more: plan --graph FILE --help).

    Parameters
    ----------
    model
        file.py:factory, package.module:factory, hf:PATH/config.json, or a bundled name (gpt2, llama-70b, …).
    cluster
        A cluster file, PRESET[:NODES] such as dgx-h100:8, or local:N for CPU workers on this machine.
    batch_size
        Samples per optimizer step.
    strategy
        layer: every op on one device, every device one contiguous run of the model. feature: every op on all devices,
        tensors sharded. free: any op, or block of its neurons, on any device. auto: all are planned, the fastest plan
        that fits is taken.
    microbatches
        auto, or into how many pieces the batch is cut.
    schedule
        auto, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, list or list-split.
    optimizer_memory
        Whose state is budgeted: none, sgd, momentum, adam, adamw or amsgrad.
    precision
        compute=bf16,master=fp32 and so on: any of compute, parameters, gradients, master, and loss_scale=dynamic.
    loss_reduction
        mean, sum or token_mean: how micro-batches' losses become the batch's; as the model's loss is made if not given.
    min_stages
        Use at least this many devices, each with a stage or more.
    max_stages
        Use at most this many stages.
    recompute
        none, full or auto: whether backward computes the activations of blocks again; auto: where memory asks for it.
    pin
        layer: GLOB=STAGE over module paths or op names, such as `layers.0.*=0`; free: GLOB=DEVICE. feature: GLOB=LAYOUT
        over parameters, inputs, ops or module paths, such as `*.up_proj.weight=S0` or `input_ids=S0,R`; or a pattern:
        `*=zero3`, `*=data,column_row` (of data zero1 zero3 column_row sequence vocabulary). May be repeated.
    mesh
        feature: the shape of the mesh of devices, such as 8x4, outermost axis first; searched if not given.
    objective
        free: throughput (of micro-batches, the default) or latency (of one batch).
    split
        free: NAME=SIZE,SIZE: how an op, or what NAME (a glob) can mean in this model, is split into blocks of neurons,
        such as `mlp=60,40`, or `conv2d:2=7,7` for dimension 2 of an op's output; `none` for nothing; chosen for the
        devices if not given. May be repeated.
    batch_dims
        NAME=DIM: where the batch is in an input, or NAME=none for an input without one; may be repeated.
    dynamic_dims
        NAME=DIM,DIM: sizes of an input that may differ from batch to batch; may be repeated.
    time_limit
        Seconds for the search; the best plan so far is kept.
    seq
        Sequence length of a bundled or hf: model.
    dtype
        Data type of a bundled or hf: model, such as bfloat16.
    set_
        key=value for the factory's arguments; may be repeated.
    output
        The file to write the plan to; without it nothing is written.
    timings
        Also print, on stderr, each pass of the compile with its seconds and what came out.
    json
        Print one JSON object: the plan.
    """
    count: Any = microbatch_count(microbatches)
    dims: dict[str, Any] = {
        "batch_dims": options.batch_dims(batch_dims),
        "dynamic_dims": options.dynamic_dims(dynamic_dims),
    }
    types = read_precision(precision)
    reduction = checked_reduction(loss_reduction)
    wanted = PlanOptions(
        batch_size=batch_size,
        optimizer_memory=optimizer_memory,
        strategy=strategy,
        schedule=schedule,
        microbatches=count,
        pins=pins(pin, strategy),
        mesh=mesh_shape(mesh),
        objective=cast("Objective | None", objective),
        splits=block_sizes(split),
        min_stages=min_stages,
        max_stages=max_stages,
        recompute=cast("RecomputeMode | None", recompute),
        time_limit_seconds=time_limit,
    )
    wanted.check()
    check_output(output)
    machines = ClusterSpec.parse(cluster)
    wanted.check_mesh(machines)
    with progress(f"loading {model}"):
        workload = load_workload(model, settings=settings(set_), seq=seq, dtype=dtype)
    with pass_times() as times:
        with progress(f"tracing {model}"):
            traced = as_graph(workload, precision=types, loss_reduction=reduction, **dims)
        with progress("searching"):
            made = partition(traced, machines, precision=types, **vars(wanted))
    if timings:
        print(pass_table(times), file=sys.stderr)
    if output is not None:
        made.save(output)
    emit(str(made), made.to_dict(), json)
    if made.certificate.solver_status != "time limit":
        return 0
    return report(
        TimeLimitError(
            f"the search stopped after {time_limit:g} s with a plan that fits",
            because=[
                f"it is within {percent(made.certificate.gap)} of the best "
                + STRATEGY_WORDS[made.strategy].best_of
                + " can have"
                if made.certificate.gap < 1
                else "how far it is from the best was not found out in that time"
            ],
            suggestions=["use the plan as it is, or search on with a larger --time-limit"],
        )
    )
