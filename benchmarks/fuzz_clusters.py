"""Random clusters × small random models × all strategies: a plan or a stated reason, and never slower for more devices.

    python -m benchmarks.fuzz_clusters                          300 instances, every strategy
    python -m benchmarks.fuzz_clusters --first 40 --instances 20 --strategies layer hybrid

An instance is a model (``bound_models``), a batch size, a cluster of one to five nodes of one to eight devices of one to
three kinds, and the same cluster with a node or a device more. Both are planned by each strategy:

    planned     both; the step on the larger one is not longer
    refused     an error in the user's words (PartitionerError, not InternalError)
    SLOWER      the larger cluster's plan takes longer, though it could leave out what was added
    RAISED      anything else

The exit code is 1 if something is slower or raised. The seed of everything is the instance's number.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bound_models import traced_model
from cost_models.cluster import ClusterSpec
from cost_models.errors import InternalError, PartitionerError
from partitioner import Plan, partition
from passes.graph.graph import OpGraph

STRATEGIES = ("layer", "feature", "hybrid", "free")
INSTANCES_PER_MODEL = 10
"""Clusters and batches that a traced model is planned for."""
MOST_SECONDS, FREE_SECONDS = 60.0, 0.5
"""Limits of a search, and of a free one."""
KINDS: Sequence[Mapping[str, Any]] = (
    {"device": "A100-40GB", "links": "NVLink3"},
    {"device": "A100-80GB", "links": "PCIe4"},
    {"device": "H100-80GB", "links": "NVLink4"},
    {
        "device": {
            "name": "small",
            "kind": "cpu",
            "memory": "256MiB",
            "memory_bandwidth": "10GB/s",
            "flops": {"float32": "20G", "float64": "10G"},
            "launch_overhead": "1us",
        },
        "links": {"default": {"bandwidth": "2GB/s", "latency": "10us"}},
    },
)
NETWORKS = (
    "Ethernet-25G",
    {"bandwidth": "50GB/s", "latency": "5us", "per": "device"},
    {"bandwidth": "100MB/s", "latency": "50us"},
)


@dataclass(frozen=True)
class Found:
    """What became of one instance by one strategy. ``said``: seconds on both clusters, or the reason."""

    instance: int
    strategy: str
    outcome: str
    said: str


def random_clusters(draw: random.Random) -> tuple[ClusterSpec, ClusterSpec]:
    """Draw a cluster, and the same with a node or a device more."""
    kinds = draw.sample(range(len(KINDS)), draw.randint(1, 3))
    nodes = [(draw.choice(kinds), draw.randint(1, 8)) for _ in range(draw.randint(1, 5))]
    more = list(nodes)
    if draw.random() < 0.5:
        more.insert(draw.randint(0, len(nodes)), (draw.choice(kinds), draw.randint(1, 8)))
    else:
        grown = draw.randrange(len(nodes))
        more[grown] = (nodes[grown][0], nodes[grown][1] + 1)
    network = draw.choice(NETWORKS)
    return _cluster(nodes, network), _cluster(more, network)


def _cluster(nodes: Sequence[tuple[int, int]], network: object) -> ClusterSpec:
    """Make nodes of (kind, devices)."""
    text = " ".join(f"{'ABCD'[kind]}{count}" for kind, count in nodes)
    data = [{"name": f"n{i}", "count": count, **KINDS[kind]} for i, (kind, count) in enumerate(nodes)]
    return ClusterSpec.from_dict({"name": text, "nodes": data, "network": network})


def look_at(number: int, strategies: Sequence[str] = STRATEGIES) -> Iterator[Found]:
    """Plan one instance by each strategy."""
    draw = random.Random(number)
    graph = traced_model(number // INSTANCES_PER_MODEL)
    clusters = random_clusters(draw)
    batch_size = draw.choice([4, 6, 8, 12, 16, 32, 48, 60, 64])
    for strategy in strategies:
        where = f"{clusters[0].name} | {clusters[1].name}, batch {batch_size}"
        steps: list[float | None] = []
        reason = ""
        try:
            for cluster in clusters:
                try:
                    steps.append(_planned(graph, cluster, strategy, batch_size).prediction.step_seconds)
                except InternalError:
                    raise
                except PartitionerError as error:
                    steps.append(None)
                    reason = error.what
        except Exception as error:  # noqa: BLE001 anything else is what is looked for
            place = traceback.extract_tb(error.__traceback__)[-1]
            yield Found(number, strategy, "RAISED", f"{where}: {error!r} at {place.filename}:{place.lineno}")
            continue
        small, large = steps
        if small is not None and (large is None or large > small * (1 + 1e-9)):
            longer = reason if large is None else f"{large / small:.4f} times {small:.4g} s"
            yield Found(number, strategy, "SLOWER", f"{where}: {longer}")
        elif large is None or small is None:
            yield Found(number, strategy, "refused", reason)
        else:
            yield Found(number, strategy, "planned", f"{small:.4g} s, {large:.4g} s")


def _planned(graph: OpGraph, cluster: ClusterSpec, strategy: str, batch_size: int) -> Plan:
    limit = FREE_SECONDS if strategy == "free" else MOST_SECONDS
    return partition(
        graph,
        cluster,
        strategy=strategy,
        batch_size=batch_size,
        micro_couplings=True,
        time_limit_seconds=limit,
    )


def main() -> int:
    """Look at the instances of the command line; 1 if something is slower or raised."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--instances", type=int, default=300)
    options.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    given = options.parse_args()
    logging.disable(logging.WARNING)
    began, outcomes = time.perf_counter(), Counter[str]()
    for number in range(given.first, given.first + given.instances):
        for found in look_at(number, given.strategies):
            outcomes[found.outcome] += 1
            if found.outcome in ("SLOWER", "RAISED"):
                print(f"{number} {found.strategy} {found.outcome}: {found.said}", flush=True)
        if (number + 1) % 10 == 0:
            print(f"{number + 1}: {dict(outcomes)}, {time.perf_counter() - began:.0f} s", flush=True)
    print(dict(outcomes))
    return 1 if outcomes["SLOWER"] or outcomes["RAISED"] else 0


if __name__ == "__main__":
    sys.exit(main())
