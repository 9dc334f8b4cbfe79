"""How long the feature-wise search takes and how sure it is: from a model to a plan on 64 H100s.

    python -m benchmarks.feature_search [--models llama-8b …] [--batches 64 …] [--nodes 8] [--seq 8192] [--limit SECONDS]

Every model is traced once, without weights, in a process of its own, so that its peak memory is its own. ``search``
includes the mesh shape and the number of micro-batches; its CPU seconds beside it tell how busy the machine was. Where a
model does not fit, the row has what every sharding needs at least: that was proved. Last the whole ``partition()`` of the
first model, traced anew: trace, search, local graph, simulation, description.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, TimeLimitError
from partitioner import partition
from partitioner.models.bundled import bundled
from passes.costs.costs import GraphCosts, costs_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.certificate import relative_gap
from passes.search.feature.place import FeatureRequest, place_features
from passes.trace.trace import trace

MODELS = {"llama-8b": (64, 256, 512), "llama-70b": (64, 256), "llama-405b": (64, 256)}
"""And samples per step."""
HEAD = (
    "model",
    "batch",
    "devices",
    "trace s",
    "costs s",
    "search s",
    "search CPU s",
    "gap",
    "status",
    "mesh",
    "micro",
    "step s",
    "GiB",
    "peak RSS GiB",
)


def rows_of(model: str, batches: Sequence[int], nodes: int, seq: int, limit: float, sink: Connection) -> None:
    """Search one model for every batch size; send a row each, then None."""
    machine = ClusterSpec.preset("dgx-h100", nodes=nodes)
    began = time.perf_counter()
    workload = bundled(model, seq=seq)
    graph = trace(workload.model, workload.example_inputs)
    traced = time.perf_counter()
    costs = costs_of(graph, machine)
    costed = time.perf_counter()
    for batch in batches:
        sink.send(
            (
                model,
                str(batch),
                str(len(machine.devices)),
                f"{traced - began:.1f}",
                f"{costed - traced:.1f}",
                *_searched(graph, costs, machine, batch, limit),
                f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f}",
            )
        )
    sink.send(None)


def _searched(
    graph: OpGraph, costs: GraphCosts, machine: ClusterSpec, batch: int, limit: float
) -> tuple[str, ...]:
    began, busy = time.perf_counter(), time.process_time()
    try:
        found = place_features(graph, costs, machine, FeatureRequest(Job(batch), time_limit_seconds=limit))
    except (InfeasibleError, TimeLimitError) as error:
        word = "does not fit: " + error.because[0] if isinstance(error, InfeasibleError) else "out of time"
        return f"{time.perf_counter() - began:.2f}", f"{time.process_time() - busy:.2f}", "", word, *[""] * 4
    return (
        f"{time.perf_counter() - began:.2f}",
        f"{time.process_time() - busy:.2f}",
        f"{relative_gap(found.cost.seconds, found.proof.bound_seconds):.1e}",
        "time limit" if found.proof.late else "optimal",
        "×".join(map(str, found.placement.mesh.shape)),
        str(found.placement.microbatches),
        f"{found.cost.seconds:.3f}",
        f"{found.cost.memory_bytes / 2**30:.1f}",
    )


def partitioned(model: str, batch: int, nodes: int, seq: int, limit: float, sink: Connection) -> None:
    """Send what the whole of ``partition()`` took, as a line."""
    machine = ClusterSpec.preset("dgx-h100", nodes=nodes)
    began, busy = time.perf_counter(), time.process_time()
    plan = partition(
        bundled(model, seq=seq), machine, strategy="feature", batch_size=batch, time_limit_seconds=limit
    )
    sink.send(
        f"{model}, batch {batch}: model to plan {time.perf_counter() - began:.1f} s, "
        f"CPU {time.process_time() - busy:.1f} s, simulated step {plan.prediction.step_seconds:.3f} s"
    )
    sink.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument(
        "--batches", nargs="+", type=int, help="samples per step; by default each model's own"
    )
    parser.add_argument("--nodes", type=int, default=8, help="machines of 8 H100")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per search")
    asked = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    for model in asked.models:
        batches = asked.batches or MODELS.get(model, (64,))
        for row in _elsewhere(rows_of, model, batches, asked.nodes, asked.seq, asked.limit):
            print("| " + " | ".join(row) + " |", flush=True)
    first = asked.models[0]
    batch = (asked.batches or MODELS.get(first, (64,)))[0]
    print()
    for line in _elsewhere(partitioned, first, batch, asked.nodes, asked.seq, asked.limit):
        print(line, flush=True)


def _elsewhere(work: Callable[..., None], *arguments: object) -> Iterator[Any]:
    """What ``work(*arguments, sink)`` sends from a process of its own."""
    context = multiprocessing.get_context("spawn")
    source, sink = context.Pipe(duplex=False)
    worker = context.Process(target=work, args=(*arguments, sink))
    worker.start()
    sink.close()
    try:
        while (found := source.recv()) is not None:
            yield found
    except EOFError:
        raise SystemExit(f"{work.__name__}{arguments} failed") from None
    worker.join()


if __name__ == "__main__":
    main()
