"""Blocks that a mesh computes again: their forward is charged twice, collectives included, and holds less meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.layout import Mesh
from passes.costs.costs import cost_graph, costs_of
from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.on_mesh import OnMesh
from passes.lower.realize import realize
from passes.shard.shard import shard_graph
from passes.shard.words import FeaturePlacement
from passes.trace.trace import trace
from runtime.ops.bridges import sum_gradient
from tests.distributed.sharded_models import COLUMN_ROW, ZERO3, Forced, Gpt, gpt_batch, place

MACHINE, SAMPLES = ClusterSpec.local(2), 8
BLOCKS = ("h.0", "h.1")
QUICK = ClusterSpec.from_dict(
    {
        "nodes": [
            {
                "count": 2,
                "device": {"preset": "cpu-worker"},
                "links": {"default": {"bandwidth": 1e15, "latency": 0}},
            }
        ]
    }
)
"""The same workers, whose collectives take no time: a block's gathers are one, and started in front of another."""


@cache
def graph() -> OpGraph:
    return trace(Gpt(tied=False), gpt_batch(SAMPLES), loss_reduction="mean")


def placed(forced: Forced) -> FeaturePlacement:
    return place(graph(), Mesh((0, 1), (2,), ("all",)), (forced,), 2)


def on_mesh(
    forced: Forced, blocks: tuple[str, ...], schedule: str = "1f1b", machine: ClusterSpec = MACHINE
) -> OnMesh:
    """The one stage of a model on two ranks."""
    placement = placed(forced)
    candidate = Candidate(
        {node.name: 0 for node in graph().ops},
        ((0, 1),),
        2,
        schedule,
        recomputed_blocks=(blocks,),
        shardings={0: placement},
    )
    return realize(graph(), costs_of(graph(), machine), machine, Job(SAMPLES), candidate).meshes[0]


def sent(own: OnMesh, *, backward: bool) -> Counter[tuple[str, str, float]]:
    """Count the collectives of one way."""
    return Counter(
        (item.value, item.kind, item.size_bytes) for item in own.collectives if item.backward == backward
    )


@pytest.mark.parametrize("forced", [ZERO3, COLUMN_ROW], ids=["zero3", "column_row"])
def test_forward_counts_twice_with_its_collectives(forced: Forced) -> None:
    kept, again = (on_mesh(forced, blocks, machine=QUICK) for blocks in ((), BLOCKS))
    assert sent(again, backward=False) == sent(kept, backward=False)
    extra = sent(again, backward=True) - sent(kept, backward=True)
    assert extra
    assert extra <= sent(kept, backward=False)
    mine, theirs = again.segment.cost, kept.segment.cost
    assert mine.forward_seconds == pytest.approx(theirs.forward_seconds, rel=1e-6)
    slower = mine.backward_input_seconds - theirs.backward_input_seconds
    assert 0.4 * mine.forward_seconds < slower < mine.forward_seconds
    assert mine.saved_bytes < 0.6 * theirs.saved_bytes
    assert mine.transient_bytes > theirs.transient_bytes
    bytes_sent = [sum(c.sent_bytes for c in own.segment.collectives) for own in (again, kept)]
    volume = {"all_reduce": 1.0, "all_gather": 0.5}
    more = sum(volume[kind] * size for _, kind, size in extra.elements())
    assert bytes_sent[0] - bytes_sent[1] == more > 0


def test_every_gather_of_a_block_is_made_again_but_what_follows_the_last_product_is_not() -> None:
    """Checkpointing stops when all that backward needs is there: a block's last sum is not made twice."""
    gathers, sums = (
        sent(on_mesh(f, BLOCKS), backward=True) - sent(on_mesh(f, ()), backward=True)
        for f in (ZERO3, COLUMN_ROW)
    )
    forward = sent(on_mesh(ZERO3, ()), backward=False)
    of_blocks = {name for name, _, _ in forward if name.startswith("p_model_h_")}
    assert len(of_blocks) == 2 * 16
    left = of_blocks.difference(name for name, _, _ in gathers)
    assert left <= {f"p_model_h_{i}_down_{p}__all_gather_all" for i in (0, 1) for p in ("weight", "bias")}
    summed = [name for name, kind, _ in sums if kind == "all_reduce"]
    made = [name for name, kind, _ in sent(on_mesh(COLUMN_ROW, ()), backward=False) if kind == "all_reduce"]
    assert (len(made), len(summed)) == (5, 2), "after attention, not after the MLP"


def test_one_block_is_less_than_two() -> None:
    none, one, two = (
        on_mesh(ZERO3, blocks, machine=QUICK).segment.cost for blocks in ((), BLOCKS[:1], BLOCKS)
    )
    assert none.backward_input_seconds < one.backward_input_seconds < two.backward_input_seconds
    assert none.saved_bytes > one.saved_bytes > two.saved_bytes
    # the first block is computed again when the second is done with: less is alive then than at first
    assert one.transient_bytes < two.transient_bytes
    peaks = [cost.saved_bytes + cost.transient_bytes for cost in (none, one, two)]
    assert peaks[0] > max(peaks[1:])  # with two, one's parameters come while the other's gradients are summed


def test_halves_apart_run_the_last_product_again_too() -> None:
    """There it is a function of ours, which saves after it ran; and what weight halves need stays for them."""
    together, apart = (on_mesh(COLUMN_ROW, BLOCKS, schedule).segment.cost for schedule in ("1f1b", "zb-h1"))
    assert apart.transient_bytes > together.transient_bytes
    halves = [own.backward_input_seconds + own.backward_weight_seconds for own in (apart, together)]
    assert halves[0] > halves[1]  # nothing is hidden there
    rest = {
        "transient_bytes": 0,
        "first_transient_bytes": 0,
        "backward_input_seconds": 0.0,
        "backward_weight_seconds": 0.0,
    }
    assert replace(apart, **rest) == replace(together, **rest)


@pytest.mark.parametrize("blocks", [(), BLOCKS])
def test_sums_of_input_gradients_run_beside_weight_gradients(blocks: tuple[str, ...]) -> None:
    """By hand, bridge by bridge: the executor's own rule names the layers."""
    together, apart = (on_mesh(COLUMN_ROW, blocks, schedule) for schedule in ("1f1b", "zb-h1"))
    own = shard_graph(graph(), placed(COLUMN_ROW)).graph
    costs = cost_graph(own, only_size=SAMPLES // 2 // own.batch.multiple)
    size, device = SAMPLES // 2 // own.batch.multiple, MACHINE.devices[0]
    readers = {
        node.name: [costs.ops.index(user.name) for user in node.users]
        for node in own.ops
        if node.target is sum_gradient and all("linear" in str(user.target) for user in node.users)
    }
    assert len(readers) >= 4
    sums = [t for t in together.collectives if t.backward and t.value in readers and t.kind == "all_reduce"]
    saved = sum(min(t.seconds, costs.weight_gradient_seconds(readers[t.value], size, device)) for t in sums)
    # Gradients of norms' weights are made with those of inputs.
    others = [op for op, half in enumerate(costs.weight_half) if not half]
    at_once = costs.segment_seconds(others, size, device).backward_weight
    assert at_once > 0.0
    whole = apart.segment.cost.backward_weight_seconds + at_once
    assert whole - together.segment.cost.backward_weight_seconds == pytest.approx(saved, rel=1e-9)
    assert saved > 0.0
    assert set(block_of(graph()).values()) == set(BLOCKS)


def test_gathers_run_beside_the_ops_in_front_of_them() -> None:
    """By hand: gathers that follow each other are one collective, beside what stands between them and those before."""
    ahead, apart = (on_mesh(ZERO3, (), schedule) for schedule in ("1f1b", "zb-h1"))
    own, device = shard_graph(graph(), placed(ZERO3)).graph, MACHINE.devices[0]
    size = SAMPLES // 2 // own.batch.multiple
    costs = cost_graph(own, only_size=size)
    gathers = {
        t.value: t.seconds
        for t in ahead.collectives
        if not t.backward and t.kind == "all_gather" and t.value.startswith("p_")
    }
    steps: list[tuple[list[int], float]] = [([], 0.0)]
    """Ops in front of each step, and its gathers' seconds."""
    for op, name in enumerate(costs.ops):
        ops, sending = steps[-1]
        if name in gathers:
            steps[-1] = ops, sending + gathers[name]
        elif sending:
            steps.append(([op], 0.0))
        else:
            ops.append(op)
    saved = sum(
        min(sending, costs.segment_seconds(ops, size, device).forward)
        for ops, sending in steps[1:]
        if sending
    )
    alone = {t.value: t.seconds for t in apart.collectives if not t.backward}
    saved += sum(alone[name] - seconds for name, seconds in gathers.items())
    assert len(steps) > 5
    assert apart.segment.cost.forward_seconds - ahead.segment.cost.forward_seconds == pytest.approx(
        saved, rel=1e-9
    )
    assert saved > 0.0


def test_a_rank_holds_its_part_of_the_leaves_that_it_reads_for_the_whole_step() -> None:
    """The executor puts all micro-batches of a step on the device at once."""
    leaves = {name: batch.numel() * batch.element_size() for name, batch in gpt_batch(SAMPLES).items()}
    assert on_mesh(COLUMN_ROW, ()).leaf_bytes == leaves
    assert on_mesh(ZERO3, ()).leaf_bytes == {name: size // 2 for name, size in leaves.items()}
    ops = [node.name for node in graph().ops]
    stage_of = {name: int(index >= len(ops) // 2) for index, name in enumerate(ops)}
    candidate = Candidate(stage_of, ((0,), (1,)), 2, "1f1b")
    found = realize(graph(), costs_of(graph(), MACHINE), MACHINE, Job(SAMPLES), candidate)
    assert [own.batch for own in found.state] == [leaves["ids"], leaves["labels"]]
