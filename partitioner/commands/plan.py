"""``partitioner plan``: from a model and a cluster to a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, cast

from cyclopts import Parameter

from cost_models.cluster import ClusterSpec
from cost_models.errors import InterruptedSearchError, TimeLimitError
from cost_models.shown import printable
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.api import plan_traced
from partitioner.commands import options
from partitioner.commands.options import (
    NOTHING_GIVEN,
    Dims,
    Flag,
    JsonFlag,
    ModelOptions,
    OutputFile,
    QuietFlag,
    WholeNumber,
    block_sizes,
    check_output,
    emit,
    mesh_shape,
    microbatch_count,
    pins,
    progress,
    read_precision,
    report,
)
from partitioner.models.as_graph import Check, as_graph
from partitioner.planning.option_table import with_command_help
from partitioner.planning.options import PlanOptions
from partitioner.report.live import live_line
from partitioner.report.text import columns
from passes.interrupts import best_so_far_kept
from passes.search.words import STRATEGY_WORDS
from passes.timings import PassTime, pass_times
from passes.trace.loss.reduction import checked_reduction


@with_command_help
def plan(
    model: str,
    /,
    *,
    cluster: str,
    batch_size: WholeNumber,
    strategy: str = "layer",
    microbatches: str = "auto",
    micro_couplings: Flag = False,
    schedule: str = "auto",
    optimizer_memory: str = "adamw",
    precision: str | None = None,
    loss_reduction: str | None = None,
    min_stages: WholeNumber | None = None,
    max_stages: WholeNumber | None = None,
    recompute: str | None = None,
    pin: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    mesh: str | None = None,
    fix: str | None = None,
    objective: str | None = None,
    split: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    batch_dims: Dims = (),
    dynamic_dims: Dims = (),
    opaque: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    check: str = "on",
    time_limit: float = 60.0,
    model_options: ModelOptions = NOTHING_GIVEN,
    output: OutputFile = None,
    timings: Flag = False,
    quiet: QuietFlag = False,
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
    output
        The file to write the plan to; without it nothing is written.
    timings
        Also print, on stderr, each pass of the compile with its seconds and what came out.
    """
    given = {**locals(), "microbatches": microbatch_count(microbatches)}
    dims: dict[str, Any] = {
        "batch_dims": options.batch_dims(batch_dims),
        "dynamic_dims": options.dynamic_dims(dynamic_dims),
    }
    types = read_precision(precision)
    reduction = checked_reduction(loss_reduction)
    given |= {
        "pins": pins(pin, strategy),
        "mesh": mesh_shape(mesh),
        "splits": block_sizes(split),
        "time_limit_seconds": time_limit,
    }
    wanted = PlanOptions(**{field.name: given[field.name] for field in fields(PlanOptions)})
    wanted.check()
    check_output(output)
    machines = ClusterSpec.parse(cluster)
    wanted.check_mesh(machines)
    with best_so_far_kept(), _or_no_plan():
        with live_line(quiet=quiet), pass_times() as times:
            with progress(f"loading {model}", quiet=quiet):
                workload = model_options.load(model)
            with progress(f"tracing {model}", quiet=quiet):
                traced = as_graph(
                    workload,
                    precision=types,
                    loss_reduction=reduction,
                    opaque=opaque,
                    check=cast("Check", check),
                    **dims,
                )
            with progress("searching", quiet=quiet):
                made = plan_traced(traced, machines, wanted, types)
        if output is not None:
            made.save(output)
        if timings:
            print(pass_table(times), file=sys.stderr)
        emit(made, made.to_dict(), json)
    status = made.certificate.solver_status
    if status not in ("time limit", "interrupted"):
        return 0
    stopped = "was interrupted" if status == "interrupted" else f"stopped after {time_limit:g} s"
    return report(
        TimeLimitError(
            f"the search {stopped} with a plan that fits",
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


@contextmanager
def _or_no_plan() -> Iterator[None]:
    """Say clearly that there is no plan where Ctrl-C ends the work before one was found."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedSearchError(
            "the search was interrupted",
            ["no plan that fits was found until then; nothing is written"],
            ["give it more time: from the first that is found on, Ctrl-C takes the best so far"],
        ) from None


def pass_table(times: Sequence[PassTime]) -> str:
    """Render the passes in the order in which they ran, each with its phases, and with their shares of the whole.

    ``processor``: the process's own seconds, without those for which it waited; ``peak``: the most memory until then.
    """
    whole = sum(each.seconds for each in times)
    rows = []
    for each in times:
        peak = format_bytes(each.peak_bytes) if each.peak_bytes else ""
        busy = format_seconds(each.processor_seconds)
        rows.append(
            [each.name, format_seconds(each.seconds), _share(each.seconds, whole), busy, peak, each.result]
        )
        for phase in each.phases:
            seconds, share = format_seconds(phase.seconds), _share(phase.seconds, whole)
            rows.append([f"  {phase.name}", seconds, share, "", "", counted(phase.calls, "time")])
    busy = format_seconds(sum(each.processor_seconds for each in times))
    most = max((each.peak_bytes for each in times), default=0)
    rows.append(["all", format_seconds(whole), "", busy, format_bytes(most) if most else "", ""])
    heads = ("pass", "time", "share", "processor", "peak", "result")
    return printable(columns(heads, rows, left=("pass", "result")))


def _share(seconds: float, whole: float) -> str:
    return percent(seconds / whole) if whole else ""
