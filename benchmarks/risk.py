"""The price of a risk: plans that fill the memory by prediction beside those that keep within a risk of 5%.

    python -m benchmarks.risk                       all pairs
    python -m benchmarks.risk --only 'cell/gpt2/*'  a part
    python -m benchmarks.risk --update --missing    write each pair that the file lacks: goes on where it ended
    python -m benchmarks.risk --summary             the file's figures alone

    cell/MODEL/CLUSTER      the cells of docs/06g-hybrid.md, hybrid
    plan/MODEL/CLUSTER      twenty plans of bundled models, auto

A line has the steps at 50% and at 5%, their ratio, the chances of not fitting, and the processor seconds of both, each in a
process of its own, tracing aside. The clock is the processor's, as for guards. ABOVE: the plan is above 5% and does not say
so; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import found_clusters
from benchmarks.guards import LIMIT_SECONDS, clock
from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from cost_models.room import FILLS
from partitioner import partition
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.planning.options import RISK
from passes.graph.graph import OpGraph

FILE = Path(__file__).parent / "data" / "risk.json"


@dataclass(frozen=True)
class Bundled:
    """A plan of a bundled model by ``auto``."""

    model: str
    cluster: str
    batch: int
    settings: Mapping[str, str]


def _bf16(**settings: int) -> dict[str, str]:
    return {"dtype": "bfloat16", **{name: str(value) for name, value in settings.items()}}


PLANS = (
    Bundled("gpt2", "A100-40GB:1", 64, _bf16(seq=1024)),
    Bundled("gpt2", "A100-40GB:4", 512, _bf16(seq=1024)),
    Bundled("gpt2", "dgx-h100:1", 1024, _bf16(seq=1024)),
    Bundled("bert", "A100-40GB:2", 512, _bf16(seq=512)),
    Bundled("bert", "dgx-h100:1", 4096, _bf16(seq=512)),
    Bundled("t5", "A100-40GB:4", 512, _bf16(seq=512)),
    Bundled("vit", "A100-40GB:1", 512, _bf16()),
    Bundled("vit", "dgx-a100:1", 4096, _bf16()),
    Bundled("resnet50", "A100-40GB:2", 2048, _bf16()),
    Bundled("whisper", "A100-40GB:4", 256, _bf16()),
    Bundled("llama-1b", "H100-80GB:1", 16, _bf16(seq=4096)),
    Bundled("llama-1b", "A100-40GB:4", 64, _bf16(seq=4096)),
    Bundled("llama-8b", "H100-80GB:4", 32, _bf16(seq=4096)),
    Bundled("llama-8b", "dgx-h100:1", 64, _bf16(seq=4096)),
    Bundled("llama-8b", "dgx-a100:2", 128, _bf16(seq=8192)),
    Bundled("llama-8b", "dgx-h100:8", 64, _bf16(seq=4096)),
    Bundled("mixtral", "dgx-h100:2", 64, _bf16(seq=4096)),
    Bundled("llama-70b", "dgx-h100:4", 128, _bf16(seq=4096)),
    Bundled("llama-70b", "dgx-h100:8", 512, _bf16(seq=2048)),
    Bundled("llama-405b", "dgx-h100:64", 512, _bf16(seq=8192)),
)
"""Sizes at which the memory is short in some, and not in others."""


@dataclass(frozen=True)
class Side:
    """A plan at one risk. ``step_seconds``: None where nothing fits."""

    step_seconds: float | None
    chance: float | None
    cpu_seconds: float
    says_not_safe: bool = False


@dataclass(frozen=True)
class Pair:
    """The plan that fills the memory by prediction, and the one within the risk."""

    full: Side
    safe: Side

    @property
    def ratio(self) -> float | None:
        """The step within the risk over the other; None where either is missing, or the plan says that it is not safe."""
        a, b = self.full.step_seconds, self.safe.step_seconds
        return None if a is None or b is None or self.safe.says_not_safe else b / a

    @property
    def is_above(self) -> bool:
        """True if the plan is above the risk, and does not say so."""
        return (self.safe.chance or 0.0) > RISK and not self.safe.says_not_safe


@dataclass(frozen=True)
class Case:
    """A model that is planned twice."""

    traced: Callable[[], OpGraph]
    planned: Callable[[float], dict[str, Any]]
    """Plans at a risk: keyword arguments of ``Side`` but the seconds."""


def cases() -> dict[str, Case]:
    """Return every case by its name."""
    found: dict[str, Case] = {}
    for model in found_clusters.MODELS:
        for cluster in found_clusters.CLUSTERS:
            case = Case(partial(found_clusters.traced, model), partial(_cell, model, cluster))
            found[f"cell/{model}/{cluster}"] = case
    for each in PLANS:
        found[f"plan/{each.model}/{each.cluster}"] = Case(partial(_traced, each), partial(_bundled, each))
    return found


def _cell(model: str, cluster: str, risk: float) -> dict[str, Any]:
    graph, spec = found_clusters.traced(model), found_clusters.CLUSTERS[cluster]()
    batch = found_clusters.MODELS[model].batch
    cell = found_clusters.planned(graph, spec, "hybrid", batch, LIMIT_SECONDS, risk=risk)
    too_risky = cell.get("too_risky", False)
    return {
        "step_seconds": cell.get("step_seconds"),
        "chance": cell.get("chance"),
        "says_not_safe": too_risky,
    }


def _bundled(row: Bundled, risk: float) -> dict[str, Any]:
    try:
        plan = partition(
            _traced(row),
            ClusterSpec.parse(row.cluster),
            batch_size=row.batch,
            risk=risk,
        )
    except PartitionerError:
        return {"step_seconds": None, "chance": None}
    return {
        "step_seconds": plan.prediction.step_seconds,
        "chance": plan.intervals.chance_of_not_fitting,
        "says_not_safe": plan.is_too_risky,
    }


def _traced(row: Bundled) -> OpGraph:
    return _traced_once(row.model, tuple(row.settings.items()))


@cache
def _traced_once(model: str, settings: tuple[tuple[str, str], ...]) -> OpGraph:
    return as_graph(load_workload(model, settings=dict(settings)), check="off")


def made(case: Case) -> Pair:
    """Plan at both risks, each in a process of its own that knows the traced graph."""
    case.traced()
    sides = []
    for risk in (FILLS, RISK):
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
            sides.append(process.submit(_side, case, risk).result())
    return Pair(*sides)


def _side(case: Case, risk: float) -> Side:
    with clock("cell/"):
        began = os.times()
        found = case.planned(risk)
        ended = os.times()
    return Side(**found, cpu_seconds=round(ended.user + ended.system - began.user - began.system, 1))


def line(name: str, pair: Pair) -> str:
    """Write a pair in a line."""
    full, safe = pair.full, pair.safe
    ratio = "" if pair.ratio is None else f"{pair.ratio:.3f}"
    words = "ABOVE" if pair.is_above else "not safe" if safe.says_not_safe else ""
    return (
        f"{name:32} {_seconds(full):>9} {_seconds(safe):>9} {ratio:>6}  {_chance(full):>4} {_chance(safe):>4}  "
        f"{full.cpu_seconds:7.1f} {safe.cpu_seconds:7.1f} CPU s  {words}"
    ).rstrip()


def _seconds(side: Side) -> str:
    return "-" if side.step_seconds is None else f"{side.step_seconds:.4g} s"


def _chance(side: Side) -> str:
    return "-" if side.chance is None else f"{side.chance:.0%}"


def summary(pairs: Iterable[Pair]) -> Iterator[str]:
    """Say what the risk costs over all pairs."""
    every = list(pairs)
    ratios = [pair.ratio for pair in every if pair.ratio is not None]
    if not ratios:
        return
    plans = [pair for pair in every if pair.safe.step_seconds is not None]
    risky = sum((pair.full.chance or 0.0) > RISK for pair in plans)
    not_safe = sum(pair.safe.says_not_safe for pair in plans)
    above = sum(pair.is_above for pair in plans)
    yield (
        f"{len(plans)} plans: above {RISK:.0%} at {FILLS:.0%}: {risky}; not safe, and say so: {not_safe}; above: {above}"
    )
    yield (
        f"step at {RISK:.0%} over that at {FILLS:.0%}: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}"
    )
    searched = [pair for pair in plans if not pair.safe.says_not_safe]
    full, safe = (
        sum(side.cpu_seconds for side in sides)
        for sides in zip(*((pair.full, pair.safe) for pair in searched), strict=True)
    )
    each = statistics.median(pair.safe.cpu_seconds / pair.full.cpu_seconds for pair in searched)
    yield f"processor seconds of searches that find one: {safe:.0f} of {full:.0f}, median ratio {each:.2f}"


def _read() -> dict[str, Pair]:
    if not FILE.exists():
        return {}
    rows = json.loads(FILE.read_text())
    return {
        name: Pair(**{side: Side(**figures) for side, figures in row.items()}) for name, row in rows.items()
    }


def main() -> int:
    """Make every pair; 1 if a plan is above the risk and does not say so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="a glob over names")
    parser.add_argument("--update", action="store_true", help="write what was found, one by one")
    parser.add_argument("--missing", action="store_true", help="leave out what the file has")
    parser.add_argument("--summary", action="store_true", help="plan nothing")
    given = parser.parse_args()
    os.environ["PARTITIONER_CALIBRATION"] = "none"
    known = _read()
    found = {name: pair for name, pair in known.items() if given.summary}
    for name, case in cases().items():
        if given.summary or not fnmatch.fnmatch(name, given.only) or (given.missing and name in known):
            continue
        found[name] = made(case)
        print(line(name, found[name]), flush=True)
        if given.update:
            known[name] = found[name]
            lines = {key: json.dumps(asdict(each)) for key, each in sorted(known.items())}
            FILE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {v}" for k, v in lines.items()) + "\n}\n")
    if given.summary:
        print("\n".join(line(name, pair) for name, pair in found.items()))
    print("\n".join(summary(found.values())))
    return int(any(pair.is_above for pair in found.values()))


if __name__ == "__main__":
    sys.exit(main())
