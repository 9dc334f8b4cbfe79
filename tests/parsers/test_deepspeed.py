"""DeepSpeed's own classes read what is written for it, find the same bounds, and the same plan comes back."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.utils import partition_balanced, partition_uniform

from cost_models.errors import UsageError
from partitioner.formats import deepspeed
from partitioner.formats.from_plan import parallelism_of
from tests.parsers.plans import PLANS
from tests.support.formatted_plans import llama_plan_of, plan_of
from tests.unit.partitioner.formats.test_deepspeed import FORMS

LLAMAS = [
    ("tensor=2 data=2 zero=1 microbatch=2 recompute=none", "auto"),
    ("tensor=2 data=2 microbatch=2 recompute=full", "auto"),
    ("tensor=2 data=2 zero=3 microbatch=1 recompute=none", "auto"),
    ("pipeline=2 data=2 zero=1 microbatch=1 recompute=none", "1f1b"),
    ("pipeline=4 data=1 microbatch=1 recompute=full", "1f1b"),
]


class _Ranks:
    """A stand-in for the groups of processes, of which the configuration asks one number."""

    def __init__(self, data: int) -> None:
        self.data = data

    def get_data_parallel_world_size(self) -> int:
        return self.data


def _parsed(config: dict[str, Any], data: int, monkeypatch: pytest.MonkeyPatch) -> DeepSpeedConfig:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_, **__: 0)
    return DeepSpeedConfig(config, mpu=_Ranks(data))


@pytest.mark.parametrize(("fix", "schedule", "model"), [
    *((fix, schedule, "gpt2") for fix, schedule in PLANS), *((fix, schedule, "llama") for fix, schedule in LLAMAS),
])  # fmt: skip
def test_plans_come_back(fix: str, schedule: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = llama_plan_of(fix, schedule) if model == "llama" else plan_of(fix, schedule)
    p = parallelism_of(plan)
    beyond = p.sequence or p.chunks > 1 or (p.tensor > 1 and (model == "gpt2" or p.pipeline > 1))
    with pytest.raises(UsageError) if beyond else nullcontext():
        text = str(deepspeed.write(plan))
    if beyond:
        return
    config = _parsed(json.loads(text), p.data, monkeypatch)
    assert config.zero_config.stage == p.zero
    assert config.train_micro_batch_size_per_gpu == p.microbatch
    assert config.gradient_accumulation_steps == p.microbatches
    assert config.train_batch_size == p.batch_size
    assert max(1, config.tensor_parallel_config.autotp_size) == p.tensor
    assert config.pipeline["activation_checkpoint_interval"] == int(p.pipeline > 1 and p.recompute == "full")
    understood = deepspeed.read(text, p.world_size)
    assert understood.problems == ()
    assert understood.parallelism == replace(p, layers=())  # pipeline.py has these


def test_its_rules_match_the_weights_that_they_are_of() -> None:
    text = str(deepspeed.write(llama_plan_of("tensor=2 data=2 zero=1 microbatch=2 recompute=none")))
    config = TPTrainingConfig(**json.loads(text)["tensor_parallel"]).get_partition_config_object()
    assert isinstance(config, AutoTPConfig)
    wanted = {"q_proj": "column", "o_proj": "row", "up_proj": "column", "down_proj": "row"}
    for name, direction in wanted.items():
        inner = "self_attn" if name in ("q_proj", "o_proj") else "mlp"
        spec = config.find_matching_spec(f"model.layers.3.{inner}.{name}.weight")
        assert spec is not None
        assert spec.partition_type == PartitionType(direction)
    assert config.find_matching_spec("lm_head.weight").gather_output
    assert config.find_matching_spec("model.layers.3.input_layernorm.weight") is None


def test_bounds_are_found_as_deepspeed_finds_them() -> None:
    drawn = random.Random(43)
    for _ in range(200):
        weights = [drawn.choice([0, 1, 1, 3, 7]) for _ in range(drawn.randint(1, 14))]
        parts = drawn.randint(1, 6)
        assert deepspeed.balanced_bounds(weights, parts) == [
            int(n) for n in partition_balanced(weights, parts)
        ]
        assert deepspeed.uniform_bounds(len(weights), parts) == partition_uniform(len(weights), parts)


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_deepspeed_reads_the_forms_as_we_do(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form, wanted = FORMS[number]
    given = {name: value for name, value in form.items() if value != "auto"}  # as the Trainer leaves none
    given.setdefault("train_micro_batch_size_per_gpu", 1) if "train_batch_size" not in given else None
    given.pop("bf16", None)
    config = _parsed(given, wanted.data * (wanted.tensor if wanted.pipeline == 1 else 1), monkeypatch)
    assert config.train_micro_batch_size_per_gpu == wanted.microbatch
    assert config.gradient_accumulation_steps == wanted.microbatches
    assert {0: 0, 1: 1, 2: 1, 3: 3}[int(config.zero_config.stage)] == wanted.zero
