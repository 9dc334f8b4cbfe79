"""Megatron's flags: what is written, what is read, and what is refused with its place."""

from __future__ import annotations

import random
import re
from contextlib import suppress

import pytest

from cost_models.errors import UsageError
from partitioner.formats import megatron
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from tests.support.formatted_plans import plan_of

PLANS = [
    ("pipeline=2 sequence=2 data=2 zero=1 microbatch=1 recompute=none", "1f1b"),
    ("pipeline=2 interleave=2 tensor=2 data=2 zero=1 microbatch=1 recompute=full", "interleaved"),
    ("tensor=4 data=2 microbatch=2 recompute=none", "auto"),
    ("data=8 zero=3 microbatch=2 recompute=none", "auto"),
]


@pytest.mark.parametrize(("fix", "schedule"), PLANS)
def test_what_is_written_is_read_as_the_same_degrees(fix: str, schedule: str) -> None:
    plan = plan_of(fix, schedule)
    understood = megatron.read(str(megatron.write(plan)), 8)
    assert understood.parallelism == parallelism_of(plan)
    assert understood.problems == ()


@pytest.mark.parametrize(
    ("fix", "schedule", "reason"),
    [
        ("pipeline=2 data=4 zero=1 microbatch=1", "zb-h1", "not zb-h1"),
        ("sequence=2 data=4 microbatch=1 recompute=gathers", "auto", "gather again"),
        ("pipeline=4 interleave=2 data=2 microbatch=8", "interleaved", "multiple of 4 micro-batches, not 2"),
    ],
)
def test_what_it_cannot_run_is_refused(fix: str, schedule: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        megatron.write(plan_of(fix, schedule))


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((4, 4), "Et*4|t*4,L"),
        ((2, 3, 3, 1), "Et*2|(t*3|)*2,tL"),
        ((0, 2, 2, 2, 0), "E|(t*2|)*3,L"),
        ((7, 9, 9, 7), "Et*7|(t*9|)*2,t*7,L"),
        ((1, 1, 1), "Et|t|tL"),
    ],
)
def test_layouts(layers: tuple[int, ...], text: str) -> None:
    assert megatron.layout_text(layers) == text
    assert tuple(megatron.read_layout(text)) == layers


# Forms as in Megatron-LM's examples and issues: a script's arrays, continued lines, "=", and the older ways to say stages.
SCRIPT = """
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPT_MODEL_ARGS=(
    --num-layers 96   # of GPT-3
    --hidden-size 12288
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 1536 --bf16)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]}
"""
MODEL_CONFIG = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --micro-batch-size: 4
  --global-batch-size: 32
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: false
  --bf16: true
TEST_TYPE: regular
"""  # as Megatron-LM's functional tests have it
FORMS = {
    MODEL_CONFIG: (
        8,
        Parallelism(pipeline=2, tensor=2, sequence=True, data=2, microbatch=4, microbatches=4, layers=(6, 6)),
    ),
    "torchrun --nproc-per-node=8 pretrain_gpt.py --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--micro-batch-size 4 --global-batch-size 256 --recompute-granularity selective --use-distributed-optimizer": (
        8,
        Parallelism(data=8, zero=1, microbatch=4, microbatches=8, recompute="selective"),
    ),
    SCRIPT: (128, Parallelism(pipeline=16, tensor=8, microbatches=1536, layers=(6,) * 16)),
    "--tensor-model-parallel-size=2 \\\n --sequence-parallel \\\n --global-batch-size 64": (
        8,
        Parallelism(tensor=2, sequence=True, data=4, microbatches=16),
    ),
    "--pipeline-model-parallel-size 4 --num-layers 16 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 8": (
        4,
        Parallelism(pipeline=4, chunks=2, microbatches=8, schedule="interleaved", layers=(2,) * 8),
    ),
    "--pipeline-model-parallel-size 2 --num-layers 16 --num-virtual-stages-per-pipeline-rank 4 --global-batch-size 8": (
        2,
        Parallelism(pipeline=2, chunks=4, microbatches=8, schedule="interleaved", layers=(2,) * 8),
    ),
    "--pipeline-model-parallel-size 4 --num-layers 30 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split": (4, Parallelism(pipeline=4, layers=(7, 8, 8, 7))),
    "--pipeline-model-parallel-size 4 --num-layers 30 --decoder-first-pipeline-num-layers 6 "
    "--decoder-last-pipeline-num-layers 4": (4, Parallelism(pipeline=4, layers=(6, 10, 10, 4))),
    '--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et*3|(tt|)*2,t|L" --num-layers 8': (
        2,
        None,  # five stages on two ranks
    ),
    '--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et*3|(tt|)*2,tL" --num-layers 8': (
        2,
        Parallelism(
            pipeline=2, chunks=2, microbatch=1, schedule="interleaved", layers=(3, 2, 2, 1), microbatches=2
        ),
    ),
    "--micro-batch-size 2 --global-batch-size 32 --use-distributed-optimizer --recompute-activations": (
        4,
        Parallelism(data=4, zero=1, microbatch=2, microbatches=4, recompute="selective"),
    ),
    "--micro-batch-size 1 --global-batch-size 8 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (
        8,
        Parallelism(data=8, zero=3, recompute="full"),
    ),
}


@pytest.mark.parametrize("text", FORMS)
def test_forms_that_people_have(text: str) -> None:
    devices, wanted = FORMS[text]
    if wanted is None:
        with pytest.raises(UsageError, match="5 stages for --pipeline-model-parallel-size 2"):
            megatron.read(text, devices)
    else:
        batch = wanted.batch_size
        said = text if "--global-batch-size" in text else f"{text} --global-batch-size {batch}"
        assert megatron.read(said, devices).parallelism == wanted


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("--tensor-model-parallel-size $TP", "--tensor-model-parallel-size: expected a whole number, not"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size"),
        (
            "--pipeline-model-parallel-size",
            "--pipeline-model-parallel-size: expected a whole number, not nothing",
        ),
        ("--tensor-model-parallel-size 2 --tensor-model-parallel-size 4", "is there twice"),
        ("--micro-batch-size 1 --recompute-granularity some", "expected full or selective, not some"),
        ("--micro-batch-size 1 --context-parallel-size 2", "--context-parallel-size 2"),
        ("--hidden-size 12", "no flag such as"),
        ("--micro-batch-size '1", "quotes do not match"),
        ("--pipeline-model-parallel-size 4 --num-layers 30", "30 layers"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|txL", "'x' is none of"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout tt|tL", "E, the embedding"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t", "L, the loss"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(t*999999|)*999999L",
            "more than",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=re.escape(place)):
        megatron.read(text, 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--tensor-model-parallel-size 3", "8 devices are no multiple of tensor 3"),
        ("--micro-batch-size 3 --global-batch-size 16", "is no multiple of --micro-batch-size 3"),
        ("--sequence-parallel --micro-batch-size 1", "--sequence-parallel needs"),
    ],
)
def test_broken_rules_are_told(text: str, problem: str) -> None:
    assert any(problem in told for told in megatron.read(text, 8).problems)


def test_parallel_flags_that_are_not_read_are_named() -> None:
    notes = megatron.read(
        "--micro-batch-size 1 --tp-comm-overlap --overlap-param-gather --moe-router-fsdp 1", 8
    ).notes
    assert notes == ("--moe-router-fsdp is not read",)


def test_mutated_files_are_read_or_refused() -> None:
    drawn = random.Random(43)
    for text in list(FORMS) * 10:
        letters = list(text)
        for _ in range(drawn.randint(1, 4)):
            at = drawn.randrange(len(letters))
            letters[at : at + drawn.randint(0, 2)] = drawn.choice(
                ["", "-", "|", "0", '"', "x", " ", "*9", "\x00", "é"]
            )
        with suppress(UsageError):  # anything else fails
            megatron.read("".join(letters), 8)
