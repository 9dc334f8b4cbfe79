"""Small random models of many kinds, and clusters of many kinds: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.free_clusters import clusters as unlike_clusters
from cost_models.cluster import ClusterSpec
from cost_models.op_profile import PHASES, Cost, CostCurve, CostLine, OpTimes, Phase
from cost_models.spec.rates import MeasuredRates
from cost_models.spec.sections import HostSpec
from passes.graph.graph import OpGraph
from passes.trace.trace import trace

WORDS = 96


class Attention(nn.Module):
    """[b, t, d] -> [b, t, d]; the scores as one op, or as products."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for part in self.inside(x).split(d, -1)
        )
        if self.fused:
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            made = torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v
        y: Tensor = self.outside(made.transpose(1, 2).reshape(b, t, d))
        return y


class Gated(nn.Module):
    """[b, t, d] -> [b, t, d]."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, times * width, bias=False), nn.Linear(width, times * width)
        self.down = nn.Linear(times * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Convolved(nn.Module):
    """[b, t, d] -> [b, t, d], along positions."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=groups)
        self.norm = nn.GroupNorm(groups, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x.transpose(1, 2))).relu().transpose(1, 2)
        return y


class Mixed(nn.Module):
    """[b, t, d] -> [b, t, d]: sums along positions, a mask, a contraction in index notation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("btd,de->bte", x.cumsum(1), self.weight)
        return torch.where(y > 0, y, 0.5 * x).tanh()


class RandomModel(nn.Module):
    """Tokens -> a loss of one of four kinds."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([16, 32, 64, 128])
        self.embedding = nn.Embedding(WORDS, width)
        self.norms, self.blocks = nn.ModuleList(), nn.ModuleList()
        norms: list[Callable[[], nn.Module]] = [
            lambda: nn.LayerNorm(width),
            lambda: nn.RMSNorm(width),
            nn.Identity,
            lambda: nn.Dropout(0.1),
        ]
        blocks: list[Callable[[], nn.Module]] = [
            lambda: Attention(width, draw.choice([2, 4]), draw.random() < 0.5),
            lambda: Gated(width, draw.choice([2, 4])),
            lambda: Convolved(width, draw.choice([1, 4])),
            lambda: Mixed(width),
            lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
            lambda: nn.Linear(width, width),
        ]
        for _ in range(draw.randint(1, 5)):
            self.norms.append(draw.choice(norms)())
            self.blocks.append(draw.choice(blocks)())
        self.residual = draw.random() < 0.7
        self.kind = draw.choice(["tied", "head", "contrast", "square"])
        self.head = nn.Linear(width, WORDS, bias=False) if self.kind == "head" else None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            y = block(norm(x))
            x = x + y if self.residual else y
        if self.kind == "square":
            return (x - self.embedding(labels)).pow(2).mean()
        if self.kind == "contrast":  # work that grows with the square of the micro-batch
            near = F.normalize(x.mean(1), dim=-1)
            return torch.logsumexp(near @ near.t() * 10, -1).mean()
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten())


def random_model(seed: int) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """A model on the meta device, with a batch to trace it with."""
    draw = random.Random(seed)
    steps = draw.choice([4, 8, 32])
    with torch.device("meta"):
        model = RandomModel(draw)
    ids = torch.randint(0, WORDS, (4, steps), generator=torch.Generator().manual_seed(seed))
    return model, {"ids": ids, "labels": ids.clone()}


@lru_cache(maxsize=1)
def traced_model(seed: int) -> OpGraph:
    """Trace ``random_model``; the last one is kept."""
    model, batch = random_model(seed)
    return trace(model, batch, name=f"random {seed}")


def _like(device: object, count: int, bandwidth: str = "300GB/s", latency: str = "3us") -> ClusterSpec:
    links = {"default": {"bandwidth": bandwidth, "latency": latency}}
    nodes = [{"name": "n", "count": count, "device": device, "links": links}]
    return ClusterSpec.from_dict({"name": f"{count} alike", "nodes": nodes})


def calibrated(count: int) -> ClusterSpec:
    """Workers with measured times: caches make small ops cheap per byte, overheads make tiny ones dear."""
    curve = CostCurve(((1e3, 4e-6), (1e5, 8e-6), (1e6, 1e-4), (1e8, 2e-2)))
    kinds = ("linear", "matmul", "conv2d", "conv_transpose2d", "scaled_dot_product_attention")
    lines: dict[tuple[str, Phase], Cost] = {
        (kind, phase): CostLine(1e-5, 2e-11 * (1 + number), 1e-10 * (1 + number))
        for number, kind in enumerate(kinds)
        for phase in PHASES
    }
    curves: dict[tuple[str, Phase], Cost] = {
        ("elementwise", "forward"): curve,
        ("view", "forward"): CostCurve(((1.0, 1e-6),)),
        ("optimizer adamw", "forward"): CostLine(2e-6, 0.0, 3e-10),
    }
    times = OpTimes(tuple(sorted({**lines, **curves}.items(), key=lambda item: item[0])))
    worker = {
        "kind": "cpu",
        "memory": "8GiB",
        "memory_bandwidth": 1e10,
        "flops": {"float32": 5e10, "float64": 5e10},
    }
    machine = _like(worker, count, "20GB/s", "1us")
    return machine.with_device_rates(
        MeasuredRates(op_times=times, host_costs=HostSpec(contention=1.2)), "made up"
    )


def _plain(memory_bandwidth: str, launch: str) -> dict[str, Any]:
    return {
        "kind": "cpu",
        "memory": "8GiB",
        "memory_bandwidth": memory_bandwidth,
        "flops": {"float32": "20G", "float64": "10G"},
        "launch_overhead": launch,
    }


CLUSTERS: Mapping[str, Callable[[], ClusterSpec]] = {
    "a100-4": lambda: _like("A100-40GB", 4),
    "a100-2": lambda: _like("A100-40GB", 2),
    "h100-4-slow-links": lambda: _like("H100-80GB", 4, "1GB/s", "50us"),
    "cpu-4": lambda: _like(_plain("10GB/s", "1us"), 4, "20GB/s", "1us"),
    "cpu-3-no-launches": lambda: _like(_plain("100MB/s", "0us"), 3, "100GB/s", "0.01us"),
    "calibrated-4": lambda: calibrated(4),
    "calibrated-2": lambda: calibrated(2),
    "unlike-gpu-4": lambda: unlike_clusters()["gpu-4"],
    "unlike-cpu-2": lambda: unlike_clusters()["cpu-2"],
    "unlike-slow-4": lambda: unlike_clusters()["slow-4"],
}
"""GPUs and CPUs, alike and unlike, rates from data sheets and from calibrations, links that cost nothing and much."""
