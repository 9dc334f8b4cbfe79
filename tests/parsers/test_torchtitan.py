"""torchtitan's own classes and functions take what is written for it, and the same plan comes back.

Most of the package cannot be imported without what it depends on (tyro, spmd_types), so the classes and functions that say
what a configuration means are taken out of its files, and run as they stand there.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dataclasses
import os
import sys
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining import schedules

from cost_models.cluster import ClusterSpec
from partitioner.formats.check import described
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.schedule_csv import schedule_of
from partitioner.formats.torchtitan import FILE, write
from partitioner.formats.torchtitan_read import BESIDE, NO_MATTER, NUMBERS, read
from runtime.schedules import SCHEDULES
from tests.support.decoder import LAYERS, MODULES, Decoder, decoder_plan

EIGHT = ClusterSpec.parse("H100-80GB:8")


def pipelined(layers: tuple[int, ...], schedule: str, **fields: Any) -> Parallelism:
    return Parallelism(
        **{"pipeline": 2, "data": 4, "microbatches": 8, "schedule": schedule, "layers": layers, **fields}
    )


EVEN, HALVES, ONES = (2, 2, 2, 2), (4, 4), (1,) * 8
PLANS = [
    Parallelism(data=8, microbatches=4),
    Parallelism(data=8, microbatch=4, recompute="full"),
    Parallelism(data=8, zero=3, microbatches=4),
    Parallelism(data=8, zero=3, microbatch=2, microbatches=2, recompute="gathers"),
    Parallelism(data=8, zero=3, microbatches=4, recompute="full"),
    Parallelism(tensor=2, data=4, microbatches=8),
    Parallelism(tensor=2, sequence=True, data=4, microbatch=2, microbatches=2, recompute="full"),
    Parallelism(tensor=4, sequence=True, data=2, zero=3, microbatches=4),
    pipelined(HALVES, "1f1b"),
    pipelined((3, 5), "1f1b", zero=3, recompute="gathers"),
    pipelined(EVEN, "1f1b", pipeline=4, data=2, recompute="full"),
    pipelined(ONES, "1f1b", pipeline=8, data=1, microbatches=4),
    pipelined(HALVES, "gpipe", tensor=2, data=2),
    pipelined(HALVES, "1f1b", tensor=2, sequence=True, data=2, zero=3),
    pipelined(EVEN, "interleaved", chunks=2),
    pipelined(ONES, "interleaved", pipeline=4, chunks=2, data=2, microbatches=9),
    pipelined(EVEN, "interleaved", chunks=2, zero=3, recompute="full"),
    pipelined(EVEN, "zb-v", chunks=2),
    pipelined(HALVES, "zb-h1", tensor=2, data=2),
    pipelined(EVEN, "zb-h2", pipeline=4, data=2, microbatch=2),
]


@cache
def source(path: str) -> ast.Module:
    return ast.parse(Path(str(distribution("torchtitan").locate_file(f"torchtitan/{path}"))).read_text())


def taken(path: str, names: set[str] | None = None, **known: Any) -> Any:
    """The named classes and functions of a file of the package, or all of it; ``known``: what they refer to."""
    nodes = [node for node in source(path).body if names is None or getattr(node, "name", None) in names]
    made = ModuleType(f"taken_{Path(path).stem}")
    vars(made).update(known)
    sys.modules[made.__name__] = made  # dataclasses look for it
    flags = __future__.annotations.compiler_flag if names is not None else 0
    exec(compile(ast.Module(nodes, []), path, "exec", flags=flags, dont_inherit=True), vars(made))
    return made


@cache
def configs() -> Any:
    return taken("config/configs.py")


@cache
def pipelines() -> Any:
    names = {"_build_pipeline_schedule", "_get_pp_rank_to_stage_indices_mapping", "_split_module"}
    names |= {"_generate_llm_fqn_per_model_part"}
    known = {name: value for name, value in vars(schedules).items() if not name.startswith("__")}
    quiet = SimpleNamespace(info=lambda text: None, warning=lambda text: None)
    known |= {
        "copy": copy,
        "nn": nn,
        "os": os,
        "ModuleDict": nn.ModuleDict,
        "ModuleList": nn.ModuleList,
        "logger": quiet,
    }
    return taken("distributed/pipeline_parallel.py", names, **known)


def run(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the file as Python; the package's policies of checkpointing need what is not installed."""
    policies: Any = ModuleType("torchtitan.distributed.activation_checkpoint")
    for name in ("FullAC", "SelectiveAC"):
        setattr(policies, name, SimpleNamespace(Config=lambda name=name: name))
    for name, module in (
        ("torchtitan", ModuleType("torchtitan")),
        ("torchtitan.config", configs()),
        ("torchtitan.distributed", ModuleType("torchtitan.distributed")),
        (policies.__name__, policies),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    left: dict[str, Any] = {}
    exec(compile(text, FILE, "exec"), left)
    return left


@pytest.mark.parametrize("wanted", PLANS, ids=described)
def test_plans_come_back(wanted: Parallelism, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = decoder_plan(wanted, EIGHT)
    assert parallelism_of(plan) == wanted
    written = write(plan)
    for name, text in written.files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    made = run(written.files[FILE], monkeypatch)
    parallelism, training = made["parallelism"], made["training"]
    assert made["activation_checkpoint"] == ("FullAC" if wanted.recompute == "full" else None)

    dims_of = taken(
        "distributed/parallel_dims.py",
        {"ParallelDims"},
        dataclass=dataclasses.dataclass,
        field=dataclasses.field,
    ).ParallelDims
    dims = dims_of.from_config(parallelism, wanted.world_size)  # it checks their product
    assert (dims.pp, dims.dp_replicate * dims.dp_shard, dims.tp) == (
        wanted.pipeline,
        wanted.data,
        wanted.tensor,
    )
    local = training.local_batch_size
    assert training.global_batch_size == wanted.batch_size
    assert training.global_batch_size % (local * wanted.data) == 0
    if wanted.pipeline > 1:
        check_pipeline(wanted, plan, parallelism, local)
    else:
        assert local == wanted.microbatch

    found = read(written.files[FILE], wanted.world_size)
    assert found.parallelism == wanted
    assert found.problems == ()
    again = decoder_plan(found.parallelism, EIGHT)
    assert again.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)


def check_pipeline(wanted: Parallelism, plan: Any, parallelism: Any, local: int) -> None:
    """Build stages and schedule as the package does, for every rank; torch then computes in the plan's own order."""
    own, parts = pipelines(), parallelism.module_fqns_per_model_part
    assert [name for part in parts for name in part] == list(MODULES)
    assert [name for part in own._generate_llm_fqn_per_model_part(4, LAYERS) for name in part] == list(
        MODULES
    )
    assert tuple(sum(name.startswith("layers.") for name in part) for part in parts) == wanted.layers
    model, ranks = Decoder(), wanted.pipeline
    for part in parts:
        stage = own._split_module(model, part)
        kept = {n for n in MODULES if n in dict(stage.named_modules()) and stage.get_submodule(n) is not None}
        assert kept == set(part)
    placed = [
        own._get_pp_rank_to_stage_indices_mapping(
            rank, ranks, parallelism.pipeline_parallel_schedule, len(parts)
        )
        for rank in range(ranks)
    ]
    stage_ranks = SCHEDULES[wanted.schedule].stage_ranks(len(parts), range(ranks))
    assert {stage: rank for rank, stages in enumerate(placed) for stage in stages} == dict(
        enumerate(stage_ranks)
    )
    fields = {
        "group_size": ranks,
        "group_rank": 0,
        "num_stages": len(parts),
        "submod": model,
        "is_last": False,
    }
    made = own._build_pipeline_schedule(
        parallelism=parallelism,
        local_batch_size=local,
        stages=[SimpleNamespace(**fields) for _ in placed[0]],
        loss_fn=lambda *_: None,
    )
    assert made._n_microbatches == wanted.microbatches
    if isinstance(made, schedules.PipelineScheduleMulti):
        told = [[str(a) for a in row if a is not None] for _, row in sorted(made.pipeline_order.items())]
        assert told == [[str(cell) for cell in row] for row in schedule_of(plan).rows]
    else:
        assert type(made).__name__ == {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}[wanted.schedule]


def test_its_own_defaults_are_the_ones_that_are_read() -> None:
    """A file that says nothing but the degree of the pipeline has the package's own values for the rest."""
    own = configs().ParallelismConfig(pipeline_parallel_degree=2)
    batch = configs().TrainingConfig()
    p = read("ParallelismConfig(pipeline_parallel_degree=2)", 2).parallelism
    assert own.pipeline_parallel_schedule == "1F1B"
    assert p.microbatch == own.pipeline_parallel_microbatch_size
    assert p.microbatches == batch.local_batch_size // own.pipeline_parallel_microbatch_size
    assert (own.data_parallel_shard_degree, own.fsdp_reshard_after_forward) == (-1, "default")
    assert own.enable_sequence_parallel


def test_every_field_of_the_package_is_known() -> None:
    fields = {field.name for field in dataclasses.fields(configs().ParallelismConfig)}
    assert fields <= {*NUMBERS, *BESIDE, *NO_MATTER}
