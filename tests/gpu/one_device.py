"""Plans on one device beside plain PyTorch on it. ``device`` is a parameter: the same functions run on a CPU in
``tests/distributed/test_one_device.py``, which is how they are tested where there is no GPU.

Functions beginning with ``train`` run in workers, those of a ``runtime.ranks.launch.WorkerPool``.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.precision import Precision
from partitioner import Plan, Workload, partition

WORDS, WIDTH, TOKENS, SAMPLES, STEPS = 64, 32, 12, 8, 4
RATE = 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """A causal language model of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    return nn.functional.cross_entropy(wide.flatten(0, 1), batch["labels"].flatten())


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, WORDS, (SAMPLES, TOKENS + 1), generator=generator)
    return {"tokens": drawn[:, :-1], "labels": drawn[:, 1:]}


def workload(dtype: torch.dtype = torch.float32) -> Workload:
    torch.manual_seed(0)
    return Workload(Net().to(dtype), batch(), loss_fn, "net")


@dataclass(frozen=True)
class Way:
    """One way to train. ``options``: of ``partition``; ``deploying``: of ``Plan.deploy``; ``dtype``: of the model."""

    options: dict[str, Any] = field(default_factory=dict)
    deploying: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5
    """The most that losses may differ from plain PyTorch's, relatively."""

    @property
    def autocast(self) -> torch.dtype | None:
        precision: Precision | None = self.options.get("precision")
        return None if precision is None else precision.compute


SIXTEEN_BITS = 2e-2
"""The relative difference of losses in 16 bits: sums in another order differ in the last of 8 bits, in each of 3 layers."""

WAYS = {
    "layer": Way({"strategy": "layer"}),
    "feature": Way({"strategy": "feature"}),
    "hybrid": Way({"strategy": "hybrid"}),
    "free": Way({"strategy": "free", "time_limit_seconds": 10.0}),
    "float64": Way(dtype=torch.float64, tolerance=1e-9),
    "bfloat16 under autocast": Way({"precision": Precision(compute=torch.bfloat16)}, tolerance=SIXTEEN_BITS),
    "float16 with loss scaling": Way(
        {"precision": Precision(compute=torch.float16, loss_scale="dynamic")}, tolerance=SIXTEEN_BITS
    ),
    "bfloat16 model": Way(dtype=torch.bfloat16, tolerance=SIXTEEN_BITS),
    "recomputed": Way({"recompute": "full"}),
    "compiled": Way(deploying={"compile": True}, tolerance=1e-4),
}

DATA_PARALLEL = Way({"strategy": "hybrid", "fix": "pipeline=1 data=2"})


def plan_of(way: Way, devices: int, device: str) -> Plan:
    """Plan for ``devices`` devices of the kind of ``device``."""
    cluster = ClusterSpec.parse(f"H100-80GB:{devices}" if device.startswith("cuda") else f"local:{devices}")
    given = {"microbatches": 2, **way.options}
    return partition(
        workload(way.dtype),
        cluster,
        batch_size=SAMPLES,
        optimizer_memory="sgd",
        **{"strategy": "layer", **given},
    )


def train_planned(plan_json: str, way: Way, device: str) -> list[float]:
    """In a worker: losses of some steps."""
    with _deployed(plan_json, way, device) as engine:
        return [float(engine.train_step(batch())) for _ in range(STEPS)]


def train_saved(plan_json: str, way: Way, device: str, folder: str) -> tuple[list[float], list[float]]:
    """In a worker: losses of steps before and after a checkpoint, and those after it again from the checkpoint."""
    with _deployed(plan_json, way, device) as engine:
        for seed in range(2):
            engine.train_step(batch(seed))
        engine.save(folder)
        straight = [float(engine.train_step(batch(seed))) for seed in (2, 3)]
    with _deployed(plan_json, way, device) as engine:
        engine.load(folder)
        assert engine.step == 2
        return straight, [float(engine.train_step(batch(seed))) for seed in (2, 3)]


def train_profiled(plan_json: str, way: Way, device: str) -> tuple[float, list[float]]:
    """In a worker: measured seconds of a step, and the rank's computing measured by the device's clock."""
    with _deployed(plan_json, way, device) as engine:
        profile = engine.profile([batch(seed) for seed in range(STEPS)])
    return profile.measured.step_seconds, list(profile.measured.busy_seconds)


def _deployed(plan_json: str, way: Way, device: str) -> Any:
    return Plan.from_json(plan_json).deploy(
        workload(way.dtype),
        optimizer=torch.optim.SGD,
        optimizer_kwargs={"lr": RATE},
        device=device,
        check_hosts=False,
        timeout_seconds=60.0,
        **way.deploying,
    )


def train_plain(way: Way, device: str) -> list[float]:
    """Train the unpartitioned model on ``device``, as anybody would: its losses."""
    made = workload(way.dtype)
    model = made.model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler(torch.device(device).type, enabled=way.autocast == torch.float16)
    losses = []
    for _ in range(STEPS):
        given = {name: tensor.to(device) for name, tensor in batch().items()}
        kind = torch.device(device).type
        casting = nullcontext() if way.autocast is None else torch.autocast(kind, dtype=way.autocast)
        optimizer.zero_grad()
        with casting:
            loss = loss_fn(model(given["tokens"]), given)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses
