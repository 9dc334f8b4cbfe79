"""torchtitan's configuration: its "ParallelismConfig" and "TrainingConfig", with a pipeline's parts and its schedule.

    parallelism = ParallelismConfig(
        data_parallel_shard_degree=8,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="1F1B",
        module_fqns_per_model_part=[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]],
    )

Names and rules: torchtitan 0.3.0, its modules "configs", "trainer", "parallel_dims" and "pipeline_parallel";
batches in tokens: its commit b5bcd76 of August 2026. Its meshes have the pipeline outermost and tensor parallelism
innermost, as groups are here. It has whole replicas, or parameters in parts among all of them (FSDP, ZeRO-3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from cost_models.precision import NAMES
from partitioner.formats.from_plan import parallelism_of, stage_modules
from partitioner.formats.parallelism import Parallelism, is_block
from partitioner.formats.schedule_csv import schedule_of
from partitioner.formats.tool import Tool, Written, cannot_express
from partitioner.formats.torchtitan_read import SELECTIVE, read
from partitioner.record.data import PlanData
from runtime.schedules import SCHEDULES

TITLE = "torchtitan"
FILE = "torchtitan_config.py"
NAMED = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
"""Schedules that torch has, too, under its names; orders are equal, action by action."""
LOOP = "PipelineScheduleMulti"
"""The name beside a CSV file of which stages lie round and round the ranks: torchtitan places them by it."""
CHECKPOINTING = {"full": "FullAC", "auto": "FullAC", "selective": "SelectiveAC"}


def write(plan: PlanData) -> Written:
    """Write the configuration of a plan, and its schedule where torch has no name for it."""
    p = parallelism_of(plan)
    parts = module_names(stage_modules(plan))
    problems = [*refusals(p), *(_problems(plan, parts) if p.pipeline > 1 else ())]
    if problems:
        raise cannot_express(TITLE, problems, "pipeline=… tensor=… data=… zero=3")
    by_name = p.pipeline == 1 or named_order(p.schedule, p.pipeline, p.microbatches)
    table = f"{p.schedule}.csv"
    policy = CHECKPOINTING.get(p.recompute)
    lines = ["from torchtitan.config import ParallelismConfig, TrainingConfig"]
    lines += [f"from torchtitan.distributed.activation_checkpoint import {policy}"] if policy else []
    lines += ["", *_call("training", "TrainingConfig", _training(plan, p))]
    lines += _call("parallelism", "ParallelismConfig", _parallelism(p, parts, "" if by_name else table))
    lines += [f"activation_checkpoint = {f'{policy}.Config()' if policy else None}"]
    files = {FILE: "\n".join(lines) + "\n"}
    if not by_name:
        files[table] = str(schedule_of(plan))
    return Written(files, tuple(_notes(plan, p, None if by_name else table)))


def named_order(schedule: str, ranks: int, microbatches: int) -> bool:
    """Tell whether torch's schedule of the same name takes so many micro-batches; it orders them alike then."""
    if schedule == "1f1b":
        return microbatches >= ranks
    if schedule == "interleaved":
        return microbatches % max(1, microbatches // ranks) == 0
    return schedule in NAMED


def refusals(p: Parallelism) -> Iterator[str]:
    """Yield why it cannot run these degrees."""
    if p.zero == 1 and p.data > 1:
        yield "replicas divide the optimizer's state alone (ZeRO-1): there they divide parameters, too (FSDP), or nothing"
    if p.recompute == "gathers" and p.zero != 3:
        yield "it does not gather again in backward what sequence parallelism gathered, alone"


def _problems(plan: PlanData, parts: Sequence[Sequence[str]] | None) -> Iterator[str]:
    """Yield why torch's pipelines cannot run the plan's stages."""
    if parts is None:
        yield "its models are an embedding, one list of blocks, a norm and a head; these stages hold other modules, or none"
    backward = [str(index) for index, stage in enumerate(plan.stages) if not stage.has_backward]
    if backward:
        yield f"stages without a backward ({', '.join(backward)}): its schedules run one on every stage"
    devices = {rank: index for index, stage in enumerate(plan.stages) for rank in stage.devices}
    tied = [t.name for t in plan.tied if len({devices[rank] for rank in t.ranks}) > 1]
    if tied:
        yield f"parameters of several stages ({', '.join(tied[:3])}): torch's pipelines do not sum their gradients"
    far = [value.name for value in plan.values if set(value.consumers) - {value.producer + 1}]
    if far:
        yield f"values for others than the next stage ({', '.join(far[:3])}): torch's stages send to the next alone"


def module_names(stages: Sequence[Sequence[str]]) -> list[list[str]] | None:
    """Return torchtitan's names of the modules of every stage; None for models of another shape than its own.

    [["embed", "h.0"], ["h.1", "norm", "head"]]   ->   [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
    """
    units = list(dict.fromkeys(unit for modules in stages for unit in modules))
    blocks = [unit for unit in units if is_block(unit)]
    if not blocks or len({block.rpartition(".")[0] for block in blocks}) > 1:
        return None
    first, last = units.index(blocks[0]), units.index(blocks[-1])
    if units[first : last + 1] != blocks:
        return None
    behind = units[last + 1 :]
    named = {block: f"layers.{index}" for index, block in enumerate(blocks)}
    named |= dict.fromkeys(units[:first], "tok_embeddings") | dict.fromkeys(behind[:-1], "norm")
    if behind:
        named[behind[-1]] = "lm_head" if len(behind) > 1 or "norm" not in behind[0] else "norm"
    parts = [list(dict.fromkeys(named[unit] for unit in modules)) for modules in stages]
    known = {
        name for part in parts for name in part
    }  # a module without an op of its own is put where its like is
    if "tok_embeddings" not in known:
        parts[0].insert(0, "tok_embeddings")
    if "lm_head" not in known:
        parts[-1].append("lm_head")
    if "norm" not in known:
        head = next(part for part in parts if "lm_head" in part)
        head.insert(head.index("lm_head"), "norm")
    flat = [name for part in parts for name in part]
    ordered = ["tok_embeddings", *(f"layers.{index}" for index in range(len(blocks))), "norm", "lm_head"]
    return parts if flat == ordered and all(parts) else None


def _training(plan: PlanData, p: Parallelism) -> Iterator[tuple[str, object]]:
    """Yield the fields of the batch, in samples."""
    yield "local_batch_size", p.microbatch * (p.microbatches if p.pipeline > 1 else 1)
    yield "global_batch_size", p.batch_size
    length = _length(plan)
    if length:
        yield "seq_len", length
    stored, compute = _types(plan)
    if stored == "bfloat16":
        yield "dtype", stored
    yield "mixed_precision_param", compute if compute == "bfloat16" else "float32"


def _length(plan: PlanData) -> int:
    """Return the tokens of a sample; 0 if the plan counts none."""
    rates = plan.prediction
    return round((rates.tokens_per_second or 0) / rates.samples_per_second)


def _types(plan: PlanData) -> tuple[str, str]:
    """Return the data types that parameters are kept and read in."""
    own = plan.model.dtype or "float32"
    stored = own if plan.precision.parameters is None else NAMES[plan.precision.parameters]
    return stored, stored if plan.precision.compute is None else NAMES[plan.precision.compute]


def _parallelism(
    p: Parallelism, parts: Sequence[Sequence[str]] | None, table: str
) -> Iterator[tuple[str, object]]:
    yield "data_parallel_replicate_degree", 1 if p.zero == 3 else p.data
    yield "data_parallel_shard_degree", p.data if p.zero == 3 else 1
    if p.zero == 3 and p.data > 1:
        yield "fsdp_reshard_after_forward", "never" if p.recompute in ("none", "selective") else "always"
    yield "tensor_parallel_degree", p.tensor
    if p.tensor > 1:
        yield "enable_sequence_parallel", p.sequence
    yield "pipeline_parallel_degree", p.pipeline
    if p.pipeline > 1:
        yield "pipeline_parallel_microbatch_size", p.microbatch
        yield "module_fqns_per_model_part", parts
        yield (
            "pipeline_parallel_schedule",
            (LOOP if table and not SCHEDULES[p.schedule].folded else NAMED[p.schedule]),
        )
        if table:
            yield "pipeline_parallel_schedule_csv", table


def _call(name: str, kind: str, fields: Iterator[tuple[str, object]]) -> Iterator[str]:
    yield f"{name} = {kind}("
    for field, value in fields:
        if field == "module_fqns_per_model_part" and isinstance(value, list):
            yield f"    {field}=["
            yield from (f"        {json.dumps(part)}," for part in value)
            yield "    ],"
        else:
            yield f"    {field}={json.dumps(value) if isinstance(value, str) else value},"
    yield ")"


def _notes(plan: PlanData, p: Parallelism, table: str | None) -> Iterator[str]:
    if table is not None:
        yield f"torchtitan looks for {table} in the folder that it is started in"
    if p.zero == 3 and p.data > 1 and p.pipeline > 1 and p.recompute in ("none", "selective"):
        yield "torch's pipelines gather parameters once a step, and keep them whole; here each micro-batch gathers them"
    if p.recompute == "auto":
        counts = sum(len([b for b in stage.recomputed_blocks if is_block(b)]) for stage in plan.stages)
        yield f"FullAC recomputes every block, where the plan does {counts}: the step is longer, and takes less memory"
    if p.recompute == "selective":
        yield SELECTIVE
    stored, compute = _types(plan)
    others = sorted({stored, compute} - {"bfloat16", "float32"})
    if others:
        yield f"torchtitan trains in bfloat16 and float32, not in {' and '.join(others)}"
    if plan.precision.master is not None and stored == "bfloat16":
        yield 'torchtitan keeps no master copies beside dtype="bfloat16"'
    if plan.loss_reduction == "mean":
        yield "torchtitan divides the loss by the step's valid tokens, as loss_reduction=token_mean does here"


def is_mine(source: str, text: str) -> bool:
    """Tell a configuration by the names of its fields."""
    if re.search(r"\bParallelismConfig\s*\(", text):
        return "accelerate" not in text
    return source.endswith(".toml") and re.search(r"(?m)^\s*\[parallelism\]", text) is not None


TOOL = Tool(TITLE, write, refusals, read, is_mine)
