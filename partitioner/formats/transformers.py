"""transformers' ``DistributedConfig``: sizes, a word for how shards divide each weight; a ``device_map`` for a pipeline.

    DistributedConfig(tp_size=2, fsdp_size=4, tp_plan={"model.layers.*.self_attn.q_proj": "colwise", "lm_head": …})

Names and rules: transformers 5.23.0 (its "distributed" folder). Its plan for the model stays in force for modules that are
not named, so modules that stay whole are named, too. The file says nothing of batches: the script has them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping

from partitioner.formats.from_plan import parallelism_of, stage_modules
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.settings import FileSettings, from_json
from partitioner.formats.tensor_words import Division, divisions_of
from partitioner.formats.tool import Tool, Understood, Written, cannot_express
from partitioner.record.data import PlanData

TITLE = "transformers"
STYLES = frozenset(
    {
        *("colwise", "colwise_rep", "colwise_gather_output", "rowwise", "rowwise_rep", "rowwise_split_input"),
        *("packed_colwise", "packed_rowwise", "embedding_rowwise", "embedding_colwise", "sequence_parallel"),
        *("replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_tp_experts"),
        *("moe_identity_expert", "local_params", "replicate", "grouped_gemm", "ep_dispatch_experts"),
    }
)
"""The words of a plan for tensors."""


_IMPORT = "from transformers.distributed import DistributedConfig"


def write(plan: PlanData) -> Written:
    """Write the arguments of ``DistributedConfig``, as JSON and as Python; for one device per stage a ``device_map``."""
    p = parallelism_of(plan)
    divisions = divisions_of(plan) if p.tensor > 1 else {}
    problems = [*refusals(p), *_inexpressible(divisions)]
    if problems:
        raise cannot_express(TITLE, problems, "pipeline=1 tensor=… data=… zero=3 recompute=none")
    if p.pipeline > 1:
        places = {name: index for index, stage in enumerate(_by_device(plan, p)) for name in stage}
        return Written({"device_map.json": _json(places)}, tuple(_map_notes(p)))
    content: dict[str, object] = {}
    if p.tensor > 1:
        content["tp_size"] = p.tensor
        content["tp_plan"] = {name: style_of(division) for name, division in divisions.items()}
    if p.data > 1:
        content["fsdp_size"] = p.data if p.zero == 3 else 1
        content["dp_replicate_size"] = 1 if p.zero == 3 else p.data
    literal = ", ".join(f"{name}={value!r}" for name, value in content.items())
    files = {
        "distributed_config.json": _json(content),
        "distributed_config.py": f"{_IMPORT}\n\nconfig = DistributedConfig({literal})\n",
    }
    return Written(files, tuple(_notes(p, divisions)))


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _by_device(plan: PlanData, p: Parallelism) -> list[list[str]]:
    """Return the modules of each device, in the order of the pipeline."""
    groups = list(dict.fromkeys(tuple(stage.devices) for stage in plan.stages))
    found: list[list[str]] = [[] for _ in groups]
    for stage, modules in zip(plan.stages, stage_modules(plan), strict=True):
        found[groups.index(tuple(stage.devices))] += modules
    return found


def refusals(p: Parallelism) -> Iterator[str]:
    """Yield why it cannot run these degrees."""
    if p.pipeline > 1 and p.data * p.tensor > 1:
        yield "its device_map gives a module one device: a pipeline has one device per stage"
    if p.sequence:
        yield "its sequence parallelism is not wired up yet (enable_sequence_parallel is reserved)"
    if p.zero == 1:
        yield "it divides parameters with the optimizer's state (FSDP), or nothing"
    if p.recompute not in ("none", "full"):
        yield f"it recomputes all blocks or none (gradient_checkpointing_enable), not {p.recompute}"


def _inexpressible(divisions: Mapping[str, Division]) -> Iterator[str]:
    conv = [name for name, division in divisions.items() if division.op == "addmm"]
    if conv:
        yield f"it divides linear layers, with weights kept as [out, in]; {conv[0]} keeps [in, out] (Conv1D)"


def style_of(division: Division) -> str:
    """Return the word for a way to divide."""
    if division.direction == "whole":
        return "replicate"
    if division.op == "embedding":
        return "embedding_rowwise" if division.direction == "column" else "embedding_colwise"
    if division.direction == "column":
        return "colwise_gather_output" if division.gathered else "colwise"
    return "rowwise_split_input" if division.splits else "rowwise"


def _script(p: Parallelism) -> str:
    return (
        f"the script passes what the file cannot say: {p.microbatch} samples to each replica's micro-batch, "
        f"{p.microbatches} of them a step (gradient_accumulation_steps)"
    )


def _notes(p: Parallelism, divisions: Mapping[str, Division]) -> Iterator[str]:
    yield _script(p)
    if p.recompute == "full":
        yield "the script turns recomputation on: model.gradient_checkpointing_enable()"
    inside = [name for name, division in divisions.items() if division.gathered and ".*" in name]
    if inside:
        yield f"what reads {', '.join(inside)} runs whole on every shard: the plan divides it again"
    if any(division.gathered and ".*" not in name for name, division in divisions.items()):
        yield "logits are gathered, and every shard computes the loss of all of them"
    if p.data > 1 and p.zero == 0:
        yield "replicas run as FSDP groups of one device: gradients are summed block by block"


def _map_notes(p: Parallelism) -> Iterator[str]:
    yield (
        "device_map runs one device at a time, in one process: a step takes about as long as on one device, and "
        f"the {p.microbatches} micro-batches of the plan do not overlap"
    )
    yield "buffers of the model itself (positions) are on the first device"


NO_BATCH = "the file says nothing of batches: one micro-batch of one sample on each replica"
_SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")
_READ = (*_SIZES, "tp_plan", "enable_expert_parallel", "enable_sequence_parallel")


def read(text: str, devices: int) -> Understood:
    """Read the arguments of ``DistributedConfig``, as JSON or as a call in Python, for so many devices."""
    call = re.search(r"\bDistributedConfig\(", text)
    settings = _from_call(text, call.start()) if call is not None else from_json(TITLE, text)
    for name in ("distributed_config",):  # a model's config.json has them inside
        settings = settings.within(name) if name in settings else settings
    sizes = {name: settings.count(name) for name in _SIZES}
    if sizes["ep_size"] > 1 or settings.flag("enable_expert_parallel"):
        raise settings.unplanned("ep_size: experts are not divided yet")
    if sizes["pp_size"] > 1:
        raise settings.unplanned(
            f"pp_size {sizes['pp_size']}: its pipelines run a forward alone, one stage at a time"
        )
    if sizes["fsdp_size"] > 1 and sizes["dp_replicate_size"] > 1:
        raise settings.unplanned(
            "fsdp_size and dp_replicate_size: parameters divided among a part of the replicas are not planned yet"
        )
    notes, problems = [NO_BATCH], []
    data = sizes["fsdp_size"] * sizes["dp_replicate_size"]
    tensor = sizes["tp_size"]
    named = settings.get("tp_plan")
    if "tp_size" not in settings and named is not None:
        if devices % data:
            problems.append(f"{devices} devices are no multiple of fsdp_size × dp_replicate_size = {data}")
        tensor = max(1, devices // data)
    if isinstance(named, Mapping):
        problems += [
            f'tp_plan: "{name}" is {style!r}, none of its words' for name, style in named.items()
            if style not in STYLES
        ]  # fmt: skip
        notes.append("tp_plan is not read: how shards divide each weight is chosen anew")
    elif named not in (None, "auto"):
        raise settings.wrong("tp_plan", 'a mapping or "auto"')
    if settings.flag("enable_sequence_parallel"):
        notes.append("enable_sequence_parallel is reserved and does nothing yet")
    notes += [f"{settings.path}{name} is not read" for name in settings.others(_READ) if settings.get(name)]
    p = Parallelism(tensor=tensor, data=data, zero=3 if sizes["fsdp_size"] > 1 else 0)
    return Understood(p, tuple(problems), tuple(notes))


def _from_call(text: str, start: int) -> FileSettings:
    """Return the arguments of the first call, whose values are literals."""
    line = text.count("\n", 0, start) + 1
    empty = FileSettings(TITLE, {})
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = f"line {getattr(error, 'lineno', None) or line}"
        raise empty.refused(f"{place}: {getattr(error, 'msg', None) or error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("DistributedConfig"):
            values = {}
            for keyword in node.keywords:
                try:
                    values[str(keyword.arg)] = ast.literal_eval(keyword.value)
                except (ValueError, TypeError, RecursionError) as error:
                    what = (
                        f"line {node.lineno}: {keyword.arg} is {ast.unparse(keyword.value)[:60]}, no literal"
                    )
                    raise empty.refused(what) from error
            if node.args:
                raise empty.refused(f"line {node.lineno}: DistributedConfig takes its arguments by name")
            return FileSettings(TITLE, values)
    raise empty.refused(f"line {line}: DistributedConfig is not called")


def is_mine(source: str, text: str) -> bool:
    """Tell its configuration by the sizes, or the call."""
    sizes = r'"(tp_size|tp_plan|fsdp_size|dp_replicate_size)"\s*:'
    return re.search(rf"\bDistributedConfig\(|{sizes}", text) is not None


TOOL = Tool(TITLE, write, refusals, read, is_mine)
