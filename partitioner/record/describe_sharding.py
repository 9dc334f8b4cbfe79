"""How the devices of a stage share it, from a compile's outcome to the plan's record of it."""

from __future__ import annotations

from typing import Any

from partitioner.record.describe_layouts import layout_rows
from partitioner.record.sharding import (
    GradientSumRecord,
    StageCollective,
    StageSharding,
    UpdateGatherRecord,
    texts_of,
)
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.search.feature.place import FeatureResult
from passes.search.placed import Placed
from passes.shard.shard import Sharded
from passes.shard.traffic import Traffic
from runtime.mesh.ranks_along import JOINT, all_ranks_along


def describe_sharding(graph: OpGraph, costs: GraphCosts, placed: Placed) -> StageSharding:
    """The record of a feature-wise placement of ``graph``."""
    sharded, search, realized = placed.sharded, placed.search, placed.realized
    assert sharded is not None
    assert isinstance(search, FeatureResult)
    fields: dict[str, Any] = dict(texts_of(sharded.placement))
    return StageSharding(
        **fields,
        samples_multiple=sharded.graph.batch.multiple,
        collectives=tuple(_collective(sharded, item) for item in realized.traffic),
        sums=tuple(
            GradientSumRecord(
                parameters=item.parameters,
                axes=item.sync.axes,
                scattered=item.sync.scattered,
                size_bytes=item.size_bytes,
                seconds=item.seconds,
            )
            for item in realized.sums
        ),
        gathers=tuple(
            UpdateGatherRecord(
                axis=item.axis, parameters=item.parameters, size_bytes=item.whole_bytes, seconds=item.seconds
            )
            for item in realized.gathers
        ),
        layouts=layout_rows(graph, sharded, costs),
        discovered_ops=search.origins.discovered,
        replicated_ops=search.origins.replicated,
        replicated_seconds=search.origins.replicated_seconds,
        replicated_matmul_share=search.replicated_matmul_share,
    )


def _collective(sharded: Sharded, item: Traffic) -> StageCollective:
    ranks = len(all_ranks_along(sharded.mesh, item.axis.split(JOINT))[0])
    return StageCollective(
        value=item.node,
        kind=item.kind,
        axis=item.axis,
        size_bytes=item.whole_bytes,
        sent_bytes=item.sent_bytes(ranks),
        backward=item.backward,
    )
