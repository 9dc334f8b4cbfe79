"""Heads of keys that queries share: no plan is slower than with copies, on more ranks than there are heads too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, partition
from passes.graph.graph import OpGraph
from passes.trace.trace import trace

TOKENS, WIDTH, HEADS, SHARED = 4096, 128, 16, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = HEADS * WIDTH
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in "qo")
        self.k, self.v = (nn.Linear(hidden, SHARED * WIDTH, bias=False) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for w in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(HEADS // SHARED, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        loss: Tensor = (x + self.o(y.transpose(1, 2).flatten(2))).float().pow(2).mean()
        return loss


def traced() -> OpGraph:
    with torch.device("meta"):
        model, x = Attention().bfloat16(), torch.empty(2, TOKENS, HEADS * WIDTH, dtype=torch.bfloat16)
    return trace(model, {"x": x})


PINS = {
    "none": {},
    "tensor parallel": {"*": "column_row"},
    "tokens for heads": {"k": "S1", "v": "S1", "scaled_dot_product_attention": "S1"},
}


@pytest.mark.parametrize("pins", PINS.values(), ids=PINS)
def test_no_plan_is_slower(pins: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def planned() -> Plan:
        cluster = ClusterSpec.parse("dgx-h100")
        return partition(
            traced(), cluster, strategy="feature", batch_size=2, mesh=(8,), pins=pins, check="off"
        )

    shared = planned()
    monkeypatch.setattr("passes.trace.build.share_heads", lambda graph: None)
    copied = planned()
    assert shared.prediction.step_seconds < copied.prediction.step_seconds
    peaks = [max(plan.prediction.peak_memory_bytes.values()) for plan in (shared, copied)]
    assert peaks[0] <= peaks[1]
