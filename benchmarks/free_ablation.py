"""Ablation of the free search: what each method and each constant is worth.

    python -m benchmarks.free_ablation                              all rows on all cases
    python -m benchmarks.free_ablation --rows 'other*,no *' --cases 'lstm*,moe*'
    python -m benchmarks.free_ablation --record runs.json           keep what was run; run only what is new

A row is one change of constants, everything else as it is. The clock stands still and integer programs end by their
nodes, so searches end by the work they have done, whatever else the machine does; as simulations then seem to take no
time, ``MOST_QUIET`` is what two seconds hold of simulations of 0.1 s.

    step    simulated step divided by the step with everything on: geometric mean, least and most of all cases
    slower  cases whose step is more than 0.5% longer
    gap     certified gap in percent, less that with everything on: mean of all cases
    CPU     user seconds of the search divided by those with everything on, all cases together
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pulp

from benchmarks.free_clusters import clusters
from benchmarks.free_scaling import made
from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.report.text import columns
from passes.costs.costs import GraphCosts, costs_of
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.search.anywhere.climb import KINDS
from passes.search.free.request import FreeRequest, Objective
from passes.search.free.rounds import place_rounds
from passes.search.free.variants import TimeBudget, layer_start
from passes.search.judge import Judge
from passes.search.outcome import Outcome

PROGRAM_NODES = 1000
"""Nodes of an integer program at most: one second or two."""
BASE = {"free.judge.MOST_QUIET": 16}
"""Everything on."""
SLOWER = 1.005
"""Ratio of steps from which a case counts as slower."""


@dataclass(frozen=True)
class Case:
    """A model on a cluster. ``source``: of ``load_workload``, or a kind and number of ops of the scaling benchmark."""

    source: str
    cluster: str
    batch: int
    objective: Objective = "throughput"
    settings: Mapping[str, str] = field(default_factory=dict)
    split: bool = False
    microbatches: int | Literal["auto"] = "auto"

    def graph(self) -> OpGraph:
        kind, _, ops = self.source.partition("/")
        if kind == "scaling":
            name, _, number = ops.partition("/")
            return made(name, int(number))
        return as_graph(load_workload(self.source, settings=self.settings))

    def devices(self) -> ClusterSpec:
        return TIGHT if self.cluster == "tight" else clusters()[self.cluster]


TIGHT = ClusterSpec.local(3, memory="1200MiB")
"""Devices that two layers of GPT-2 with 16 samples just fit."""
LSTM = {"layers": "2", "source_steps": "2", "target_steps": "2"}
CASES: dict[str, Case] = {
    "mlp": Case("examples.mlp:mlp", "gpu-2", 1024, split=True),
    "mlp-latency": Case("examples.mlp:mlp", "cpu-2", 64, "latency", split=True),
    "mlp-4": Case("examples.mlp:mlp", "cpu-4", 1024, split=True),
    "moe-latency": Case("examples.moe:moe", "slow-2", 8, "latency", {"blocks": "1"}),
    "lstm": Case("examples.lstm_seq2seq:lstm_seq2seq", "gpu-2", 64, settings=LSTM),
    "towers-latency": Case("examples.alexnet:two_towers", "cpu-4", 128, "latency"),
    "locally": Case("examples.locally_connected:locally_connected", "slow-4", 32),
    "unet": Case("examples.unet:unet", "gpu-2", 16, settings={"size": "64"}, microbatches=4),
    "gpt2": Case("gpt2", "gpu-4", 16, settings={"seq": "256", "layers": "2"}, microbatches=4),
    "transformer-100": Case("scaling/transformer/100", "gpu-8", 32, microbatches=8),
    "t5": Case("t5", "cpu-4", 16, settings={"seq": "128"}, microbatches=4),
    "resnet50": Case("resnet50", "gpu-4", 64, microbatches=4),
    "gpt2-tight": Case("gpt2", "tight", 16, settings={"seq": "256", "layers": "2"}, microbatches=4),
}

Change = Mapping[str, Any]
"""Constants below ``passes.search`` by module and name, with other values; None: a function that returns nothing."""
METHODS: dict[str, Change] = {
    "other random numbers": {"free.search.SEED": 200},
    "no start from the layer-wise plan": {"start": 0},
    "no runs to start with": {"free.search.spread": None},
    "no exact program": {"free.search.MOST_CHOICES": 0},
    "no programs over pairs of devices": {"anywhere.pairs.MOST_TERMS": 0},
    "no climbing on the prediction": {"free.search.CLIMBED_PREDICTING": 0},
    "no climbing on the simulation": {"free.judge.CLIMBED_SIMULATING": 0},
    **{
        f"no {kind} in climbing": {"anywhere.climb.KINDS": [other for other in KINDS if other != kind]}
        for kind in KINDS
    },
    "no blocks": {"free.splits.MOST_BLOCK_DEVICES": 0},
}
"""Methods switched off, one at a time; first the search as it is with other random numbers, which says what is luck."""

NUMBERS = (
    *("free.judge.PREDICTED_PER_SIMULATION", "free.predict.MESSAGE_SHARE", "anywhere.climb.SLACK"),
    *("free.rounds.PROMISING", "free.splits.LARGE_FAMILY", "free.shapes.BLOCK_MESSAGE_SHARE"),
)
"""Numbers that are tuned: each is halved and doubled."""
LIMITS = (
    *("microbatches.SPREAD", "free.search.CLIMBED_PREDICTING", "free.judge.CLIMBED_SIMULATING"),
    *("free.search.QUIET_WORK", "free.judge.MOST_QUIET", "free.place.SIMULATIONS"),
    *("free.predict.MOST_PLAYED", "anywhere.pairs.MOST_FREED", "free.search.MOST_CHOICES"),
)
"""Limits of work, which trade the search's seconds for the step's: halved and doubled too."""


def _constant(name: str) -> tuple[Any, str]:
    module, _, constant = name.rpartition(".")
    return importlib.import_module(f"passes.search.{module}"), constant


def rows() -> dict[str, Change]:
    """Every row by its name."""
    changes = dict(METHODS)
    for name in (*NUMBERS, *LIMITS):
        value = BASE.get(name) or getattr(*_constant(name))
        for word, times in (("half", 0.5), ("double", 2.0)):
            other = type(value)(max(1, round(value * times)) if isinstance(value, int) else value * times)
            if other != value:
                changes[f"{name} {word}"] = {name: other}
    return changes


@dataclass(frozen=True)
class Run:
    """A case under one change."""

    step_seconds: float
    """Seconds of the simulated step; infinite where nothing was found that fits."""
    gap: float
    cpu_seconds: float


@dataclass(eq=False)
class Bench:
    """Cases, each traced and planned layer by layer once."""

    cases: Mapping[str, Case]
    record: Path | None
    runs: dict[str, Run] = field(default_factory=dict)
    _ready: dict[str, tuple[OpGraph, GraphCosts, Outcome | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.record is not None and self.record.exists():
            self.runs = {key: Run(**each) for key, each in json.loads(self.record.read_text()).items()}

    def run(self, name: str, change: Change, seed: int) -> Run:
        """One search, or what is known of it."""
        key = f"{name} {json.dumps(change, sort_keys=True)} {seed}"
        if key not in self.runs:
            self.runs[key] = self._search(name, {"free.search.SEED": seed, **BASE, **change})
            print(f"{key:60} {self.runs[key]}", file=sys.stderr, flush=True)
            if self.record is not None:
                self.record.write_text(json.dumps({k: asdict(run) for k, run in self.runs.items()}, indent=1))
        return self.runs[key]

    def _search(self, name: str, change: Change) -> Run:
        case = self.cases[name]
        cluster = case.devices()
        job = Job(case.batch)
        request = FreeRequest(job, case.microbatches, objective=case.objective, split=case.split)
        with frozen(), mock.patch("pulp.HiGHS", EndedByNodes), contextlib.ExitStack() as patches:
            for key, value in change.items():
                if key != "start":
                    other = (lambda *_: []) if value is None else value
                    patches.enter_context(mock.patch.object(*_constant(key), other))
            if name not in self._ready:
                graph = case.graph()
                costs = costs_of(graph, cluster)
                start = layer_start(request, Judge(graph, costs, cluster, job))
                self._ready[name] = graph, costs, start
            graph, costs, start = self._ready[name]
            began = os.times().user
            first = start if change.get("start", 1) else None
            try:
                placed = place_rounds(graph, costs, cluster, request, first, TimeBudget.of(request))
            except InfeasibleError:
                return Run(math.inf, 1.0, os.times().user - began)
            cpu = os.times().user - began
        return Run(placed.best.step_seconds, placed.certificate.gap, cpu)


def frozen() -> Any:
    """The clock stands still."""
    return mock.patch.multiple("time", perf_counter=lambda: 0.0, monotonic=lambda: 0.0)


class EndedByNodes(pulp.HiGHS):
    """HiGHS with a limit of nodes instead of seconds, of which it has a clock of its own."""

    def __init__(self, *, timeLimit: float, **options: Any) -> None:  # noqa: N803
        super().__init__(mip_max_nodes=PROGRAM_NODES, **options)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802
        """Return PuLP's status and that of the solution; PuLP 3.3 has no word for a limit of nodes."""
        try:
            return super().findSolutionValues(lp)
        except KeyError:
            return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible


def table(bench: Bench, changes: Mapping[str, Change], seeds: Sequence[int]) -> str:
    """A line for each row."""
    lines = []
    base = {(name, seed): bench.run(name, {}, seed) for name in bench.cases for seed in seeds}
    for row, change in changes.items():
        found = {(name, seed): bench.run(name, change, seed) for name, seed in base}
        ratios = {
            name: math.exp(
                sum(math.log(found[name, s].step_seconds / base[name, s].step_seconds) for s in seeds)
                / len(seeds)
            )
            for name in bench.cases
        }
        worst = max(ratios, key=lambda name: ratios[name])
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        gap = 100 * sum(found[key].gap - base[key].gap for key in base) / len(base)
        cpu = sum(run.cpu_seconds for run in found.values()) / sum(run.cpu_seconds for run in base.values())
        lines.append(
            [
                row,
                f"{mean:.4f}",
                f"{min(ratios.values()):.3f}",
                f"{ratios[worst]:.3f}",
                worst if ratios[worst] > SLOWER else "",
                str(sum(ratio > SLOWER for ratio in ratios.values())),
                f"{gap:+.1f}",
                f"{cpu:.2f}",
            ]
        )
    return columns(HEAD, lines, left=("changed", "slowest"))


HEAD = ("changed", "step", "least", "most", "slowest", "slower", "gap", "CPU")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; each run on stderr as it comes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="*", help="globs over names of rows, with commas")
    parser.add_argument("--cases", default="*", help="globs over names of cases, with commas")
    parser.add_argument("--record", type=Path, help="file of runs, read and added to")
    parser.add_argument("--seeds", default="0,100", help="first random numbers, with commas")
    given = parser.parse_args(arguments)
    os.environ["PARTITIONER_CALIBRATION"] = "none"
    bench = Bench({name: CASES[name] for name in _matching(CASES, given.cases)}, given.record)
    changes = rows()
    wanted = {name: changes[name] for name in _matching(changes, given.rows)}
    print(table(bench, wanted, [int(seed) for seed in given.seeds.split(",")]))
    return 0


def _matching(names: Mapping[str, object], globs: str) -> list[str]:
    wanted = globs.split(",")
    return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in wanted)]


if __name__ == "__main__":
    sys.exit(main())
