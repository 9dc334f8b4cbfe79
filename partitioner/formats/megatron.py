"""Megatron-LM's flags: degrees, the layout of a pipeline's layers, recomputation, distributed optimizer.

    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4
    --pipeline-model-parallel-layout "Et*7|t*9|t*9|t*7L" --use-distributed-optimizer

Names and rules: megatron-core 0.16.1 (its "PipelineParallelLayerLayout" and "TransformerConfig"), Megatron-LM's arguments.
Megatron's ranks are numbered with tensor parallelism innermost and the pipeline outermost, as groups are here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from cost_models.errors import UsageError
from cost_models.units import counted
from partitioner.formats.from_plan import parallelism_of, stage_modules
from partitioner.formats.parallelism import Parallelism, Zero, is_block
from partitioner.formats.tool import Tool, Understood, Written, cannot_express
from partitioner.record.data import PlanData
from passes.search.words import RecomputeMode

TITLE = "Megatron-LM"
SCHEDULES = ("1f1b", "interleaved")
MOST = 1 << 20
"""The most layers or stages that a layout may unroll to."""


def write(plan: PlanData) -> Written:
    """Write the flags of ``pretrain_*.py`` that say how the plan divides the step, one a line."""
    p = parallelism_of(plan)
    problems = list(refusals(p))
    if problems:
        raise cannot_express(TITLE, problems, "pipeline=… tensor=… data=… zero=1")
    lines = [
        f"--tensor-model-parallel-size {p.tensor}",
        *(["--sequence-parallel"] if p.sequence else []),
        f"--pipeline-model-parallel-size {p.pipeline}",
        *([f'--pipeline-model-parallel-layout "{layout_text(p.layers)}"'] if p.pipeline > 1 else []),
        f"--micro-batch-size {p.microbatch}",
        f"--global-batch-size {p.batch_size}",
        *_ZERO_FLAGS[p.zero],
        *_recompute_flags(plan, p),
    ]
    return Written({"megatron.args": "\n".join(lines) + "\n"}, tuple(_notes(plan, p)))


def refusals(p: Parallelism) -> Iterator[str]:
    """Yield why it cannot run these degrees."""
    if p.pipeline > 1 and p.schedule not in SCHEDULES:
        yield f"it has the schedules {' and '.join(SCHEDULES)}, not {p.schedule}"
    if p.chunks > 1 and p.microbatches % p.pipeline:
        yield f"its interleaved schedule needs a multiple of {p.pipeline} micro-batches, not {p.microbatches}"
    if p.recompute == "gathers" and p.zero != 3:
        yield "it does not gather again in backward what sequence parallelism gathered, alone"
    if p.zero == 3 and p.pipeline > 1:
        yield "its FSDP is not for pipelines"


_ZERO_FLAGS: Mapping[Zero, Sequence[str]] = {
    0: (),
    1: ("--use-distributed-optimizer",),
    3: (
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
    ),
}


def layout_text(layers: Sequence[int]) -> str:
    """Write the layers of each stage as a layout: E embedding, t layer, L loss; (2, 3, 3, 1) -> "Et*2|(t*3|)*2,tL"."""
    stages = [_stage_text(count) for count in layers]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}{',' if '*' in stages[-1] else ''}L"
    words = []
    for text, run in groupby(stages[:-1]):
        count = len(list(run))
        words.append(f"({text}|)*{count}," if count > 1 else f"{text}|")
    return "".join([*words, stages[-1]])


def _stage_text(count: int) -> str:
    return f"t*{count}" if count > 1 else "t" * count


def _recompute_flags(plan: PlanData, p: Parallelism) -> list[str]:
    """Write which layers run again: of all stages the most that one of them does, as Megatron has one number."""
    if p.recompute == "selective":
        return ["--recompute-granularity selective"]
    if p.recompute not in ("full", "auto"):
        return []
    most = max(
        sum(name in set(modules) for name in stage.recomputed_blocks)
        for stage, modules in zip(plan.stages, stage_modules(plan), strict=True)
    )
    if p.recompute == "full":
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {most}"]


def _notes(plan: PlanData, p: Parallelism) -> Iterator[str]:
    counts = {
        sum(name in set(modules) for name in stage.recomputed_blocks)
        for stage, modules in zip(plan.stages, stage_modules(plan), strict=True)
        if any(map(is_block, modules))
    }
    if p.recompute == "auto" and len(counts) > 1:
        yield f"it recomputes as many layers in every stage: {max(counts)}; the plan {min(counts)} to {max(counts)}"
    if p.tensor > 1 and not p.sequence:
        yield "between products Megatron keeps whole activations on every shard; --sequence-parallel would divide them"
    if p.layers and p.layers[-1] == 0:
        yield "the last stage holds no layer: Megatron runs final norm and head there"


def _flags(text: str) -> dict[str, list[str]]:
    """Return every ``--flag`` of a script, a file of arguments or YAML of Megatron's tests, with the words behind it.

    ``--flag: true`` is a flag without words there, ``--flag: false`` none.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError("cannot read Megatron's flags", [f"quotes do not match: {error}"]) from error
    found: dict[str, list[str]] = {}
    name = None
    for word in words:
        if re.fullmatch(r"--[a-z0-9][a-z0-9-]*(:|=.*)?", word, re.DOTALL):
            name, _, value = word[2:].removesuffix(":").partition("=")
            if name in found and name in _READ:
                raise UsageError("cannot read Megatron's flags", [f"--{name} is there twice"])
            found[name] = [value] if value else []
        elif name is not None:
            found[name].append(word)
    return {name: words for name, words in found.items() if words[:1] != ["false"]}


def read(text: str, devices: int) -> Understood:
    """Read Megatron's flags, of a shell script or a file of arguments, for so many devices."""
    flags = _flags(text)
    if not flags.keys() & _READ:
        raise UsageError(
            "cannot read Megatron's flags", ["no flag such as --tensor-model-parallel-size is there"]
        )
    tensor, pipeline = (
        _count(flags, "tensor-model-parallel-size"),
        _count(flags, "pipeline-model-parallel-size"),
    )
    problems, notes = [], []
    for name in ("context-parallel-size", "expert-model-parallel-size", "expert-tensor-parallel-size"):
        if _count(flags, name) > 1:
            raise UsageError(
                "cannot plan this configuration",
                [f"--{name} {flags[name][0]}: experts and context are not divided yet"],
            )
    model = tensor * pipeline
    if devices % model:
        problems.append(
            f"{devices} devices are no multiple of tensor {tensor} × pipeline {pipeline} = {model}"
        )
    data = max(1, devices // model)
    microbatch = _count(flags, "micro-batch-size")
    batch = _count(flags, "global-batch-size", default=microbatch * data)
    if batch % (microbatch * data):
        problems.append(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {microbatch} × {counted(data, 'replica')}"
        )
    microbatches = max(1, batch // (microbatch * data))
    layers = _layers(flags, pipeline)
    chunks = max(1, len(layers) // pipeline)
    if chunks > 1 and microbatches % pipeline:
        problems.append(
            f"the interleaved schedule needs a multiple of {pipeline} micro-batches, not {microbatches}"
        )
    sequence = "sequence-parallel" in flags
    if sequence and tensor == 1:
        problems.append("--sequence-parallel needs --tensor-model-parallel-size of 2 or more")
    recompute, said = _recompute(flags)
    notes += said
    notes += [
        f"--{name} is not read"
        for name in flags
        if name not in _READ and re.search(r"parallel|pipeline|recompute|fsdp|sharding|offload", name)
    ]
    return Understood(
        Parallelism(
            pipeline=pipeline,
            chunks=chunks,
            tensor=tensor,
            sequence=sequence and tensor > 1,
            data=data,
            zero=_zero(flags),
            microbatch=microbatch,
            microbatches=microbatches,
            schedule="interleaved" if chunks > 1 else "1f1b",
            recompute=recompute,
            layers=tuple(layers),
        ),
        tuple(problems),
        tuple(notes),
        {
            word: _count(flags, name)
            for word, name in (("layers", "num-layers"), ("sequence", "seq-length"))
            if name in flags
        },
    )


_READ = frozenset(
    """
    tensor-model-parallel-size sequence-parallel context-parallel-size
    expert-model-parallel-size expert-tensor-parallel-size
    pipeline-model-parallel-size pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage
    num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split num-layers seq-length
    micro-batch-size global-batch-size use-distributed-optimizer use-megatron-fsdp data-parallel-sharding-strategy
    recompute-granularity recompute-method recompute-num-layers recompute-activations
    """.split()  # noqa: SIM905
)


def _count(flags: Mapping[str, list[str]], name: str, default: int = 1) -> int:
    """Return the whole number behind a flag. Raises UsageError that names it."""
    if name not in flags:
        return default
    words = flags[name]
    if len(words) < 1 or not re.fullmatch(r"[1-9][0-9]{0,8}", words[0]):
        shown = " ".join(words[:1]) or "nothing"
        hint = ["write the number, in place of the shell's variable"] if "$" in shown else []
        raise UsageError(
            "cannot read Megatron's flags", [f"--{name}: expected a whole number, not {shown}"], hint
        )
    return int(words[0])


def _zero(flags: Mapping[str, list[str]]) -> Zero:
    if "use-megatron-fsdp" in flags:
        strategy = (flags.get("data-parallel-sharding-strategy") or ["no_shard"])[0]
        levels: dict[str, Zero] = {"no_shard": 0, "optim": 1, "optim_grads": 1, "optim_grads_params": 3}
        if strategy not in levels:
            raise UsageError(
                "cannot read Megatron's flags",
                [f"--data-parallel-sharding-strategy: expected one of {', '.join(levels)}, not {strategy}"],
            )
        return levels[strategy]
    return 1 if "use-distributed-optimizer" in flags else 0


def _recompute(flags: Mapping[str, list[str]]) -> tuple[RecomputeMode, list[str]]:
    granularity = (flags.get("recompute-granularity") or [""])[0]
    if granularity == "selective" or "recompute-activations" in flags:
        return "selective", []
    if granularity == "full":
        if (flags.get("recompute-method") or ["uniform"])[0] == "block":
            count = _count(flags, "recompute-num-layers")
            return "auto", [
                f"{counted(count, 'layer')} of each stage recomputed: planned as many as memory asks for"
            ]
        return "full", []
    if granularity:
        raise UsageError(
            "cannot read Megatron's flags",
            [f"--recompute-granularity: expected full or selective, not {granularity}"],
        )
    return "none", []


def _layers(flags: Mapping[str, list[str]], pipeline: int) -> list[int]:
    """Return the layers of each stage; [] without a pipeline."""
    if "pipeline-model-parallel-layout" in flags:
        words = flags["pipeline-model-parallel-layout"]
        counts = read_layout(words[0] if words else "")
        if len(counts) % pipeline:
            raise UsageError(
                "cannot read Megatron's layout",
                [
                    f"{counted(len(counts), 'stage')} for --pipeline-model-parallel-size {pipeline}: no multiple"
                ],
            )
        return counts if pipeline > 1 else []
    if pipeline == 1 or "num-layers" not in flags:
        return []
    total = _count(flags, "num-layers")
    per_stage = _count(flags, "num-layers-per-virtual-pipeline-stage", default=0)
    chunks = (
        total // pipeline // per_stage if per_stage else _count(flags, "num-virtual-stages-per-pipeline-rank")
    )
    stages = pipeline * max(1, chunks)
    ends = [
        int("account-for-embedding-in-pipeline-split" in flags),
        int("account-for-loss-in-pipeline-split" in flags),
    ]
    first = _count(flags, "decoder-first-pipeline-num-layers", default=0)
    last = _count(flags, "decoder-last-pipeline-num-layers", default=0)
    inner = stages - bool(first) - bool(last)
    rest = total + sum(ends) - first - last
    if inner < 1 or rest % inner or rest < inner:
        raise UsageError(
            "cannot divide the layers among the stages",
            [f"{rest} layers (of {total}) on {counted(inner, 'stage')}: no multiple"],
            ["say --pipeline-model-parallel-layout"],
        )
    each = [rest // inner] * inner
    each[0] -= ends[0]
    each[-1] -= ends[1]
    return [*([first] if first else []), *each, *([last] if last else [])]


def read_layout(text: str) -> list[int]:
    """Count the layers of each stage of a layout such as "Et*3|(tt|)*29,t|L". Raises UsageError that names the place."""

    def refuse(why: str) -> UsageError:
        return UsageError(
            "cannot read Megatron's layout", [f"{text!r}: {why}"], ["write it as 'Et*2|(t*2|)*2,tL'"]
        )

    flat = text.replace(",", "")
    for pattern in (r"\(([^()]*)\)\*(\d{1,6})", r"([EtmL|])\*(\d{1,6})"):
        size = sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, flat))
        if size > MOST:
            raise refuse(f"{size:,} stages and layers, more than {MOST:,}")
        flat = re.sub(pattern, lambda m: m[1] * int(m[2]), flat)
    wrong = re.search(r"[^EtmL|]", flat)
    if wrong:
        raise refuse(f"{wrong[0]!r} is none of E, t, m, L, |, *n and (…)*n")
    if flat.count("E") != 1 or not flat.startswith("E"):
        raise refuse("E, the embedding, stands at the beginning, once")
    if flat.count("L") != 1 or not flat.endswith("L"):
        raise refuse("L, the loss, stands at the end, once")
    if "m" in flat:
        raise refuse("layers that predict several tokens (m) are not planned")
    return [stage.count("t") for stage in flat.split("|")]


def is_mine(source: str, text: str) -> bool:
    """Tell a script or file of arguments by its flags."""
    return (
        re.search(r"--(tensor|pipeline|context|expert)-model-parallel-|--micro-batch-size\b", text)
        is not None
    )


TOOL = Tool(TITLE, write, refusals, read, is_mine)
