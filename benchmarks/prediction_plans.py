"""The plans that the prediction benchmark runs: models of different kinds, cuts, schedules and micro-batch counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plan_tasks import plan_task
from cost_models.cluster import ClusterSpec
from examples.unet import unet
from partitioner.api import partition
from partitioner.models.as_graph import as_graph
from partitioner.models.hugging_face import example_batch
from partitioner.models.workload import Workload
from partitioner.plan import Plan
from partitioner.verify.grow_batch import grow_batch
from partitioner.verify.rank import VerificationTask
from passes.graph.graph import OpGraph
from passes.search.words import RecomputeMode


@dataclass(frozen=True)
class PlanCase:
    """One plan: a model, how its batch is cut, its schedule, and where it is split (``pins``)."""

    model: str
    schedule: str
    microbatches: int
    batch_size: int
    pins: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    recompute: RecomputeMode = "auto"

    @property
    def name(self) -> str:
        return f"{self.model} {self.schedule} m={self.microbatches}{' ' + self.note if self.note else ''}"

    def plan(self, cluster: ClusterSpec) -> Plan:
        return partition(
            graph_of(self.model),
            cluster,
            batch_size=self.batch_size,
            schedule=self.schedule,
            microbatches=self.microbatches,
            pins=self.pins,
            recompute=self.recompute,
            optimizer_memory="adamw",
        )

    def task(self, plan: Plan) -> VerificationTask:
        """What the workers need; in the model's own data type."""
        workload, graph = _workload(self.model), graph_of(self.model)
        batch = grow_batch(workload.example_inputs, graph.batch.batch_dims, workload.model, plan.batch_size)
        return plan_task(
            plan, workload, graph, batch=batch, optimizer=plan.optimizer_memory, learning_rate=1e-4
        )


def plan_cases() -> tuple[PlanCase, ...]:
    """All plans, on two workers. Pins put the cut elsewhere than the search would."""
    return (
        PlanCase("gpt2-small", "gpipe", 4, 8),
        PlanCase("gpt2-small", "1f1b", 4, 8),
        PlanCase("gpt2-small", "1f1b", 8, 8),
        PlanCase("gpt2-small", "zb-h1", 8, 8),
        PlanCase("gpt2-small", "1f1b", 4, 8, {"transformer.h.1": 0, "transformer.h.2": 1}, "cut at 2 of 6"),
        PlanCase("gpt2-small", "1f1b", 4, 8, note="recompute", recompute="full"),
        PlanCase("gpt2-small", "zb-h1", 8, 8, note="recompute", recompute="full"),
        PlanCase("llama-small", "gpipe", 4, 8, note="recompute", recompute="full"),
        PlanCase("llama-small", "gpipe", 2, 8),
        PlanCase("llama-small", "1f1b", 8, 8),
        PlanCase("llama-small", "interleaved", 4, 8),
        PlanCase("llama-small", "zb-v", 4, 8),
        PlanCase("vit-small", "1f1b", 4, 16),
        PlanCase("vit-small", "interleaved", 8, 16),
        PlanCase("unet", "gpipe", 4, 8),
        PlanCase("unet", "1f1b", 2, 8),
        PlanCase("mlp", "1f1b", 4, 512),
        PlanCase("mlp", "gpipe", 8, 512),
    )


def _gpt2() -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=256,
        n_layer=6,
        n_head=4,
        n_positions=128,
        vocab_size=2048,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    return _hugging_face(GPT2LMHeadModel(config), 128, "gpt2-small")


def _llama() -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2048,
        max_position_embeddings=128,
        use_cache=False,
    )
    return _hugging_face(LlamaForCausalLM(config), 128, "llama-small")


def _vit() -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=3,
        image_size=96,
        patch_size=8,
        num_labels=100,
    )
    return _hugging_face(ViTForImageClassification(config), 0, "vit-small")


def _hugging_face(model: Any, tokens: int, name: str) -> Workload:
    return Workload(model, example_batch(model, tokens, 2, 0), name=name)


def _mlp() -> Workload:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(768, 768), nn.LayerNorm(768), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(768, 10))
    example = (torch.randn(4, 768), torch.randint(10, (4,)))

    return Workload(_OfPair(model), example, _label_loss, name="mlp")


class _OfPair(nn.Module):
    """Applies the model to the first of the batch's two tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.model(inputs)
        return output


def _label_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


_MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2-small": _gpt2,
    "llama-small": _llama,
    "vit-small": _vit,
    "unet": lambda: unet(channels=32, depth=3, size=64),
    "mlp": _mlp,
}


@functools.cache
def _workload(model: str) -> Workload:
    torch.manual_seed(0)
    return _MODELS[model]()


@functools.cache
def graph_of(model: str) -> OpGraph:
    """The graph of one of the models, which is traced once."""
    return as_graph(_workload(model), name=model)
