"""megatron-core's own classes read what is written for Megatron-LM, and the same plan comes back."""

from __future__ import annotations

import argparse
import shlex

import pytest
import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig

from partitioner.formats import megatron
from partitioner.formats.from_plan import parallelism_of, stage_modules
from tests.parsers.plans import PLANS
from tests.support.formatted_plans import LAYERS, plan_of


@pytest.mark.parametrize(("fix", "schedule"), PLANS)
def test_plans_come_back(fix: str, schedule: str) -> None:
    plan = plan_of(fix, schedule)
    p = parallelism_of(plan)
    text = str(megatron.write(plan))
    flags = _flags(text)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=flags.tensor_model_parallel_size,
        sequence_parallel=flags.sequence_parallel,
        pipeline_model_parallel_size=flags.pipeline_model_parallel_size,
        pipeline_model_parallel_layout=flags.pipeline_model_parallel_layout,
        virtual_pipeline_model_parallel_size=p.chunks if p.chunks > 1 else None,
        recompute_granularity=flags.recompute_granularity,
        recompute_method=flags.recompute_method,
        recompute_num_layers=flags.recompute_num_layers,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
    )
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (p.tensor, p.pipeline)
    if p.pipeline > 1:
        layout = PipelineParallelLayerLayout(flags.pipeline_model_parallel_layout, p.pipeline)
        assert layout.virtual_pipeline_model_parallel_size == p.chunks
        layout.validate_layer_layout(LAYERS, 0)
        stages = [layout.layout[rank][chunk] for chunk in range(p.chunks) for rank in range(p.pipeline)]
        assert tuple(sum(layer.name == "decoder" for layer in stage) for stage in stages) == p.layers
    found = megatron.read(text, p.world_size).parallelism
    assert found == p
    modules = [name for own in stage_modules(plan) for name in own]
    again = plan_of(str(found.fix(modules)), found.schedule if found.pipeline > 1 else "auto")
    assert again.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)


def _flags(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "recompute-num-layers"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("pipeline-model-parallel-layout", "recompute-granularity", "recompute-method"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--sequence-parallel", action="store_true")
    return parser.parse_known_args(shlex.split(text))[0]
