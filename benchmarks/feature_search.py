"""How long the feature-wise search takes and how sure it is: from a model to a plan on 64 H100s.

    python -m benchmarks.feature_search [--models llama-8b …] [--batches 64 …] [--nodes 8] [--seq 8192] [--limit SECONDS]

Every model is traced without weights in a process of its own, so that its peak memory is its own. ``search`` includes the
mesh shape and the number of micro-batches; its CPU seconds beside it tell how busy the machine was. Where a model does not
fit, the row says so: that was proved.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError, TimeLimitError
from partitioner.bundled_models import bundled
from passes.compile import costs_of
from passes.costs import GraphCosts
from passes.graph import OpGraph
from passes.place_features import FeatureRequest, place_features
from passes.trace import trace

MODELS = ("llama-8b", "llama-70b", "llama-405b")
BATCHES = (64, 256, 512)
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
        found = place_features(
            graph, costs, machine, FeatureRequest(batch_size=batch, time_limit_seconds=limit)
        )
    except (InfeasibleError, TimeLimitError) as error:
        word = "infeasible, proved" if isinstance(error, InfeasibleError) else "nothing found in time"
        return f"{time.perf_counter() - began:.2f}", f"{time.process_time() - busy:.2f}", "", word, *[""] * 4
    proof = found.certificate
    return (
        f"{time.perf_counter() - began:.2f}",
        f"{time.process_time() - busy:.2f}",
        f"{proof.gap:.1e}",
        proof.solver_status,
        "×".join(map(str, found.placement.mesh.shape)),
        str(found.placement.microbatches),
        f"{found.cost.seconds:.3f}",
        f"{found.cost.memory_bytes / 2**30:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="samples per step")
    parser.add_argument("--nodes", type=int, default=8, help="machines of 8 H100")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per search")
    asked = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    context = multiprocessing.get_context("spawn")
    for model in asked.models:
        source, sink = context.Pipe(duplex=False)
        worker = context.Process(
            target=rows_of, args=(model, asked.batches, asked.nodes, asked.seq, asked.limit, sink)
        )
        worker.start()
        sink.close()
        try:
            while (row := source.recv()) is not None:
                print("| " + " | ".join(row) + " |", flush=True)
        except EOFError:
            print(f"| {model} | failed |", flush=True)
        worker.join()


if __name__ == "__main__":
    main()
