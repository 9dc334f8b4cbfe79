"""DeepSpeed's JSON: what is written, what is read, and what is refused with its place. Its own parser: tests/parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress

import pytest

from cost_models.errors import UsageError
from partitioner.formats import deepspeed
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from partitioner.plan import Plan
from tests.support.formatted_plans import llama_plan_of, plan_of
from tests.unit.partitioner.formats.mutations import mutated


@pytest.mark.parametrize(
    "make",
    [
        lambda: plan_of("data=8 zero=3 microbatch=2 recompute=none"),
        lambda: plan_of("data=8 zero=1 microbatch=2 recompute=full"),
        lambda: llama_plan_of("tensor=2 data=2 zero=1 microbatch=2 recompute=none"),
    ],
    ids=["zero 3", "recomputing", "tensor"],
)
def test_what_is_written_is_read_as_the_same_degrees(make: Callable[[], Plan]) -> None:
    plan = make()
    p = parallelism_of(plan)
    text = str(deepspeed.write(plan))
    assert deepspeed.is_mine("ds.json", text)
    understood = deepspeed.read(text, p.world_size)
    assert understood.parallelism == p
    assert understood.problems == ()


def test_weights_are_divided_as_in_the_plan() -> None:
    written = deepspeed.write(llama_plan_of("tensor=2 data=2 zero=1 microbatch=2 recompute=none"))
    specs = json.loads(str(written))["tensor_parallel"]["partition_config"]["layer_specs"]
    layers = r".*layers\.\d+\."
    assert {
        pattern: (spec["partition_type"], spec.get("gather_output", False))
        for spec in specs
        for pattern in spec["patterns"]
    } == {
        **{f"{layers}self_attn\\.{name}_proj\\.weight$": ("column", False) for name in "qkv"},
        **{f"{layers}mlp\\.{name}_proj\\.weight$": ("column", False) for name in ("gate", "up")},
        f"{layers}self_attn\\.o_proj\\.weight$": ("row", False),
        f"{layers}mlp\\.down_proj\\.weight$": ("row", False),
        r".*lm_head\.weight$": ("column", True),
    }
    assert any("a step has 16 samples" in note for note in written.notes)


def test_a_pipeline_s_bounds_are_a_method_or_said_themselves() -> None:
    equal = deepspeed.write(llama_plan_of("pipeline=2 data=2 zero=1 microbatch=1 recompute=none", "1f1b"))
    assert 'partition_method="' in equal.files["pipeline.py"]
    assert json.loads(str(equal))["pipeline"] == {"stages": 2, "activation_checkpoint_interval": 0}
    other = deepspeed.write(
        llama_plan_of("pipeline=2 data=2 microbatch=1 recompute=full borders=model.layers.1", "1f1b")
    )
    assert "self.parts = [0, 2, 7]" in other.files["pipeline.py"]
    assert other.notes[0].startswith("PipelineModule's methods uniform, parameters and type:")
    compile(other.files["pipeline.py"], "pipeline.py", "exec")


@pytest.mark.parametrize(
    ("count", "parts", "bounds"), [(9, 4, [0, 3, 5, 7, 9]), (2, 4, [0, 1, 2, 2, 2]), (8, 4, [0, 2, 4, 6, 8])]
)
def test_uniform_bounds(count: int, parts: int, bounds: list[int]) -> None:
    assert deepspeed.uniform_bounds(count, parts) == bounds


@pytest.mark.parametrize(
    (
        "weights",
        "parts",
        "bounds",
    ),  # found by DeepSpeed's own partition_balanced: tests/parsers compares 200 more
    [([0, 1, 1, 1, 1, 1, 1, 0, 0], 4, [0, 3, 5, 6, 9]), ([1], 2, [0, 1, 1])],
)
def test_balanced_bounds(weights: list[int], parts: int, bounds: list[int]) -> None:
    assert deepspeed.balanced_bounds(weights, parts) == bounds


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: plan_of("tensor=4 data=2 microbatch=2 recompute=none"), r"\[in, out\]"),
        (lambda: llama_plan_of("tensor=4 data=1 microbatch=2"), "k_proj: its divided output is gathered"),
        (lambda: plan_of("sequence=2 data=4 microbatch=1"), "whole activations between products"),
        (lambda: plan_of("pipeline=2 data=4 zero=1 microbatch=1", "zb-h1"), "1f1b, not zb-h1"),
        (lambda: plan_of("pipeline=2 tensor=2 data=2 microbatch=1", "1f1b"), "arranges all ranks as data"),
    ],
)
def test_what_it_cannot_run_is_refused(make: Callable[[], Plan], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        deepspeed.write(make())


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
# Forms as in DeepSpeed's docs (config-json, zero3, autotp), DeepSpeedExamples, transformers' docs and tests
# (ds_config_zero2.json, zero3.json), axolotl's deepspeed_configs, trl's and Databricks' examples.
FORMS: list[tuple[dict[str, object], Parallelism]] = [
    (
        {
            "train_batch_size": 8,
            "steps_per_print": 2000,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        },
        Parallelism(data=8),
    ),
    (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}},
        Parallelism(data=8, zero=1, microbatch=2, microbatches=4),
    ),
    (
        {
            "train_batch_size": 64,
            "gradient_accumulation_steps": 2,
            "fp16": {"enabled": True, "loss_scale": 0},
        },
        Parallelism(data=8, microbatch=4, microbatches=2),
    ),
    (
        {
            **AUTO,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "allgather_bucket_size": 2e8,
                "reduce_bucket_size": "auto",
            },
        },
        Parallelism(data=8, zero=1),
    ),
    (
        {
            **AUTO,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "sub_group_size": 1e9,
                "stage3_prefetch_bucket_size": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "wall_clock_breakdown": False,
        },
        Parallelism(data=8, zero=3),
    ),
    (
        {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        },
        Parallelism(data=8, zero=3, microbatch=4),
    ),
    (
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "tensor_parallel": {"autotp_size": 4},
        },
        Parallelism(tensor=4, data=2, zero=1),
    ),
    (
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 3,
            "bf16": {"enabled": True},
            "tensor_parallel": {"autotp_size": 2, "preset_model": "llama", "tp_overlap_comm": True},
        },
        Parallelism(tensor=2, data=4, microbatches=3),
    ),
    (
        {
            "train_micro_batch_size_per_gpu": 2,
            "tensor_parallel": {
                "autotp_size": 8,
                "partition_config": {
                    "use_default_specs": False,
                    "layer_specs": [
                        {
                            "patterns": [r".*\.qkv_proj\.weight$"],
                            "partition_type": "column",
                            "shape": [3, -1],
                        }
                    ],
                },
            },
        },
        Parallelism(tensor=8, microbatch=2),
    ),
    (
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 16,
            "activation_checkpointing": {
                "partition_activations": True,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "number_checkpoints": None,
                "profile": False,
            },
        },
        Parallelism(data=8, microbatches=16, recompute="full"),
    ),
    (
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 8, "pipeline": {"stages": 2}},
        Parallelism(pipeline=2, data=4, microbatch=8, microbatches=8),
    ),
    (
        {
            "train_micro_batch_size_per_gpu": 4,
            "pipeline": {"seed_layers": True, "activation_checkpoint_interval": 1},
            "zero_optimization": True,
            "zero_allow_untested_optimizer": True,
        },
        Parallelism(data=8, zero=1, microbatch=4, recompute="full"),
    ),
    (
        {"zero_optimization": {"stage": 0}, "gradient_clipping": 1.0, "expert_parallel": {"enabled": False}},
        Parallelism(data=8),
    ),
]


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_forms_that_people_have(number: int) -> None:
    form, wanted = FORMS[number]
    text = json.dumps(form, indent=4)
    understood = deepspeed.read(text, 8)
    assert deepspeed.is_mine("ds_config.json", text)
    assert understood.parallelism == wanted
    assert understood.problems == ()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"zero_optimization": {"stage": 2},\n}', "line 2, column 1"),
        ('{"train_batch_size": 8, "train_batch_size": 4}', "train_batch_size is there twice"),
        ("[1]", "expected a mapping, not a list of 1"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage: expected 0, 1, 2 or 3, not 4"),
        ('{"zero_optimization": 3}', "zero_optimization: expected a mapping, not 3"),
        ('{"train_batch_size": 0}', "train_batch_size: expected a whole number of 1 or more, not 0"),
        (
            '{"tensor_parallel": {"autotp_size": "two"}}',
            'tensor_parallel.autotp_size: expected a whole number of 0 or more, not "two"',
        ),
        (
            '{"expert_parallel": {"enabled": true, "autoep_size": 4}}',
            "expert_parallel.autoep_size: experts and context",
        ),
        ('{"sequence_parallel_size": 2}', "sequence_parallel_size: experts and context"),
        ('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}', "zero_hpz_partition_size: parameters"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=re.escape(place)):
        deepspeed.read(text, 8)


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            "train_batch_size 10 is not",
        ),
        ({"tensor_parallel": {"autotp_size": 3}}, "8 devices are no multiple of tensor 3"),
        ({"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}}, "incompatible with its pipelines"),
    ],
)
def test_broken_rules_are_told(form: dict[str, object], problem: str) -> None:
    assert any(problem in told for told in deepspeed.read(json.dumps(form), 8).problems)


def test_what_is_planned_otherwise_or_not_read_is_noted() -> None:
    form = {"zero_optimization": {"stage": 2}, "moe_parallel": 2, "fp16": {"enabled": True}, **AUTO}
    notes = deepspeed.read(json.dumps(form), 8).notes
    for words in (
        "ZeRO-2 is planned as ZeRO-1",
        "moe_parallel is not read",
        "--dtype float16",
        "train_batch_size: auto",
    ):
        assert any(words in note for note in notes), words  # fmt: skip


def test_mutated_files_are_read_or_refused() -> None:
    for text in mutated([json.dumps(form, indent=1) for form, _ in FORMS], 10):
        with suppress(UsageError):  # anything else fails
            deepspeed.read(text, 8)
