"""An unrolled LSTM of two layers on two devices: as a wavefront over time steps, and stage after stage.

    python -m benchmarks.wavefront [--hidden 512] [--steps 10] [--batch 32] [--rounds 30] [--json figures.json]

Both plans put layer 0 on rank 0 and layer 1 on rank 1, and run the batch in one piece. The layer-wise plan has one segment
per layer: layer 1 waits for all steps of layer 0. The free plan has segments per time step, by what is sent and received:
step t of layer 1 runs beside step t + 1 of layer 0. Simulated, drawn, and measured in turns on two processes (Gloo, one
thread each); a step is forward and backward, its time the slower rank's. Ends with 1 if the wavefront does not win.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.bootstrap import median_ratio
from benchmarks.plan_tasks import plan_task
from benchmarks.prediction_rank import prepare, time_steps
from cost_models.cluster import ClusterSpec
from examples.lstm_seq2seq import lstm_seq2seq
from partitioner import Plan, Workload, partition
from partitioner.models.as_graph import as_graph
from passes.graph.graph import OpGraph
from runtime.ranks.launch import WorkerPool
from runtime.simulate.timeline import render

VOCABULARY = 64
"""Small, so that the layers are what takes time, and not the projection above them."""

PINS = {
    "source_embedding": 0,
    "target_embedding": 0,
    "encoder.cells.0": 0,
    "decoder.cells.0": 0,
    "encoder.cells.1": 1,
    "decoder.cells.1": 1,
    "project": 1,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan both, draw both, take turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10, help="time steps of the encoder, and of the decoder")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30, help="alternations; 0 simulates only")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    options = parser.parse_args(arguments)
    workload = lstm_seq2seq(VOCABULARY, options.hidden, 2, options.steps, options.steps, options.batch)
    graph = as_graph(workload)
    plans = {
        "stage after stage": stage_after_stage(graph, ClusterSpec.local(2), options.batch),
        "wavefront": wavefront(graph, ClusterSpec.local(2), options.batch),
    }
    for name, plan in plans.items():
        print(f"{name}: {len(plan.stages)} segments\n{render(plan.simulate())}\n")
    stages, wave = (plan.prediction.step_seconds for plan in plans.values())
    print(f"simulated: {wave * 1e3:.1f} ms against {stages * 1e3:.1f} ms, {wave / stages:.3f} of it")
    figures: dict[str, object] = {"simulated_seconds": {"stages": stages, "wavefront": wave}}
    won = wave < stages
    if options.rounds:
        measured = measure(list(plans.values()), workload, graph, options.rounds)
        ratio = median_ratio(measured[1], measured[0])
        slow, fast = (statistics.median(seconds) for seconds in measured)
        print(
            f"measured:  {fast * 1e3:.1f} ms against {slow * 1e3:.1f} ms, {ratio} of it "
            f"({options.rounds} alternations)"
        )
        slow, fast = map(min, measured)
        print(f"at best:   {fast * 1e3:.1f} ms against {slow * 1e3:.1f} ms, {fast / slow:.3f} of it")
        figures |= {"measured_seconds": measured, "ratio": asdict(ratio)}
        won = won and ratio.high < 1
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    sys.exit(0 if won else 1)


def wavefront(graph: OpGraph, cluster: ClusterSpec, batch: int) -> Plan:
    """Layers on devices of their own; what they send and receive cuts them into segments. No op is split."""
    above = {"cross_entropy_loss": 1}
    linear = graph.nodes["linear"]
    whole = {linear.name: (int(linear.meta["val"].shape[-1]),)}
    return partition(
        graph,
        cluster,
        batch_size=batch,
        microbatches=1,
        strategy="free",
        pins=PINS | above,
        splits=whole,
        optimizer_memory="none",
    )


def stage_after_stage(graph: OpGraph, cluster: ClusterSpec, batch: int) -> Plan:
    """The same placement, each layer a stage: one segment, which starts when all of its inputs are there."""
    return partition(
        graph,
        cluster,
        batch_size=batch,
        microbatches=1,
        pins=PINS,
        schedule="gpipe",
        optimizer_memory="none",
        strategy="layer",
    )


def measure(plans: Sequence[Plan], workload: Workload, graph: OpGraph, rounds: int) -> list[list[float]]:
    """Seconds per step of each plan, one per round; the plans take turns, and who goes first changes."""
    found: list[list[float]] = [[] for _ in plans]
    with WorkerPool(2) as pool:
        for number, plan in enumerate(plans):
            pool.run(prepare, number, plan_task(plan, workload, graph))
        for turn in range(rounds):
            numbers = range(len(plans)) if turn % 2 == 0 else reversed(range(len(plans)))
            for number in numbers:
                steps = pool.run(time_steps, number, 3, 0)
                slowest = [max(ranks) for ranks in zip(*(rank.seconds for rank in steps), strict=True)]
                found[number].append(statistics.median(slowest))
    return found


if __name__ == "__main__":
    main()
