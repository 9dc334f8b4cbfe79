"""A PipeDream profile as a feature-wise problem: which of its layers can be split by neurons, known by their names.

    Linear(in_features=4096, out_features=1000, bias=True)      neurons     1000, from 4096 inputs
    Conv2d(64, 192, kernel_size=(5, 5), …)                      neurons     192, from 64
    ReLU(inplace), MaxPool2d(…), BatchNorm2d(64, …), Add, …     channels    every output channel from the same input channel
    Input                                                       input       costs nothing, as everywhere
    anything else: LSTM, Softmax, EmuBidirLSTM, …               samples     how it could be split is not known

``View`` is taken to keep the batch and flatten the rest, channels outermost, and ``Concat`` to join channels, as in
networks of images. Where an op adds two outputs, their neurons are dealt out alike (weights can be permuted to make it so).
"""

from __future__ import annotations

import re

from partitioner.cost_graphs.pipedream import PipeDreamProfile
from passes.search.cost_graph.layouts import LayoutOp, LayoutProblem, OpKind

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
