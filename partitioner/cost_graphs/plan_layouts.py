"""The feature-wise plan of a PipeDream profile: every op on all devices, each by samples, by features or by inputs.

An op's name tells whether it can be split by neurons:

    Linear(in_features=4096, out_features=1000, bias=True)      neurons     1000, from 4096 inputs
    Conv2d(64, 192, kernel_size=(5, 5), …)                      neurons     192, from 64
    ReLU(inplace), MaxPool2d(…), BatchNorm2d(64, …), Add, …     channels    every output channel from the same input channel
    Input                                                       input       costs nothing, as everywhere
    anything else: LSTM, Softmax, EmuBidirLSTM, …               samples     how it could be split is not known

``View`` is taken to keep the batch and flatten the rest, channels outermost, and ``Concat`` to join channels, as in
networks of images. Where an op adds two outputs, their neurons are dealt out alike (weights can be permuted to make it so).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from cost_models.errors import UsageError
from partitioner.cost_graphs.outline import outline_of
from partitioner.cost_graphs.pipedream import PipeDreamProfile
from partitioner.cost_graphs.plan import (
    GraphPlan,
    GraphPrediction,
    MachineInfo,
    bytes_per_cost,
    graph_info,
)
from partitioner.cost_graphs.read import ReadGraph
from partitioner.record.file import package_version
from passes.search.certificate import Certificate
from passes.search.cost_graph.layouts import LayoutOp, LayoutProblem, OpKind
from passes.search.cost_graph.layouts_ilp import place_layouts

NEURONS = re.compile(r"(?:Linear|Conv[123]d|ConvTranspose[123]d)\((?:\w+=)?(\d+), *(?:\w+=)?(\d+)\b")
CHANNELS = re.compile(
    r"(?:ReLU6?|LeakyReLU|ELU|Sigmoid|Tanh|Dropout|MaxPool[123]d|AvgPool[123]d|AdaptiveAvgPool[123]d|AdaptiveMaxPool[123]d"
    r"|BatchNorm[123]d|Add|Concat|View|Size|Identity)\b(?:\((\d+), eps=)?"
)
"""Layers that are split channel by channel; the group is the number of channels, where the name says it."""


def layout_problem(profile: PipeDreamProfile, devices: int, bytes_per_second: float) -> LayoutProblem:
    """Build the problem of ``passes.search.cost_graph.layouts`` for the layers of a profile, in their order."""
    ops = []
    for v, layer in enumerate(profile.layers):
        kind, inputs, neurons = kind_of(layer.what)
        if kind == "input" and profile.before[v]:
            kind = "samples"
        loaded = kind == "input"
        ops.append(
            LayoutOp(
                layer.id,
                0.0 if loaded else layer.forward_ms / 1e3,
                0.0 if loaded else layer.backward_ms / 1e3,
                layer.activation_bytes,
                layer.parameter_bytes,
                kind,
                profile.learns[v],
                neurons,
                inputs,
            )
        )
    return LayoutProblem(tuple(ops), profile.edges, devices, bytes_per_second)


def kind_of(what: str) -> tuple[OpKind, int | None, int | None]:
    """Read from a layer's name how it can be split, and how many inputs and outputs there are, where the name says so."""
    if what.startswith("Input"):
        return "input", None, None
    neurons, channels = NEURONS.match(what), CHANNELS.match(what)
    if neurons:
        return "neurons", int(neurons[1]), int(neurons[2])
    if channels:
        return "channels", None, int(channels[1]) if channels[1] else None
    return "samples", None, None


OBJECTIVE = "time per mini-batch"
LOSS = "the loss is not in the profile: taken to be computed by samples"


def plan_feature_wise(read: ReadGraph, time_limit_seconds: float = 60.0) -> GraphPlan:
    """Lay out the layers of a profile over all devices; raises UsageError for graphs that are no profiles."""
    if read.profile is None:
        raise UsageError(
            f"{read.source} cannot be planned by strategy 'feature'",
            ["it says what its nodes cost, but not how many bytes their parameters have: only profiles do"],
            ["use --strategy free, or give a PipeDream graph.txt"],
        )
    graph, devices = read.graph, read.graph.machine.devices
    problem = layout_problem(read.profile, len(devices), read.bytes_per_second)
    found = place_layouts(problem, time_limit_seconds)
    layout_of = {op.id: layout for op, layout in zip(problem.ops, found.layouts, strict=True)}
    value = found.step_seconds * 1e3 / len(devices)
    costs = found.costs
    sent = math.fsum((costs.reduce_seconds, costs.gather_seconds, costs.exchange_seconds))
    return GraphPlan(
        partitioner_version=package_version(),
        graph=graph_info(read, LOSS, *_unknown(read.profile)),
        machine=MachineInfo(accelerators=len(devices), cpus=0, memory_size=None),
        strategy="feature",
        contiguous=False,
        objective="throughput",
        cost_unit=graph.unit,
        layouts={node.id: layout_of[node.colour or node.id] for node in graph.nodes},
        placements={},
        prediction=GraphPrediction(
            max_load=value,
            makespan=None,
            loads=dict.fromkeys(devices, value),
            memory=dict.fromkeys(devices, costs.parameter_bytes),
            transfers=sent * 1e3,
        ),
        certificate=_per_minibatch(found.certificate, value),
        outline=outline_of(graph, None, bytes_per_cost(read)),
    )


def _per_minibatch(certificate: Certificate, value: float) -> Certificate:
    """Say of the ms of a mini-batch what is proved of a step."""
    bound = value * (1 - certificate.gap)
    return replace(
        certificate,
        objective=OBJECTIVE,
        objective_seconds=value,
        bound_seconds=bound,
        simulated_lower_bound_seconds=bound,
    )


def _unknown(profile: PipeDreamProfile) -> tuple[str, ...]:
    """Name the layers that nothing but samples is known to split, in a note."""
    names = dict.fromkeys(
        layer.what.partition("(")[0] for layer in profile.layers if kind_of(layer.what)[0] == "samples"
    )
    shown = ", ".join(list(names)[:6])
    return (f"by samples, as how else to split them is not known: {shown}",) if names else ()
