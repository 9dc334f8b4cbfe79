"""The models that the prediction benchmark places: small ones of different kinds, with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from examples.unet import unet
from partitioner.models.as_graph import as_graph
from partitioner.models.hugging_face import example_batch
from partitioner.models.workload import Workload
from passes.graph.graph import OpGraph


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
def workload_of(model: str) -> Workload:
    """Return one of the models with its loss and an example batch; it is made once."""
    torch.manual_seed(0)
    return _MODELS[model]()


@functools.cache
def graph_of(model: str) -> OpGraph:
    """Return the graph of one of the models, which is traced once."""
    return as_graph(workload_of(model), name=model)
