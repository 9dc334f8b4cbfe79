"""Planning time of two checkouts, side by side: processor seconds of ``partition()``, least and median of several runs.

    python -m benchmarks.planning_time --root DIR                  this checkout and DIR in turn, three runs each
    python -m benchmarks.planning_time --root DIR --tasks feature --rounds 7

layer      80 blocks of Llama 70B's shape on 64 H100, 512 samples
feature    32 blocks of Llama 8B's shape on 64 H100, 64 samples
free       the branchy graph of 100 ops of ``benchmarks.free_scaling`` on four unlike GPUs

Each run is a process of its own, which traces the model and plans a tiny one first, so that nothing is imported while the
clock runs. Both checkouts must have ``benchmarks.free_scaling``; nothing else of DIR's benchmarks is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TASKS = ("layer", "feature", "free")
LIMIT_SECONDS = 600.0
"""Longest time of one run."""


def seconds_of(task: str, root: Path) -> float:
    """Plan once, in a process with ``root`` as its code; return the processor seconds."""
    code = (
        f"import json, runpy, sys; sys.path.insert(0, {str(root)!r})\n"
        f"print(json.dumps(runpy.run_path({str(Path(__file__))!r})['plan']({task!r})))"
    )
    environment = {**os.environ, "PARTITIONER_CALIBRATION": "none", "PARTITIONER_CACHE": "none"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=environment,
        timeout=LIMIT_SECONDS,
        capture_output=True,
        check=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def plan(task: str) -> float:
    """Trace and plan the model of ``task``; return the processor seconds of planning."""
    import torch

    from partitioner import ClusterSpec, partition, trace

    def llama(blocks: int, hidden: int, wide: int, heads: int, vocabulary: int, tokens: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"hidden_size": hidden, "intermediate_size": wide, "vocab_size": vocabulary}
        config = LlamaConfig(
            num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=8, **shape
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
            ids = torch.zeros(2, tokens, dtype=torch.long)
        return trace(model, {"input_ids": ids, "labels": ids}, name="llama")

    cluster = ClusterSpec.preset("dgx-h100", nodes=8)
    if task == "layer":
        graph, batch_size = llama(80, 8192, 28672, 64, 128256, 4096), 512
    elif task == "feature":
        graph, batch_size = llama(32, 4096, 14336, 32, 128256, 8192), 64
    else:
        from benchmarks.free_clusters import clusters
        from benchmarks.free_scaling import made

        graph, batch_size, cluster = made("branchy", 100), 32, clusters()["gpu-4"]
    tiny = trace(torch.nn.Linear(8, 8), (torch.randn(4, 8),), loss_fn=lambda y, x: y.square().mean())
    partition(tiny, ClusterSpec.local(2), strategy=task, batch_size=8)
    began = os.times()
    partition(graph, cluster, strategy=task, batch_size=batch_size)
    ended = os.times()
    return ended.user + ended.system - began.user - began.system


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    for task in given.tasks:
        here: list[float] = []
        there: list[float] = []
        for _ in range(given.rounds):
            there.append(seconds_of(task, given.root.resolve()))
            here.append(seconds_of(task, ROOT))
        least, middle = min(here) / min(there), statistics.median(here) / statistics.median(there)
        print(
            f"{task:8} least {min(here):6.2f} / {min(there):6.2f} s = {least:.3f}   medians {middle:.3f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
