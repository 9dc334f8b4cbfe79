"""accelerate's YAML: what is written, checked by its own launcher; what is read, and what is refused with its place."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from cost_models.errors import UsageError
from partitioner.formats import accelerate
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from tests.support.formatted_plans import plan_of
from tests.unit.partitioner.formats.mutations import mutated

PLANS = [
    "data=8 zero=3 microbatch=2 recompute=none",
    "data=8 zero=3 microbatch=2 recompute=full",
    "data=8 zero=0 microbatch=4 recompute=none",
    "tensor=4 data=2 zero=3 microbatch=2 recompute=full",
    "tensor=8 data=1 microbatch=2 recompute=none",
]


@pytest.mark.parametrize("fix", PLANS)
def test_accelerate_reads_what_is_written_and_so_do_we(
    fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = parallelism_of(plan_of(fix))
    text = str(accelerate.write(plan_of(fix)))
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    ClusterConfig.from_yaml_file(file)  # it refuses keys that it does not know
    parsed = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, _, _ = _validate_launch_command(parsed)
    environment = prepare_multi_gpu_env(arguments)
    assert arguments.num_processes == 8
    for name, value in environment.items():
        if name not in os.environ:
            monkeypatch.setenv(name, value)
    config = ParallelismConfig()
    if arguments.use_parallelism_config:
        assert (config.total_size, config.tp_size, config.data_parallel_size) == (8, p.tensor, p.data)
    assert (environment.get("FSDP_VERSION") == "2") == (p.zero == 3)
    if p.zero == 3:
        assert environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "GPT2Block"
        assert environment["FSDP_ACTIVATION_CHECKPOINTING"] == str(p.recompute == "full").lower()
    understood = accelerate.read(text, 8)
    assert understood.parallelism == replace(p, microbatch=1, microbatches=1)
    assert understood.problems == ()


def test_batches_and_tensor_plans_are_the_script_s() -> None:
    notes = accelerate.write(plan_of("tensor=4 data=2 zero=3 microbatch=2 recompute=full")).notes
    assert "2 samples to each process's micro-batch, Accelerator(gradient_accumulation_steps=8)" in notes[0]
    assert any("tp_size=4" in note for note in notes)


@pytest.mark.parametrize(
    ("fix", "schedule", "reason"),
    [
        ("pipeline=2 data=4 microbatch=1", "1f1b", "no pipelines"),
        ("data=8 zero=1 microbatch=1", "auto", "export --to deepspeed"),
        ("tensor=2 data=4 zero=0 microbatch=1", "auto", "composes tensor parallelism with FSDP"),
        ("sequence=2 data=4 zero=3 microbatch=1", "auto", "does not divide positions"),
    ],
)
def test_what_it_cannot_run_is_refused(fix: str, schedule: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        accelerate.write(plan_of(fix, schedule))


def test_its_own_rule_refuses_whole_replicas_beside_tensor_parallelism() -> None:
    with pytest.raises(ValueError, match="cannot be used with pure data parallelism"):
        ParallelismConfig(dp_replicate_size=4, tp_size=2)


COMMON = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
rdzv_backend: static
same_network: true
use_cpu: false
"""
# Forms as in accelerate's examples and docs, trl's examples/accelerate_configs (fsdp1, fsdp2, zero1 to 3, multi_gpu,
# single_gpu), diffusers' and axolotl's pages, and what `accelerate config` asks.
FORMS = {
    "distributed_type: 'NO'\nnum_processes: 1\n": Parallelism(),
    "distributed_type: MULTI_GPU\ngpu_ids: all\nnum_processes: 8\n": Parallelism(data=8),
    "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 16\nmain_process_ip: 10.0.0.1\n": Parallelism(
        data=16
    ),
    "distributed_type: MULTI_CPU\nmpirun_config: {mpirun_ccl: '1'}\n": Parallelism(data=8),
    "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_activation_checkpointing: false\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch: BACKWARD_PRE\n"
    "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_forward_prefetch: true\n  fsdp_offload_params: false\n"
    "  fsdp_reshard_after_forward: FULL_SHARD\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
    "  fsdp_sync_module_states: true\n  fsdp_use_orig_params: true\n  fsdp_version: 1\n": Parallelism(
        data=8, zero=3
    ),
    "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: true\n  fsdp_version: 2\n": Parallelism(
        data=8, zero=3, recompute="full"
    ),
    "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: 2\n": Parallelism(
        data=8, zero=1
    ),
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n": Parallelism(data=8),
    "distributed_type: FSDP\nfsdp_config: {version: 2, reshard_after_forward: 'no'}\n": Parallelism(
        data=8, zero=1
    ),
    "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n"
    "  parallelism_config_dp_replicate_size: 1\n  parallelism_config_dp_shard_size: 4\n"
    "  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 1\n": Parallelism(
        tensor=2, data=4, zero=3
    ),
    "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_multinode_launcher: standard\n"
    "  offload_optimizer_device: none\n  offload_param_device: none\n  zero3_init_flag: true\n"
    "  zero_stage: 3\n": Parallelism(data=8, zero=3),
    "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  gradient_accumulation_steps: 4\n"
    "  gradient_clipping: 1.0\n  offload_optimizer_device: cpu\n  zero_stage: 2\n": Parallelism(
        data=8, zero=1, microbatches=4
    ),
    "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}\nnum_processes: 8\n": Parallelism(data=8),
    "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config:\n  megatron_lm_gradient_clipping: 1.0\n"
    "  megatron_lm_num_micro_batches: 4\n  megatron_lm_pp_degree: 2\n  megatron_lm_recompute_activations: true\n"
    "  megatron_lm_sequence_parallelism: true\n  megatron_lm_tp_degree: 2\n"
    "  megatron_lm_use_distributed_optimizer: true\n": Parallelism(
        pipeline=2, tensor=2, sequence=True, data=2, zero=1, microbatches=4, recompute="selective"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_people_have(form: str, tmp_path: Path) -> None:
    text = COMMON.replace("num_machines: 1\n", "") + form if "num_machines" in form else COMMON + form
    (tmp_path / "own.yaml").write_text(text)
    ClusterConfig.from_yaml_file(tmp_path / "own.yaml")
    assert accelerate.is_mine("default_config.yaml", text)
    understood = accelerate.read(text, 8)
    assert understood.parallelism == FORMS[form]
    assert understood.problems == ()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("distributed_type: FSDP\nfsdp_config:\n  a: b: c\n", "line 3, column 7"),
        ("- distributed_type: FSDP\n", "expected a mapping, not a list of 1"),
        ("num_processes: 8\n", "distributed_type is not there"),
        ("distributed_type: TPU\n", 'distributed_type: expected one of NO, MULTI_CPU'),
        ("distributed_type: FSDP\nnum_processes: 0\n", "num_processes: expected a whole number of 1 or more, not 0"),
        ("distributed_type: FSDP\nfsdp_config: yes\n", "fsdp_config: expected a mapping, not true"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}\n",
            "fsdp_config.fsdp_version: expected one of 1, 2, not 3",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n",
            "HYBRID_SHARD: parameters divided among a part",
        ),
        (
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: two}\n",
            'parallelism_config.parallelism_config_tp_size: expected a whole number of 1 or more, not "two"',
        ),
        (
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_cp_size: 2}\n",
            "parallelism_config.parallelism_config_cp_size 2: positions",
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n", "ds.json: check that"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}\n", "zero_stage: expected 0, 1, 2 or 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=re.escape(place)):
        accelerate.read(text, 8)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (
            {"dp_shard": 2, "tp": 2},
            "makes 4 processes (dp_replicate 1 × dp_shard 2 × tp 2), num_processes is 8",
        ),
        ({"tp": 8}, "FSDP needs dp_shard_size above 1"),
        ({"dp_replicate": 4, "tp": 2}, "needs dp_shard_size above 1"),
    ],
)
def test_broken_rules_are_told(sizes: dict[str, int], problem: str) -> None:
    mesh = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    text = yaml.safe_dump(
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": mesh}
    )
    assert any(problem in told for told in accelerate.read(text, 8).problems)


def test_settings_that_are_not_read_are_named() -> None:
    text = "distributed_type: MULTI_GPU\nparallelism_config: {parallelism_config_ep_size: 2}\nfsdp: 1\ntpu_env: []\n"
    assert accelerate.read(text, 8).notes[1:] == (
        "parallelism_config.parallelism_config_ep_size is not read",
        "fsdp is not read",
    )


def test_mutated_files_are_read_or_refused() -> None:
    for text in mutated(list(FORMS), 10):
        with suppress(UsageError):  # anything else fails
            accelerate.read(text, 8)
