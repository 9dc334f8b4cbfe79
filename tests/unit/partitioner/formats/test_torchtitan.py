"""torchtitan's configurations: what is written, what is read of both forms, and what is refused with its line."""

from __future__ import annotations

import random
import re

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from partitioner import Plan
from partitioner.formats.check import described
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.schedule_csv import read_csv, schedule_of
from partitioner.formats.tools import tool_of
from partitioner.formats.torchtitan import FILE, module_names, write
from partitioner.formats.torchtitan_read import SELECTIVE, read
from tests.support.decoder import decoder_plan

EIGHT = ClusterSpec.parse("H100-80GB:8")
PLANS = [
    Parallelism(data=8, zero=3, microbatch=2, microbatches=2, recompute="gathers"),
    Parallelism(tensor=2, sequence=True, data=4, microbatch=2, microbatches=2, recompute="full"),
    Parallelism(pipeline=2, tensor=2, data=2, zero=3, microbatches=4, layers=(3, 5)),
    Parallelism(pipeline=4, chunks=2, data=2, microbatches=8, schedule="interleaved", layers=(1,) * 8),
    Parallelism(pipeline=8, microbatch=2, microbatches=4, schedule="zb-h1", layers=(1,) * 8),
]


@pytest.mark.parametrize("wanted", PLANS, ids=described)
def test_what_is_written_is_read_as_the_same_degrees(wanted: Parallelism) -> None:
    plan = decoder_plan(wanted, EIGHT)
    assert parallelism_of(plan) == wanted
    written = write(plan)
    understood = read(str(written), 8)
    assert understood.parallelism == wanted
    assert understood.problems == ()
    assert understood.said == {"sequence": 4}
    assert tool_of(str(written), FILE) == "torchtitan"
    tables = {name: text for name, text in written.files.items() if name != FILE}
    assert list(tables) == (["zb-h1.csv"] if wanted.schedule == "zb-h1" else [])
    assert all(read_csv(text) == schedule_of(plan) for text in tables.values())


def test_a_file_as_it_is_written() -> None:
    plan = decoder_plan(
        Parallelism(pipeline=2, data=4, microbatches=2, recompute="full", layers=(4, 4)), EIGHT
    )
    written = write(plan)
    assert str(written) == TEXT
    assert [note for note in written.notes if "float64" not in note] == []


TEXT = """\
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC

training = TrainingConfig(
    local_batch_size=2,
    global_batch_size=8,
    seq_len=4,
    mixed_precision_param="float32",
)
parallelism = ParallelismConfig(
    data_parallel_replicate_degree=4,
    data_parallel_shard_degree=1,
    tensor_parallel_degree=1,
    pipeline_parallel_degree=2,
    pipeline_parallel_microbatch_size=1,
    module_fqns_per_model_part=[
        ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"],
        ["layers.4", "layers.5", "layers.6", "layers.7", "norm", "lm_head"],
    ],
    pipeline_parallel_schedule="1F1B",
)
activation_checkpoint = FullAC.Config()"""


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (Parallelism(data=8, zero=1), "(ZeRO-1)"),
        (Parallelism(tensor=2, sequence=True, data=4, recompute="gathers"), "does not gather again"),
        (Parallelism(pipeline=2, data=4, microbatches=2, layers=(8, 0)), "an embedding, one list of blocks"),
    ],
)
def test_what_it_cannot_run_is_refused(wanted: Parallelism, reason: str) -> None:
    plan = decoder_plan(wanted, EIGHT)
    if wanted.layers:
        plan = with_loss_alone(plan)
    with pytest.raises(UsageError, match=re.escape(reason)):
        write(plan)


def with_loss_alone(plan: Plan) -> Plan:
    """A plan whose last stage has the loss, and the head is in the one before."""
    first, last = plan.stages
    moved = first.model_copy(update={"ops": (*first.ops, *last.ops[:-1])})
    return plan.model_copy(update={"stages": (moved, last.model_copy(update={"ops": last.ops[-1:]}))})


@pytest.mark.parametrize(
    ("stages", "parts"),
    [
        (
            [["wte", "wpe", "h.0"], ["h.1", "ln_f", "lm_head"]],
            [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]],
        ),
        ([["e", "h.0", "norm"], ["head"]], [["tok_embeddings", "layers.0", "norm"], ["lm_head"]]),
        ([["e", "h.0"], ["h.1", "head"]], [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]),
        ([["e", "h.0"], ["h.1", "norm"]], [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]),
        ([["e", "h.0", "h.1", "norm", "head"], []], None),  # the loss alone
        ([["e", "encoder.0"], ["decoder.0", "head"]], None),
        ([["e", "h.0", "between", "h.1"], ["norm", "head"]], None),
        ([["h.0"], ["e", "h.1", "head"]], None),
        ([[], []], None),
    ],
)
def test_names_of_modules(stages: list[list[str]], parts: list[list[str]] | None) -> None:
    assert module_names(stages) == parts


PARTS = (
    '[["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3"], ["layers.4", "norm", "output"]]'
)
# After torchtitan's config_registry.py, its docs and train_configs/*.toml; the last are in tokens, as since August 2026.
FORMS: dict[str, tuple[int, Parallelism]] = {
    """
Trainer.Config(
    model_spec=model_registry("70B"),
    training=TrainingConfig(local_batch_size=8, seq_len=8192, steps=1000),
    parallelism=ParallelismConfig(tensor_parallel_degree=8),
    activation_checkpoint=FullAC.Config(),
)""": (64, Parallelism(tensor=8, sequence=True, data=8, zero=3, microbatch=8, recompute="full")),
    "p = config.ParallelismConfig(data_parallel_replicate_degree=4, data_parallel_shard_degree=1)\n"
    "activation_checkpoint = None": (4, Parallelism(data=4, microbatch=8)),
    f"""
ParallelismConfig(
    data_parallel_shard_degree=2,
    tensor_parallel_degree=2,
    enable_sequence_parallel=False,
    pipeline_parallel_degree=2,
    pipeline_parallel_schedule="interleaved1f1b",
    pipeline_parallel_microbatch_size=2,
    module_fqns_per_model_part={PARTS},
    fsdp_reshard_after_forward="always",
)
TrainingConfig(local_batch_size=2 * 4, global_batch_size=32)
x = f(activation_checkpoint=None)
""": (
        8,
        Parallelism(
            pipeline=2, chunks=2, tensor=2, data=2, zero=3, microbatch=2, microbatches=8,
            schedule="interleaved", recompute="gathers", layers=(1, 2, 1, 1),
        ),
    ),
    'ParallelismConfig(pipeline_parallel_degree=4, pipeline_parallel_schedule="ZBVZeroBubble")': (
        4,
        Parallelism(pipeline=4, chunks=2, microbatches=8, schedule="zb-v", recompute="selective"),
    ),
    'ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B",'
    'pipeline_parallel_schedule_csv="mine/zb-h2.csv")': (
        2,
        Parallelism(pipeline=2, microbatches=8, schedule="zb-h2", recompute="selective"),
    ),
    "ParallelismConfig(fsdp_reshard_after_forward='never')\nt(activation_checkpoint=None)": (
        8,
        Parallelism(data=8, zero=3, microbatch=8),
    ),
    "[training]\nlocal_batch_size = 2\nglobal_batch_size = 32\nseq_len = 4096\n[parallelism]\n"
    "data_parallel_shard_degree = 4\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = 'none'\n": (
        8,
        Parallelism(tensor=2, sequence=True, data=4, zero=3, microbatch=2, microbatches=4, recompute="gathers"),
    ),
    "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'GPipe'\n"
    "[activation_checkpoint]\nmode = 'full'\n": (
        2,
        Parallelism(pipeline=2, microbatches=8, schedule="gpipe", recompute="full"),
    ),
    "ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4, data_parallel_shard_degree=1)\n"
    "TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8 * 4096, max_context_length=4096, "
    "num_tokens_per_train_step=2 * 4 * 8 * 4096)\nc(activation_checkpoint=None)": (
        2,
        Parallelism(pipeline=2, microbatch=8, microbatches=8),
    ),
    "ParallelismConfig(data_parallel_replicate_degree=2)\nTrainingConfig(num_tokens_per_microbatch_per_dp_rank=4096)\n"
    "c(activation_checkpoint=MemoryBudgetAC.Config(memory_budget=0.5))": (
        2,
        Parallelism(data=2, microbatch=2, recompute="auto"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_forms_that_people_have(text: str) -> None:
    devices, wanted = FORMS[text]
    understood = read(text, devices)
    assert understood.parallelism == wanted
    assert understood.problems == ()
    assert tool_of(text, "llama3.toml") == "torchtitan"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("x = 1", "no ParallelismConfig(…) is there"),
        ("ParallelismConfig(\n", "line 1: this is no Python"),
        ("ParallelismConfig(\n  tensor_parallel_degree='2')", "line 2: tensor_parallel_degree: expected a whole number"),
        ("ParallelismConfig(\n  tensor_parallel_degree=True)", "line 2: tensor_parallel_degree: expected a whole number"),
        ("ParallelismConfig(\n\n  tensor_parallel_degree=0)", "line 3: tensor_parallel_degree: expected 1 or more"),
        ("ParallelismConfig(data_parallel_shard_degree=-2)", "expected 1 or more, or -1, not -2"),
        ("ParallelismConfig(\n tensor_parallel_degree=n)", "line 2: tensor_parallel_degree: expected a plain value"),
        ("ParallelismConfig(\n module_fqns_per_model_part=[f'l.{i}' for i in x])", "line 2: module_fqns_per_model_part"),
        ("ParallelismConfig(\n pipeline_parallel_degree=2, module_fqns_per_model_part=['a'])", "line 2: module_fqns"),
        ("ParallelismConfig(\n 8)", "line 2: ParallelismConfig takes its settings by name"),
        ("ParallelismConfig(\n **d)", "line 2: ** in ParallelismConfig(…)"),
        ("ParallelismConfig()\n\nParallelismConfig()", "there 2 times, in lines 1, 3"),
        ("ParallelismConfig(tensor_parallel_degree=9**9**9)", "expected a plain value"),
        ("ParallelismConfig(tensor_parallel_degree=9999999999999*9999999999999)", "expected a plain value"),
        ("ParallelismConfig(tensor_parallel_degree=99999999999999)", "expected 1 or more, not 99999999999999"),
        ("ParallelismConfig(fsdp_reshard_after_forward='some')", "expected one of default, always, never, not \"some\""),
        ("ParallelismConfig(enable_sequence_parallel=1)", "enable_sequence_parallel: expected true or false, not 1"),
        ("ParallelismConfig(\n pipeline_parallel_degree=2,\n pipeline_parallel_schedule='1F2B')", "did you mean \"1f1b\"?"),
        ("ParallelismConfig()\nf(activation_checkpoint=SomeAC.Config())", "line 2: activation_checkpoint: expected one"),
        ("ParallelismConfig(context_parallel_degree=2)", "line 1: context_parallel_degree=2: that is not planned yet"),
        (
            "ParallelismConfig(data_parallel_shard_degree=4,\n expert_parallel_degree=8)",
            "shard × context × tensor = 4 is no multiple of 8",
        ),
        ("TrainingConfig(local_batch_size=1, max_context_length=8)\nParallelismConfig()", "in tokens or in samples"),
        ("[parallelism]\ntensor_parallel_degree = 2\ntensor_parallel_degree = 2\n", "line 3"),
        ("[parallelism]\ntensor_parallel_degree = '2'\n", "line 2: tensor_parallel_degree: expected a whole number"),
        ("[training]\nseq_len = 8\n", "no table [parallelism] is there"),
        ("parallelism = 3\n[training]\n", "line 1: parallelism: expected a table"),
        ("[parallelism]\n[activation_checkpoint]\nmode = 'op'\n", "line 3: mode: expected one of full, selective"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_line(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=re.escape(place)):
        read(text, 8)


TWO = "pipeline_parallel_degree=2"
HALVES = '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ParallelismConfig(tensor_parallel_degree=3)", "8 devices are no multiple of replicate 1 × tensor 3"),
        (f"ParallelismConfig({TWO}, pipeline_parallel_microbatch_size=3)", "local_batch_size 8 is no multiple"),
        ("ParallelismConfig()\nTrainingConfig(global_batch_size=12)", "global_batch_size 12 is no multiple of 8 × 8"),
        (f"ParallelismConfig({TWO})\nTrainingConfig(local_batch_size=1)", "1F1B needs 2 micro-batches or more, not 1"),
        (f"ParallelismConfig({TWO}, pipeline_parallel_schedule='PipelineScheduleMulti')", "no schedule by itself"),
        (f"ParallelismConfig({TWO}, module_fqns_per_model_part={PARTS})", "1F1B runs one part on each rank, not 2"),
        (
            f"ParallelismConfig({TWO}, pipeline_parallel_schedule='ZBVZeroBubble', module_fqns_per_model_part={HALVES})",
            "runs two parts on each rank, not 1",
        ),
        (
            f"ParallelismConfig({TWO}, pipeline_parallel_schedule='Interleaved1F1B')\nTrainingConfig(local_batch_size=9)",
            "needs a multiple of 4 micro-batches, not 9",
        ),
        (
            f"ParallelismConfig({TWO}, module_fqns_per_model_part={HALVES.replace('layers.1', 'layers.2')})",
            "names the layers in another order",
        ),
        (f"ParallelismConfig({TWO}, module_fqns_per_model_part={HALVES.replace('norm', 'x')})", "names norm 0 times"),
        (
            f"ParallelismConfig({TWO}, module_fqns_per_model_part={HALVES.replace('], [', '], [], [')})",
            "3 model parts for 2 groups",
        ),
        ("ParallelismConfig()\nTrainingConfig(num_tokens_per_microbatch_per_dp_rank=3000)", "3,000 tokens"),
    ],
)  # fmt: skip
def test_broken_rules_are_told(text: str, problem: str) -> None:
    assert problem in " | ".join(read(text, 8).problems)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("ParallelismConfig(enable_async_tensor_parallel=True)", "enable_async_tensor_parallel is not read"),
        ("ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=4)", "(HSDP)"),
        ("ParallelismConfig()", "no activation_checkpoint is said"),
        ("ParallelismConfig()\nactivation_checkpoint = SelectiveAC.Config()", SELECTIVE),
        (f"ParallelismConfig({TWO})\nTrainingConfig(global_batch_size=64)", "runs empty 2 times a step"),
        (f"ParallelismConfig({TWO})", "divides the layers by its rule"),
        (f"ParallelismConfig({TWO}, pipeline_parallel_schedule='DualPipeV')", "planned as zb-v"),
        (
            f"ParallelismConfig({TWO}, pipeline_parallel_schedule_csv='a.csv')",
            "the order in a.csv is not read",
        ),
    ],
)
def test_what_is_read_otherwise_is_noted(text: str, note: str) -> None:
    assert note in " | ".join(read(text, 8).notes)


def test_mutated_files_are_read_or_refused_with_their_line() -> None:
    drawn = random.Random(43)
    texts = [*FORMS, TEXT]
    refused = []
    for text in texts * 10:
        letters = list(text)
        for _ in range(drawn.randint(1, 4)):
            at = drawn.randrange(len(letters))
            letters[at : at + drawn.randint(0, 2)] = drawn.choice(
                ["", "-", "[", "]", "0", '"', "'", "x", " ", ")", ",", "*9", "=", "\n", "\x00", "é"]
            )
        try:
            read("".join(letters), 8)
        except UsageError as error:
            refused.append(str(error))
    assert 20 < len(refused) < 10 * len(texts)
    where = re.compile(r"line \d+|lines \d+|null bytes|no ParallelismConfig|no table|cannot plan")
    assert [text for text in refused if not where.search(text)] == []
