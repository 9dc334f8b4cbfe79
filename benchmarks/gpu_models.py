"""One model trained on one device: its step time and peak memory beside their predictions, with defaults and calibrated.

    python -m benchmarks.gpu_models gpt2 --device cuda --calibration gpu.json --json gpt2.json

``make gpu`` runs this once for each of MODELS, each in a process of its own, so that one that fails takes no other along.
Weights are random, sizes such that training takes less than 20 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.residuals import counted_bytes
from cost_models.cluster import ClusterSpec
from cost_models.measure.calibration import Calibration
from cost_models.precision import Precision
from cost_models.spec.presets import DEVICES, is_called
from cost_models.variants import calibrated
from examples.mlp import mlp
from examples.unet import unet
from partitioner.api import partition
from partitioner.models.as_graph import as_graph
from partitioner.models.hugging_face import build, example_batch
from partitioner.models.load import load_workload
from partitioner.models.workload import Workload
from partitioner.plan import Plan
from partitioner.verify.grow_batch import grow_batch
from passes.graph.graph import OpGraph
from passes.trace.batch import map_tensors

STEPS, WARM_UPS = 10, 3
BF16 = Precision(compute=torch.bfloat16)


@dataclass(frozen=True)
class GpuModel:
    """One model, how it is loaded and trained."""

    load: Callable[[], Workload]
    batch_size: int
    microbatches: int = 1
    precision: Precision = field(default_factory=Precision)


def _bundled(name: str, seq: int | None = None, **settings: str) -> Callable[[], Workload]:
    return lambda: load_workload(name, settings=settings, seq=seq, dtype=None)


def _transformer(kind: str, dtype: torch.dtype, **sizes: int) -> Workload:
    """Build a language model of transformers, 1,024 wide, with weights: the bundled ones are full-size and have none."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=1024,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
        **sizes,
    )
    model = build(getattr(transformers, f"{kind}ForCausalLM"), config, dtype, on_meta=False)
    return Workload(model, example_batch(model, 1024, 2, 0), name=kind.lower())


def _llama() -> Workload:
    """Build a Llama of 350 million parameters."""
    return _transformer("Llama", torch.float32, num_hidden_layers=24, vocab_size=32_000)


def _mixtral() -> Workload:
    """Build a mixture of 8 experts, 2 a token, in bfloat16: 610 million parameters, of which a token meets 200 million."""
    return _transformer("Mixtral", torch.bfloat16, num_hidden_layers=8, vocab_size=16_000)


MODELS: Mapping[str, GpuModel] = {
    "gpt2": GpuModel(_bundled("gpt2", 512), 8),
    "gpt2-bf16": GpuModel(_bundled("gpt2", 1024), 8, 2, BF16),
    "bert": GpuModel(_bundled("bert", 512), 16),
    "bert-bf16": GpuModel(_bundled("bert", 512), 32, 2, BF16),
    "t5": GpuModel(_bundled("t5", 256), 8),
    "llama-bf16": GpuModel(_llama, 8, 2, BF16),
    "mixtral-bf16": GpuModel(_mixtral, 8, 2),
    "vit": GpuModel(_bundled("vit"), 32),
    "resnet50": GpuModel(_bundled("resnet50"), 32),
    "unet": GpuModel(lambda: unet(channels=64, size=256), 8),
    "mlp": GpuModel(lambda: mlp(inputs=4096, hidden=16384, pairs=2), 4096, 4),
}


def preset_of(card: str, memory_bytes: int) -> str | None:
    """Return the preset that a driver's name means: "NVIDIA A100-SXM4-80GB" is an "A100-80GB"; None where there is none.

    Of a family with several sizes, the one whose memory is closest, if it is within a tenth.
    """
    found = {
        name: ClusterSpec.one_node(name, 1).nodes[0].resolved().device
        for name, data in DEVICES.items()
        if data["kind"] == "cuda" and is_called(name, card)
    }
    sizes = {name: device.resolved().memory or 0 for name, device in found.items() if device is not None}
    near = {
        name: (
            -name.count("-"),
            abs(size - memory_bytes),
        )  # "H100-PCIE-80GB" says more of a card than "H100-80GB"
        for name, size in sizes.items()
        if abs(size - memory_bytes) < 0.1 * memory_bytes
    }
    return min(near, key=near.__getitem__) if near else None


def cluster_of(device: torch.device) -> ClusterSpec:
    """Return the cluster of this one device, at the default costs of its preset."""
    if device.type != "cuda":
        return ClusterSpec.local(1)
    properties = torch.cuda.get_device_properties(device)
    return _cluster_of_card(properties.name, properties.total_memory)


def _cluster_of_card(card: str, memory_bytes: int) -> ClusterSpec:
    preset = preset_of(card, memory_bytes)
    if preset is None:
        raise SystemExit(
            f"there is no preset of {card} with {memory_bytes:,} bytes; "
            f"predictions need one of {', '.join(DEVICES)}"
        )
    return ClusterSpec.one_node(preset, 1)


def figures_of(
    model: GpuModel,
    cluster: ClusterSpec,
    device: torch.device,
    calibrate: Callable[[ClusterSpec], ClusterSpec] | None = None,
    steps: int = STEPS,
) -> Iterator[dict[str, Any]]:
    """Yield all figures that are there, each time that there are more, so that what fails later loses none.

    First the prediction at default costs, then the measurement by that plan, last the prediction at measured costs.
    """
    workload = model.load()
    graph, plan = _planner(model, workload)
    defaults = plan(cluster)
    row: dict[str, Any] = {
        "batch_size": model.batch_size,
        "microbatches": model.microbatches,
        "precision": str(model.precision),
        "predicted": {"defaults": _predicted(defaults)},
    }
    yield row
    row["measured"] = _measured(defaults, workload, graph, model.batch_size, device, steps)
    yield row
    if calibrate is not None:
        row["predicted"]["calibrated"] = _predicted(plan(calibrate(cluster)))
        yield row


def predicted_again(model: GpuModel, calibration: Calibration) -> dict[str, Any]:
    """Predict a model on the card of a calibration, at the default costs and at the measured ones."""
    _, plan = _planner(model, model.load())
    cluster = _cluster_of_card(calibration.machine.card, calibration.machine.memory_bytes)
    return {
        "defaults": _predicted(plan(cluster)),
        "calibrated": _predicted(plan(calibrated(cluster, calibration))),
    }


def _planner(model: GpuModel, workload: Workload) -> tuple[OpGraph, Callable[[ClusterSpec], Plan]]:
    """Trace the model; return the graph, and what plans it on a cluster."""
    graph = as_graph(workload, precision=model.precision, check="off")  # compared elsewhere; it takes minutes
    plan = partial(
        partition,
        graph,
        batch_size=model.batch_size,
        microbatches=model.microbatches,
        precision=model.precision,
        optimizer_memory="adamw",
    )
    return graph, plan


def _measured(
    plan: Plan, workload: Workload, graph: OpGraph, samples: int, device: torch.device, steps: int
) -> dict[str, Any]:
    """Train by the plan on a batch that lies on the device already: a step's median seconds, and its peaks of memory."""
    whole = grow_batch(workload.example_inputs, graph.batch.batch_dims, workload.model, samples)
    batch = map_tensors(whole, lambda _, leaf: leaf.to(device))
    on_gpu = device.type == "cuda"
    seconds = []
    with plan.deploy(workload, graph=graph, device=device, check_hosts=False) as engine:
        for number in range(WARM_UPS + steps):
            if number == WARM_UPS and on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            started = time.perf_counter()
            engine.train_step(batch)
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
    return {
        "step_seconds": statistics.median(seconds[WARM_UPS:]),
        "all_step_seconds": seconds,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
    }


def _predicted(plan: Plan) -> dict[str, Any]:
    return {
        "step_seconds": plan.prediction.step_seconds,
        "peak_bytes": counted_bytes(plan, "allocated"),
        "reserved_bytes": counted_bytes(plan, "reserved"),
        "confidence": plan.prediction.confidence,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one model and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(one)
    device, calibrate = torch.device(options.device), None
    if options.calibration is not None and options.calibration.exists():
        calibrate = partial(calibrated, calibration=Calibration.load(options.calibration))
    for row in figures_of(MODELS[options.model], cluster_of(device), device, calibrate):
        options.json.write_text(json.dumps(row, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
