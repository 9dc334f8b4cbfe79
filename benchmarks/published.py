"""Predicted beside published: steps that others measured on GPUs and published, predicted by the defaults of this package.

    make published RUNS=runs.csv    = python -m benchmarks.published --runs runs.csv [--only GLOB] [--json rows.json]
                                      [--held-out]
                                      [--residuals], then python -m benchmarks.intervals: the intervals of predictions

A row of ``--runs`` is one run: its model, cards, batch, and what a step took. Nothing is fitted here: each row is planned
as it was run (one replica per device, ZeRO-3 where it was FSDP, so many micro-batches), and the error is what the
simulation says over what was published, less one. Rows that are refused count as such.

Efficiencies of the stack of 2023 were fitted on llm-foundry's runs (``cost_models.spec.presets``, [FIT]). ``--held-out``
predicts those runs with numbers in place of them that know none of these runs (``NOT_FITTED``); no other source was
fitted on.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from benchmarks.published_models import bert_large, gpt2, mpt, resnet50
from benchmarks.residuals import (
    FILE,
    HELD_OUT_FILE,
    Counts,
    Residual,
    counted_bytes,
    replace_residuals,
    residual_of,
)
from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from cost_models.precision import Precision
from cost_models.room import FILLS
from cost_models.spec.presets import MACHINE_NETWORKS
from cost_models.spec.rates import MeasuredRates
from partitioner import Plan, partition
from partitioner.models.as_graph import as_graph
from partitioner.models.workload import Workload
from passes.graph.graph import OpGraph
from passes.search.words import RecomputeMode

CARDS = {
    "v100_16gb": ("V100-16GB", "dgx-v100"),
    "v100_32gb": ("V100-32GB", "dgx-v100"),
    "a100_40gb": ("A100-40GB", "dgx-a100"),
    "a100_80gb": ("A100-80GB", "dgx-a100"),
    "h100_80gb": ("H100-80GB", "dgx-h100"),
}
"""The device's and the machine's preset of each card."""
PER_MACHINE = 8
CONTEXT_BYTES = 1343 * 2**20
"""What the driver counts for a process that has loaded its kernels and no tensors; of Hugging Face's runs, in their source
("Methods and tools for efficient training on a single GPU"), whose memory is the driver's count."""
PUBLISHERS = {
    "mpt": "llm-foundry",
    "hf": "Hugging Face",
    "rasbt": "LLMs-from-scratch",
    "dle": "DeepLearningExamples",
}
"""Who measured the runs whose names begin so."""
NOT_FITTED: Mapping[str, Mapping[str, float]] = {
    "A100-40GB": {"attention": 0.40, "attention_backward": 0.30, "memory": 0.87},
    "A100-80GB": {"attention": 0.40, "attention_backward": 0.30, "memory": 0.76},
    "H100-80GB": {"attention": 0.22, "attention_backward": 0.18, "memory": 0.80},
}
"""Efficiencies of the stack of 2023 by preset, without llm-foundry's runs. On an A100 the first FlashAttention reaches 0.30
to 0.50 of the peak forward and 0.25 to 0.35 backward (arXiv 2307.08691, section 1): their middles. On an H100 it is assumed
to be to FlashAttention-2 as on an A100: 0.33 of 0.60 by 0.40, 0.30 of 0.50 by 0.30. The memory's part is the newest's."""


@dataclass(frozen=True)
class Run:
    """One published run. ``peak_bytes``: 0 where it was not published."""

    id: str
    gpu: str
    gpus: int
    tokens: int
    batch: int
    microbatches: int
    step_seconds: float
    peak_bytes: float
    source: str


@dataclass(frozen=True)
class Outcome:
    """A run beside its prediction; ``refused`` says why there is none."""

    run: Run
    step_seconds: float = 0.0
    peak_bytes: float = 0.0
    refused: str = ""
    residual: Residual | None = None

    @property
    def error(self) -> float:
        return self.step_seconds / self.run.step_seconds - 1.0

    @property
    def memory_error(self) -> float:
        return self.peak_bytes / self.run.peak_bytes - 1.0


COLUMNS = (
    "id",
    "gpu",
    "gpus",
    "sequence",
    "global_batch",
    "microbatches",
    "step_seconds",
    "peak_memory_gib",
    "source",
)
"""Columns of a file of runs; ``id`` names the model and how it was run, ``peak_memory_gib`` may be empty."""


def read_runs(path: Path) -> list[Run]:
    """Read a file of runs."""
    with path.open(newline="") as file:
        return [
            Run(
                row["id"],
                row["gpu"],
                int(row["gpus"]),
                int(row["sequence"]),
                int(row["global_batch"]),
                int(row["microbatches"]),
                float(row["step_seconds"]),
                float(row["peak_memory_gib"] or 0) * 2**30,
                row["source"],
            )
            for row in csv.DictReader(file)
        ]


@dataclass(frozen=True)
class Setting:
    """What of a run decides its graph. ``autocast``: the type of a ``torch.autocast`` around the model.

    ``one_by_one``: its optimizer updates one parameter after the other, as transformers' own AdamW did before torch 2.0;
    ``torch.optim`` works on all at once since. ``zero_grad`` of that time filled gradients with zeros, and kept them.
    """

    model: Callable[[], Workload]
    precision: Precision | None = None
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False
    optimizer: str = "adamw"
    recompute: RecomputeMode = "none"
    zero: int = 0
    stack: str | None = None
    one_by_one: bool = False


def setting_of(run: Run) -> Setting:
    """Return the setting that a run's name tells, as its README describes it."""
    words = run.id.split("/")[0].split("-")
    if words[0] == "mpt":
        size, tokens = words[1], run.tokens
        mixed = Precision(compute=torch.bfloat16)
        return Setting(
            lambda: mpt(size, tokens),
            mixed,
            recompute="full" if run.id.endswith("/ac") else "gathers",
            zero=3,
            stack="2023",
        )
    half = torch.float16 if {"fp16", "amp"} & set(words) else None
    scaled = Precision(loss_scale="dynamic") if half else None
    if words[0] == "dle":
        return Setting(resnet50, scaled, autocast=half, optimizer="momentum")
    if words[0] == "hf":
        again: RecomputeMode = "full" if "ckpt" in words else "none"
        return Setting(bert_large, scaled, autocast=half, recompute=again, one_by_one=True)
    own = "native" not in words
    attention = "sdpa" if "flash" in words else "chain"
    dtype = torch.bfloat16 if "bf16" in words else torch.float32
    return Setting(lambda: gpt2(own, attention), dtype=dtype, tf32="tf32" in words)


@lru_cache(maxsize=4)
def _traced(name: str, tokens: int) -> OpGraph:
    """Trace the model of the runs that begin with ``name``."""
    setting = setting_of(Run(name, "", 1, tokens, 0, 1, 1.0, 0.0, ""))
    workload = setting.model()
    workload.model.to(setting.dtype)
    cast = setting.autocast
    with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
        return as_graph(workload, precision=setting.precision)


def cluster_of(run: Run, setting: Setting, held_out: bool = False) -> ClusterSpec:
    """Return the cards of a run, in machines of eight."""
    device, machine = CARDS[run.gpu]
    # It ran, so it fitted, however close to the edge it is predicted: that is not asked here.
    memory = 2 * ClusterSpec.one_node(device, 1).devices[0].memory_bytes
    card = {"preset": device, "memory": memory} | ({"stack": setting.stack} if setting.stack else {})
    node = {"preset": machine, "count": PER_MACHINE, "device": card} if run.gpus > 1 else {"device": card}
    machines = -(-run.gpus // PER_MACHINE)
    nodes: dict[str, object] = {"nodes": [{**node, "name": f"machine{i}"} for i in range(machines)]}
    if run.gpus > PER_MACHINE:
        nodes["network"] = MACHINE_NETWORKS[machine]
    cluster = ClusterSpec.model_validate(nodes)
    if setting.tf32:
        peak = cluster.devices[0].flops_per_second["tf32"]
        part = cluster.devices[0].efficiency["matmul"]
        products = MeasuredRates(flops_per_second={"float32": peak}, efficiency={"vector": part})
        cluster = cluster.with_device_rates(products, provenance="float32 multiplied as tf32")
    if held_out and setting.stack:
        rates = MeasuredRates(efficiency=NOT_FITTED[CARDS[run.gpu][0]])
        cluster = cluster.with_device_rates(rates, provenance="without llm-foundry's runs")
    return cluster


def planned(run: Run, held_out: bool = False) -> Plan:
    """Plan a run as it was run; with ``held_out`` without what was fitted on its source.

    Raises PartitionerError where it is refused.
    """
    setting = setting_of(run)
    graph = _traced(run.id.split("/")[0], run.tokens)
    samples = run.batch // (run.gpus * run.microbatches)
    fix = [f"data={run.gpus}", f"zero={setting.zero}", f"microbatch={samples}"]
    fix.append(f"recompute={setting.recompute}")
    plan = partition(
        graph,
        cluster_of(run, setting, held_out),
        strategy="hybrid",
        fix=" ".join(fix),
        batch_size=run.batch,
        optimizer_memory=setting.optimizer,
        check="off",
        risk=FILLS,  # it ran, so it fitted
    )
    return _one_by_one(plan) if setting.one_by_one else plan


def _one_by_one(plan: Plan) -> Plan:
    """Return the plan with the peaks that it has where the optimizer makes nothing for all parameters at once, and
    gradients are there from one step to the next."""
    kept = [
        stage.model_copy(update={"gradient_bytes": 0, "first_transient_bytes": stage.transient_bytes})
        for stage in plan.stages
    ]
    other = plan.model_copy(update={"update_bytes": {}, "stages": tuple(kept)})
    peaks = {str(rank): peak for rank, peak in enumerate(other.simulate().peak_bytes)}
    prediction = plan.prediction.model_copy(update={"peak_memory_bytes": peaks})
    return other.model_copy(update={"prediction": prediction})


def predicted(run: Run, held_out: bool = False) -> Outcome:
    """Predict one run."""
    try:
        plan = planned(run, held_out)
    except PartitionerError as error:
        return Outcome(run, refused="; ".join([error.what, *error.because])[:300])
    prediction = plan.prediction
    source = f"{PUBLISHERS[run.id.split('-')[0]]}, {run.gpu}"
    counts: Counts = "driver" if run.id.startswith("hf-") else "reserved"
    context_bytes = CONTEXT_BYTES if counts == "driver" else 0
    own_bytes = max(0.0, run.peak_bytes - context_bytes)
    return Outcome(
        run,
        prediction.step_seconds,
        counted_bytes(plan, counts) + context_bytes,
        residual=residual_of("published", source, run.id, plan, run.step_seconds, own_bytes, counts),
    )


def spread(errors: Sequence[float]) -> str:
    """Summarize errors: median and mean of their sizes, share within 10%, median with sign."""
    if not errors:
        return "none"
    sizes = [abs(error) for error in errors]
    near = sum(size <= 0.1 for size in sizes) / len(sizes)
    return (
        f"{len(errors):4}  median {statistics.median(sizes):6.1%}  mean {statistics.fmean(sizes):6.1%}"
        f"  within 10% {near:4.0%}  bias {statistics.median(errors):+6.1%}"
    )


def report(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the table and its summaries."""
    yield f"{'run':44} {'published':>10} {'predicted':>10} {'error':>7} {'memory':>16}"
    for outcome in outcomes:
        run = outcome.run
        if outcome.refused:
            yield f"{run.id:44} refused: {outcome.refused}"
            continue
        memory = ""
        if run.peak_bytes:
            memory = f"{run.peak_bytes / 2**30:6.2f} {outcome.memory_error:+7.1%}"
        yield (
            f"{run.id:44} {run.step_seconds:9.3f}s {outcome.step_seconds:9.3f}s {outcome.error:+7.1%} {memory:>16}"
        )
    done = [outcome for outcome in outcomes if not outcome.refused]
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in done:
        groups["all"].append(outcome)
        groups[f"card {outcome.run.gpu}"].append(outcome)
        groups[f"source {outcome.run.id.split('-')[0]}"].append(outcome)
    for name, members in sorted(groups.items()):
        yield f"time    {name:20} {spread([member.error for member in members])}"
    known = [outcome.memory_error for outcome in done if outcome.run.peak_bytes]
    yield f"memory  {'all':20} {spread(known)}"
    yield f"refused {len(outcomes) - len(done)} of {len(outcomes)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, required=True, help=f"a CSV file with the columns {', '.join(COLUMNS)}"
    )
    parser.add_argument("--only", default="*", help="glob over the runs' ids")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--residuals", action="store_true", help="put the rows into benchmarks/residuals.csv")
    parser.add_argument(
        "--held-out", action="store_true", help="predict each run without what was fitted on its source"
    )
    options = parser.parse_args(arguments)
    if options.residuals and options.only != "*":
        parser.error("--residuals replaces all rows of this benchmark: leave out --only")
    runs = [run for run in read_runs(options.runs) if fnmatch.fnmatch(run.id, options.only)]
    since = time.perf_counter()
    ordered = sorted(runs, key=lambda run: (run.id.split("/")[0], run.tokens))
    outcomes = [predicted(run, options.held_out) for run in ordered]
    print("\n".join(report(outcomes)))
    print(f"{time.perf_counter() - since:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    if options.residuals:
        found = [outcome.residual for outcome in outcomes if outcome.residual]
        replace_residuals("published", found, HELD_OUT_FILE if options.held_out else FILE)


if __name__ == "__main__":
    main()
