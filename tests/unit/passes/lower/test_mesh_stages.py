"""Equal stages are sharded and costed once, and have the numbers that they have by themselves, under their own names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.layout import Mesh, Replicate, Shard
from passes.graph.blocks import block_of
from passes.graph.graph import OpGraph
from passes.graph.part import part_of
from passes.graph.recomputed import recomputed_ops
from passes.lower import mesh_stages
from passes.lower.candidate import Candidate
from passes.lower.job import Job
from passes.lower.lower import crossing_values
from passes.lower.mesh_stages import MeshStages
from passes.lower.on_mesh import OnMesh, cost_on_mesh
from passes.lower.placed_graph import meshes_of
from passes.lower.realize import segmented
from passes.lower.segment import Segmentation
from passes.lower.summarize import shared_state
from passes.shard.shard import shard_graph
from passes.shard.words import FeaturePlacement, all_replicated
from passes.trace.trace import trace
from tests.distributed.sharded_models import BATCH, COLUMN_ROW, Gpt, gpt_batch, place

BLOCKS, SAMPLES, JOB = 6, 16, Job(16)
CLUSTER = ClusterSpec.parse("dgx-h100:4")
SHAPE, AXES = (2, 2), ("data", "tensor")
DISTINCT = 3
"""The first stage, which embeds, the last, which makes the loss, and any other.

Each is sharded once, though the last needs multiples of 4 samples, and for the others 2 would do.
"""


@cache
def graph_of(change: Callable[[Gpt], None] = lambda model: None) -> OpGraph:
    model = Gpt(tied=False, blocks=BLOCKS)
    change(model)
    return trace(model, gpt_batch(SAMPLES), loss_reduction="mean")


@dataclass
class Pipeline:
    """A block to a stage, each on four ranks; the second stage from the end is what tests change."""

    graph: OpGraph
    candidate: Candidate = field(init=False)
    changed: int = BLOCKS - 2

    def __post_init__(self) -> None:
        blocks, copied = block_of(self.graph), recomputed_ops(self.graph)
        stage, stage_of = 0, {}
        for node in self.graph.ops:
            if node.name not in copied:
                stage = int(blocks[node.name].rpartition(".")[2]) if node.name in blocks else stage
                stage_of[node.name] = stage
        groups = tuple(tuple(range(4 * stage, 4 * stage + 4)) for stage in range(BLOCKS))
        whole = place(self.graph, Mesh(groups[0], SHAPE, AXES), (BATCH, COLUMN_ROW), 2)
        shardings = {i: replace(whole, mesh=Mesh(ranks, SHAPE, AXES)) for i, ranks in enumerate(groups)}
        self.candidate = Candidate(stage_of, groups, 2, "1f1b", shardings=shardings)
        between = dict.fromkeys(crossing_values(self.graph, self.segmentation), (Shard(0), Replicate()))
        shardings = {i: replace(own, values=between) for i, own in shardings.items()}
        self.candidate = replace(self.candidate, shardings=shardings)

    def place(self, change: Callable[[FeaturePlacement], FeaturePlacement]) -> None:
        """Change the placement of one stage."""
        shardings = dict(self.candidate.shardings)
        shardings[self.changed] = change(shardings[self.changed])
        self.candidate = replace(self.candidate, shardings=shardings)

    @property
    def segmentation(self) -> Segmentation:
        return segmented(self.graph, self.candidate, recomputed_ops(self.graph))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often a stage is sharded, and costed."""
    found: Counter[str] = Counter()

    def counting(name: str) -> None:
        function = getattr(mesh_stages, name)

        def counted(*args: object) -> object:
            found[name] += 1
            return function(*args)

        monkeypatch.setattr(mesh_stages, name, counted)

    counting("shard_graph")
    counting("cost_on_mesh")
    return found


def found_in(pipeline: Pipeline) -> Mapping[int, OnMesh]:
    return MeshStages(pipeline.graph, CLUSTER, JOB).of(pipeline.candidate, pipeline.segmentation)


def agree_with_each_alone(pipeline: Pipeline, found: Mapping[int, OnMesh]) -> None:
    """Compare every number and every name with those of a graph of the stage's own."""
    graph, candidate, segmentation = pipeline.graph, pipeline.candidate, pipeline.segmentation
    assert found.keys() == set(range(BLOCKS))
    for index, ops, placement in meshes_of(graph, segmentation, candidate.shardings):
        part = part_of(graph, ops, segmentation.recomputed)
        own = shard_graph(part, placement, 4, shared_state(graph, segmentation))
        size = SAMPLES // candidate.microbatches
        regions = segmentation.regions_of(index)
        alone = cost_on_mesh(graph, own, CLUSTER, JOB, index, size, regions, False)
        assert alone.collectives
        assert alone.sums
        assert vars(found[index]) == vars(alone)


def test_equal_stages_are_sharded_and_costed_once(done: Counter[str]) -> None:
    pipeline = Pipeline(graph_of())
    found = found_in(pipeline)
    assert done == {"shard_graph": DISTINCT, "cost_on_mesh": DISTINCT}
    agree_with_each_alone(pipeline, found)


def test_what_other_candidates_have_is_not_made_again(done: Counter[str]) -> None:
    """Micro-batches of another size, and halves apart, cost something else on the same shards."""
    pipeline = Pipeline(graph_of())
    stages = MeshStages(pipeline.graph, CLUSTER, JOB)
    smaller = replace(pipeline.candidate, microbatches=4)
    deferring = replace(smaller, schedule="zb-h1")
    for costed, candidate in enumerate((pipeline.candidate, smaller, deferring), start=1):
        for _ in range(2):
            stages.of(candidate, pipeline.segmentation)
            assert done == {"shard_graph": DISTINCT, "cost_on_mesh": DISTINCT * costed}


def _frozen(model: Gpt) -> None:
    model.h[4].get_submodule("up").get_parameter("bias").requires_grad = False


def _shared(model: Gpt) -> None:
    model.h[4].get_submodule("norm1").bias = model.h[5].get_submodule("norm1").get_parameter("bias")


def _other_number(model: Gpt) -> None:
    norm = model.h[4].get_submodule("norm1")
    assert isinstance(norm, nn.LayerNorm)
    norm.eps = 1e-3


@pytest.mark.parametrize("change", [_frozen, _shared, _other_number])
def test_an_unlike_op_or_parameter_makes_a_stage_unlike(
    change: Callable[[Gpt], None], done: Counter[str]
) -> None:
    pipeline = Pipeline(graph_of(change))
    found = found_in(pipeline)
    assert done == {"shard_graph": DISTINCT + 1, "cost_on_mesh": DISTINCT + 1}
    agree_with_each_alone(pipeline, found)


WEIGHT = "h.4.norm1.weight"
ROWS = (Replicate(), Shard(0))


@pytest.mark.parametrize(
    "what", ["choices", "all such choices", "stored", "sharded_state", "leaving", "arriving"]
)
def test_an_unlike_layout_makes_a_stage_unlike(what: str, done: Counter[str]) -> None:
    pipeline = Pipeline(graph_of())
    gelu = next(
        n.name
        for n in pipeline.graph.ops
        if block_of(pipeline.graph).get(n.name) == "h.4" and "gelu" in n.name
    )
    values = list(crossing_values(pipeline.graph, pipeline.segmentation))

    def change(own: FeaturePlacement) -> FeaturePlacement:
        match what:
            case "choices":
                return replace(own, choices={**own.choices, gelu: (all_replicated(1, 1),) * 2})
            case "all such choices":  # their numbers in the key stay as they are
                data = own.choices[gelu][0]
                other = data, all_replicated(1, 1)
                same = {op: other if c == own.choices[gelu] else c for op, c in own.choices.items()}
                return replace(own, choices=same)
            case "stored":
                return replace(own, stored={**own.stored, WEIGHT: ROWS})
            case "sharded_state":
                return replace(own, sharded_state={**own.sharded_state, WEIGHT: (Shard(0), Replicate())})
            case _:
                whole = {values[4 if what == "leaving" else 3]: (Replicate(), Replicate())}
                return replace(own, values={**own.values, **whole})

    pipeline.place(change)
    found = found_in(pipeline)
    assert done == {"shard_graph": DISTINCT + 1, "cost_on_mesh": DISTINCT + 1}
    agree_with_each_alone(pipeline, found)


def test_a_block_that_is_computed_again_is_costed_anew_on_the_same_shards(done: Counter[str]) -> None:
    pipeline = Pipeline(graph_of())
    again = tuple((f"h.{stage}",) if stage == pipeline.changed else () for stage in range(BLOCKS))
    pipeline.candidate = replace(pipeline.candidate, recomputed_blocks=again)
    found = found_in(pipeline)
    assert done == {"shard_graph": DISTINCT, "cost_on_mesh": DISTINCT + 1}
    agree_with_each_alone(pipeline, found)


def test_a_stage_over_other_links_is_costed_anew_on_the_same_shards(done: Counter[str]) -> None:
    pipeline = Pipeline(graph_of())
    across = (24, 25, 26, 16)  # on two nodes; the others each in one
    pipeline.place(lambda own: replace(own, mesh=Mesh(across, SHAPE, AXES)))
    groups = tuple(across if i == pipeline.changed else g for i, g in enumerate(pipeline.candidate.groups))
    pipeline.candidate = replace(pipeline.candidate, groups=groups)
    found = found_in(pipeline)
    assert done == {"shard_graph": DISTINCT, "cost_on_mesh": DISTINCT + 1}
    agree_with_each_alone(pipeline, found)
