"""Galvatron's JSON: a word for each layer: its shards, how replicas divide state, whether it is recomputed.

    {"pp_deg": 2, "tp_sizes_enc": "2,2,2,2", "dp_types_enc": "0,0,0,0", "checkpoint": "0,0,1,1", "pp_division": "2,2",
     "global_bsz": 16, "chunks": 4, "pipeline_type": "pipedream_flush", "default_dp_type": "zero2"}

Names: Hetu-Galvatron at cea12ff. ``dp_types_enc``: 1 is ZeRO-3, 0 the default type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from cost_models.units import counted
from partitioner.formats.from_plan import parallelism_of, stage_modules
from partitioner.formats.parallelism import Parallelism, Zero, is_block
from partitioner.formats.settings import FileSettings, from_json
from partitioner.formats.tool import Tool, Understood, Written, cannot_express
from partitioner.record.data import PlanData
from passes.search.words import RecomputeMode

TITLE = "Galvatron"
_SCHEDULES = {"1f1b": "pipedream_flush", "gpipe": "gpipe"}


def write(plan: PlanData) -> Written:
    """Write the file that ``galvatron_config_path`` names."""
    p = parallelism_of(plan)
    modules = stage_modules(plan)
    blocks = [name for stage in modules for name in stage if is_block(name)]
    problems = list(refusals(p))
    if problems:
        raise cannot_express(TITLE, problems, "pipeline=… tensor=… data=… zero=3")
    again = {name for stage in plan.stages for name in stage.recomputed_blocks}
    content = {
        "pp_deg": p.pipeline,
        "tp_sizes_enc": _each(blocks, p.tensor),
        "tp_consecutive_flags": _each(blocks, 1),
        "dp_types_enc": _each(blocks, int(p.zero == 3)),
        "use_sp": _each(blocks, 0),
        "checkpoint": ",".join(str(int(name in again)) for name in blocks),
        "global_bsz": p.batch_size,
        "chunks": p.microbatches,
        "pp_division": ",".join(map(str, p.layers or (len(blocks),))),
        "pipeline_type": _SCHEDULES.get(p.schedule, "gpipe"),
        "default_dp_type": "ddp" if p.zero == 0 else "zero2",
        "vtp": p.tensor,
        "vsp": 0,
        "embed_sdp": int(p.zero == 3),
    }
    return Written({"galvatron.json": json.dumps(content, indent=2) + "\n"}, tuple(_notes(p)))


def _each(blocks: Sequence[str], value: int) -> str:
    return ",".join([str(value)] * len(blocks))


def refusals(p: Parallelism) -> Iterator[str]:
    """Yield why it cannot run these degrees."""
    if p.pipeline > 1 and (p.schedule not in _SCHEDULES or p.chunks > 1):
        yield f"it has the schedules gpipe and 1f1b (pipedream_flush), not {p.schedule}"
    if p.zero == 1:
        yield "it divides gradients with the optimizer's state (zero2), or parameters too (dp_types_enc 1)"
    if p.recompute in ("gathers", "selective"):
        yield f"it recomputes whole layers, not {p.recompute}"


def _notes(p: Parallelism) -> Iterator[str]:
    if p.tensor > 1:
        word = "with" if p.sequence else "without"
        yield f"--sequence-parallel is a flag of its script: start it {word} that, as the plan"
    yield "embedding and head are not among its layers: the first and the last stage hold them"


_NAMES = ("pp_deg", "tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint", "global_bsz",
          "chunks", "pp_division", "pipeline_type", "default_dp_type", "vtp", "vsp", "embed_sdp",
          "cp_sizes_enc", "ep_sizes_enc", "tp_of_ep_sizes_enc")  # fmt: skip


def read(text: str, devices: int) -> Understood:
    """Read a strategy for so many devices. Raises UsageError for one that differs from layer to layer."""
    settings = from_json(TITLE, text)
    if "tp_sizes_enc" not in settings:
        raise settings.refused("tp_sizes_enc is not there")
    problems, notes = [], []
    pipeline = settings.count("pp_deg")
    shards = _numbers(settings, "tp_sizes_enc")
    layers = len(shards)
    types = _numbers(settings, "dp_types_enc", [0] * layers)
    ulysses = _numbers(settings, "use_sp", [0] * layers)
    again = _numbers(settings, "checkpoint", [0] * layers)
    for name, values in (("dp_types_enc", types), ("use_sp", ulysses), ("checkpoint", again)):
        if len(values) != layers:
            raise settings.refused(f"{name}: {counted(len(values), 'layer')}, tp_sizes_enc has {layers}")
    for name, values in (("tp_sizes_enc", shards), ("dp_types_enc", types)):
        if len(set(values)) > 1:
            raise settings.unplanned(
                f"{name}: layers that are divided differently ({', '.join(map(str, sorted(set(values))))})"
            )
    _refuse_others(settings, ulysses)
    tensor = shards[0]
    if tensor < 1:
        raise settings.wrong("tp_sizes_enc", "sizes of 1 or more")
    if devices % (tensor * pipeline):
        problems.append(f"{devices} devices are no multiple of tensor {tensor} × pipeline {pipeline}")
    data = max(1, devices // tensor // pipeline)
    chunks = settings.count("chunks")
    batch = settings.count("global_bsz", data * chunks)
    if batch % (data * chunks):
        problems.append(f"global_bsz {batch} is no multiple of {counted(data, 'replica')} × chunks {chunks}")
    division = _numbers(settings, "pp_division", [])
    if division and (len(division) != pipeline or sum(division) != layers):
        problems.append(
            f"pp_division {'+'.join(map(str, division))} are not {layers} layers in {pipeline} stages"
        )
    default = settings.word("default_dp_type", {"ddp": 0, "zero2": 2, "zero3": 3}, 0)
    zero: Zero = 3 if types[0] or default == 3 else 1 if default else 0
    if zero == 1 and data > 1:
        notes.append(
            "zero2 is planned as ZeRO-1: gradients, which it divides among the replicas, are kept whole"
        )
    if settings.count("vtp", tensor) != tensor:
        notes.append(f"vtp {settings.get('vtp')} is not read: embedding and head are divided as the layers")
    if settings.get("embed_sdp") is not None and bool(settings.count("embed_sdp", 0, least=0)) != (zero == 3):
        notes.append("embed_sdp is not read: embedding and head are divided as the layers")
    notes += [f"{name} is not read" for name in settings.others(_NAMES)]
    some = f"{sum(map(bool, again))} of {counted(layers, 'layer')} recomputed: planned as many as memory asks for"
    notes += [some] if any(again) and not all(again) else []
    recompute: RecomputeMode = "full" if all(again) else "auto" if any(again) else "none"
    p = Parallelism(
        pipeline=pipeline,
        tensor=tensor,
        data=data,
        zero=zero,
        microbatch=max(1, batch // data // chunks),
        microbatches=chunks,
        schedule=settings.word("pipeline_type", {word: name for name, word in _SCHEDULES.items()}, "1f1b"),
        recompute=recompute,
        layers=tuple(division) if pipeline > 1 else (),
    )
    return Understood(p, tuple(problems), tuple(notes), {"layers": layers})


def _refuse_others(settings: FileSettings, ulysses: Sequence[int]) -> None:
    """Raise UsageError for parallelism that is not planned."""
    if any(ulysses) or settings.count("vsp", 0, least=0):
        raise settings.unplanned("use_sp: positions are not divided between attentions yet")
    for name in ("cp_sizes_enc", "ep_sizes_enc", "tp_of_ep_sizes_enc"):
        if any(size > 1 for size in _numbers(settings, name)):
            raise settings.unplanned(f"{name}: experts and context are not divided yet")
    if any(flag != 1 for flag in _numbers(settings, "tp_consecutive_flags", [1])):
        raise settings.unplanned("tp_consecutive_flags 0: shards of neighbouring ranks alone are planned")


def _numbers(settings: FileSettings, name: str, default: Sequence[int] = ()) -> list[int]:
    """Return a list written as "1,2,2"."""
    value = settings.get(name)
    if value is None:
        return list(default)
    if not isinstance(value, str) or not re.fullmatch(r"\d{1,6}(,\d{1,6}){0,9999}", value, re.ASCII):
        raise settings.wrong(name, 'numbers such as "2,2,2"')
    return [int(word) for word in value.split(",")]


def is_mine(source: str, text: str) -> bool:
    """Tell its JSON by the layers' sizes."""
    return '"tp_sizes_enc"' in text


TOOL = Tool(TITLE, write, refusals, read, is_mine)
