"""The surrogate as it is defined, op by op, against what the search says that its pipelines cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError
from cost_models.layout import Replicate, Shard
from passes.costs.costs import costs_of
from passes.lower.job import Job
from passes.search.hybrid.bounds import full_bound, quick_bound
from passes.search.hybrid.decode import Decoded
from passes.search.hybrid.evaluate import CandidateCost, check_agreement
from passes.search.hybrid.options import GroupOption
from passes.search.hybrid.recipes.walk import needed_bytes
from passes.search.hybrid.search import GroupSearch, SolvedOption
from tests.support.matrix import thinned
from tests.support.traced_models import loaded

MODELS = ("gpt2", "llama-8b", "t5", "mixtral", "unet")
KINDS = ("one", "replicas", "tensor", "both", "interleaved")
"""Groups of one device; of replicas; of shards; of both; stages that go round and round."""
ROOMS = (1.0, 1.1, 1.4)
"""Times the least memory that a pipeline is found for."""
SHOWN = [("gpt2", "both"), ("llama-8b", "interleaved"), ("mixtral", "tensor"), ("unet", "replicas")]


@cache
def search(model: str) -> GroupSearch:
    graph, cluster = loaded(model)[1], ClusterSpec.parse("dgx-h100:1")
    return GroupSearch(graph, costs_of(graph, cluster), cluster, Job(16))


@cache
def options_of(model: str, kind: str) -> list[GroupOption]:
    """The options of a kind with the fewest and the most micro-batches."""
    found = []
    for option in search(model).options():
        (run,) = option.runs
        its = (
            "one"
            if run.size == 1
            else "replicas"
            if run.tensor == 1
            else "tensor"
            if run.replicas == 1
            else "both"
        )
        if kind == ("interleaved" if option.chunks > 1 else its):
            found.append(option)
    return [found[0], found[-1]]


def decoded(model: str, option: GroupOption) -> Iterator[tuple[SolvedOption, Decoded]]:
    """Solve an option with much memory, and with hardly enough."""
    own, room = search(model), 1.0
    for step in (2.0, 1.05):
        while own.solve(option, math.inf, room / step) is not None:
            room /= step
    for more in (*ROOMS, 1 / room):
        solved, staged = own.solve(option, math.inf, room * more), own.staged(option, room * more)
        if solved is not None:
            assert staged is not None
            assert quick_bound(staged, math.inf) <= solved.seconds * (1 + 1e-9)
            assert full_bound(staged, math.inf) <= solved.seconds * (1 + 1e-9)
            for on_mesh in (False, True):
                bound = own.first_bound(option, math.inf, room * more, on_mesh=on_mesh)
                assert bound <= solved.seconds * (1 + 1e-9)
            yield solved, own.decode(solved, one_queue=True)


def gains_by_recomputing(own: GroupSearch, solved: SolvedOption) -> bool:
    """Tell whether the fullest stage would need less with its blocks computed again.

    Running one again makes anew all that it keeps: a stage gains that holds two blocks, or one of two micro-batches.
    """
    option, starts = solved.option, solved.pipeline.starts
    ends, held = (*starts[1:], len(own.pieces)), option.in_flight[::-1]
    needed = [needed_bytes(steps, count) for steps, count in zip(solved.steps, held, strict=True)]
    fullest = needed.index(max(needed))
    blocks = sum(map(bool, own.pieces.blocks[starts[fullest] : ends[fullest]]))
    return blocks * held[fullest] > 1


@pytest.mark.parametrize(
    ("model", "kind"), thinned([(model, kind) for model in MODELS for kind in KINDS], SHOWN)
)
def test_the_search_s_objective_and_memory_are_those_of_every_op(model: str, kind: str) -> None:
    own = search(model)
    cost = CandidateCost(own.pieces, own.cluster, own.job, own.piece_search.shared)
    tight, may_gain = 0, False
    for option in options_of(model, kind):
        for number, (solved, found) in enumerate(decoded(model, option)):
            may_gain |= number == 0 and gains_by_recomputing(own, solved)
            assert not found.unlike
            evaluated = cost.evaluated(found.candidate, found.values)
            assert evaluated.objective_seconds == pytest.approx(solved.seconds, rel=1e-9)
            check_agreement(evaluated, solved.seconds, found.unlike)
            for steps, stage, held in zip(
                solved.steps, evaluated.stages, option.in_flight[::-1], strict=True
            ):
                needed = stage.state_bytes + held * stage.held_bytes + stage.buffer_bytes
                assert needed == pytest.approx(needed_bytes(steps, held), rel=1e-9)
            kept = [
                layout[0]
                for sharding in found.candidate.shardings.values()
                for layout in (*sharding.stored.values(), *sharding.sharded_state.values())
            ]
            zero = "data" in {a for s in found.candidate.shardings.values() for a in s.mesh.axes}
            tight += bool(found.candidate.recomputed_blocks) or (
                zero and any(isinstance(p, Shard) for p in kept)
            )
    # stages that share a device may fit to the last without either
    assert tight or kind == "interleaved" or not may_gain, (
        "short of memory, blocks are computed again, or replicas keep parts"
    )


def test_what_does_not_agree_is_refused() -> None:
    option = options_of("gpt2", "both")[0]
    own = search("gpt2")
    solved, found = next(decoded("gpt2", option))
    cost = CandidateCost(own.pieces, own.cluster, own.job, own.piece_search.shared)
    (number, sharding), *_ = found.candidate.shardings.items()
    parts = {
        name: (Shard(0), *layout[1:])
        for name, layout in sharding.stored.items()
        if layout[0] == Replicate() and own.pieces.graph.parameters[name].shape[0] % 2 == 0
    }
    assert parts.keys() - sharding.sharded_state.keys()
    other = replace(
        found.candidate,
        shardings={**found.candidate.shardings, number: replace(sharding, sharded_state=parts)},
    )
    with pytest.raises(InternalError, match="not what the pipeline costs"):
        check_agreement(cost.evaluated(other, found.values), solved.seconds, ())


def test_leaves_read_for_their_size_alone_are_laid_out_on_the_mesh_of_their_own_stage() -> None:
    """The first stage reads no labels, and its mesh has one axis; the last reads them, on a mesh of two."""
    nodes = [
        {"name": name, "count": count, "device": device, "links": "NVLink3"}
        for name, count, device in (("large", 2, "A100-80GB"), ("small", 4, "A100-40GB"))
    ]
    cluster = ClusterSpec.from_dict({"nodes": nodes, "network": "Ethernet-25G"})
    graph = loaded("gpt2")[1]
    own = GroupSearch(graph, costs_of(graph, cluster), cluster, Job(16))
    wanted = [(1, 2), (2, 2)]
    option = next(o for o in own.options() if [(run.replicas, run.tensor) for run in o.runs] == wanted)
    solved = own.solve(option, math.inf)
    assert solved is not None
    shardings = own.decode(solved, one_queue=True).candidate.shardings
    assert [len(own.mesh.shape) for own in shardings.values()] == [1, 2]
    assert all(len(layout) == len(s.mesh.shape) for s in shardings.values() for layout in s.batch.values())
