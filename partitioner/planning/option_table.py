"""The options of a plan, each explained once: for ``help(partition)`` and for ``partitioner plan --help``.

Whoever takes these options says so with :func:`with_python_help` or :func:`with_command_help`, which add the table below
to its docstring.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PlanOption:
    """One option. ``python`` and ``command`` say how it is given, where that differs."""

    name: str
    meaning: str
    python: str = ""
    command: str = ""
    flag: str = ""
    """The parameter's name in a command, where it is another: an option that may be repeated is singular there."""


OPTIONS = (
    PlanOption("batch_size", "Samples per optimizer step", "; the example's own batch size if not given."),
    PlanOption(
        "strategy",
        "layer: every op on one device, every device one contiguous run of the model. feature: every op on all devices, "
        "tensors sharded. hybrid: a pipeline of device groups that share their stages, searched with both of "
        "the above, or as fix says. free: any op, or block of its neurons, on any device. auto (the default): hybrid, then "
        "free from there where that can win, and the faster one is taken; what is fixed may ask for another alone",
    ),
    PlanOption(
        "microbatches", "auto, or into how many pieces the batch is cut (this is gradient accumulation)"
    ),
    PlanOption(
        "micro_couplings",
        "Search several micro-batches also where samples are coupled (contrastive losses over the batch, routing with a "
        "capacity, averages of the batch that forward keeps): that is then computed per micro-batch, and trains something "
        "else. By default such a batch stays in one piece; batch norm sees micro-batches either way",
    ),
    PlanOption("schedule", "auto, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, list or list-split"),
    PlanOption(
        "optimizer_memory",
        "Whose state is budgeted: none, sgd, momentum, adam, adamw, fused-adamw or amsgrad",
    ),
    PlanOption(
        "precision",
        "Data types of a step",
        ": a Precision, the model's own if not given. A trace keeps what it was traced in.",
        ": compute=bf16,master=fp32 and so on: any of compute, parameters, gradients, master, and loss_scale=dynamic.",
    ),
    PlanOption(
        "loss_reduction",
        "mean (weighted by samples), sum or token_mean (by the whole batch's valid labels): how micro-batches' losses "
        "become the batch's; as the model's loss is made if not given",
    ),
    PlanOption("min_stages", "Use at least this many devices, each with a stage or more"),
    PlanOption("max_stages", "Use at most this many stages"),
    PlanOption(
        "recompute",
        "none, full or auto: whether backward computes the activations of blocks again; auto: where memory asks for it "
        "(feature: of all blocks, where nothing fits otherwise). By default auto, but full for a model with gradient "
        "checkpointing enabled",
    ),
    PlanOption(
        "pins",
        "layer: stages by glob over module paths or op names; free: devices, likewise. feature: layouts by glob over "
        "parameters, inputs, ops or module paths: a placement (R, S0, S1, …, P) per axis of the mesh, or a pattern of "
        "data zero1 zero3 column_row sequence vocabulary. hybrid: likewise, for all stages or one (`stage 0:GLOB`)",
        '; as {"layers.0.*": 0}, {"*.up_proj.weight": "S0"} or {"*": "data column_row"}.',
        "; as `layers.0.*=0`, `*.up_proj.weight=S0`, `input_ids=S0,R` or `*=data,column_row`. May be repeated.",
        flag="pin",
    ),
    PlanOption(
        "mesh",
        "feature: the shape of the mesh of devices, outermost axis first; searched if not given",
        ", such as (8, 4).",
        ", such as 8x4.",
    ),
    PlanOption(
        "fix",
        "hybrid: what is fixed, the rest is filled in: pipeline, interleave, tensor, sequence, data (degrees), zero (0, 1, "
        "3), microbatch (samples on each replica), recompute, groups (devices of each, where unequal), borders (modules "
        "that begin a stage), queues (one or several for what a device sends; one on GPUs)",
        ', such as "pipeline=8 tensor=4 zero=1 microbatch=1" or {"groups": (1, 3)}.',
        ", such as 'pipeline=8 tensor=4 zero=1 microbatch=1' or 'groups=1,3'.",
    ),
    PlanOption(
        "objective",
        "free: throughput (of micro-batches, the default) or latency (of one batch, in one piece unless the number of "
        "micro-batches is given)",
        command=". For a table of clusters: usd, the fewest dollars per sample first.",
    ),
    PlanOption(
        "splits",
        "free: how an op, or what a glob can mean in this model, is split into blocks of neurons; chosen for the devices "
        "if not given",
        ': sizes by name, such as {"mlp": (60, 40)}, or {"conv2d:2": (7, 7)} for dimension 2 of an op\'s output; {} for '
        "none.",
        ": NAME=SIZE,SIZE, such as `mlp=60,40`, or `conv2d:2=7,7` for dimension 2 of an op's output; `none` for nothing. "
        "May be repeated.",
        flag="split",
    ),
    PlanOption(
        "risk",
        "The chance of not fitting the devices' memory that a plan may have, by how far off predicted peaks are; 5% if not "
        "given. Plans above it are taken only where nothing else fits, and say so. From 50% on predictions fill the memory",
        ", such as 0.05.",
        ", such as 5%.",
    ),
    PlanOption(
        "batch_dims",
        "Where the batch is in an input, or that it has none",
        ": {leaf name: dimension or None}.",
        ": NAME=DIM, or NAME=none; may be repeated.",
    ),
    PlanOption(
        "dynamic_dims",
        "Sizes of an input that may differ from batch to batch",
        ": {leaf name: dimensions}.",
        ": NAME=DIM,DIM; may be repeated.",
    ),
    PlanOption(
        "opaque",
        "Modules that run whole, their own code as it is, as one op each",
        ': their paths, such as ["encoder.ctc", "layers.*.router"]; "loss" is the loss function.',
        ": a path, such as `encoder.ctc`, or `layers.*.router`; `loss` is the loss function. May be repeated.",
    ),
    PlanOption(
        "check",
        "on compares the trace with the model itself, where it has values: two steps on the example batch tell whether "
        "hooks or Python state (counters, random numbers) change what is computed, which no trace can hold; off trusts the "
        "trace",
    ),
    PlanOption(
        "time_limit_seconds",
        "Seconds for the search; the best plan so far is kept. By default 20 for auto, which answers once a plan is proved "
        "to be within 1% of the best, else 60",
        flag="time_limit",
    ),
)


def with_python_help(function: F) -> F:
    """Add the options that ``function`` takes to its docstring, as ``help`` shows it."""
    taken = inspect.signature(function).parameters
    rows = [
        textwrap.fill(f"``{o.name}``: {o.meaning}{o.python or '.'}", 116, subsequent_indent="    ")
        for o in OPTIONS
        if o.name in taken
    ]
    function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Options:", "", *rows])
    return function


def with_command_help(function: F) -> F:
    """Add the options that a command takes to the section ``Parameters`` of its docstring, which is the last one."""
    taken = inspect.signature(function).parameters
    rows = []
    for option in OPTIONS:
        name = option.flag or option.name
        if name in taken:
            rows += [name, textwrap.indent(f"{option.meaning}{option.command or '.'}", "    ")]
    function.__doc__ = "\n".join([inspect.getdoc(function) or "", *rows])
    return function
