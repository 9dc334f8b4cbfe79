"""Guards: steps, gaps and processor seconds of many plans as numbers in a file, so that a change of the search is seen.

    python -m benchmarks.guards                          compare with benchmarks/data/guards.json
    python -m benchmarks.guards --only 'cell/gpt2/*'     a part
    python -m benchmarks.guards --update                 accept what was found, part by part if need be

    cell/MODEL/CLUSTER/STRATEGY    the cells of docs/06g-hybrid.md; ``hand`` is the fastest line by hand
    hand/MODEL/CLUSTER/FIX         the configurations of benchmarks/hand_configurations.py
    free/CASE                      the cases of benchmarks/free_ablation.py, everything on
    placement/GRAPH/SEARCH         the cost graphs of benchmarks/device_placement.py, in their own unit of time

Predictions fill the memory (``risk`` 50%): how far off they are known to be changes no step here.

The clock stands still, so searches end by the work they have done and find the same on every run; that of a cell is this
process's processor time, with a limit of 60 s, which only unlike devices reach. A step or a gap above that of the file is
WORSE, a hybrid plan slower than another of its cell is SLOWER. The exit code is 1 if anything is.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import device_placement, found_clusters, free_ablation, hand_configurations
from benchmarks.hand_lines import hand_lines
from benchmarks.placement_measured import DATA, measured
from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from cost_models.room import FILLS
from partitioner import partition
from partitioner.cost_graphs.read import read_graph
from passes.search.cost_graph.contiguous import place_contiguous
from passes.search.cost_graph.throughput import place_for_throughput

FILE = Path(__file__).parent / "data" / "guards.json"
LIMIT_SECONDS = 60.0
SAME = 1e-9
"""Relative difference of steps, and difference of gaps, up to which they are equal: rounding."""


@dataclass(frozen=True)
class Guard:
    """One plan. ``step_seconds``: None where nothing fits."""

    step_seconds: float | None
    gap: float | None
    cpu_seconds: float

    @property
    def step(self) -> float:
        """The step; infinite where nothing fits."""
        return math.inf if self.step_seconds is None else self.step_seconds


Made = tuple[float | None, float | None]
"""Step and gap."""


def guards() -> dict[str, Callable[[], Made]]:
    """Return what makes each guard, by name."""
    made: dict[str, Callable[[], Made]] = {}
    for model in found_clusters.MODELS:
        for cluster in found_clusters.CLUSTERS:
            for strategy in found_clusters.SEARCHED:
                made[f"cell/{model}/{cluster}/{strategy}"] = partial(_cell, model, cluster, strategy)
            made[f"cell/{model}/{cluster}/hand"] = partial(_by_hand, model, cluster)
    for row in hand_configurations.ROWS:
        made[f"hand/{row.name}/{row.cluster}/{row.fix}"] = partial(_hand, row)
    bench = free_ablation.Bench(free_ablation.CASES, None)
    for case in free_ablation.CASES:
        made[f"free/{case}"] = partial(_free, bench, case)
    for graph in device_placement.KNOWN:
        for search in (place_contiguous, place_for_throughput):
            kind = search.__name__.removeprefix("place_")
            made[f"placement/{graph}/{kind}"] = partial(_placement, graph, search)
    return made


def _figures(cell: Mapping[str, Any]) -> Made:
    return cell.get("step_seconds"), cell.get("gap")


def _cell(model: str, cluster: str, strategy: str) -> Made:
    spec, batch = found_clusters.CLUSTERS[cluster](), found_clusters.MODELS[model].batch
    graph = found_clusters.traced(model)
    return _figures(found_clusters.planned(graph, spec, strategy, batch, LIMIT_SECONDS))


def _by_hand(model: str, cluster: str) -> Made:
    spec, batch = found_clusters.CLUSTERS[cluster](), found_clusters.MODELS[model].batch
    graph = found_clusters.traced(model)
    parameters = sum(math.prod(each.shape) for each in graph.parameters.values())
    lines = hand_lines(spec, batch, parameters)
    cells = [found_clusters.planned(graph, spec, "hybrid", batch, LIMIT_SECONDS, fix) for fix in lines]
    return _figures(min(cells, key=found_clusters.step_of, default={}))


def _hand(row: hand_configurations.Row) -> Made:
    cluster = ClusterSpec.parse(row.cluster)
    try:
        plan = partition(
            hand_configurations.traced(row),
            cluster,
            strategy="hybrid",
            fix=row.fix,
            batch_size=row.batch,
            risk=FILLS,
        )
    except PartitionerError:
        return None, None
    return plan.prediction.step_seconds, plan.certificate.gap


def _free(bench: free_ablation.Bench, case: str) -> Made:
    run = bench.run(case, {}, 0)
    return run.step_seconds, run.gap


def _placement(name: str, search: Callable[..., Any]) -> Made:
    graph = read_graph(DATA / "device-placement" / f"{name}.json").graph
    found, _ = measured(search, graph, LIMIT_SECONDS)
    return found.value, found.certificate.gap


def clock(name: str) -> Any:
    """Replace the clock: a cell's is the processor's time, others' stands still."""
    if name.startswith("cell/"):
        return mock.patch.multiple("time", perf_counter=time.process_time, monotonic=time.process_time)
    return free_ablation.frozen()


def judged(before: Guard | None, now: Guard) -> str:
    """Return a word for what changed."""
    if before is None:
        return "new"
    if now.step > before.step * (1 + SAME):
        return f"WORSE: step {now.step / before.step:.4f} times"
    if now.gap is not None and before.gap is not None and now.gap > before.gap + SAME:
        return f"WORSE: gap {now.gap - before.gap:+.2%}"
    return (
        "as before" if now.step >= before.step * (1 - SAME) else f"better: {now.step / before.step:.4f} times"
    )


def slower_hybrids(found: Mapping[str, Guard]) -> Iterator[str]:
    """Yield cells whose hybrid plan is slower than another of the cell."""
    for name, guard in found.items():
        kind, *cell, strategy = name.split("/")
        if kind == "cell" and strategy == "hybrid":
            others = {
                other: found.get("/".join([kind, *cell, other])) for other in ("layer", "feature", "hand")
            }
            for other, theirs in others.items():
                if theirs is not None and guard.step > theirs.step * (1 + SAME):
                    yield f"{'/'.join(cell)}: hybrid {guard.step:.4g} s, {other} {theirs.step:.4g} s"


def _words(guard: Guard) -> str:
    if guard.step_seconds is None:
        return f"does not fit              {guard.cpu_seconds:7.1f} CPU s"
    gap = "" if guard.gap is None else f"{guard.gap:.2%}"
    return f"{guard.step_seconds:12.6g} s  {gap:>8} {guard.cpu_seconds:9.1f} CPU s"


def main() -> int:
    """Make every guard; 1 if one is worse."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="a glob over names")
    parser.add_argument("--update", action="store_true", help="write what was found, one by one")
    parser.add_argument("--missing", action="store_true", help="leave out what the file has")
    given = parser.parse_args()
    os.environ["PARTITIONER_CALIBRATION"] = "none"
    known = {k: Guard(**each) for k, each in json.loads(FILE.read_text()).items()} if FILE.exists() else {}
    found: dict[str, Guard] = {}
    worse = 0
    for name, make in guards().items():
        if not fnmatch.fnmatch(name, given.only) or (given.missing and name in known):
            continue
        began = os.times()
        with clock(name):
            step, gap = make()
        ended = os.times()
        cpu = ended.user + ended.system - began.user - began.system
        found[name] = Guard(step, gap, round(cpu, 1))
        word = judged(known.get(name), found[name])
        worse += word.startswith("WORSE")
        print(f"{name:64} {_words(found[name])}  {word}", flush=True)
        if given.update:
            known[name] = found[name]
            lines = {key: json.dumps(asdict(each)) for key, each in sorted(known.items())}
            FILE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {v}" for k, v in lines.items()) + "\n}\n")
    slower = list(slower_hybrids(found if not given.update else known))
    for line in slower:
        print(f"SLOWER than a part of it: {line}")
    total = sum(guard.cpu_seconds for guard in found.values())
    before = sum(known[name].cpu_seconds for name in found if name in known)
    print(
        f"{len(found)} guards, {worse} worse, {len(slower)} hybrids slower; {total:.0f} CPU s (of {before:.0f})"
    )
    return int(bool(worse or slower))


if __name__ == "__main__":
    sys.exit(main())
