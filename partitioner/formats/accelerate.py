"""accelerate's YAML, as ``accelerate config`` writes it: the sizes of its device mesh, and what FSDP divides and wraps.

    distributed_type: FSDP
    fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_transformer_layer_cls_to_wrap: GPT2Block}
    parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2}

Names and rules: accelerate 1.15.0 (its "ParallelismConfig", "ClusterConfig" and "FullyShardedDataParallelPlugin").
The file says nothing of batches: the script passes them. Files for DeepSpeed and Megatron-LM are read, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
import yaml

from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism, Zero, is_block
from partitioner.formats.settings import FileSettings, from_yaml
from partitioner.formats.tool import Tool, Understood, Written, cannot_express
from partitioner.record.data import PlanData
from passes.search.words import RecomputeMode

TITLE = "accelerate"
PREFIX = "parallelism_config_"
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def write(plan: PlanData) -> Written:
    """Write the configuration file of ``accelerate launch --config_file``."""
    p = parallelism_of(plan)
    problems = list(refusals(p))
    if problems:
        raise cannot_express(TITLE, problems, "tensor=… data=… zero=3 recompute=none")
    gpu = plan.cluster.devices[plan.used_devices[0]].kind == "cuda"
    kind = "FSDP" if p.zero == 3 else "NO" if p.world_size == 1 else "MULTI_GPU" if gpu else "MULTI_CPU"
    nodes = {plan.cluster.devices[rank].node for rank in plan.used_devices}
    content: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": _PRECISIONS.get(plan.precision.compute or torch.float32, "no"),
        "num_machines": len(nodes),
        "num_processes": p.world_size,
        "use_cpu": not gpu,
    }
    if p.zero == 3:
        content["fsdp_config"] = _fsdp(plan, p)
    if p.zero == 3 or p.tensor > 1:
        sizes = {
            "dp_replicate": 1,
            "dp_shard": p.data if p.zero == 3 else 1,
            "tp": p.tensor,
            "cp": 1,
            "sp": 1,
        }
        content["parallelism_config"] = {f"{PREFIX}{name}_size": size for name, size in sizes.items()}
    text = yaml.safe_dump(content, sort_keys=False)
    return Written({"accelerate.yaml": text}, tuple(_notes(p)))


def _fsdp(plan: PlanData, p: Parallelism) -> Mapping[str, object]:
    """Return the settings of FSDP2. The blocks' classes are what is gathered together."""
    names = {} if plan.outline is None else plan.outline.class_names()
    classes = sorted({name for path, name in names.items() if is_block(path)})
    wrapped = {"fsdp_transformer_layer_cls_to_wrap": ",".join(classes)} if classes else {}
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "NO_WRAP",
        **wrapped,
        "fsdp_activation_checkpointing": p.recompute == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }


def refusals(p: Parallelism) -> Iterator[str]:
    """Yield why it cannot run these degrees."""
    if p.pipeline > 1:
        yield "it has no pipelines"
    if p.sequence:
        yield "its tensor parallelism follows the model's own plan, which does not divide positions between products"
    if p.zero == 1:
        yield "it divides the optimizer's state alone only through DeepSpeed: export --to deepspeed"
    if p.tensor > 1 and p.data > 1 and p.zero == 0:
        yield "its ParallelismConfig composes tensor parallelism with FSDP, not with whole replicas: zero=3"
    if p.recompute not in ("none", "full"):
        yield f"it recomputes all blocks or none, not {p.recompute}"


def _notes(p: Parallelism) -> Iterator[str]:
    yield (
        f"the script passes what the file cannot say: {p.microbatch} samples to each process's micro-batch, "
        f"Accelerator(gradient_accumulation_steps={p.microbatches})"
    )
    if p.recompute == "full" and p.zero != 3:
        yield "without FSDP the script turns recomputation on: model.gradient_checkpointing_enable()"
    if p.tensor > 1:
        yield (
            "tensor parallelism is the model's own plan: the script loads it with "
            f"from_pretrained(…, tp_plan='auto', tp_size={p.tensor}), or with what export --to transformers writes"
        )
    if p.zero == 3 and p.microbatches > 1:
        yield "FSDP2 gathers parameters again in every micro-batch, and sums gradients in the last one alone by default"


_MEGATRON = ("tp_degree", "pp_degree", "num_micro_batches", "sequence_parallelism",
             "recompute_activations", "use_distributed_optimizer", "gradient_clipping")  # fmt: skip
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA"), "ddp"),
    **dict.fromkeys(("MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON"), "ddp"),
    **{"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"},
}
_READ = (
    "distributed_type",
    "num_processes",
    "fsdp_config",
    "parallelism_config",
    "deepspeed_config",
    "megatron_lm_config",
)
_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


def read(text: str, devices: int) -> Understood:
    """Read a configuration file for so many devices; where it says how many processes, for these."""
    settings = from_yaml(TITLE, text)
    if "distributed_type" not in settings:
        raise settings.refused("distributed_type is not there")
    kind = settings.word("distributed_type", _KINDS, "ddp")
    if settings.get("distributed_type") == "NO":
        processes = settings.count("num_processes")
    else:
        processes = (
            devices if settings.get("num_processes") == -1 else settings.count("num_processes", devices)
        )
    readers = {"ddp": _ddp, "fsdp": _fully_sharded, "deepspeed": _deepspeed, "megatron": _megatron}
    understood = readers[kind](settings, processes)
    unread = settings.others(_READ, r"parallel|fsdp|deepspeed|megatron|shard|pipeline|tensor")
    notes = (*understood.notes, *(f"{name} is not read" for name in unread))
    return Understood(understood.parallelism, understood.problems, notes)


NO_BATCH = "the file says nothing of batches: one micro-batch of one sample on each replica"


def _sizes(settings: FileSettings, processes: int) -> tuple[dict[str, int], list[str], list[str]]:
    """Return the sizes of the mesh, the rules that they break, and notes."""
    given = settings.within("parallelism_config")
    sizes = {name: given.count(f"{PREFIX}{name}_size") for name in _SIZES}
    for name in ("cp", "sp"):
        if sizes[name] > 1:
            raise given.unplanned(
                f"{given.path}{PREFIX}{name}_size {sizes[name]}: positions are not divided between attentions yet"
            )
    replicas, shards, tensor = sizes["dp_replicate"], sizes["dp_shard"], sizes["tp"]
    problems = []
    if given.values and replicas * shards * tensor not in (1, processes):
        problems.append(
            f"parallelism_config makes {replicas * shards * tensor} processes (dp_replicate {replicas} × "
            f"dp_shard {shards} × tp {tensor}), num_processes is {processes}"
        )
    if tensor > 1 and replicas > 1 and shards == 1:
        problems.append("tp_size above 1 with dp_replicate_size above 1 needs dp_shard_size above 1")
    known = [f"{PREFIX}{name}_size" for name in _SIZES]
    known += [f"{PREFIX}{name}" for name in ("cp_backend", "sp_backend", "cp_comm_strategy")]
    return sizes, problems, [f"{name} is not read" for name in given.others(known)]


def _ddp(settings: FileSettings, processes: int) -> Understood:
    sizes, problems, notes = _sizes(settings, processes)
    if sizes["dp_shard"] > 1:
        problems.append("dp_shard_size above 1 needs distributed_type: FSDP with fsdp_version: 2")
    tensor = sizes["tp"]
    data = sizes["dp_replicate"] if tensor > 1 else processes
    return Understood(Parallelism(tensor=tensor, data=data), tuple(problems), (NO_BATCH, *notes))


_STRATEGIES: Mapping[str, str] = {
    **{name: name for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")},
    **{"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"},
    **{"true": "FULL_SHARD", "false": "SHARD_GRAD_OP"},
}  # fmt: skip


def _fully_sharded(settings: FileSettings, processes: int) -> Understood:
    sizes, problems, notes = _sizes(settings, processes)
    fsdp = settings.within("fsdp_config")
    fsdp = FileSettings(TITLE, {_prefixed(name): value for name, value in fsdp.values.items()}, fsdp.path)
    version = fsdp.word("fsdp_version", {"1": 1, "2": 2}, 1)
    strategy = "FULL_SHARD"
    if version == 1:
        strategy = fsdp.word("fsdp_reshard_after_forward", _STRATEGIES, strategy)
        strategy = fsdp.word("fsdp_sharding_strategy", _STRATEGIES, strategy)
        if settings.within("parallelism_config").values:
            problems.append("parallelism_config needs fsdp_version: 2")
    elif not fsdp.flag("fsdp_reshard_after_forward", True):
        strategy = "SHARD_GRAD_OP"
    replicas, shards, tensor = sizes["dp_replicate"], sizes["dp_shard"], sizes["tp"]
    if strategy.startswith("HYBRID") or (replicas > 1 and shards > 1):
        said = (
            f"fsdp_config: {strategy}"
            if strategy.startswith("HYBRID")
            else "dp_replicate_size and dp_shard_size"
        )
        raise settings.unplanned(
            f"{said}: parameters divided among a part of the replicas are not planned yet"
        )
    meshed = replicas * shards * tensor > 1
    if meshed and shards == 1 and version == 2:
        problems.append(
            "FSDP needs dp_shard_size above 1: its Accelerator refuses a mesh with nothing to divide"
        )
    zero: Zero = 0 if strategy == "NO_SHARD" else 1 if strategy == "SHARD_GRAD_OP" else 3
    if strategy == "SHARD_GRAD_OP":
        notes.append(
            "parameters are gathered once a micro-batch and kept until its backward, gradients divided: planned as "
            "ZeRO-1, which keeps parameters whole and divides the optimizer's state"
        )
    if fsdp.flag("fsdp_offload_params"):
        notes.append("fsdp_config.fsdp_offload_params is not read: parameters are planned on the devices")
    recompute: RecomputeMode = "full" if fsdp.flag("fsdp_activation_checkpointing") else "none"
    data = replicas * shards if meshed else processes
    return Understood(
        Parallelism(tensor=tensor, data=data, zero=zero, recompute=recompute),
        tuple(problems),
        (NO_BATCH, *notes),
    )


def _prefixed(name: str) -> str:
    """Return a setting of FSDP under its long name, as its launcher does."""
    return name if name.startswith("fsdp") else f"fsdp_{name}"


def _deepspeed(settings: FileSettings, processes: int) -> Understood:
    sizes, problems, notes = _sizes(settings, processes)
    given = settings.within("deepspeed_config")
    if "deepspeed_config_file" in given:
        raise given.refused(
            f"{given.path}deepspeed_config_file: what it says is in {given.get('deepspeed_config_file')}: check that"
        )
    stage = given.count("zero_stage", 2, least=0)
    if stage > 3:
        raise given.wrong("zero_stage", "0, 1, 2 or 3")
    if stage == 2:
        notes.append("ZeRO-2 is planned as ZeRO-1: gradients, which it divides, are kept whole")
    for name in ("offload_optimizer_device", "offload_param_device"):
        if str(given.get(name) or "none") != "none":
            notes.append(f"{given.path}{name} is not read: all is planned on the devices")
    zero: Zero = 3 if stage == 3 else 1 if stage else 0
    tensor = sizes["tp"]
    if processes % tensor:
        problems.append(f"num_processes {processes} is no multiple of tp_size {tensor}")
    microbatches = given.count("gradient_accumulation_steps")
    p = Parallelism(tensor=tensor, data=max(1, processes // tensor), zero=zero, microbatches=microbatches)
    return Understood(
        p,
        tuple(problems),
        ("the file does not say the samples of a micro-batch: one on each replica", *notes),
    )


def _megatron(settings: FileSettings, processes: int) -> Understood:
    given = settings.within("megatron_lm_config")
    short = {re.sub("^megatron_lm_", "", name): value for name, value in given.values.items()}
    given = FileSettings(TITLE, short, f"{given.path}megatron_lm_")
    tensor, pipeline = given.count("tp_degree"), given.count("pp_degree")
    problems = []
    if processes % (tensor * pipeline):
        problems.append(
            f"num_processes {processes} is no multiple of tp_degree {tensor} × pp_degree {pipeline}"
        )
    p = Parallelism(
        pipeline=pipeline,
        tensor=tensor,
        sequence=tensor > 1 and given.flag("sequence_parallelism"),
        data=max(1, processes // tensor // pipeline),
        zero=1 if given.flag("use_distributed_optimizer") else 0,
        microbatches=given.count("num_micro_batches"),
        recompute="selective" if given.flag("recompute_activations") else "none",
    )
    notes = [f"{name} is not read" for name in given.others(_MEGATRON)]
    return Understood(
        p,
        tuple(problems),
        ("the file does not say the samples of a micro-batch: one on each replica", *notes),
    )


def is_mine(source: str, text: str) -> bool:
    """Tell its configuration file by the keys that all of them have."""
    return re.search(r"^distributed_type\s*:", text, re.MULTILINE) is not None


TOOL = Tool(TITLE, write, refusals, read, is_mine)
