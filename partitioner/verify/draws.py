"""Random draws, the same in both worlds: the unpartitioned model's are recorded, and the plan's ops are given them.

A graph's drawing ops are matched with the draws of an eager forward in their order, by kind and shape. Ops that draw and
compute in one (rrelu) are not matched: they may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.layout import Shard
from partitioner.record.data import PlanData
from passes.graph.graph import OpGraph
from passes.graph.recomputed import draws_random_numbers
from passes.shard.words import read_choice
from runtime.mesh.ranks_along import JOINT
from runtime.ops.local import run_local
from runtime.ops.replay import Draws, replay
from runtime.segment.code import SegmentCode

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


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
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
        self._found: dict[str, list[Tensor]] = {node.name: [] for node in self._ops}

    @property
    def draws(self) -> Draws:
        """The recorded draws, for all ops that were found in every micro-batch."""
        most = max(map(len, self._found.values()), default=0)
        return {name: drawn for name, drawn in self._found.items() if len(drawn) == most and most}

    def __bool__(self) -> bool:
        return bool(self._ops)

    def add(self, recorder: Recorder) -> None:
        """Match one micro-batch's draws. Draws that the graph does not have were of no use."""
        left = recorder.drawn
        for node in self._ops:
            wanted = (kind_of(node.target), node.meta["val"].dim())
            place = next((i for i, (kind, drawn) in enumerate(left) if (kind, drawn.dim()) == wanted), None)
            if place is not None:  # an op that the model did not draw for leaves the others what is theirs
                self._found[node.name].append(left[place][1])
                left = left[place + 1 :]


def cuts_of(plan: PlanData) -> dict[str, dict[str, str]]:
    """Return the mesh axes that share each dimension of each op's first output: {"rand_like": {"dim0": "data"}}."""
    found: dict[str, dict[str, str]] = {}
    for stage in plan.stages:
        for op, texts in stage.sharding.choices.items() if stage.sharding is not None else ():
            axes = found.setdefault(op, {})
            assert stage.sharding is not None
            for (axis, size), text in zip(stage.sharding.axes.items(), texts, strict=True):
                placement = read_choice(text).outputs[0]
                if isinstance(placement, Shard) and size > 1:
                    role = f"dim{placement.dim}"
                    axes[role] = f"{axes[role]}{JOINT}{axis}" if role in axes else axis
    return found


def with_replayed(code: SegmentCode, draws: Draws, cuts: Mapping[str, Mapping[str, str]]) -> SegmentCode:
    """Return ``code`` with the ops in ``draws`` replaced by what was drawn. ``cuts``: as ``cuts_of`` gives them."""
    if not any(node.name in draws for node in code.module.graph.nodes):
        return code
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in code.module.graph.nodes:
        if node.op != "call_function" or node.name not in draws:
            made[node] = graph.node_copy(node, made.__getitem__)
            continue
        target: Any = replay
        args: tuple[Any, ...] = (node.name,)
        if node.target is run_local:
            target, args = run_local, ("replayed", node.args[1], dict(cuts[node.name]), node.name)
        made[node] = graph.create_node("call_function", target, args, name=node.name)
        made[node].meta = dict(node.meta)
    return replace(code, module=fx.GraphModule(torch.nn.Module(), graph))


def unmatched(graph: OpGraph, draws: Draws) -> tuple[str, ...]:
    """Name the ops that draw random numbers of their own all the same."""
    return tuple(node.name for node in graph.ops if draws_random_numbers(node) and node.name not in draws)
