"""DeepSpeed's JSON: ZeRO's stage, the batch, tensor parallelism with a rule for each weight, a pipeline's bounds.

    {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
     "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": […], "partition_type": …}]}}}

Names and rules: DeepSpeed 0.19.8 (its "DeepSpeedConfig", "AutoTPConfig" and "PipelineModule"). How many stages a pipeline
has is no setting but an argument of PipelineModule: it is written as ``pipeline.stages``, which DeepSpeed accepts and
does not use, and into a Python file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from partitioner.formats.from_plan import parallelism_of, stage_modules
from partitioner.formats.parallelism import Parallelism, Zero, is_block
from partitioner.formats.settings import FileSettings, from_json
from partitioner.formats.tensor_words import Division, divisions_of
from partitioner.formats.tool import Tool, Understood, Written, cannot_express
from partitioner.record.data import PlanData

TITLE = "DeepSpeed"
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def write(plan: PlanData) -> Written:
    """Write the configuration of ``deepspeed.initialize``; for a pipeline the module's arguments, too."""
    p = parallelism_of(plan)
    divisions = divisions_of(plan) if p.tensor > 1 else {}
    problems = [*refusals(p), *_inexpressible(divisions)]
    if problems:
        raise cannot_express(TITLE, problems, "pipeline=1 tensor=… data=… recompute=none")
    content: dict[str, object] = {
        "train_micro_batch_size_per_gpu": p.microbatch,
        "gradient_accumulation_steps": p.microbatches,
    }
    if p.tensor == 1:
        content["train_batch_size"] = p.batch_size
    content["zero_optimization"] = {"stage": p.zero}
    if (half := _PRECISIONS.get(plan.precision.compute or torch.float32)) is not None:
        content[half] = {"enabled": True}
    if p.tensor > 1:
        rules = {"use_default_specs": False, "layer_specs": _layer_specs(divisions)}
        content["tensor_parallel"] = {"autotp_size": p.tensor, "partition_config": rules}
    if p.recompute == "full":
        content["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    if p.pipeline == 1:
        return Written({"deepspeed.json": _json(content)}, tuple(_notes(plan, p, divisions)))
    content["pipeline"] = {"stages": p.pipeline, "activation_checkpoint_interval": int(p.recompute == "full")}
    module, notes = _pipeline_module(plan, p)
    files = {"deepspeed.json": _json(content), "pipeline.py": module}
    return Written(files, (*notes, *_notes(plan, p, divisions)))


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"


def refusals(p: Parallelism) -> Iterator[str]:
    """Yield why it cannot run these degrees."""
    if p.pipeline > 1 and p.zero == 3:
        yield "its pipelines are not for ZeRO-2 and ZeRO-3"
    if p.pipeline > 1 and p.tensor > 1:
        yield "its AutoTP arranges all ranks as data × tensor: beside a pipeline the model divides its own layers"
    if p.pipeline > 1 and (p.schedule != "1f1b" or p.chunks > 1):
        yield f"its pipelines run 1f1b, not {p.schedule}"
    if p.sequence:
        yield "its AutoTP keeps whole activations between products"
    if p.recompute not in ("none", "full"):
        yield f"it recomputes what the model passes to its checkpoint function, all blocks or none, not {p.recompute}"


def _inexpressible(divisions: Mapping[str, Division]) -> Iterator[str]:
    if any(division.op == "addmm" for division in divisions.values()):
        yield "AutoTP takes shards of weights kept as [in, out] (Conv1D) by its own rules alone"
        return
    for name, division in divisions.items():
        if division.gathered and name.count(".*"):
            yield f"{name}: its divided output is gathered inside of a block, which AutoTP's layers behind it do not expect"
        if division.splits:
            yield f"{name}: it takes its part of a whole input, AutoTP's rows take divided ones"


def _layer_specs(divisions: Mapping[str, Division]) -> list[dict[str, object]]:
    """Write a rule for each way to divide: patterns of full names, as its presets have them."""
    ways: dict[tuple[str, bool], list[str]] = {}
    for name, division in divisions.items():
        if division.op == "linear" and division.direction != "whole":
            gathered = (
                division.direction == "column" and ".*" not in name
            )  # a head: its logits are whole behind it
            ways.setdefault((division.direction, gathered), []).append(_pattern(name))
    return [
        {"patterns": patterns, "partition_type": direction, **({"gather_output": True} if gathered else {})}
        for (direction, gathered), patterns in ways.items()
    ]


def _pattern(name: str) -> str:
    """Write the regular expression of a module's weight, from the list of blocks on: any path may stand before it."""
    words = [r"\d+" if word == "*" else re.escape(word) for word in name.split(".")]
    first = words.index(r"\d+") - 1 if r"\d+" in words else len(words) - 1
    return ".*" + r"\.".join([*words[first:], "weight"]) + "$"


def _notes(plan: PlanData, p: Parallelism, divisions: Mapping[str, Division]) -> Iterator[str]:
    if p.tensor > 1:
        yield (
            "train_batch_size is left to DeepSpeed: without an mpu it multiplies by all ranks, shards among them, "
            f"and calls the batch {p.batch_size * p.tensor}; a step has {p.batch_size} samples"
        )
        yield "embeddings stay whole, and logits are gathered for the loss, which every shard computes of all of them"
    if p.recompute == "full" and p.pipeline == 1:
        yield "the model passes its blocks to deepspeed.checkpointing.checkpoint; the section alone recomputes nothing"
    if p.zero == 3:
        yield "parameters below stage3_param_persistence_threshold (100 000 numbers) stay whole on every device"
    if p.recompute == "full" and p.pipeline > 1:
        yield "activation_checkpoint_interval 1 recomputes every layer of the list, embedding and head among them"


def _pipeline_module(plan: PlanData, p: Parallelism) -> tuple[str, list[str]]:
    """Write the module's arguments: a method of PipelineModule that finds the plan's bounds, or the bounds themselves."""
    units = stage_modules(plan)
    bounds = [0, *accumulate(map(len, units))]
    names = [name for stage in units for name in stage]
    method = next((m for m, found in methods(plan, names, p.pipeline).items() if found == bounds), None)
    listed = "".join(f"\n    # stage {index}: {', '.join(stage)}" for index, stage in enumerate(units))
    interval = int(p.recompute == "full")
    if method is not None:
        call = f'PipelineModule(layers, num_stages={p.pipeline}, partition_method="{method}", '
        text = "from deepspeed.pipe import PipelineModule\n\n\ndef pipeline_of(layers, loss_fn):\n"
        text += f'    """The plan\'s stages, of these layers in the model\'s order."""{listed}\n'
        text += f"    return {call}activation_checkpoint_interval={interval}, loss_fn=loss_fn)\n"
        return text, []
    text = f'''from deepspeed.pipe import PipelineModule


class PlannedPipeline(PipelineModule):
    """The plan's stages, of these layers in the model's order."""{listed}

    def _partition_layers(self, method="uniform"):
        self.parts = {bounds}
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def pipeline_of(layers, loss_fn):
    return PlannedPipeline(layers, num_stages={p.pipeline}, activation_checkpoint_interval={interval}, loss_fn=loss_fn)
'''
    return text, [
        f"PipelineModule's methods uniform, parameters and type: give other bounds than {bounds}: pipeline.py sets them"
    ]


def methods(plan: PlanData, names: Sequence[str], stages: int) -> dict[str, list[int]]:
    """Return the bounds that each method of PipelineModule finds for layers of these names."""
    found = {"uniform": uniform_bounds(len(names), stages)}
    if plan.outline is None:
        return found
    sizes = dict.fromkeys(names, 0)
    for given in plan.outline.inputs:
        owner = next((name for name in names if given.name.startswith(f"{name}.")), None)
        if given.kind == "parameter" and owner is not None:
            sizes[owner] += torch.Size(given.shape).numel()
    found["parameters"] = balanced_bounds(list(sizes.values()), stages)
    classes = plan.outline.class_names()
    kinds = sorted({classes[name] for name in names if is_block(name) and name in classes})
    pattern = "|".join(kinds).lower()
    if pattern:
        like = [int(re.search(pattern, classes.get(name, "").lower()) is not None) for name in names]
        found["type:" + "|".join(kinds)] = balanced_bounds(like, stages)
    return found


def uniform_bounds(count: int, parts: int) -> list[int]:
    """Return the bounds of equal parts, the first ones larger by one where they are not."""
    if count <= parts:
        return [min(part, count) for part in range(parts + 1)]
    each, more = divmod(count, parts)
    return [each * part + min(part, more) for part in range(parts + 1)]


def balanced_bounds(weights: Sequence[int], parts: int) -> list[int]:
    """Return the bounds whose largest and smallest part are the closest, with DeepSpeed's choice among equals: the last.

    As in its "partition_balanced": part by part, so that not all ways are compared. O(len(weights)² · parts).
    """
    count = len(weights)
    if count <= parts:
        return uniform_bounds(count, parts)
    sums = [0, *accumulate(weights)]
    none = float("inf")
    largest: dict[tuple[int, int], float] = {(0, 0): 0.0}
    smallest: dict[tuple[int, int], float] = {}
    cost: dict[tuple[int, int], float] = {(0, 0): 0.0}
    start: dict[tuple[int, int], int] = {}
    for end in range(1, count + 1):
        for part in range(1, min(end, parts) + 1):
            for begin in range(end):
                size = sums[end] - sums[begin]
                most = max(largest.get((begin, part - 1), none), size)
                least = min(smallest.get((begin, part - 1), none), size)
                if cost.get((end, part), none) >= most - least:
                    cost[end, part], start[end, part] = most - least, begin
                    largest[end, part], smallest[end, part] = most, least
    bounds = [count]
    for part in range(parts, 0, -1):
        bounds.append(start.get((bounds[-1], part), 0))
    return bounds[::-1]


_READ = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
    "tensor_parallel",
    "activation_checkpointing",
    "pipeline",
)
_PARALLEL = r"parallel|pipeline|zero|checkpointing|expert|sequence|hybrid|mesh"


def read(text: str, devices: int) -> Understood:
    """Read a configuration for so many devices."""
    settings = from_json(TITLE, text)
    problems: list[str] = []
    notes: list[str] = []
    for name, key in (("expert_parallel", "autoep_size"), ("sequence_parallel_size", "")):
        inner = settings.within(name) if key else settings
        if _auto_count(inner, key or name, 1, notes) > 1 and (not key or inner.flag("enabled")):
            raise settings.unplanned(f"{inner.path}{key or name}: experts and context are not divided yet")
    tensor = max(1, _auto_count(settings.within("tensor_parallel"), "autotp_size", 1, notes, least=0))
    pipeline = _auto_count(settings.within("pipeline"), "stages", 1, notes)
    if devices % (tensor * pipeline):
        problems.append(f"{devices} devices are no multiple of tensor {tensor} × pipeline {pipeline}")
    data = max(1, devices // tensor // pipeline)
    zero = _zero(settings, notes)
    if pipeline > 1 and settings.within("zero_optimization").count("stage", 0, least=0) > 1:
        problems.append("ZeRO-2 and ZeRO-3 are incompatible with its pipelines")
    microbatch, microbatches = _batch(settings, data if pipeline > 1 else data * tensor, problems, notes)
    if tensor > 1 and "train_batch_size" in settings:
        notes.append(
            f"without an mpu DeepSpeed counts all ranks in train_batch_size, shards among them: {data} replicas take "
            f"{microbatch * microbatches * data} samples a step"
        )
    interval = settings.within("pipeline").count("activation_checkpoint_interval", 0, least=0)
    sections = "activation_checkpointing" in settings and pipeline == 1
    if sections:
        notes.append(
            "activation_checkpointing is planned as recomputation of every block: the model has to ask for it"
        )
    for half in ("bf16", "bfloat16", "fp16"):
        if settings.get(half) is not None and _enabled(settings.within(half)):
            notes.append(
                f"{half}: say --dtype {'float16' if half == 'fp16' else 'bfloat16'} to check its memory and time"
            )
    notes += [f"{name} is not read" for name in settings.others(_READ, _PARALLEL)]
    notes += [
        f"{name} is not read"
        for name in settings.within("tensor_parallel").others(
            ("autotp_size", "partition_config", "preset_model"), "tp|overlap|parallel"
        )
    ]
    return Understood(
        Parallelism(
            pipeline=pipeline,
            tensor=tensor,
            data=data,
            zero=zero,
            microbatch=microbatch,
            microbatches=microbatches,
            recompute="full" if sections or interval else "none",
        ),
        tuple(problems),
        tuple(notes),
    )


def _enabled(section: FileSettings) -> bool:
    return section.get("enabled") != "auto" and section.flag("enabled")


def _auto_count(settings: FileSettings, name: str, default: int, notes: list[str], least: int = 1) -> int:
    """Return a whole number; where the Trainer of transformers is to fill it in ("auto"), the default."""
    if settings.get(name) == "auto":
        notes.append(
            f"{settings.path}{name}: auto, which the script's arguments fill in, is taken as {default}"
        )
        return default
    return settings.count(name, default, least)


def _zero(settings: FileSettings, notes: list[str]) -> Zero:
    if isinstance(settings.get("zero_optimization"), bool):  # an earlier form
        return 1 if settings.get("zero_optimization") else 0
    section = settings.within("zero_optimization")
    stage = _auto_count(section, "stage", 0, notes, least=0)
    if stage > 3:
        raise section.wrong("stage", "0, 1, 2 or 3")
    if stage == 2:
        notes.append(
            "ZeRO-2 is planned as ZeRO-1: gradients, which it divides among the replicas, are kept whole"
        )
    for name in ("offload_optimizer", "offload_param"):
        if str(section.within(name).get("device") or "none") != "none":
            notes.append(f"{section.path}{name} is not read: all is planned on the devices")
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        if section.count(name, 1, least=-1) > 1:
            raise section.unplanned(
                f"{section.path}{name}: parameters divided among a part of the replicas are not planned yet"
            )
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "cpu_offload"):
        if section.flag(name):
            notes.append(f"{section.path}{name} is not read")
    return 3 if stage == 3 else 1 if stage else 0


def _batch(settings: FileSettings, ranks: int, problems: list[str], notes: list[str]) -> tuple[int, int]:
    """Return the samples of a micro-batch and the micro-batches, by DeepSpeed's rule of the three numbers."""
    known: dict[str, int | None] = {}
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        asked = settings.get(name)
        known[name] = None if asked in (None, "auto") else settings.count(name)
        if asked == "auto":
            notes.append(f"{name}: auto, which the script's arguments fill in")
    total, micro, steps = known.values()
    if total is None and micro is None:
        notes.append("the file does not say the samples of a micro-batch: one on each replica")
    if micro is None:
        micro = 1 if total is None else max(1, total // ranks // (steps or 1))
    if steps is None:
        steps = 1 if total is None else max(1, total // ranks // micro)
    if total is not None and total != micro * steps * ranks:
        problems.append(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} × gradient_accumulation_steps {steps} "
            f"× {ranks} ranks"
        )
    return micro, steps


def is_mine(source: str, text: str) -> bool:
    """Tell its JSON by the settings of which every configuration has one."""
    return (
        re.search(r'"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)"\s*:', text)
        is not None
    )


TOOL = Tool(TITLE, write, refusals, read, is_mine)
