"""Pass share_heads: attention reads heads of keys and values before they are copied, where every device has a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner import Workload
from passes.trace.trace import trace
from tests.support.traced_models import eager_loss, run

aten = torch.ops.aten
TOKENS, HEADS, GROUP, WIDTH = 6, 2, 2, 8
Copy = Callable[[Tensor], Tensor]
"""From [b, s, k, d] to [b, k · group, s, d]."""


def _transformers(x: Tensor) -> Tensor:
    b, s, k, d = x.shape
    return x.transpose(1, 2)[:, :, None, :, :].expand(b, k, GROUP, s, d).reshape(b, k * GROUP, s, d)


def _llama(x: Tensor) -> Tensor:
    b, s, k, d = x.shape
    return x[:, :, :, None, :].expand(b, s, k, GROUP, d).reshape(b, s, k * GROUP, d).transpose(1, 2)


def _torchtune(x: Tensor) -> Tensor:
    wide = x.view(*x.shape[:3], 1, WIDTH).expand(-1, -1, -1, GROUP, -1)
    return wide.flatten(2, 3).permute(0, 2, 1, 3)


COPIES: dict[str, Copy] = {
    "transformers": _transformers,
    "llama": _llama,
    "torchtune": _torchtune,
    "repeated": lambda x: x.transpose(1, 2).unsqueeze(2).repeat(1, 1, GROUP, 1, 1).flatten(1, 2),
    "interleaved": lambda x: x.transpose(1, 2).repeat_interleave(GROUP, dim=1),
    "in another type": lambda x: _llama(x.float()).contiguous().to(x.dtype),
}
OTHER_HEADS: dict[str, Copy] = {
    "tiled": lambda x: x.transpose(1, 2).repeat(1, GROUP, 1, 1),
    "copies outside": lambda x: x.transpose(1, 2)[:, None].expand(-1, GROUP, -1, -1, -1).flatten(1, 2),
    "tokens": lambda x: x.repeat_interleave(GROUP, 1).view(-1, TOKENS, HEADS * GROUP, WIDTH).transpose(1, 2),
}


class Attention(nn.Module):
    def __init__(self, copy: Copy, causal: bool = True, read_twice: bool = False, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(8, HEADS * GROUP * WIDTH),
            *(nn.Linear(8, HEADS * WIDTH) for _ in "kv"),
        )
        self.copy, self.read_twice = copy, read_twice
        self.options = {"is_causal": causal, **options}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH)) for w in (self.q, self.k, self.v))
        k, v = self.copy(k), self.copy(v)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, **self.options).float().pow(2).mean()
        return y + k.float().pow(2).mean() if self.read_twice else y


def traced(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
    """Return the attention of the trace, which computes what the module does."""
    batch = {"x": torch.randn(3, TOKENS, 8).to(dtype)}
    workload = Workload(module.to(dtype), batch, None)
    graph = trace(workload.model, batch)
    torch.testing.assert_close(run(graph, workload.model, batch)[0], eager_loss(workload, batch))
    (node,) = (node for node in graph.ops if node.target is aten.scaled_dot_product_attention.default)
    return node


def shares_heads(node: fx.Node) -> bool:
    key, value = (source.meta["val"] for source in node.args[1:3])  # type: ignore[union-attr]
    assert key.shape[1] == value.shape[1]
    return bool(node.kwargs.get("enable_gqa")) and key.shape[1] == HEADS


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_copies_of_heads_are_left_out(copy: Copy) -> None:
    assert shares_heads(traced(Attention(copy)))


@pytest.mark.parametrize("copy", OTHER_HEADS.values(), ids=OTHER_HEADS)
def test_other_copies_stay(copy: Copy) -> None:
    assert not shares_heads(traced(Attention(copy)))


NO_KERNEL: dict[str, tuple[nn.Module, torch.dtype]] = {
    "float32 on CUDA": (Attention(_llama), torch.float32),
    "float16 before sm_80": (Attention(_llama), torch.float16),
    "mask": (Attention(_llama, False, attn_mask=torch.rand(TOKENS, TOKENS) > 0.2), torch.bfloat16),
    "dropout": (Attention(_llama, dropout_p=1e-9), torch.bfloat16),
}


@pytest.mark.parametrize(("module", "dtype"), NO_KERNEL.values(), ids=NO_KERNEL)
def test_copies_stay_where_shared_heads_have_no_kernel(module: nn.Module, dtype: torch.dtype) -> None:
    assert not shares_heads(traced(module, dtype))


def test_copies_that_are_read_elsewhere_too_stay() -> None:
    assert not shares_heads(traced(Attention(_llama, read_twice=True)))
