"""transformers' DistributedConfig: what is written, checked by its class and a model of it; what is read and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from cost_models.errors import UsageError
from partitioner.formats import transformers
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.tensor_words import Division
from partitioner.plan import Plan
from tests.support.formatted_plans import llama_plan_of, plan_of
from tests.unit.partitioner.formats.mutations import mutated


def test_its_words_are_the_ones_that_the_package_has() -> None:
    assert set(ALL_PARALLEL_STYLES) == transformers.STYLES


@pytest.mark.parametrize(
    "make",
    [
        lambda: llama_plan_of("tensor=2 data=2 zero=3 microbatch=2 recompute=none"),
        lambda: llama_plan_of("tensor=4 data=1 microbatch=2 recompute=none"),
        lambda: llama_plan_of("tensor=2 data=2 zero=0 microbatch=2 recompute=none"),
        lambda: plan_of("data=8 zero=3 microbatch=2 recompute=none"),
    ],
    ids=["tensor 2 and FSDP", "tensor 4", "tensor 2 and replicas", "FSDP"],
)
def test_transformers_takes_what_is_written_and_we_read_it(make: Callable[[], Plan]) -> None:
    plan = make()
    p = parallelism_of(plan)
    written = transformers.write(plan)
    text = str(written)
    config = DistributedConfig.from_dict(json.loads(text))
    assert (config.tp_size, config.dp_size) == (p.tensor, p.data)
    for form in written.files.values():
        assert transformers.is_mine("a file", form)
        understood = transformers.read(form, p.world_size)
        assert understood.parallelism == replace(p, microbatch=1, microbatches=1)
        assert understood.problems == ()
    if p.tensor > 1:
        with torch.device("meta"):
            sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 4}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
            model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        found, _, _ = model._resolve_parallel_plans(
            config
        )  # it refuses words and names that it does not know
        asked = json.loads(text)["tp_plan"]
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                assert found[name] == asked[re.sub(r"\.\d+\.", ".*.", name)]


def test_tensor_plans_follow_the_layouts() -> None:
    """Two key-value heads among four shards are gathered, and what reads them runs whole."""
    written = transformers.write(llama_plan_of("tensor=4 data=1 microbatch=2 recompute=none"))
    plan = json.loads(str(written))["tp_plan"]
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.self_attn.k_proj"] == "colwise_gather_output"
    assert plan["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert plan["lm_head"] == "colwise_gather_output"
    assert any("self_attn.v_proj runs whole on every shard" in note for note in written.notes)


@pytest.mark.parametrize(
    ("division", "word"),
    [
        (Division("column", "linear"), "colwise"),
        (Division("column", "linear", gathered=True), "colwise_gather_output"),
        (Division("row", "linear"), "rowwise"),
        (Division("row", "linear", splits=True), "rowwise_split_input"),
        (Division("column", "embedding"), "embedding_rowwise"),
        (Division("row", "embedding"), "embedding_colwise"),
        (Division("whole", "linear"), "replicate"),
    ],
)
def test_words(division: Division, word: str) -> None:
    assert transformers.style_of(division) == word


def test_a_pipeline_becomes_a_device_map() -> None:
    written = transformers.write(
        llama_plan_of("pipeline=4 data=1 microbatch=1 recompute=none borders=model.layers.0,model.layers.2,lm_head",
                      "1f1b")
    )  # fmt: skip
    places = json.loads(written.files["device_map.json"])
    assert places["model.embed_tokens"] == 0
    assert [places[f"model.layers.{n}"] for n in range(4)] == [1, 1, 2, 2]
    assert places["lm_head"] == 3
    assert written.notes[0].startswith("device_map runs one device at a time")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: plan_of("tensor=4 data=2 microbatch=2 zero=3 recompute=none"), r"keeps \[in, out\]"),
        (lambda: plan_of("sequence=2 data=4 zero=3 microbatch=1"), "not wired up"),
        (lambda: plan_of("data=8 zero=1 microbatch=1"), "or nothing"),
        (lambda: plan_of("pipeline=2 data=4 microbatch=1", "1f1b"), "one device per stage"),
    ],
)
def test_what_it_cannot_run_is_refused(make: Callable[[], Plan], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        transformers.write(make())


SAVED = json.dumps(DistributedConfig(tp_size=2, fsdp_size=4).to_dict())
# Forms as in transformers' docs (perf_infer_gpu_multi, fsdp), its tests (test_tensor_parallel, checkpoints of Llama),
# nnsight's and Liger's pages, what to_json_string writes, and a config.json that holds one.
FORMS = {
    '{"tp_size": 8}': Parallelism(tensor=8),
    '{"tp_plan": "auto"}': Parallelism(tensor=8),
    '{"fsdp_size": 8}': Parallelism(data=8, zero=3),
    '{"tp_size": 2, "fsdp_size": 4, "fsdp_mixed_precision": true}': Parallelism(tensor=2, data=4, zero=3),
    '{"dp_replicate_size": 8}': Parallelism(data=8),
    SAVED: Parallelism(tensor=2, data=4, zero=3),
    '{"model_type": "llama", "distributed_config": {"tp_size": 8}}': Parallelism(tensor=8),
    '{"tp_size": 4, "dp_replicate_size": 2, "tp_plan": {"layers.*.self_attn.q_proj": "colwise"}}': Parallelism(
        tensor=4, data=2
    ),
    "DistributedConfig(tp_size=8)": Parallelism(tensor=8),
    "from transformers.distributed import DistributedConfig\nmodel = AutoModelForCausalLM.from_pretrained(\n"
    '    "Qwen/Qwen3-0.6B", distributed_config=DistributedConfig(tp_size=2, tp_plan="auto", fsdp_size=4),\n'
    "    dtype=torch.bfloat16,\n)\n": Parallelism(tensor=2, data=4, zero=3),
    "import transformers\nc = transformers.distributed.DistributedConfig(\n    fsdp_size=8, fsdp_plan=None)\n": Parallelism(
        data=8, zero=3
    ),
    'cfg = DistributedConfig(fsdp_size=2, tp_plan={"model.layers.*.mlp.down_proj": "rowwise"})': Parallelism(
        tensor=4, data=2, zero=3
    ),
    '{"tp_size": 2, "fsdp_size": 4, "enable_sequence_parallel": true, "tp_plan": {}}': Parallelism(
        tensor=2, data=4, zero=3
    ),
}


@pytest.mark.parametrize("text", FORMS)
def test_forms_that_people_have(text: str) -> None:
    assert transformers.is_mine("a file", text)
    understood = transformers.read(text, 8)
    assert understood.parallelism == FORMS[text]
    assert understood.problems == ()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"tp_size": 0}', "tp_size: expected a whole number of 1 or more, not 0"),
        ('{"tp_size": 2, "tp_plan": ["q"]}', 'tp_plan: expected a mapping or "auto", not a list of 1'),
        ('{"tp_size": 2', "line 1, column 14"),
        ('{"tp_size": 4, "ep_size": 4}', "ep_size: experts are not divided yet"),
        ('{"pp_size": 2}', "pp_size 2: its pipelines run a forward alone"),
        ('{"fsdp_size": 4, "dp_replicate_size": 2}', "fsdp_size and dp_replicate_size"),
        ("x = 1\nDistributedConfig(tp_size=WORLD)", "line 2: tp_size is WORLD, no literal"),
        ("x = 1\nDistributedConfig(tp_size=", "line 2: "),
        ("DistributedConfig(2)", "line 1: DistributedConfig takes its arguments by name"),
        ("# DistributedConfig(2)", "line 1: DistributedConfig is not called"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=re.escape(place)):
        transformers.read(text, 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"tp_size": 2, "tp_plan": {"lm_head": "columns"}}', "\"lm_head\" is 'columns', none of its words"),
        ('{"tp_plan": "auto", "fsdp_size": 3}', "8 devices are no multiple of"),
    ],
)
def test_broken_rules_are_told(text: str, problem: str) -> None:
    assert any(problem in told for told in transformers.read(text, 8).problems)


def test_mutated_files_are_read_or_refused() -> None:
    for text in mutated(list(FORMS), 10):
        with suppress(UsageError):  # anything else fails
            transformers.read(text, 8)
