"""A new plan for ``partitioner plan``: the model is loaded, traced, placed. A file of its own, for it imports torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.errors import InterruptedSearchError, TimeLimitError
from cost_models.precision import Precision
from cost_models.shown import printable
from cost_models.units import counted, format_bytes, format_seconds, percent
from partitioner.api import plan_traced
from partitioner.commands import options
from partitioner.commands.options import ModelOptions, emit, progress
from partitioner.models.as_graph import as_graph
from partitioner.plan import Plan
from partitioner.planning.options import PlanOptions
from partitioner.report.live import live_line
from partitioner.report.text import columns
from passes.graph.graph import OpGraph
from passes.interrupts import best_so_far_kept
from passes.search.words import STRATEGY_WORDS
from passes.timings import PassTime, pass_times
from passes.trace.loss.reduction import checked_reduction


@dataclass(frozen=True)
class PlanAsked:
    """The options of a plan, read from a command line, and those of the trace."""

    options: PlanOptions
    precision: Precision
    of_trace: Mapping[str, Any]
    """Arguments of ``as_graph``."""

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> PlanAsked:
        """Read the arguments of a command, as they were given."""
        given = {**arguments, "microbatches": options.microbatch_count(arguments["microbatches"])}
        precision = options.read_precision(given["precision"])
        given |= {
            "pins": options.pins(given["pin"], given["strategy"]),
            "mesh": options.mesh_shape(given["mesh"]),
            "splits": options.block_sizes(given["split"]),
            "risk": options.chance(given["risk"]),
            "time_limit_seconds": given["time_limit"],
        }
        wanted = PlanOptions(**{field.name: given[field.name] for field in fields(PlanOptions)})
        wanted.check()
        of_trace = {
            "precision": precision,
            "loss_reduction": checked_reduction(given["loss_reduction"]),
            "batch_dims": options.batch_dims(given["batch_dims"]),
            "dynamic_dims": options.dynamic_dims(given["dynamic_dims"]),
            "opaque": given["opaque"],
            "check": given["check"],
        }
        return cls(wanted, precision, of_trace)

    def trace(self, model: str, of_model: ModelOptions, *, quiet: bool) -> OpGraph:
        """Load a model and trace it."""
        with progress(f"loading {model}", quiet=quiet):
            workload = of_model.load(model)
        with progress(f"tracing {model}", quiet=quiet):
            return as_graph(workload, **self.of_trace)


def plan_model(
    model: str,
    arguments: Mapping[str, Any],
    output: Path | None,
    *,
    timings: bool,
    quiet: bool,
    json: bool,
) -> Plan:
    """Plan, write and print. ``arguments``: the command's that decide about the plan, as they were given."""
    wanted = PlanAsked.read(arguments)
    options.check_output(output)
    machines = ClusterSpec.parse(arguments["cluster"])
    wanted.options.check_mesh(machines)
    with best_so_far_kept(), _or_no_plan():
        with live_line(quiet=quiet), pass_times() as times:
            traced = wanted.trace(model, arguments["model_options"], quiet=quiet)
            with progress("searching", quiet=quiet):
                made = plan_traced(traced, machines, wanted.options, wanted.precision)
        if output is not None:
            made.save(output)
        if timings:
            print(pass_table(times), file=sys.stderr)
        emit(made, made.to_dict(), json)
    return made


def out_of_time(plan: Plan, limit_seconds: float | None) -> TimeLimitError | None:
    """Return the error that says how far a search came that was stopped; None if it came to its end.

    ``limit_seconds``: as given; None: the strategy's own.
    """
    status = plan.certificate.solver_status
    if status not in ("time limit", "interrupted"):
        return None
    spent = plan.certificate.search_seconds if limit_seconds is None else limit_seconds
    stopped = "was interrupted" if status == "interrupted" else f"stopped after {spent:.3g} s"
    return TimeLimitError(
        f"the search {stopped} with a plan that fits",
        because=[
            f"it is within {percent(plan.certificate.gap)} of the best "
            + STRATEGY_WORDS[plan.strategy].best_of
            + " can have"
            if plan.certificate.gap < 1
            else "how far it is from the best was not found out in that time"
        ],
        suggestions=["use the plan as it is, or search on with a larger --time-limit"],
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
