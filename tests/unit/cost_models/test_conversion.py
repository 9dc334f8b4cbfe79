"""Bridges: the steps are right on real tensors (nested shards included), deterministic, and cost what the forms say."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from cost_models.cluster import ClusterSpec
from cost_models.communication import ring_all_reduce_seconds, slowest_hop
from cost_models.conversion import (
    AxisChange,
    axis_groups,
    axis_links,
    local_share,
    path,
    steps,
    steps_bytes_per_rank,
    volume_share,
)
from cost_models.layout import Mesh, Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class Need:
    placement: Placement
    partial_gradient: bool = False


R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def spread(whole: torch.Tensor, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> dict:
    """What each rank (by coordinates) holds."""
    held = {}
    for at in itertools.product(*map(range, shape)):
        local, scale = whole, 1.0
        for placement, size, i in zip(placements, shape, at, strict=True):
            if isinstance(placement, Shard):
                local = local.chunk(size, placement.dim)[i]
            elif isinstance(placement, Partial):
                scale *= (i + 1) * 2.0 / (size * (size + 1))  # unequal parts that add up to 1
        held[at] = local * scale
    return held


def _stepped(step: AxisChange, line: list[torch.Tensor], i: int) -> torch.Tensor:
    if step.kind in ("all_reduce", "reduce_scatter"):
        whole = torch.stack(line).sum(0)
        return whole if step.kind == "all_reduce" else whole.chunk(len(line), step.dim)[i]
    if step.kind == "all_gather":
        return torch.cat(line, step.dim)
    if step.kind == "all_to_all":
        return torch.cat([x.chunk(len(line), step.to_dim)[i] for x in line], step.dim)
    if step.kind == "slice":
        return line[i].chunk(len(line), step.dim)[i]
    return line[i] if i == 0 else torch.zeros_like(line[i])


def apply(step: AxisChange, held: dict, size: int) -> dict:
    done = {}
    for at in held:
        line = [held[(*at[: step.axis], j, *at[step.axis + 1 :])] for j in range(size)]
        i = at[step.axis]
        done[at] = _stepped(step, line, i)
    return done


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 2, 2)])
def test_every_conversion_is_right_on_real_tensors(shape: tuple[int, ...]) -> None:
    whole = torch.arange(24 * 24, dtype=torch.float64).reshape(24, 24)
    layouts = list(itertools.product((R, P, S0, S1), repeat=len(shape)))
    spreads = {layout: spread(whole, layout, shape) for layout in layouts}
    for source, target in itertools.product(layouts, layouts):
        held = spreads[source]
        for step in path(source, target, shape):
            assert step.share == pytest.approx(
                next(iter(held.values())).numel()
                / whole.numel()
                * (shape[step.axis] if step.kind in ("all_gather", "all_to_all") else 1)
            )
            held = apply(step, held, shape[step.axis])
        wanted = spreads[tuple(R if p == P else p for p in target)]
        for axis, placement in enumerate(target):
            if placement == P:  # the sum over the axis is the whole
                held = apply(AxisChange("all_reduce", axis, -1, 1.0), held, shape[axis])
        for at, local in held.items():
            assert local.shape == wanted[at].shape
            assert torch.allclose(local, wanted[at], rtol=1e-7, atol=1e-7)


def test_the_table_of_bridges() -> None:
    mesh = Mesh((0, 1), (2,), ("x",))

    def kinds(source: Placement, need: Need) -> tuple[str, str]:
        forward, backward = steps((source,), (need,), mesh)
        return "+".join(s.kind for s in forward), "+".join(s.kind for s in backward)

    assert kinds(R, Need(R)) == ("", "")
    assert kinds(R, Need(R, True)) == ("", "all_reduce")
    assert kinds(R, Need(S0)) == ("slice", "all_gather")
    assert kinds(S0, Need(R)) == ("all_gather", "slice")
    assert kinds(S0, Need(R, True)) == ("all_gather", "reduce_scatter")
    assert kinds(P, Need(R)) == ("all_reduce", "")
    assert kinds(P, Need(R, True)) == ("all_reduce", "all_reduce")
    assert kinds(P, Need(S1)) == ("reduce_scatter", "all_gather")
    assert kinds(S0, Need(S1)) == ("all_to_all", "all_to_all")
    assert kinds(R, Need(P)) == ("keep_first", "")
    assert kinds(P, Need(P)) == ("", "")


def test_an_outer_shard_leaves_only_after_the_inner_one() -> None:
    assert [str(s) for s in path((S0, S0), (R, R), (2, 2))] == [
        "all_gather axis 1 dim 0",
        "all_gather axis 0 dim 0",
    ]
    assert [s.kind for s in path((S0, S0), (R, S0), (2, 2))] == ["all_gather", "all_gather", "slice"]
    assert [str(s) for s in path((P, P), (S0, S0), (2, 2))] == [
        "reduce_scatter axis 0 dim 0",
        "reduce_scatter axis 1 dim 0",
    ]


def test_the_cheapest_order_scatters_before_it_sums() -> None:
    assert [s.kind for s in path((P, P), (R, S0), (2, 2))] == ["reduce_scatter", "all_reduce"]
    assert [s.kind for s in path((P,), (R,), (4,))] == ["all_reduce"]


def test_volumes_follow_the_ring() -> None:
    n, p = 1024.0, 4
    assert steps_bytes_per_rank(path((P,), (R,), (p,)), n, (p,)) == 2 * n * (p - 1) / p
    assert steps_bytes_per_rank(path((S0,), (R,), (p,)), n, (p,)) == n * (p - 1) / p
    assert steps_bytes_per_rank(path((S0,), (S1,), (p,)), n, (p,)) == n / p * (p - 1) / p
    assert volume_share(AxisChange("slice", 0, 0, 1.0), p) == 0
    assert local_share((S0, R, S1), (2, 3, 4)) == 1 / 8


def test_axes_inside_nodes_are_faster() -> None:
    cluster = ClusterSpec.preset("dgx-h100", 2)
    mesh = Mesh(tuple(range(16)), (2, 8), ("outer", "inner"))
    assert axis_groups(mesh, 0)[:2] == [[0, 8], [1, 9]]
    assert axis_groups(mesh, 1) == [list(range(8)), list(range(8, 16))]
    outer, inner = (axis_links(mesh, axis, cluster) for axis in (0, 1))
    n = 2.0**28
    assert inner.seconds("all_reduce", n) < outer.seconds("all_reduce", n)
    assert inner.ring == slowest_hop(axis_groups(mesh, 1), cluster)
    alone = axis_links(Mesh(tuple(range(8)), (8,), ("inner",)), 0, ClusterSpec.preset("dgx-h100"))
    assert inner.seconds("all_reduce", n) == alone.seconds("all_reduce", n)  # a port each: nothing is shared
    flat = axis_links(Mesh(tuple(range(16)), (16,), ("all",)), 0, cluster)
    assert flat.per_node == 8  # eight rings, one for each card, or the switches: never slower than one ring
    assert flat.seconds("all_reduce", n) <= ring_all_reduce_seconds(n, 16, flat.ring)
    assert flat.seconds("slice", n) == 0
