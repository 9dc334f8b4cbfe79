"""A few ``fix`` lines that fit a cluster, as people write them: tensor parallelism in nodes, pipelines across, data around.

    data=W                              one group, FSDP or ZeRO over all devices, a few micro-batches tried
    data=. tensor=node                  the same around whole nodes
    pipeline=8 data=. tensor=node       a pipeline of nodes, micro-batches of one sample
    pipeline=8 interleave=2 …           the same with two stages on each group, on half of a node
    groups=1,2,1,2                      unlike nodes: a stage on each

After the public recipes of ``hand_configurations``. ``zero`` is what the model's size asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cost_models.cluster import ClusterSpec

MOST_LINES = 4
MOST_STAGES = 8
"""Groups of a pipeline: eight in most of the recipes."""
STATE_BYTES = 16
"""Bytes per parameter in 16 bits with AdamW: 2 and 2 of gradient, 4 of the master copy and 8 of the moments."""
OPTIMIZER_SHARE = 0.75
"""Of ``STATE_BYTES`` what ZeRO-1 keeps in parts."""
STATE_ROOM = 0.5
"""Share of a device's memory that a person leaves to state. By hand."""


def hand_lines(cluster: ClusterSpec, batch_size: int, parameters: int) -> tuple[str, ...]:
    """Return the lines for a model of so many parameters; each gives every device work."""
    nodes = list(Counter(device.node for device in cluster.devices).values())
    made = (
        _on_unlike(cluster, nodes, batch_size)
        if _unlike(cluster)
        else _on_equal(cluster, nodes[0], batch_size, parameters)
    )
    return tuple(dict.fromkeys(made))[:MOST_LINES]


def _unlike(cluster: ClusterSpec) -> bool:
    return len({device.speed_alone for device in cluster.devices}) > 1


def _on_unlike(cluster: ClusterSpec, nodes: list[int], batch_size: int) -> Iterator[str]:
    """Yield a stage on each node: on as many shards as every node has, on half as many, on none."""
    groups, least = "groups=" + ",".join(map(str, nodes)), min(nodes)
    yield f"{groups} tensor={least} zero=1 recompute=auto"
    if least > 1:
        yield f"{groups} tensor={least // 2} zero=1 recompute=auto"
    yield f"{groups} tensor=1 zero=3 recompute=auto"
    if batch_size % cluster.world_size == 0:
        yield f"data={cluster.world_size} zero=3 recompute=auto"


def _on_equal(cluster: ClusterSpec, node: int, batch_size: int, parameters: int) -> Iterator[str]:
    world, memory = cluster.world_size, min(device.memory_bytes for device in cluster.devices)

    def line(pipeline: int, interleave: int, tensor: int) -> Iterator[str]:
        data, rest = divmod(world, pipeline * tensor)
        if rest or not data or batch_size % data:
            return
        zero = _zero(parameters / (pipeline * tensor), data, memory)
        words = [("pipeline", pipeline), ("interleave", interleave), ("tensor", tensor), ("data", data)]
        said = [f"{name}={number}" for name, number in words if number > 1]
        yield " ".join([*said, f"zero={zero}", *["microbatch=1"] * (pipeline > 1), "recompute=auto"])

    groups = min(MOST_STAGES, world // node) if world > node else 2
    inside = node if world > node else node // 2
    yield from line(1, 1, 1)
    yield from line(1, 1, node)
    yield from line(groups, 1, inside)
    yield from line(groups, 2, max(1, inside // 2))


def _zero(parameters: float, replicas: int, memory_bytes: int) -> int:
    """Return the least ZeRO with which the state of so many parameters per shard leaves room."""
    state = STATE_BYTES * parameters
    if replicas == 1 or state <= STATE_ROOM * memory_bytes:
        return 0
    return 1 if state * (1 - OPTIMIZER_SHARE * (1 - 1 / replicas)) <= STATE_ROOM * memory_bytes else 3
