"""What saving and loading cost: GPT-2 with 124 M parameters and AdamW on two local ranks.

    make checkpoint         = python -m benchmarks.checkpoint [--quick] [--rounds N] [--json FILE]

Seconds are the slowest rank's, from a barrier on. Memory is what the operation adds to the resident memory of the rank
that it adds most to, at its peak (``VmHWM`` after a reset), and is given beside what a rank holds. An asynchronous save
holds training up while it copies (the call itself) and while it writes (steps that run meanwhile, against steps alone).
docs/11-benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from partitioner.engine.engine import Engine
from runtime.ranks.launch import WorkerPool

RANKS, BATCH, SEQ = 2, 2, 64


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, measure in two fresh processes, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, to see whether it works")
    parser.add_argument("--rounds", type=int, default=5, help="saves and loads of each kind")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    options = parser.parse_args(arguments)
    plan = partition(
        workload(), ClusterSpec.local(RANKS), batch_size=BATCH, microbatches=2, pins=pins(), strategy="layer"
    )
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.directory))
    try:
        with WorkerPool(RANKS) as pool:
            rounds = 1 if options.quick else options.rounds
            results = pool.run(measure, plan.model_dump_json(), str(folder), rounds, timeout_seconds=1800.0)
        size = sum(file.stat().st_size for file in folder.glob("step-*/*"))
        with WorkerPool(RANKS) as pool:  # fresh: nothing has been freed that could be used again
            deployed = pool.run(deploy_and_close, plan.model_dump_json(), str(folder), timeout_seconds=600.0)
    finally:
        shutil.rmtree(folder)
    for result, one in zip(results, deployed, strict=True):
        result["found"]["deploy(weights=)"] = [one]
    print(report(results, size))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def workload() -> Workload:
    """GPT-2, on the meta device: every rank makes its own part."""
    config = GPT2Config(use_cache=False, loss_type="ForCausalLM")
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    return Workload(model, {"input_ids": ids, "labels": ids.clone()}, None, "gpt2")


def pins() -> dict[str, int]:
    """Half of the blocks each."""
    return {f"transformer.h.{layer}": layer // 6 for layer in range(12)}


def measure(plan_json: str, folder: str, rounds: int) -> dict[str, Any]:
    """One rank's measurements: (seconds, bytes added at the peak) of each operation."""
    plan, made = Plan.from_json(plan_json), workload()
    batch = made.example_inputs
    found: dict[str, list[tuple[float, int]]] = {}
    with plan.deploy(made, init_fn=draw, timeout_seconds=120.0) as engine:
        engine.train_step(batch)
        held = sum(p.numel() * p.itemsize for p in engine.parameters.values())
        state = sum(t.numel() * t.itemsize for s in engine.optimizer.state.values() for t in s.values())
        steps = [timed(lambda: engine.train_step(batch))[0] for _ in range(3 * rounds)]
        beside: list[float] = []
        for _ in range(rounds):
            found.setdefault("save", []).append(timed(lambda: engine.save(folder)))
            call, whole, during = asynchronous(engine, batch, folder)
            found.setdefault("save, asynchronous: the call", []).append(call)
            found.setdefault("save, asynchronous: until written", []).append(whole)
            beside += during
            found.setdefault("load", []).append(timed(lambda: engine.load(folder)))
            found.setdefault("state_dict", []).append(timed(engine.state_dict))
    return {"held": held, "state": state, "steps": steps, "beside": beside, "found": found}


def deploy_and_close(plan_json: str, folder: str) -> tuple[float, int]:
    """Trace, lower and read the rank's share: (seconds, bytes added at the peak)."""
    plan, made = Plan.from_json(plan_json), workload()

    def deploy() -> None:
        with plan.deploy(made, weights=folder, timeout_seconds=120.0):
            pass

    return timed(deploy)


def asynchronous(
    engine: Engine, batch: Any, folder: str
) -> tuple[tuple[float, int], tuple[float, int], list[float]]:
    """The call, the time until the checkpoint is whole, and the steps that ran meanwhile on all ranks."""
    during: list[float] = []
    pending: list[Any] = []
    base = reset_peak()
    started = time.perf_counter()
    call, _ = timed(lambda: pending.append(engine.save(folder, asynchronous=True)), reset=False)
    copied = peak_bytes() - base
    writing = True
    while writing:
        seconds, _ = timed(lambda: engine.train_step(batch), reset=False)
        both = torch.tensor([not pending[0].done()], dtype=torch.int64)
        dist.all_reduce(both, dist.ReduceOp.MIN)
        writing = bool(both)
        if writing or not during:
            during.append(seconds)
    pending[0].wait()
    added = peak_bytes() - base
    return (call, copied), (time.perf_counter() - started, added), during


def timed(operation: Callable[[], Any], *, reset: bool = True) -> tuple[float, int]:
    """(seconds, bytes added at the peak)."""
    dist.barrier()
    base = reset_peak() if reset else 0
    started = time.perf_counter()
    result = operation()
    seconds = time.perf_counter() - started
    added = peak_bytes() - base
    del result
    return seconds, added


def reset_peak() -> int:
    """Let the peak start from what is in use now."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed, and is kept for the next use, would hide it
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most memory this process has had since the reset, mapped files included."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def draw(module: torch.nn.Module) -> None:
    """Values for one submodule."""
    for parameter in module.parameters(recurse=False):
        torch.nn.init.normal_(parameter, std=0.02)


def report(results: Sequence[dict[str, Any]], size_bytes: int) -> str:
    """The table."""
    held = max(r["held"] for r in results) / 1e6
    state = max(r["state"] for r in results) / 1e6
    lines = [
        f"A rank holds up to {held:.0f} MB of parameters and {state:.0f} MB of optimizer state; "
        f"a checkpoint is {size_bytes / 1e6:.0f} MB",
        "",
        "| operation | seconds | MB added to a rank at the peak |",
        "|---|---|---|",
    ]
    for name in results[0]["found"]:
        rounds = list(zip(*(r["found"][name] for r in results), strict=True))
        seconds = statistics.median(max(rank[0] for rank in each) for each in rounds)
        added = max(rank[1] for each in rounds for rank in each) / 1e6
        lines.append(f"| {name} | {seconds:.2f} | {added:.0f} |")
    alone = statistics.median(map(max, zip(*(r["steps"] for r in results), strict=True)))
    beside = statistics.median(map(max, zip(*(r["beside"] for r in results), strict=True)))
    lines.append("")
    lines.append(f"A training step takes {alone:.3f} s alone, {beside:.3f} s while a checkpoint is written")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
