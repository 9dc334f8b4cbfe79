"""Every bridge on real Gloo processes: forward and gradient against what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from cost_models.errors import InternalError
from runtime.mesh.axis import Axis
from runtime.ops import bridges
from runtime.ops.bridges import bind
from runtime.ranks.launch import WorkerPool
from runtime.segment.portable import pack, unpack
from tests.support.matrix import thinned

SHAPE = (8, 4, 12)  # every dimension divides by 2 and by 4
Case = tuple[str, tuple[int, ...], bool]

CASES: dict[str, Case] = {
    "all_reduce": ("all_reduce", (), False),
    "all_reduce_partial": ("all_reduce", (), True),
    "sum_gradient": ("sum_gradient", (), False),
    "keep_first": ("keep_first", (), False),
    "first_gradient": ("first_gradient", (), False),
    **{f"split_{d}": ("split", (d,), False) for d in (0, 1, -1)},
    **{f"all_gather_{d}": ("all_gather", (d,), False) for d in (0, 1, 2)},
    **{f"all_gather_partial_{d}": ("all_gather", (d,), True) for d in (0, -1)},
    **{f"reduce_scatter_{d}": ("reduce_scatter", (d,), False) for d in (0, 1, 2)},
    **{f"all_to_all_{c}_{j}": ("all_to_all", (c, j), False) for c, j in ((0, 1), (1, 0), (2, 1), (-1, 0))},
}


def graph_of(case: Case, parts: int) -> fx.GraphModule:
    name, args, partial = case
    graph = fx.Graph()
    x = graph.placeholder("x")
    options: dict[str, Any] = {"axis": "tensor"}
    if args:
        options["parts"] = parts
    if partial:
        options["partial"] = True
    graph.output((graph.call_function(getattr(bridges, name), (x, *args), options),))
    return fx.GraphModule(torch.nn.Module(), graph)


def world_axis(order: tuple[int, ...] | None = None) -> Axis:
    rank, size = dist.get_rank(), dist.get_world_size()
    index = rank if order is None else order.index(rank)
    return Axis("tensor", size, index, dist.group.WORLD, order)


def tensors(rank: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers that every process knows of every rank."""
    g = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def run_all(order: tuple[int, ...] | None, transposed: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """In a worker: result and input gradient of every case; the input is this place's, so is the output gradient."""
    axis = world_axis(order)
    found = {}
    for name, case in CASES.items():
        module = bind(unpack(pack(graph_of(case, axis.size))), {"tensor": axis})
        x = tensors(axis.index, SHAPE, 1)
        if transposed:
            x = x.transpose(0, 2).contiguous().transpose(0, 2)
        kept = x.clone()
        x.requires_grad_()
        (y,) = module(x)
        y.backward(tensors(axis.index, tuple(y.shape), 2))
        assert torch.equal(x, kept), f"{name} wrote into its input"
        assert x.grad is not None
        found[name] = (y.detach(), x.grad)
    return found


def one_process(case: Case, places: int) -> tuple[list[Tensor], list[Tensor]]:
    """Results and input gradients of all places, from the definitions."""
    name, args, partial = case
    x = [tensors(i, SHAPE, 1) for i in range(places)]

    def zeros_but_first(of: list[Tensor]) -> list[Tensor]:
        return [t if i == 0 else torch.zeros_like(t) for i, t in enumerate(of)]

    def gathered(of: list[Tensor], dim: int) -> list[Tensor]:
        return [torch.cat(of, dim)] * places

    def parted(of: list[Tensor], dim: int) -> list[Tensor]:
        return [t.chunk(places, dim)[i] for i, t in enumerate(of)]

    def total(of: list[Tensor]) -> list[Tensor]:
        return [torch.stack(of).sum(0)] * places

    def same(of: list[Tensor]) -> list[Tensor]:
        return of

    def exchanged(of: list[Tensor], cut: int, join: int) -> list[Tensor]:
        return [torch.cat([t.chunk(places, cut)[i] for t in of], join) for i in range(places)]

    if name == "all_to_all":
        cut, join = args
        y = exchanged(x, cut, join)
        g = [tensors(i, tuple(t.shape), 2) for i, t in enumerate(y)]
        return y, exchanged(g, join, cut)
    ways: dict[str, tuple[Callable[..., list[Tensor]], Callable[..., list[Tensor]]]] = {
        "all_reduce": (total, total if partial else same),
        "sum_gradient": (same, total),
        "keep_first": (zeros_but_first, same),
        "first_gradient": (same, zeros_but_first),
        "split": (parted, gathered),
        "all_gather": (gathered, (lambda g, d: parted(total(g), d)) if partial else parted),
        "reduce_scatter": (lambda t, d: parted(total(t), d), gathered),
    }
    there, back = ways[name]
    y = there(x, *args)
    g = [tensors(i, tuple(t.shape), 2) for i, t in enumerate(y)]
    return y, back(g, *args) if back is not same and args else back(g)


@pytest.mark.parametrize(
    ("world_size", "order", "transposed"),
    thinned(
        [(2, None, False), (2, (1, 0), True), (4, None, True), (4, (2, 0, 3, 1), False)],
        [(2, (1, 0), True), (4, (2, 0, 3, 1), False)],
    ),
)
def test_equals_one_process(
    pool: WorkerPool, world_size: int, order: tuple[int, ...] | None, transposed: bool
) -> None:
    results = pool.run(run_all, order, transposed, world_size=world_size, timeout_seconds=60)
    for name, case in CASES.items():
        values, gradients = one_process(case, world_size)
        for place in range(world_size):
            value, gradient = results[place if order is None else order[place]][name]
            assert value.is_contiguous() or (not case[1] and case[0] != "all_reduce"), name
            torch.testing.assert_close(value, values[place], rtol=1e-14, atol=1e-14, msg=name)
            torch.testing.assert_close(gradient, gradients[place], rtol=1e-14, atol=1e-14, msg=name)


def move_types() -> dict[str, list[Tensor]]:
    axis = world_axis()
    found: dict[str, list[Tensor]] = {}
    for dtype in (torch.bool, torch.int64, torch.complex64, torch.bfloat16):
        x = torch.arange(8).add(axis.index).remainder(3).to(dtype).view(2, 4)
        if dtype.is_complex:
            x = (x + 1j * x).conj()
        found[str(dtype)] = [axis.gather(x, 1), axis.exchange(x, 1, 0), axis.part(x, 1)]
        if dtype != torch.bool:
            found[str(dtype)] += [axis.sum(x), axis.sum_part(x, 1)]
    return found


def test_every_data_type_moves(pool: WorkerPool) -> None:
    results = pool.run(move_types, world_size=2, timeout_seconds=60)
    for dtype in (torch.bool, torch.int64, torch.complex64, torch.bfloat16):
        x = [torch.arange(8).add(i).remainder(3).to(dtype).view(2, 4) for i in range(2)]
        if dtype.is_complex:
            x = [(t + 1j * t).conj().resolve_conj() for t in x]
        for place, result in enumerate(r[str(dtype)] for r in results):
            assert torch.equal(result[0], torch.cat(x, 1))
            assert torch.equal(result[1], torch.cat([t.chunk(2, 1)[place] for t in x]))
            assert torch.equal(result[2], x[place].chunk(2, 1)[place])
            if dtype != torch.bool:
                assert torch.equal(result[3], x[0] + x[1])
                assert torch.equal(result[4], (x[0] + x[1]).chunk(2, 1)[place])


def write_in_place() -> tuple[bool, bool]:
    """Between two matrix products a sum is made in place, and gradients are right all the same."""
    axis = world_axis()
    g = torch.Generator().manual_seed(axis.index)
    x = torch.randn(3, 4, generator=g, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4, generator=g, dtype=torch.float64, requires_grad=True)
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    reduced = graph.call_function(bridges.all_reduce, (product,), {"axis": "tensor"})
    graph.output((graph.call_function(torch.ops.aten.mm.default, (reduced, b)),))
    (y,) = bind(fx.GraphModule(torch.nn.Module(), graph), {"tensor": axis})(x, w)
    y.sum().backward()
    total = axis.sum(x.detach() @ w.detach())
    expected = x.detach().t() @ (torch.ones_like(y) @ w.detach().t()) + total.t() @ torch.ones_like(y)
    assert w.grad is not None
    return torch.allclose(y, total @ w), torch.allclose(w.grad, expected)


def test_a_sum_made_in_place(pool: WorkerPool) -> None:
    assert pool.run(write_in_place, world_size=2, timeout_seconds=60) == [(True, True)] * 2


def linears_fused(name: str) -> list[tuple[Tensor, ...]]:
    """The result and all gradients of two linear layers behind a bridge, fused and not."""
    axis = world_axis()
    graph = fx.Graph()
    x, w, b, v = (graph.placeholder(n) for n in "xwbv")
    args: tuple[Any, ...] = (x,) if name == "sum_gradient" else (x, 1)
    options = {"axis": "tensor"} | ({} if name == "sum_gradient" else {"parts": axis.size, "partial": True})
    bridge = graph.call_function(getattr(bridges, name), args, options)
    first = graph.call_function(torch.ops.aten.linear.default, (bridge, w, b))
    second = graph.call_function(torch.ops.aten.linear.default, (bridge, v))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (first, second)),))
    found = []
    for fused in (False, True):
        module = bind(fx.GraphModule(torch.nn.Module(), graph), {"tensor": axis}, fused=fused)
        assert any("linears_behind" in str(n.target) for n in module.graph.nodes) == fused
        given = [
            tensors(axis.index, shape, 3).requires_grad_() for shape in [(2, 4, 4), (6, 4), (6,), (6, 4)]
        ]
        (y,) = module(*given)
        y.backward(tensors(axis.index, tuple(y.shape), 4))
        found.append((y.detach(), *(t.grad for t in given if t.grad is not None)))
    return found


@pytest.mark.parametrize("name", ["sum_gradient", "all_gather"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_fused_layers_compute_the_same(pool: WorkerPool, world_size: int, name: str) -> None:
    for plain, fused in pool.run(linears_fused, name, world_size=world_size, timeout_seconds=60):
        assert len(plain) == len(fused) == 5
        for one, other in zip(plain, fused, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_an_unbound_bridge_refuses_numbers() -> None:
    with pytest.raises(InternalError, match="not bound"):
        graph_of(CASES["all_reduce"], 2)(torch.zeros(2))
    assert graph_of(CASES["all_gather_1"], 2)(torch.empty(SHAPE, device="meta"))[0].shape == (8, 8, 12)


def test_prints_by_name() -> None:
    text = str(graph_of(CASES["all_to_all_0_1"], 2).graph)
    assert "runtime.ops.bridges.all_to_all](args = (%x, 0, 1), kwargs = {axis: tensor, parts: 2})" in text


def run_at_once(order: tuple[int, ...] | None) -> bool:
    """In a worker: gathers and sums of parts of four tensors of two data types at once, and each by itself."""
    dims = (0, 1, 2, 0)
    alone, packed, coalesced = (world_axis(order) for _ in range(3))
    # As on NCCL: Gloo has the same collectives.
    coalesced.__dict__.update(_of_messages=False, _coalesces=True)
    xs = [tensors(alone.index, SHAPE, seed) for seed in range(4)]
    xs[1] = xs[1].float()
    gathered, summed = [*map(alone.gather, xs, dims)], [*map(alone.sum_part, xs, dims)]
    for axis in (packed, coalesced):
        for expected, start in ((gathered, axis.start_wholes), (summed, axis.start_sums_of_parts)):
            for own, wait in zip(expected, start(xs, dims), strict=True):
                found = wait()
                torch.testing.assert_close(found, own, rtol=0.0, atol=0.0)
                assert found.is_contiguous()
    return True


@pytest.mark.parametrize("order", [None, (1, 0)])
def test_several_at_once_are_each_by_itself(order: tuple[int, ...] | None, pool: WorkerPool) -> None:
    assert all(pool.run(run_at_once, order, world_size=2))
