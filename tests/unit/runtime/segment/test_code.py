"""Whose gradients are in memory of their own."""

from __future__ import annotations

import torch
from torch import fx

from runtime.segment.code import SegmentCode, SegmentInput

aten = torch.ops.aten


def code_of(ops: list[tuple[object, tuple[object, ...]]], names: list[str]) -> SegmentCode:
    """A graph of ``ops`` on inputs called ``names``; "a" is the first input, 0 the first op's result."""
    graph = fx.Graph()
    given = {name: graph.placeholder(name) for name in names}
    made: list[fx.Node] = []
    for target, args in ops:
        nodes = tuple(given.get(a, a) if isinstance(a, str) else made[a] for a in args)  # type: ignore[call-overload]
        made.append(graph.call_function(target, nodes))  # type: ignore[arg-type]
    graph.output((made[-1],))
    inputs = tuple(SegmentInput("batch" if name == "x" else "parameter", name) for name in names)
    return SegmentCode(0, fx.GraphModule(torch.nn.Module(), graph), inputs, ())


def test_weights_of_products() -> None:
    code = code_of(
        [(aten.linear.default, ("x", "w", "b")), (aten.mm.default, (0, "v"))], ["x", "w", "b", "v"]
    )
    assert code.fresh == {"w", "v"}  # a bias gets the output's gradient where there is one row


def test_what_is_added_has_the_sums_gradient() -> None:
    code = code_of([(aten.add.Tensor, ("a", "c")), (aten.mm.default, ("x", 0))], ["x", "a", "c"])
    assert code.fresh == frozenset()
    code = code_of([(aten.addmm.default, ("a", "x", "c"))], ["x", "a", "c"])
    assert code.fresh == {"c"}


def test_one_reader_of_another_kind_is_enough() -> None:
    ops: list[tuple[object, tuple[object, ...]]] = [
        (aten.embedding.default, ("w", "x")),
        (aten.linear.default, (0, "w")),
    ]
    assert code_of(ops, ["x", "w"]).fresh == {"w"}  # tied: two new tensors are added
    assert code_of([*ops, (aten.add.Tensor, (1, "w"))], ["x", "w"]).fresh == frozenset()
