"""``partitioner plan``: the plan of an earlier call that was the same, or a new one (``plan_model``)."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import Any

from cost_models.errors import UsageError
from partitioner.commands.options import (
    NOTHING_GIVEN,
    Clusters,
    Flag,
    JsonFlag,
    ModelOptions,
    OutputFile,
    QuietFlag,
    WholeNumber,
    check_output,
    cluster_texts,
    emit,
    progress,
    report,
)
from partitioner.commands.plan_options import AS_USUAL, PlanChoices
from partitioner.planning.option_table import with_command_help
from partitioner.planning.stored_plans import StoredPlan, plan_key, store_plan, stored_plan
from partitioner.record.file import write_text
from partitioner.report.text import terminal_width, text_within
from runtime.collector import collector_paused


@with_command_help
def plan(
    model: str,
    /,
    *,
    cluster: Clusters,
    batch_size: WholeNumber,
    microbatches: str = "auto",
    choices: PlanChoices = AS_USUAL,
    model_options: ModelOptions = NOTHING_GIVEN,
    output: OutputFile = None,
    no_cache: Flag = False,
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
        A cluster file, PRESET[:NUMBER] such as dgx-h100:8, aws:p5.48xlarge:4 or RTX4090:2, or local:N for CPU workers here.
        Several (repeated, or as PRESET:1,2,4) stand in a table, the fastest first; with --objective usd, the cheapest.
    output
        The file to write the plan to, of several the first of the table; without it nothing is written.
    no_cache
        Plan anew: neither read nor write the plans of earlier calls.
    timings
        Plan anew, and also print, on stderr, each pass of the compile with its seconds and what came out.
    """
    arguments: dict[str, Any] = {
        **choices.arguments(),
        "batch_size": batch_size,
        "microbatches": microbatches,
        "model_options": model_options,
    }
    texts = cluster_texts(cluster)
    if len(texts) > 1 or choices.objective == "usd":
        if timings:
            raise UsageError("cannot print --timings", ["they are of one plan, on one cluster, for its time"])
        from partitioner.commands.offers import plan_on_each  # it imports torch

        return plan_on_each(model, texts, arguments, output, quiet=quiet, json=json)
    arguments["cluster"] = texts[0]
    key = None if no_cache else plan_key(model, arguments)
    known = None if key is None or timings else stored_plan(key)
    if known is not None:
        check_output(output)
        return _emit_known(known, output, quiet=quiet, json=json)
    with collector_paused():  # passes pause it anyway; between them it would walk all that they made
        with progress("importing torch", quiet=quiet):
            from partitioner.commands.plan_model import out_of_time, plan_model
        made = plan_model(model, arguments, output, timings=timings, quiet=quiet, json=json)
    interrupted = made.certificate.solver_status == "interrupted"
    in_its_own_time = choices.strategy == "auto" and choices.time_limit is None and not interrupted
    if (stopped := out_of_time(made, choices.time_limit)) and not in_its_own_time:
        return report(stopped)
    if key is not None:
        width = terminal_width()
        with text_within(width):
            store_plan(key, StoredPlan(made.to_json(), str(made), width))
    return 0


def _emit_known(known: StoredPlan, output: Path | None, *, quiet: bool, json: bool) -> int:
    """Write and print the plan of an earlier call as that call did."""
    if not quiet:
        print("this call was planned before (--no-cache plans anew)", file=sys.stderr)
    if output is not None:
        write_text(output, known.plan)
    table: object = known.table
    if not json and known.width != terminal_width():
        from partitioner.plan import Plan  # it imports torch

        table = Plan.from_json(known.plan)
    emit(table, json_text.loads(known.plan), json)
    return 0
