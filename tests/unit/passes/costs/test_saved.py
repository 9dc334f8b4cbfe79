"""What autograd keeps: the model's sum against real CPU runs, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from examples.lora import adapted
from passes.costs.costs import GraphCosts, cost_graph
from passes.graph.graph import OpGraph
from passes.trace.loss.reduction import with_normalizers
from passes.trace.trace import trace
from tests.support.matrix import thinned

Batch = dict[str, Tensor]


def llama() -> tuple[nn.Module, Batch]:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _tokens()


def lora() -> tuple[nn.Module, Batch]:
    """Adapters train, all else is frozen: what a frozen layer reads is not kept for it, nor any gradient of it."""
    model, batch = llama()
    return adapted(model, rank=4, scale=2.0, layers=("q_proj", "v_proj", "down_proj")), batch


def gpt2() -> tuple[nn.Module, Batch]:
    """With dropout everywhere, so that attention takes the math path."""
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config), _tokens()


def resnet() -> tuple[nn.Module, Batch]:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=5)
    batch = {"pixel_values": torch.randn(3, 3, 32, 32), "labels": torch.tensor([0, 1, 2])}
    return transformers.ResNetForImageClassification(config), batch


class Oddities(nn.Module):
    """Views saved through their base, one tensor saved twice, dead branches, a frozen part, an in-place op, a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.qkv(self.frozen(x)).chunk(3, dim=-1)
        unused = torch.exp(a)  # does not reach the loss, so it saves nothing
        h = torch.relu_(a * b) + (a * a).transpose(1, 2).reshape(x.shape[0], -1, 8)
        h = self.norm(h) + c.detach() * unused.shape[-1]
        h = F.dropout(h.expand(x.shape), 0.5) * torch.where(h > 0, h, 0.5 * h)
        return self.gru(h)[0].pow(2).mean() + F.pad(c, (1, 1)).abs().max()


def oddities() -> tuple[nn.Module, Batch]:
    return Oddities(), {"x": torch.randn(3, 6, 8)}


def _tokens() -> Batch:
    ids = torch.randint(0, 64, (3, 16))
    return {"input_ids": ids, "labels": ids.clone()}


def union_of_saved(run: Callable[[], Any], present: list[Tensor]) -> int:
    """Bytes of the storages that a real forward saves, except those that are ``present`` anyway."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []
    excluded = {t.untyped_storage()._cdata for t in present}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    assert kept is not None
    return sum(sizes.values())


def run_graph(graph: OpGraph, model: nn.Module, batch: Batch) -> int:
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    batch = with_normalizers(graph, batch, 1)
    pools = {"parameter": state, "buffer": state, "constant": graph.constants, "batch": batch}
    inputs = [pools[i.kind][i.name] for i in graph.inputs]
    return union_of_saved(lambda: graph.module(*inputs), inputs)


@pytest.mark.parametrize(
    "example",
    thinned([llama, lora, gpt2, resnet, oddities], [lora, gpt2, resnet, oddities]),
    ids=lambda f: f.__name__,
)
def test_equals_a_real_cpu_run_at_other_batch_sizes_than_the_traced_one(example):
    torch.manual_seed(0)
    model, batch = example()
    model.train()
    graph = trace(model, batch)
    costs = cost_graph(graph)
    for size in (1, 2, 7):
        other = {name: torch.cat([t] * 3)[:size].clone() for name, t in batch.items()}
        assert costs.saved_bytes(range(len(costs.ops)), size) == run_graph(graph, model, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_eager_model_differs_by_the_keys_it_does_not_repeat_and_no_more(dtype):
    """Eager Llama calls causal attention without a mask, which spares it repeating grouped keys and values.

    While it is traced it has a mask, which the graph leaves out again, and what was repeated with it; in float32 each layer
    keeps that.
    """
    model, batch = llama()
    model.to(dtype)
    costs = cost_graph(trace(model, batch))
    eager = union_of_saved(lambda: model(**batch), [*model.parameters(), *model.buffers(), *batch.values()])
    layers, repeated_bytes, grouped_bytes = 2, 3 * 16 * 32 * 4, 3 * 16 * 16 * 4
    extra = layers * 2 * (repeated_bytes - grouped_bytes) if dtype == torch.float32 else 0
    assert costs.saved_bytes(range(len(costs.ops)), 3) == eager + extra


class OneAttention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True).sum()


def _attention(dtype: torch.dtype = torch.float32, **options: Any) -> GraphCosts:
    model = OneAttention(options.pop("dropout", 0.0)).to(dtype)
    return cost_graph(trace(model, {"x": torch.randn(2, 64, 32, dtype=dtype)}), **options)


def test_the_backend_is_the_targets_and_is_named():
    assert _attention().attention_backend == "cpu-flash"
    assert _attention(device_kind="cuda").attention_backend == "efficient"
    assert _attention(torch.bfloat16, device_kind="cuda").attention_backend == "flash"
    assert _attention(torch.bfloat16, device_kind="cuda", attention="cudnn").attention_backend == "cudnn"
    assert _attention(dropout=0.1).attention_backend == "math"


def test_math_attention_is_charged_as_a_kind_of_its_own():
    fused = "scaled_dot_product_attention"
    assert {"math_attention", fused} & set(_attention().rates.kinds) == {fused}
    assert {"math_attention", fused} & set(_attention(dropout=0.1).rates.kinds) == {"math_attention"}


def test_math_attention_keeps_scores_and_fused_attention_does_not():
    scores_bytes = 2 * 4 * 64 * 64 * 4
    kept = {}
    for backend in ("math", "cpu-flash"):
        costs = _attention(attention=backend)
        sizes = costs.storage_bytes(2)
        kept[backend] = max(sizes[name] for names in costs.saved for name in names)
    assert kept["math"] == scores_bytes > kept["cpu-flash"]


def test_query_key_and_value_are_views_of_one_storage():
    costs = _attention()
    attention = next(s for name, s in zip(costs.ops, costs.saved, strict=True) if "attention" in name)
    sizes = costs.storage_bytes(2)
    assert sorted(sizes[name] for name in attention) == [2 * 4 * 64 * 4, 2 * 64 * 32 * 4, 2 * 64 * 96 * 4]


class DropoutOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + self.weight, 0.1).sum()


def test_dropout_keeps_noise_on_a_cpu_and_a_boolean_mask_on_a_gpu():
    graph = trace(DropoutOnly(), {"x": torch.randn(2, 8)})
    every = range(len(graph.ops))
    assert cost_graph(graph, device_kind="cpu").saved_bytes(every, 16) == 16 * 8 * 4
    assert cost_graph(graph, device_kind="cuda").saved_bytes(every, 16) == 16 * 8


class NormOnly(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.exp()).sum()


def test_rms_norm_on_a_gpu_is_one_kernel_each_way_which_keeps_its_input_if_its_weight_has_the_same_type():
    def costs(weight: torch.dtype) -> GraphCosts:
        model = NormOnly(weight)
        return cost_graph(trace(model, {"x": torch.randn(2, 8, dtype=torch.bfloat16)}), device_kind="cuda")

    fused, mixed = costs(torch.bfloat16), costs(torch.float32)
    norm = next(i for i, name in enumerate(fused.ops) if "norm" in name)
    assert fused.at(16).forward_launches[norm] == 1 < mixed.at(16).forward_launches[norm]
    assert fused.saved_bytes([norm], 16) == 16 * (8 * 2 + 4)  # the input, and a root of 32 bits for each row


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].sum()


def test_a_fused_lstm_is_costed_by_its_cells_and_says_that_this_is_an_estimate():
    costs = cost_graph(trace(Recurrent(), {"x": torch.randn(2, 5, 8)}))
    lstm = next(i for i, name in enumerate(costs.ops) if "lstm" in name)
    assert costs.estimated == (costs.ops[lstm],)
    assert costs.at(4).forward_flops[lstm] == 2 * 4 * 5 * 8 * (8 + 8) * 4
    assert costs.saved_bytes([lstm], 4) >= 4 * 5 * 8 * 4 * 5
