"""Bounds against simulations: no plan of a random model simulates below a bound that any plan of that step carries.

    python -m benchmarks.bound_check                        1,000 instances (models × clusters × batches), every strategy
    python -m benchmarks.bound_check --slice 3/10           every tenth instance, from the third on: to go on another day
    python -m benchmarks.bound_check --seed 7 --instances 50

An instance is a random model, a cluster and a batch size (``bound_models``). Each strategy plans it, each time drawn from:
layer-wise, with full recomputation, in fixed micro-batches under a drawn schedule; feature-wise on any mesh or a drawn one,
in drawn micro-batches; free with whole ops, with split ones, for latency. What is compared:

    every simulated candidate of every search, chosen or not    ≥ the bound on any plan (one per step: all plans carry it)
    every simulated candidate of whole ops                      ≥ the bound on whole ops of its own certificate
    the work of every op on shards, of all ranks together       ≥ what the bound counts of the whole op

The last line is the lemma that the first rests on (``passes.search.any_plan``). Prints the least ratio of each kind.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.bound_models import CLUSTERS, traced_model
from cost_models.errors import InfeasibleError, InternalError, PartitionerError
from passes.compile import bounded
from passes.costs.costs import cost_graph, costs_of
from passes.lower.job import Job
from passes.lower.placed_graph import on_meshes
from passes.search.any_plan import counted_work
from passes.search.certificate import ROUNDING
from passes.search.feature.place import FeatureRequest
from passes.search.free.request import FreeRequest
from passes.search.judge import Judge
from passes.search.layer.request import LayerRequest
from passes.search.outcome import Outcome
from passes.search.request import Request
from passes.search.strategies import search

INSTANCES_PER_MODEL = 20
"""Clusters and batches that a traced model is planned for."""


@dataclass
class Tally:
    """What was compared, and the least ratio of a simulation to its bound."""

    plans: int = 0
    candidates: int = 0
    refused: int = 0
    crashed: int = 0
    """Searches that ended in an error of their own."""
    sharded_ops: int = 0
    least_any: float = math.inf
    least_whole: float = math.inf
    least_work: float = math.inf
    broken: list[str] = field(default_factory=list)


def check_instance(seed: int, number: int, tally: Tally, seconds: float = 0.2) -> None:
    """Plan one instance with every strategy, and compare. ``seconds``: limit of a free search."""
    draw = random.Random(f"{seed}:{number}")
    graph = traced_model(seed * 1_000_003 + number // INSTANCES_PER_MODEL)
    cluster_name = draw.choice(sorted(CLUSTERS))
    cluster = CLUSTERS[cluster_name]()
    batch = draw.choice([2, 4, 6, 8, 12, 16, 32, 64, 100, 256, 1024])
    job = Job(batch, optimizer=draw.choice(["adamw", "sgd", "momentum"]))
    costs = costs_of(graph, cluster)
    for request in _requests(job, len(cluster.devices), draw, seconds):
        judge = Judge(graph, costs, cluster, job)
        where = f"instance {number}, {request.strategy}, {cluster_name}, batch {batch}: {request}"
        try:
            outcome = search(request, judge)
            found = bounded(outcome, judge)
        except InfeasibleError:
            tally.refused += 1
            continue
        except PartitionerError as error:
            if "bound" in str(error):
                tally.broken.append(f"{where}: {error}")
            elif isinstance(error, InternalError):  # not about bounds: told, and the rest goes on
                tally.crashed += 1
                print(f"crashed: {where}: {error}"[:1200], flush=True)
            else:
                tally.refused += 1
            continue
        tally.plans += 1
        _compare(found, judge, tally, where)


def _compare(outcome: Outcome, judge: Judge, tally: Tally, where: str) -> None:
    certificate = outcome.certificate
    for own in {id(j): j for j in (judge, outcome.judge)}.values():
        whole = own.graph is judge.graph
        for simulated in (*own.tried, outcome.best):
            tally.candidates += 1
            ratio = simulated.step_seconds / max(certificate.simulated_lower_bound_seconds, 1e-30)
            tally.least_any = min(tally.least_any, ratio)
            if ratio < 1 - ROUNDING:
                tally.broken.append(f"{where}: {ratio} of the bound on any plan")
            if whole and not simulated.candidate.shardings and certificate.whole_ops_bound_seconds:
                ratio = simulated.step_seconds / certificate.whole_ops_bound_seconds
                tally.least_whole = min(tally.least_whole, ratio)
                if ratio < 1 - ROUNDING:
                    tally.broken.append(f"{where}: {ratio} of the bound on whole ops")
    realized = outcome.carried.realized
    for own in on_meshes(
        judge.graph, realized.segmentation, outcome.best.candidate.shardings
    ).sharded.values():
        size = judge.job.batch_size // outcome.best.candidate.microbatches
        local = own.graph
        kind = judge.cluster.devices[0].counted_as
        units = size // local.batch.multiple
        part = counted_work(local, cost_graph(local, device_kind=kind, only_size=units), units)
        whole_work = counted_work(judge.graph, judge.costs, size)
        ranks = math.prod(own.mesh.shape)
        for op, (flops, moved) in whole_work.items():
            tally.sharded_ops += 1
            have = part.get(op, (0.0, 0.0))
            for name, own_work, needed in (("FLOPs", have[0], flops), ("bytes", have[1], moved)):
                if needed and ranks * own_work < needed * (1 - 1e-12):
                    ratio = ranks * own_work / needed
                    tally.least_work = min(tally.least_work, ratio)
                    tally.broken.append(f"{where}: {op} on shards does {ratio:.4f} of the whole's {name}")
                elif needed:
                    tally.least_work = min(tally.least_work, ranks * own_work / needed)


def _requests(job: Job, devices: int, draw: random.Random, seconds: float) -> Iterator[Request]:
    divisors = [m for m in range(1, job.batch_size + 1) if job.batch_size % m == 0]
    fixed = draw.choice([m for m in (1, 2, 3, 4, 5, 7, 8, 16) if m <= job.batch_size])
    yield draw.choice(
        [
            LayerRequest(job),
            LayerRequest(job, recompute="full", microbatches=fixed),
            LayerRequest(job, microbatches=fixed, schedule=draw.choice(["gpipe", "1f1b", "zb-h1", "zb-v"])),
        ]
    )
    count = draw.choice(divisors[:4])
    meshes = [None, (devices,), (2, 2)] if devices == 4 else [None, (devices,)]
    yield FeatureRequest(
        job,
        microbatches=draw.choice(["auto", count]),
        mesh=draw.choice(meshes),
        time_limit_seconds=5 * seconds,
    )
    yield draw.choice(
        [
            FreeRequest(job, split=False, time_limit_seconds=seconds),
            FreeRequest(job, time_limit_seconds=2 * seconds),
            FreeRequest(job, objective="latency", time_limit_seconds=seconds),
            FreeRequest(job, microbatches=fixed, time_limit_seconds=seconds),
        ]
    )


def main() -> int:
    """Check the instances of the command line; 1 if a bound is broken."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--instances", type=int, default=1000)
    options.add_argument("--slice", default="1/1", help="k/n: every n-th model, from the k-th on")
    options.add_argument("--free-seconds", type=float, default=0.2)
    given = options.parse_args()
    first, step = map(int, given.slice.split("/"))
    logging.disable(logging.WARNING)
    tally, begun, done = Tally(), time.perf_counter(), 0
    for number in range(given.instances):
        if number // INSTANCES_PER_MODEL % step != first - 1:
            continue
        known = len(tally.broken)
        check_instance(given.seed, number, tally, given.free_seconds)
        done += 1
        for text in tally.broken[known:]:
            print(text[:600], flush=True)
        if done % 20 == 0:
            print(report(tally, done, time.perf_counter() - begun), flush=True)
    print(report(tally, done, time.perf_counter() - begun))
    return 1 if tally.broken else 0


def report(tally: Tally, done: int, seconds: float) -> str:
    """What was compared, in a line."""
    ratios = f"{tally.least_any:.4f} any plan, {tally.least_whole:.4f} whole ops"
    return (
        f"{done} instances, {tally.plans} plans ({tally.refused} refused, {tally.crashed} crashed), "
        f"{tally.candidates} simulations, {tally.sharded_ops} ops on shards: {len(tally.broken)} broken; "
        f"least simulated / bound: {ratios}; least work of parts / whole {tally.least_work:.6f}; {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
