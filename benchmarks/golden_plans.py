"""Golden plans: sixty plans of every kind as canonical text, so that a change of structure is seen to change nothing.

    python -m benchmarks.golden_plans                     compare with benchmarks/golden_plans.sha256
    python -m benchmarks.golden_plans --texts DIR         write what is hashed, to compare two commits with diff -r
    python -m benchmarks.golden_plans --update            accept what differs
    python -m benchmarks.golden_plans --only 'free/*'     a part

A case gives texts: the plan file, the printed table, the programs of all ranks, the simulated step, explanations, an
evaluation's programs, or the error of what cannot be planned. The clock stands still, so searches end by the work they have
done; most models are small enough for their integer programs to be solved to the end. Two things differ all the same: on
another kind of processor the last digits of a sum, and on a busy machine bounds and alternatives of ``free`` and ``auto``,
since the solver has a clock of its own. Programs and steps do not.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.free_clusters import clusters
from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError
from cost_models.precision import Precision
from cost_models.room import FILLS
from partitioner import Plan, Workload, partition, trace
from partitioner.cost_graphs.plan import plan_graph
from partitioner.cost_graphs.plan_layouts import plan_feature_wise
from partitioner.cost_graphs.read import read_graph
from partitioner.evaluation.placed import inference_programs, inference_segments
from partitioner.evaluation.placement import reuse_placement, without_writes
from partitioner.evaluation.sharding import reuse_sharding
from partitioner.models.as_graph import as_graph
from partitioner.models.load import load_workload
from partitioner.record.rebuild import plan_code, plan_programs, ranks_in_order
from passes.graph.graph import OpGraph
from passes.shard.shard import shard_graph
from runtime.simulate.simulation import Simulation

ROOT = Path(__file__).parents[1]
HASHES = Path(__file__).with_suffix(".sha256")
DATA = Path("tests") / "data"
"""From the root, so that texts, which wrap, say the same whatever folder the checkout is in."""
TINY = {"size": "tiny"}

USUAL: Mapping[str, Any] = {"strategy": "layer", "batch_size": 8, "risk": FILLS}
"""Options of a case that says nothing else; predictions fill the memory, however far off they are known to be."""
Texts = Mapping[str, str]


MODELS: dict[str, tuple[str, dict[str, str]]] = {
    **{
        name: (name, TINY)
        for name in ("gpt2", "llama-1b", "llama-8b", "bert", "t5", "vit", "resnet50", "whisper", "mixtral")
    },
    "gpt2-full": ("gpt2", {"seq": "256", "layers": "4"}),
    "llama-8b-8": ("llama-8b", {"layers": "8", "seq": "1024"}),
    "llama-70b-4": ("llama-70b", {"layers": "4"}),
    "unet": ("examples.unet:unet", {"channels": "8", "depth": "2", "size": "16"}),
    "alexnet": ("examples.alexnet:alexnet", {"classes": "16", "width": "0.0625", "size": "63"}),
    "towers": ("examples.alexnet:two_towers", {}),
    "lstm": (
        "examples.lstm_seq2seq:lstm_seq2seq",
        {"vocabulary": "64", "hidden": "16", "layers": "2", "source_steps": "3", "target_steps": "4"},
    ),
    "mlp": ("examples.mlp:mlp", {}),
    "moe": ("examples.moe:moe", {}),
    "locally": ("examples.locally_connected:locally_connected", {}),
    "gpt": ("examples/byte_text.py:gpt", {"layers": "2", "width": "32"}),
}
"""Where each model comes from, and how it is made small."""


def _tight(memory: str) -> ClusterSpec:
    """Two local workers with little memory each."""
    device = {
        "name": "small-worker",
        "kind": "cpu",
        "memory": memory,
        "memory_bandwidth": "10GB/s",
        "flops": {"float64": "50G", "float32": "100G", "bfloat16": "100G"},
        "launch_overhead": "6us",
    }
    link = {"bandwidth": "1GB/s", "latency": "20us"}
    node = {"name": "host", "count": 2, "device": device, "links": {"default": link}}
    return ClusterSpec.from_dict(
        {"name": f"two workers of {memory}", "nodes": [node], "network": {**link, "per": "device"}},
        source="golden",
    )


CLUSTERS: dict[str, Callable[[], ClusterSpec]] = {
    **{f"local:{n}": (lambda n=n: ClusterSpec.local(n)) for n in (1, 2, 3, 4)},
    "dgx": lambda: ClusterSpec.preset("dgx-h100"),
    "dgx:2": lambda: ClusterSpec.preset("dgx-h100", nodes=2),
    "unlike": lambda: ClusterSpec.load(ROOT / "docs" / "clusters" / "two-unlike-nodes.yaml"),
    **{
        name: (lambda name=name: clusters()[name]) for name in ("gpu-4", "gpu-2", "cpu-2", "slow-2", "slow-4")
    },
    **{f"tight:{size}": (lambda size=size: _tight(size)) for size in ("1MiB", "1.4MiB", "2MiB")},
}


_workloads: dict[str, Workload] = {}
_graphs: dict[str, OpGraph] = {}


def workload(model: str) -> Workload:
    """A model by its name in ``MODELS``, made once."""
    if model not in _workloads:
        text, settings = MODELS[model]
        _workloads[model] = load_workload(text, settings=settings)
    return _workloads[model]


def graph_of(model: str) -> OpGraph:
    """Its training graph, traced once."""
    if model not in _graphs:
        _graphs[model] = as_graph(workload(model))
    return _graphs[model]


def planned(model: str, cluster: str, explain: tuple[str, ...] = (), **options: Any) -> Texts:
    """A plan, all that follows from it, and what it says of ``explain``."""
    graph, machines = graph_of(model), CLUSTERS[cluster]()
    try:
        plan = partition(graph, machines, **{**USUAL, **options})
    except PartitionerError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    texts = {
        "plan": canonical(plan.to_dict()),
        "table": str(plan),
        "programs": "\n".join(map(str, plan_programs(plan))),
        "step": simulated(plan.simulate()),
        "code": _code(plan, graph),
    }
    for name in explain:
        found = plan.explain(name, graph)
        texts[f"explain {name}"] = f"{found}\n{canonical(found.to_dict())}"
    return texts


def _code(plan: Plan, graph: OpGraph) -> str:
    """What the first and the last rank run, op by op."""
    ranks = sorted({plan.used_devices[0], plan.used_devices[-1]})
    return "\n\n".join(str(plan.graph(graph, rank=plan.used_devices.index(rank))) for rank in ranks)


def evaluated(model: str, cluster: str, **options: Any) -> Texts:
    """The evaluation graph of a model where its plan has training, and the programs that run it."""
    graph, machines = graph_of(model), CLUSTERS[cluster]()
    plan = partition(graph, machines, **{**USUAL, **options})
    work = workload(model)
    work.model.eval()
    try:
        evaluation = without_writes(
            trace(work.model, work.example_inputs, loss_fn=work.loss_fn, name="evaluation")
        )
    finally:
        work.model.train()
    code = plan_code(plan, graph, ranks_in_order(plan))
    (sharding, *_) = (stage.sharding for stage in plan.stages)
    if sharding is not None:
        placement = sharding.placement(plan.stages[0].devices, plan.microbatches)
        stored = {name: each.leaf for name, each in code.shardings.items()}
        reused = reuse_sharding(graph, placement, evaluation, stored, {}, 1)
        choices = "\n".join(f"{name}: {choice}" for name, choice in sorted(reused.choices.items()))
        return {"choices": choices, "graph": printed(shard_graph(evaluation, reused, 1).graph)}
    stage_of = {op: index for index, stage in enumerate(plan.stages) for op in stage.ops}
    groups = [stage.devices for stage in plan.stages]
    holders: dict[str, set[int]] = {}
    for node in code.graph.ops:
        for given in code.graph.inputs:
            read = any(source.name == given.node for source in node.all_input_nodes)
            if read and given.kind in ("parameter", "buffer") and node.name in code.segmentation.segment_of:
                rank = code.segmentation.ranks[code.segmentation.segment_of[node.name]][0]
                holders.setdefault(given.name, set()).add(plan.used_devices[rank])
    placed = reuse_placement(code.graph, stage_of, evaluation, groups, holders)
    segments = inference_segments(placed.graph, placed.segmentation, {}, plan.cluster, 2, 1e-6)
    programs = inference_programs(segments, plan.cluster, plan.microbatches)
    return {
        "graph": printed(placed.graph),
        "programs": "\n".join(map(str, programs)),
        "segments": str(segments),
    }


def cost_graph(path: str, strategy: str = "free", **options: Any) -> Texts:
    """The plan of a cost graph of another project."""
    reading = {key: options.pop(key) for key in ("devices", "bytes_per_second") if key in options}
    try:
        read = read_graph(DATA / path, **reading)
        plan = plan_feature_wise(read) if strategy == "feature" else plan_graph(read, **options)
    except PartitionerError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    data = plan.to_dict()
    data["graph"]["source"] = path
    return {"plan": canonical(data), "table": str(plan)}


def printed(graph: OpGraph) -> str:
    """A graph op by op; functions by name, whatever room they are in."""
    return re.sub(r"\bruntime\.[\w.]*\.(\w+)", r"\1", str(graph.graph))


def canonical(data: Any) -> str:
    """JSON with sorted keys; the version and the date of making are no part of a plan."""
    if isinstance(data, dict):
        data.pop("partitioner_version", None)
        certificate = data.get("certificate", {})
        for name in (
            "bound_seconds",
            "gap",
        ):  # an integer program's bound differs in its last digits from run to run
            if certificate.get(name):
                certificate[name] = float(f"{certificate[name]:.6g}")
    return json.dumps(data, indent=1, sort_keys=True)


def simulated(step: Simulation) -> str:
    """Every number of a simulated step."""
    return canonical(
        {
            "step_seconds": step.step_seconds,
            "busy_seconds": step.busy_seconds,
            "peak_bytes": step.peak_bytes,
            "bubble_fraction": step.bubble_fraction,
            "link_bytes": dict(step.link_bytes),
            "pair_bytes": {f"{a}-{b}": size for (a, b), size in step.pair_bytes.items()},
            "timeline": [
                [f"{s.start_seconds} {s.end_seconds} {s.text}" for s in row] for row in step.timeline
            ],
            "transfers": [
                [t.start_seconds, t.end_seconds, t.message.label, t.size_bytes] for t in step.transfers
            ],
        }
    )


def _cases() -> dict[str, Callable[[], Texts]]:
    """Every case by its name."""
    plan: dict[str, tuple[str, str, dict[str, Any]]] = {
        "layer/gpt2-2": ("gpt2", "local:2", {"explain": ("transformer.wte.weight", "transformer.h.1.mlp")}),
        "layer/gpt2-3-zb-v": ("gpt2", "local:3", {"schedule": "zb-v"}),
        "layer/gpt2-1": ("gpt2", "local:1", {}),
        "layer/llama-tied": ("llama-1b", "local:4", {"schedule": "zb-h1", "microbatches": 4}),
        "layer/bert-interleaved": ("bert", "local:2", {"schedule": "interleaved", "microbatches": 4}),
        "layer/t5": ("t5", "local:3", {"min_stages": 3}),
        "layer/vit-gpipe": ("vit", "local:4", {"schedule": "gpipe", "microbatches": 3, "min_stages": 4}),
        "layer/resnet50": ("resnet50", "local:2", {"batch_size": 16}),
        "layer/whisper": ("whisper", "slow-4", {}),
        "layer/mixtral": ("mixtral", "slow-2", {"min_stages": 2}),
        "layer/unet": ("unet", "local:3", {"min_stages": 2}),
        "layer/lstm-zb-h2": ("lstm", "slow-4", {"schedule": "zb-h2", "microbatches": 8, "min_stages": 4}),
        "layer/moe-pins": ("moe", "local:2", {"pins": {"*": 0}, "max_stages": 2}),
        "layer/gpt2-full-dgx": ("gpt2-full", "dgx", {"batch_size": 64}),
        "layer/llama-8b-bf16": ("llama-8b-8", "dgx", {"batch_size": 32, "precision": "mixed"}),
        "layer/llama-8b-unlike": ("llama-8b-8", "unlike", {"batch_size": 32}),
        "layer/llama-70b-4": ("llama-70b-4", "dgx:2", {"batch_size": 32, "recompute": "full"}),
        "layer/gpt2-tight": ("gpt2", "tight:1.4MiB", {"batch_size": 32}),
        "layer/gpt2-tight-none": ("gpt2", "tight:1MiB", {"batch_size": 32, "recompute": "none"}),
        "layer/infeasible": ("gpt2-full", "tight:2MiB", {"batch_size": 32}),
        "layer/wrong-pins": (
            "gpt2",
            "local:2",
            {"pins": {"nothing.*": 0, "transformer.h.0.*": 1, "lm_head": 0}},
        ),
        "layer/list": ("lstm", "slow-2", {"schedule": "list", "min_stages": 2}),
        "feature/gpt2-2": (
            "gpt2",
            "local:2",
            {"explain": ("transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight")},
        ),
        "feature/gpt2-column": ("gpt2", "local:4", {"mesh": (2, 2), "pins": {"*": "data column_row"}}),
        "feature/gpt2-zero3": ("gpt2", "local:4", {"mesh": (4,), "pins": {"*": "zero3"}}),
        "feature/gpt2-zero1": ("gpt2", "local:4", {"mesh": (2, 2), "pins": {"*": "zero1 column_row"}}),
        "feature/llama-sequence": ("llama-8b", "local:2", {"pins": {"*": "sequence"}}),
        "feature/llama-vocabulary": ("llama-8b", "local:2", {"pins": {"*": "vocabulary"}}),
        "feature/t5": ("t5", "local:4", {}),
        "feature/vit": ("vit", "local:2", {"microbatches": 2}),
        "feature/resnet50": ("resnet50", "local:2", {"batch_size": 16}),
        "feature/mixtral": ("mixtral", "local:2", {}),
        "feature/unet": ("unet", "local:4", {}),
        "feature/alexnet": ("alexnet", "local:4", {"batch_size": 16}),
        "feature/llama-8b-dgx": ("llama-8b-8", "dgx", {"batch_size": 32, "mesh": (2, 4)}),
        "feature/llama-70b-4": ("llama-70b-4", "dgx", {"batch_size": 16, "mesh": (8,), "precision": "mixed"}),
        "feature/tight": ("gpt2", "tight:2MiB", {"batch_size": 32}),
        "feature/infeasible": ("gpt2-full", "tight:2MiB", {"batch_size": 32}),
        "feature/wrong-pins": ("gpt2", "local:2", {"pins": {"transformer.wte.weight": "S7", "none": "S0"}}),
        "free/mlp": ("mlp", "slow-2", {"explain": ("pairs.0.up", "pairs.1.down.weight")}),
        "free/mlp-splits": ("mlp", "slow-2", {"splits": {"*": (60, 40)}}),
        "free/towers": ("towers", "slow-2", {"batch_size": 4, "splits": {}}),
        "free/mlp-pins": ("mlp", "slow-2", {"pins": {"classify": 1}, "splits": {}}),
        "free/lstm-latency": ("lstm", "slow-2", {"objective": "latency", "splits": {}}),
        "free/locally": ("locally", "slow-2", {"splits": {}}),
        "free/moe": ("moe", "slow-2", {"microbatches": 2, "splits": {}}),
        "free/infeasible": ("moe", "tight:1MiB", {"splits": {}}),
        "free/one-device": ("mlp", "local:1", {}),
        "auto/mlp": ("mlp", "slow-2", {}),
        "auto/gpt": ("gpt", "local:2", {"microbatches": 2}),
        "auto/infeasible": ("moe", "tight:1MiB", {}),
    }
    found: dict[str, Callable[[], Texts]] = {}
    for name, (model, cluster, options) in plan.items():
        strategy = name.split("/")[0]
        given = {**options, "strategy": strategy}
        if given.get("precision") == "mixed":
            given["precision"] = _mixed()
        found[name] = lambda model=model, cluster=cluster, given=given: planned(model, cluster, **given)
    found |= {
        "evaluation/gpt2": lambda: evaluated("gpt2", "local:3", strategy="layer", min_stages=3),
        "evaluation/t5": lambda: evaluated("t5", "local:2", strategy="layer", min_stages=2),
        "evaluation/resnet50": lambda: evaluated(
            "resnet50", "local:2", strategy="layer", min_stages=2, batch_size=16
        ),
        "evaluation/gpt2-feature": lambda: evaluated(
            "gpt2", "local:2", strategy="feature", pins={"*": "column_row"}
        ),
        "evaluation/vit-feature": lambda: evaluated(
            "vit", "local:2", strategy="feature", pins={"*": "zero3"}
        ),
        "evaluation/mlp-free": lambda: evaluated("mlp", "slow-2", strategy="free", splits={}),
    }
    bert = "device-placement/OperatorGraphs/bert_l-3_inference.json"
    layers = "device-placement/LayerGraphs/bert24_inference.json"
    found |= {
        "cost_graph/bert-free": lambda: cost_graph(bert),
        "cost_graph/bert24-contiguous": lambda: cost_graph(layers, contiguous=True),
        "cost_graph/bert24-latency": lambda: cost_graph(layers, objective="latency"),
        "cost_graph/vgg16-free": lambda: cost_graph("pipedream/vgg16/graph.txt", devices=4),
        "cost_graph/alexnet-feature": lambda: cost_graph("pipedream/alexnet/graph.txt", "feature", devices=4),
        "cost_graph/vgg16-feature": lambda: cost_graph("pipedream/vgg16/graph.txt", "feature", devices=16),
        "cost_graph/resnet18-contiguous": lambda: cost_graph(
            "pipedream/resnet18/graph.txt", contiguous=True, devices=4
        ),
        "cost_graph/no-profile": lambda: cost_graph(layers, "feature"),
    }
    return found


def _mixed() -> Precision:
    return Precision.from_fields({"compute": "bfloat16", "master": "float32"})


def main() -> int:
    """Make every case; 1 if a text is not as it was."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--only", default="*")
    given = parser.parse_args()
    folder = given.texts and given.texts.resolve()
    os.chdir(ROOT)
    os.environ["PARTITIONER_CALIBRATION"] = "none"
    known: dict[str, str] = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    now: dict[str, str] = {}
    different = 0

    for name, make in _cases().items():
        if not fnmatch.fnmatch(name, given.only):
            continue
        began = os.times().user
        with (
            mock.patch("time.perf_counter", return_value=0.0),
            mock.patch("time.monotonic", return_value=0.0),
        ):
            texts = make()
        changed = []
        for part, text in texts.items():
            key = f"{name}/{part}"
            now[key] = hashlib.sha256(text.encode()).hexdigest()
            if known.get(key) != now[key]:
                changed.append(part)
            if folder is not None:
                file = folder / f"{key}.txt"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n")
        lost = [key for key in known if key.rsplit("/", 1)[0] == name and key not in now]
        different += bool(changed or lost)
        word = "as before" if not changed and not lost else f"differs: {', '.join([*changed, *lost])}"
        print(f"{name:34} {os.times().user - began:6.1f} CPU s  {word}", flush=True)
    if given.update:
        HASHES.write_text(json.dumps(dict(sorted({**known, **now}.items())), indent=1) + "\n")
    print(f"{len(now)} texts; {different} of the cases differ")
    return 1 if different and not given.update else 0


if __name__ == "__main__":
    sys.exit(main())
