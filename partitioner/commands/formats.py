"""``partitioner export | check``: plans for other tools, and configurations of theirs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.files import replace_file, text_of
from cost_models.shown import printable
from cost_models.units import counted, format_seconds
from partitioner.commands.options import (
    NOTHING_GIVEN,
    Flag,
    JsonFlag,
    ModelOptions,
    PlannedModelOptions,
    QuietFlag,
    WholeNumber,
    chance,
    emit,
    progress,
)
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.tool import Tool, Written
from partitioner.formats.tools import tool_named, tool_of
from partitioner.plan import Plan
from runtime.collector import collector_paused


def export(
    plan: Path,
    /,
    *,
    to: str,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    nearest: str | None = None,
    model_options: PlannedModelOptions = NOTHING_GIVEN,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Write a plan as another tool's configuration; what its runtime does otherwise is said on stderr.

    Parameters
    ----------
    plan
        The plan file.
    to
        The tool: megatron, torchtitan, torch_schedule, deepspeed, accelerate, transformers, galvatron, rankfile, and for
        inference vllm and llama_cpp.
    output
        The folder to write the files to, made if it is not there; without it the main file goes to stdout.
    nearest
        The plan's model, as for partitioner plan: plan it anew within what the tool can run, the fastest that fits.
        What that costs is said on stderr; in the folder the plan is plan.json.
    """
    tool = tool_named(to)
    given = Plan.load(plan)
    if nearest is None:
        with progress(f"writing for {tool.title}", quiet=quiet):
            written = tool.write(given)
    else:
        written = _nearest(given, tool, nearest, model_options, quiet=quiet)
    for note in written.notes:
        print(printable(f"note: {note}"), file=sys.stderr)
    if output is not None:
        _write(output, written.files)
    shown = "\n".join(str(output / name) for name in written.files) if output is not None else written
    emit(shown, {"files": dict(written.files), "notes": list(written.notes)}, json)
    return 0


def _nearest(given: Plan, tool: Tool, model: str, of_model: PlannedModelOptions, *, quiet: bool) -> Written:
    """Write the nearest plan that the tool can run, and what it costs as its first note."""
    dims = of_model.dims()
    with collector_paused():
        from partitioner.explain.graph_of_plan import graph_of  # these import torch
        from partitioner.formats.nearest import nearest_plan
        from partitioner.planning.options import RISK, PlanOptions

        with progress(f"tracing {model}", quiet=quiet):
            graph = graph_of(given, of_model.load(model), "plan anew", dims)
        risk = RISK if given.risk is None else given.risk.allowed
        options = PlanOptions(given.batch_size, given.optimizer_memory, risk=risk)
        found = nearest_plan(tool, graph, given.cluster, options, partial(progress, quiet=quiet))
    written = tool.write(found)
    mine, theirs = found.prediction.step_seconds, given.prediction.step_seconds
    cost = f"its nearest plan takes {format_seconds(mine)} a step, {mine / theirs:.2f}x of {format_seconds(theirs)}"
    files = {**written.files, "plan.json": found.to_json()}
    return Written(files, (cost, *written.notes))


def check(
    file: Path,
    /,
    *,
    model: str,
    cluster: str,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    batch_size: WholeNumber | None = None,
    microbatch: WholeNumber | None = None,
    optimizer_memory: str = "adamw",
    risk: str = "5%",
    alone: Flag = False,
    model_options: ModelOptions = NOTHING_GIVEN,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Check another tool's configuration: is it legal, does it fit, how long is a step, can it hang, what is better.

    Parameters
    ----------
    file
        The tool's file: flags, a script with them, a configuration.
    model
        As for partitioner plan.
    cluster
        As for partitioner plan.
    from_
        The tool it is of, as the file looks if not given: megatron, torchtitan, torch_schedule, deepspeed, accelerate,
        transformers or galvatron.
    batch_size
        Samples of a step, where the file does not say.
    microbatch
        Samples of a micro-batch on each replica, likewise.
    alone
        Do not search for what is better.
    """
    machines = ClusterSpec.parse(cluster)
    text = text_of(file)
    name = from_ or tool_of(text, str(file))
    tool = tool_named(name)
    if tool.read is None:
        raise UsageError(f"nothing is read of {tool.title}")
    understood = tool.read(text, machines.world_size)
    understood = replace(understood, parallelism=_with_batch(understood.parallelism, batch_size, microbatch))
    with collector_paused():
        from partitioner.formats.check import check_configuration, heads_of  # these import torch
        from partitioner.models.as_graph import as_graph
        from partitioner.planning.options import PlanOptions

        with progress(f"loading {model}", quiet=quiet):
            workload = model_options.load(model)
        with progress(f"tracing {model}", quiet=quiet):
            graph = as_graph(workload)
        options = PlanOptions(optimizer_memory=optimizer_memory, risk=chance(risk))
        checked = check_configuration(
            str(file), tool.title, understood, graph, machines, options, heads_of(workload.model),
            partial(progress, quiet=quiet), best=not alone,
        )  # fmt: skip
    emit(checked, checked.to_dict(), json)
    return checked.exit_code


def _with_batch(p: Parallelism, batch_size: int | None, microbatch: int | None) -> Parallelism:
    """Return the same degrees with another batch, micro-batch, or both."""
    each = p.microbatch if microbatch is None else microbatch
    batch = p.batch_size if batch_size is None else batch_size
    if batch % (each * p.data):
        raise UsageError(
            f"cannot cut a batch of {batch}",
            [f"it is no multiple of {each} samples on each of {counted(p.data, 'replica')}"],
            ["give --batch-size and --microbatch that divide"],
        )
    return replace(p, microbatch=each, microbatches=batch // (each * p.data))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}", [str(error.strerror)]) from error
