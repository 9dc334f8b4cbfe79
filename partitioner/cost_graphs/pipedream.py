"""PipeDream's profiles (graph.txt): one line per layer, then one per edge.

    node4 -- Conv2d(3, 64) -- forward_compute_time=1.2, backward_compute_time=2.1, activation_size=820.0, parameter_size=9.0
    ⇥node4 -- node5

Times are milliseconds, sizes bytes, of one mini-batch. Each layer becomes two nodes of one colour, ``node4`` and
``node4.backward``; sending a layer's output or its gradient costs activation_size / bandwidth at either end. Gradients go
back to layers that have parameters or lie behind some. Where a layer gives gradients to several others, a node
``node7.to.node4`` that costs nothing stands for each of them, since a node has one output cost. As in PipeDream's own
optimizer, ``Input`` costs nothing: its time is that of the data loader.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from passes.search.cost_graph.graph import GraphMachine, GraphNode, PlacementGraph

DEFAULT_BYTES_PER_SECOND = 1e9
NUMBERS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
NODE = re.compile(r"(?P<id>\S+) -- (?P<what>.*) -- (?P<numbers>forward_compute_time=.*)")
STAGE = re.compile(r" -- stage_id=\d+\s*$")
EDGE = re.compile(r"\s+(?P<source>\S+) -- (?P<target>\S+)\s*")


@dataclass(frozen=True)
class Layer:
    """One line of a profile."""

    id: str
    what: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class PipeDreamProfile:
    """``edges``: positions of (producer, consumer)."""

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]

    @cached_property
    def before(self) -> tuple[list[int], ...]:
        """The layers that each layer reads."""
        found: tuple[list[int], ...] = tuple([] for _ in self.layers)
        for u, v in self.edges:
            found[v].append(u)
        return found

    @cached_property
    def learns(self) -> list[bool]:
        """True for each layer whose output has a gradient that anything needs."""
        learns = [layer.parameter_bytes > 0 for layer in self.layers]
        changed = True
        while changed:
            changed = False
            for v, sources in enumerate(self.before):
                if not learns[v] and any(learns[u] for u in sources):
                    learns[v] = changed = True
        return learns


def is_pipedream(text: str) -> bool:
    """Tell whether a text looks like a profile."""
    return any(NODE.match(STAGE.sub("", line)) for line in text.splitlines()[:200])


def profile_of(text: str) -> tuple[PipeDreamProfile | None, list[str]]:
    """Read the profile, or list every line that cannot be read."""
    layers: dict[str, Layer] = {}
    pairs: list[tuple[int, str, str]] = []
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        found = None if line[:1].isspace() else NODE.fullmatch(STAGE.sub("", line.rstrip()))
        edge = EDGE.fullmatch(line)
        if found:
            layer = _layer(found)
            if isinstance(layer, str):
                problems.append(f"line {number}: {layer}")
            elif layer.id in layers:
                problems.append(f"line {number}: {layer.id} is there twice")
            else:
                layers[layer.id] = layer
        elif edge:
            pairs.append((number, edge["source"], edge["target"]))
        elif line.strip():
            problems.append(f"line {number}: neither a layer nor an edge: {line.strip()[:60]!r}")
    position = {name: v for v, name in enumerate(layers)}
    problems += [
        f"line {number}: there is no {name}"
        for number, *ends in pairs
        for name in ends
        if name not in position and not problems
    ]
    if problems:
        return None, problems
    edges = dict.fromkeys((position[source], position[target]) for _, source, target in pairs)
    return PipeDreamProfile(tuple(layers.values()), tuple(edges)), []


def _layer(found: re.Match[str]) -> Layer | str:
    """Read a layer, or say what is wrong with its numbers."""
    values: dict[str, float] = {}
    for part in re.split(r",\s*(?=[a-z_]+=)", found["numbers"]):
        key, _, text = part.partition("=")
        if key not in NUMBERS:
            return f"unknown key {key!r}"
        try:
            values[key] = _number(text)
        except ValueError:
            return f"{key}={text} is no number from 0 up"
    missing = [key for key in NUMBERS if key not in values]
    if missing:
        return f"no {', '.join(missing)}"
    return Layer(found["id"], found["what"], *(values[key] for key in NUMBERS))


def _number(text: str) -> float:
    """Read "3.5", or "[1.0; 2.0]" for a layer with several outputs: their sum."""
    value = math.fsum(float(part) for part in text.strip().strip("[]").split(";"))
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def graph_of(profile: PipeDreamProfile, devices: int, bytes_per_second: float) -> PlacementGraph:
    """Build the cost graph of training, in milliseconds per mini-batch, on ``devices`` accelerators."""
    layers, per_byte = profile.layers, 1e3 / bytes_per_second
    count = len(layers)
    inputs = [layer.what.startswith("Input") and not profile.before[v] for v, layer in enumerate(layers)]
    nodes: list[GraphNode] = []
    gradients = [[u for u in sources if profile.learns[u]] for sources in profile.before]
    for v, layer in enumerate(layers):
        sent = 0.0 if inputs[v] else layer.activation_bytes * per_byte
        cost = 0.0 if inputs[v] else layer.forward_ms
        nodes.append(
            GraphNode(layer.id, layer.what, cost, 0.0, sent, layer.parameter_bytes, layer.id, backward=False)
        )
    edges = list(profile.edges)
    for v, layer in enumerate(layers):
        to = gradients[v]
        sent = layers[to[0]].activation_bytes * per_byte if len(to) == 1 else 0.0
        cost = 0.0 if inputs[v] else layer.backward_ms
        name = f"{layer.id}.backward"
        nodes.append(
            GraphNode(name, f"gradient of {layer.what}", cost, 0.0, sent, 0.0, layer.id, backward=True)
        )
        edges.append((v, count + v))
    for v, layer in enumerate(layers):
        to = gradients[v]
        if len(to) == 1:
            edges.append((count + v, count + to[0]))
        for u in to if len(to) > 1 else ():
            sent = layers[u].activation_bytes * per_byte
            name = f"{layer.id}.to.{layers[u].id}"
            edges += [(count + v, len(nodes)), (len(nodes), count + u)]
            nodes.append(GraphNode(name, "gradient", 0.0, 0.0, sent, 0.0, layer.id, backward=True))
    notes = (
        f"costs in ms of one mini-batch; {bytes_per_second:g} B/s between devices",
        *(("the time of Input is the data loader's: not counted",) if any(inputs) else ()),
    )
    return PlacementGraph(tuple(nodes), tuple(edges), GraphMachine(devices), "ms", notes)
