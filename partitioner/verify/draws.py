"""Random draws: the same in both worlds, or compared among ranks.

The unpartitioned model's draws are recorded, and the plan's ops are given them. A graph's drawing ops are matched with the
draws of an eager forward in their order, by kind and shape. Ops that draw and compute in one (rrelu) are not matched: they
may differ.

Dropout is off and other draws are replayed, so nothing that is compared depends on the ranks' own random numbers. At the
beginning of each segment that draws, ranks therefore draw a few numbers more, in the way of its ops:

    the segment has     run_local("random", "aten.dropout.default", {"shards": "data"}, …)
    ranks draw          run_local("random", "aten.rand.default",    {"shards": "data"}, [8])

    same place on "data", same micro-batch      the same numbers
    another place, or another micro-batch       other numbers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.layout import Mesh, Shard
from partitioner.record.data import PlanData
from passes.fidelity.agree import ComparedQuantity
from passes.graph.graph import OpGraph
from passes.graph.nodes import copy_graph
from passes.graph.recomputed import draws_random_numbers
from passes.shard.words import read_choice
from runtime.measure.record import Note, note
from runtime.mesh.ranks_along import JOINT
from runtime.mesh.sharding import coordinates
from runtime.ops.local import run_local
from runtime.ops.replay import DrawsByOp, replay
from runtime.segment.code import SegmentCode

DRAWN = "random draws"
"""Kind of the comparisons of what ranks draw by themselves."""
WRONGLY_DRAWN = "{}: shards or micro-batches draw the same random numbers, or copies draw others"
"""The words for an op with such a difference."""
_RAND, _COUNT = torch.ops.aten.rand.default, 8
_RANDOM = "random"
"""The local form of ops that draw on shards (``runtime.ops.local``)."""
PURE = frozenset(
    {
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli"),
        *("multinomial", "normal", "uniform", "exponential", "cauchy", "geometric", "log_normal", "random"),
        *("poisson", "binomial"),
    }
)
"""Ops whose result is the draw, without a gradient."""


def kind_of(op: object) -> str:
    """Name what an op draws, in place or not: "" for anything that is no pure draw."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return ""
    name = op._schema.name.removeprefix("aten::").removesuffix("_").removesuffix("_functional")
    return name if name in PURE else ""


class DrawRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Within it, eager draws are kept, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if kind := kind_of(func):
            self.drawn.append((kind, result.detach().clone()))
        return result


class RecordedDraws:
    """The draws of an unpartitioned step, by the graph's drawing ops."""

    def __init__(self, graph: OpGraph) -> None:
        self._ops = [node for node in graph.ops if draws_random_numbers(node) and kind_of(node.target)]
        self._drawn: dict[str, list[Tensor]] = {node.name: [] for node in self._ops}

    @property
    def draws(self) -> DrawsByOp:
        """The recorded draws, for all ops that were found in every micro-batch."""
        most = max(map(len, self._drawn.values()), default=0)
        return {name: drawn for name, drawn in self._drawn.items() if len(drawn) == most and most}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the draws of one micro-batch meanwhile. Draws that the graph does not have were of no use."""
        if not self._ops:
            yield
            return
        with DrawRecorder() as recorder:
            yield
        left = recorder.drawn
        for node in self._ops:
            wanted = (kind_of(node.target), node.meta["val"].dim())
            place = next((i for i, (kind, drawn) in enumerate(left) if (kind, drawn.dim()) == wanted), None)
            if place is not None:  # an op that the model did not draw for leaves the others what is theirs
                self._drawn[node.name].append(left[place][1])
                left = left[place + 1 :]


def cuts_of(plan: PlanData) -> dict[str, dict[str, str]]:
    """Return the mesh axes that share each dimension of each op's first output: {"rand_like": {"dim0": "data"}}."""
    axes_of: dict[str, dict[str, str]] = {}
    for stage in plan.stages:
        for op, texts in stage.sharding.choices.items() if stage.sharding is not None else ():
            axes = axes_of.setdefault(op, {})
            assert stage.sharding is not None
            for (axis, size), text in zip(stage.sharding.axes.items(), texts, strict=True):
                placement = read_choice(text).outputs[0]
                if isinstance(placement, Shard) and size > 1:
                    role = f"dim{placement.dim}"
                    axes[role] = f"{axes[role]}{JOINT}{axis}" if role in axes else axis
    return axes_of


def with_replayed(code: SegmentCode, draws: DrawsByOp, cuts: Mapping[str, Mapping[str, str]]) -> SegmentCode:
    """Return ``code`` with the ops in ``draws`` replaced by what was drawn. ``cuts``: as ``cuts_of`` gives them."""
    if not any(node.name in draws for node in code.module.graph.nodes):
        return code
    graph = copy_graph(code.module.graph)
    for node in graph.nodes:
        if node.op != "call_function" or node.name not in draws:
            continue
        if node.target is run_local:
            node.args = ("replayed", node.args[1], dict(cuts[node.name]), node.name)
        else:
            node.target, node.args = replay, (node.name,)
        node.kwargs = {}
    return replace(code, module=fx.GraphModule(torch.nn.Module(), graph))


def unmatched(graph: OpGraph, draws: DrawsByOp) -> tuple[str, ...]:
    """Name the ops that draw random numbers of their own all the same."""
    return tuple(node.name for node in graph.ops if draws_random_numbers(node) and node.name not in draws)


@dataclass(frozen=True)
class OwnDraw:
    """Numbers that ranks draw in one segment as its op ``op`` does. ``axes``: those along which ranks have shards."""

    op: str
    segment: int
    axes: str
    mesh: Mesh | None

    @property
    def note(self) -> str:
        """The name under which each rank notes them."""
        return f"{self.op} in segment {self.segment}"


def own_draws(code: SegmentCode, drawing: frozenset[str]) -> tuple[OwnDraw, ...]:
    """Return a draw for each way in which ops of ``code`` draw. ``drawing``: ops that draw while training."""
    draws: dict[str, OwnDraw] = {}
    for node in code.module.graph.nodes:
        on_shards = node.target is run_local and node.args[0] == _RANDOM
        if on_shards or node.name in drawing:
            axes = node.args[2]["shards"] if on_shards else ""
            draws.setdefault(axes, OwnDraw(node.name, code.index, axes, code.mesh))
    return tuple(draws.values())


def with_own_draws(code: SegmentCode, draws: Sequence[OwnDraw]) -> SegmentCode:
    """Return ``code`` with those of these draws that are its own before its first op, each with a note."""
    draws = [draw for draw in draws if draw.segment == code.index]
    if not draws:
        return code
    graph = copy_graph(code.module.graph)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for draw in draws:
            args: tuple[Any, ...] = ([_COUNT],)
            if draw.axes:
                args = (_RANDOM, "aten.rand.default", {"shards": draw.axes}, [_COUNT])
            op = run_local if draw.axes else _RAND
            numbers = graph.create_node("call_function", op, args, name=f"own_{draw.op}")
            graph.call_function(note, (draw.note, numbers))
    return replace(code, module=fx.GraphModule(code.module, graph), random=True)


def compare_draws(
    draws: Sequence[OwnDraw], noted: Sequence[Mapping[str, Sequence[Note]]]
) -> Iterator[ComparedQuantity]:
    """Compare each draw over ranks and micro-batches. Its error: the number of pairs that are alike wrongly, or unlike."""
    for draw in draws:
        numbers = [
            (number, _place(draw, rank), microbatch)
            for rank, notes in enumerate(noted)
            for microbatch, number in enumerate(notes.get(draw.note, ()))
        ]
        wrong = sum(
            (number == other) != ((place, microbatch) == (other_place, other_microbatch))
            for at, (number, place, microbatch) in enumerate(numbers)
            for other, other_place, other_microbatch in numbers[:at]
        )
        yield ComparedQuantity(DRAWN, draw.op, float(wrong), 0.0)


def _place(draw: OwnDraw, rank: int) -> tuple[int, ...]:
    """Return the place of ``rank`` among the shards that the op draws for."""
    if draw.mesh is None or not draw.axes:
        return ()
    place = coordinates(draw.mesh, rank)
    return tuple(place[draw.mesh.axes.index(axis)] for axis in draw.axes.split(JOINT))
