"""The parallelism that a torchtitan configuration says, in Python or in old TOML files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cost_models.errors import UsageError
from cost_models.spec.fields import did_you_mean
from cost_models.units import counted, show
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.tool import Understood
from partitioner.formats.torchtitan_fields import GivenSetting, GivenSettings, refused, settings_of
from passes.search.words import RecomputeMode
from runtime.schedules import SCHEDULES

READ_SCHEDULES: Mapping[str, tuple[str, int, str]] = {
    "1f1b": ("1f1b", 1, ""),
    "gpipe": ("gpipe", 1, ""),
    "interleaved1f1b": ("interleaved", 2, ""),
    "zbvzerobubble": ("zb-v", 2, ""),
    "loopedbfs": ("interleaved", 2, "LoopedBFS holds every micro-batch: planned as interleaved"),
    "interleavedzerobubble": (
        "interleaved",
        2,
        "InterleavedZeroBubble: planned as interleaved, with whole backwards",
    ),
    "dualpipev": ("zb-v", 2, "DualPipeV is planned as zb-v, which lays stages alike"),
    "pipelineschedulesingle": ("list", 1, ""),
    "pipelineschedulemulti": ("list", 1, ""),
}
"""torch's names in small letters -> ours, stages per rank where the file does not say, what differs."""
ABSTRACT = ("pipelineschedulesingle", "pipelineschedulemulti")
"""Names that need a CSV file."""
SELECTIVE = (
    "SelectiveAC keeps attention's output and every second product of a block; here attentions run again"
)
UNPLANNED = ("context_parallel_degree", "expert_parallel_degree")
NUMBERS = {
    "data_parallel_replicate_degree": 1,
    "data_parallel_shard_degree": -1,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "pipeline_parallel_microbatch_size": 1,
    "num_pp_microbatches": 1,
}
"""Whole numbers of ParallelismConfig that are read, with torchtitan's defaults."""
BESIDE = frozenset(
    ["fsdp_reshard_after_forward", "enable_sequence_parallel", "module_fqns_per_model_part", "pipeline_parallel_schedule",
     "pipeline_parallel_schedule_csv", "pipeline_parallel_layers_per_stage", "pipeline_parallel_first_stage_less_layers",
     "pipeline_parallel_last_stage_less_layers"]
)  # fmt: skip
"""Its other fields that are read."""
NO_MATTER = frozenset(
    ["spmd_backend", "full_dtensor", "enable_fsdp_symm_mem", "context_parallel_load_balancer",
     "context_parallel_rotate_method", "context_parallel_ptrr_mask_key"]
)  # fmt: skip
"""Fields that change neither degrees nor order."""
BATCH = {"local_batch_size": 8, "global_batch_size": -1, "seq_len": 2048}
TOKENS = {
    "num_tokens_per_microbatch_per_dp_rank": 16384,
    "num_tokens_per_train_step": -1,
    "max_context_length": 2048,
}
"""The batch in tokens, of torchtitan after 0.3.0."""


def read(text: str, devices: int) -> Understood:
    """Read a configuration for so many devices. Raises UsageError that names the line."""
    settings = settings_of(text)
    given = settings.parallelism
    degrees = {name: _number(given, name, default) for name, default in NUMBERS.items()}
    problems: list[str] = []
    notes = [f"{name} is not read" for name in given if name not in {*NUMBERS, *BESIDE, *NO_MATTER}]
    _refuse_unplanned(given, degrees)
    replicate, shard = degrees["data_parallel_replicate_degree"], degrees["data_parallel_shard_degree"]
    tensor, pipeline = degrees["tensor_parallel_degree"], degrees["pipeline_parallel_degree"]
    if shard == -1:
        model = replicate * tensor * pipeline
        shard = max(1, devices // model)
        if devices % model or devices < model:
            what = f"replicate {replicate} × tensor {tensor} × pipeline {pipeline} = {model}"
            problems.append(f"{counted(devices, 'device')} are no multiple of {what}")
    data = replicate * shard
    if replicate > 1 and shard > 1:
        notes.append(f"parameters are in parts among {shard} replicas there (HSDP); planned among all {data}")
    microbatch, microbatches = _batch(settings, degrees, data, problems, notes)
    schedule, chunks, layers = _pipeline(settings, pipeline, microbatches, problems, notes)
    sequence = _flag(given, "enable_sequence_parallel", default=True)
    parallelism = Parallelism(
        pipeline=pipeline,
        chunks=chunks,
        tensor=tensor,
        sequence=sequence and tensor > 1,
        data=data,
        zero=3 if shard > 1 else 0,
        microbatch=microbatch,
        microbatches=microbatches,
        schedule=schedule,
        recompute=_recompute(settings, pipeline, shard, notes),
        layers=tuple(layers),
    )
    lengths = (name for name in ("seq_len", "max_context_length") if name in settings.training)
    said = [("sequence", _number(settings.training, name, 0)) for name in lengths]
    return Understood(parallelism, tuple(problems), tuple(notes), dict(said))


def _number(table: Mapping[str, GivenSetting], name: str, default: int) -> int:
    """Return a whole number; -1 where that stands for what is left. Raises UsageError that names the line."""
    if name not in table:
        return default
    value, line = table[name].value, table[name].line
    if type(value) is not int:
        raise refused(line, f"{name}: expected a whole number, not {show(value)}")
    if (value < 1 and not (value == -1 == default)) or value >= 1 << 40:
        raise refused(line, f"{name}: expected 1 or more{', or -1' if default == -1 else ''}, not {value}")
    return value


def _flag(table: Mapping[str, GivenSetting], name: str, *, default: bool) -> bool:
    value = table[name].value if name in table else default
    if not isinstance(value, bool):
        raise refused(table[name].line, f"{name}: expected true or false, not {show(value)}")
    return value


def _word(table: Mapping[str, GivenSetting], name: str, default: str, allowed: Sequence[str] = ()) -> str:
    value = table[name].value if name in table else default
    if value is None and not allowed:
        return ""
    if not isinstance(value, str) or (allowed and value not in allowed):
        what = f"one of {', '.join(allowed)}" if allowed else "text"
        raise refused(table[name].line, f"{name}: expected {what}, not {show(value)}")
    return value


def _refuse_unplanned(given: Mapping[str, GivenSetting], degrees: Mapping[str, int]) -> None:
    over = [name for name in UNPLANNED if degrees[name] > 1]
    if not over:
        return
    reasons = [f"line {given[name].line}: {name}={degrees[name]}: that is not planned yet" for name in over]
    shard, experts = degrees["data_parallel_shard_degree"], degrees["expert_parallel_degree"]
    dense = shard * degrees["context_parallel_degree"] * degrees["tensor_parallel_degree"]
    if shard > 0 and dense % experts:
        reasons.append(
            f"torchtitan refuses it, too: shard × context × tensor = {dense} is no multiple of {experts}"
        )
    raise UsageError("cannot plan this configuration", reasons)


def _batch(
    settings: GivenSettings, degrees: Mapping[str, int], data: int, problems: list[str], notes: list[str]
) -> tuple[int, int]:
    """Return the samples of a micro-batch on each replica, and the micro-batches of a step."""
    training, pipeline = settings.training, degrees["pipeline_parallel_degree"] > 1
    tokens = [name for name in TOKENS if name in training]
    samples = [name for name in BATCH if name in training]
    if tokens and samples:
        raise refused(
            training[tokens[0]].line,
            f"{tokens[0]} beside {samples[0]}: a version has a batch in tokens or in samples",
        )
    if tokens or "num_pp_microbatches" in settings.parallelism:
        each, step, length = (_number(training, name, default) for name, default in TOKENS.items())
        at_once = degrees["num_pp_microbatches"] if pipeline else 1
        if each % length:
            problems.append(
                f"{each:,} tokens of a micro-batch are no samples of max_context_length {length:,}"
            )
        microbatch, name, unit = max(1, each // length), "num_tokens_per_train_step", each
    else:
        local, step, _ = (_number(training, name, default) for name, default in BATCH.items())
        microbatch = degrees["pipeline_parallel_microbatch_size"] if pipeline else local
        if local % microbatch:
            problems.append(
                f"local_batch_size {local} is no multiple of pipeline_parallel_microbatch_size {microbatch}"
            )
        at_once, name, unit = max(1, local // microbatch), "global_batch_size", microbatch
    if step == -1:
        return microbatch, at_once
    if step % (unit * at_once * data):
        problems.append(f"{name} {step:,} is no multiple of {unit * at_once:,} × {counted(data, 'replica')}")
    runs = max(1, step // (unit * at_once * data))
    if pipeline and runs > 1:
        notes.append(
            f"the pipeline runs empty {runs} times a step there; planned as one run of {runs * at_once}"
        )
    return microbatch, at_once * runs


def _pipeline(
    settings: GivenSettings, pipeline: int, microbatches: int, problems: list[str], notes: list[str]
) -> tuple[str, int, list[int]]:
    """Return the schedule, the stages of each rank, and the layers of each stage where they are said."""
    given = settings.parallelism
    name = _word(given, "pipeline_parallel_schedule", "1F1B")
    table = _word(given, "pipeline_parallel_schedule_csv", "")
    if pipeline == 1:
        return "1f1b", 1, []
    if name.lower() not in READ_SCHEDULES:
        where = given["pipeline_parallel_schedule"].line
        near = did_you_mean(name, READ_SCHEDULES)
        why = f"pipeline_parallel_schedule: torch has no {show(name)}{near}"
        raise refused(where, why, "there are GPipe, 1F1B, Interleaved1F1B, ZBVZeroBubble")
    schedule, chunks, note = READ_SCHEDULES[name.lower()]
    if table:
        stem = table.rpartition("/")[2].removesuffix(".csv")
        schedule = stem if stem in SCHEDULES else "list"
        note = f"the order in {table} is not read with this file: planned as {schedule}"
    elif name.lower() in ABSTRACT:
        problems.append(f"{name} is no schedule by itself: it needs pipeline_parallel_schedule_csv")
    parts = _parts(given)
    if parts:
        layers = _layers(parts, problems)
        if len(parts) % pipeline:
            problems.append(f"{counted(len(parts), 'model part')} for {pipeline} groups: no multiple")
        chunks, single = max(1, len(parts) // pipeline), chunks == 1 and not table
        if chunks > 1 and single:
            problems.append(f"{name} runs one part on each rank, not {chunks}")
        if SCHEDULES[schedule].folded and chunks != 2:
            problems.append(f"{name} runs two parts on each rank, not {chunks}")
        if chunks == 1 and schedule == "interleaved":
            schedule = "1f1b"
            notes.append(f"{name} of one part on each rank is 1F1B")
    else:
        layers = []
        stages = counted(chunks * pipeline, "stage")
        notes.append(f"torchtitan divides the layers by its rule; planned are the best borders of {stages}")
    if note:
        notes.append(note)
    if schedule == "1f1b" and microbatches < pipeline and not table:
        problems.append(f"1F1B needs {pipeline} micro-batches or more, not {microbatches}")
    if schedule == "interleaved" and not table and microbatches % max(1, microbatches // pipeline):
        problems.append(
            f"{name} needs a multiple of {microbatches // pipeline} micro-batches, not {microbatches}"
        )
    return schedule, chunks, layers


def _parts(given: Mapping[str, GivenSetting]) -> list[list[str]]:
    setting = given.get("module_fqns_per_model_part")
    if setting is None or not setting.value:
        return []
    value = setting.value
    if not isinstance(value, list) or not all(
        isinstance(part, list) and all(isinstance(name, str) for name in part) for part in value
    ):
        raise refused(setting.line, "module_fqns_per_model_part: expected lists of names")
    return value


def _layers(parts: Sequence[Sequence[str]], problems: list[str]) -> list[int]:
    """Count the layers of each part; problems are those that are missing, or in another order than the model's."""
    names = [name for part in parts for name in part]
    numbers = [name.removeprefix("layers.") for name in names if name.startswith("layers.")]
    if numbers != [str(index) for index in range(len(numbers))]:
        problems.append(
            "module_fqns_per_model_part names the layers in another order than 0, 1, 2, … once each"
        )
    ends = (("tok_embeddings", parts[0]), ("norm", parts[-1]), ("lm_head", parts[-1]))
    for name, part in ends:
        there = [n for n in names if n == name or (name == "lm_head" and n == "output")]
        if len(there) != 1:
            problems.append(f"module_fqns_per_model_part names {name} {len(there)} times")
        elif there[0] not in part and name != "norm":
            problems.append(f"module_fqns_per_model_part has {there[0]} in the middle")
    return [sum(name.startswith("layers.") for name in part) for part in parts]


def _recompute(settings: GivenSettings, pipeline: int, shard: int, notes: list[str]) -> RecomputeMode:
    """Return what backward computes again: by the policy of checkpointing, and of parameters in parts."""
    allowed = ("default", "always", "never")
    policy = _word(settings.parallelism, "fsdp_reshard_after_forward", "default", allowed)
    again = shard > 1 and (policy == "always" or (policy == "default" and pipeline == 1))
    mode = "selective" if settings.checkpointing is None else settings.checkpointing.value
    if settings.checkpointing is None:
        notes.append("no activation_checkpoint is said: torchtitan's own is SelectiveAC")
    if mode == "full":
        if shard > 1 and not again:
            notes.append(
                "parameters stay whole until backward there; planned as gathered again with each block"
            )
        return "full"
    if mode == "selective":
        notes.append(SELECTIVE)
        if again:
            notes.append("parameters are gathered again in backward there, and stay whole as planned here")
        return "selective"
    if mode == "memory_budget":
        notes.append(
            "MemoryBudgetAC leaves to the compiler what is kept; planned as blocks run again where memory asks for it"
        )
        return "auto"
    return "gathers" if again else "none"
