"""A plan for GPUs has room for what its optimizer makes while it steps: a copy of the parameters, under Adam's kinds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import InfeasibleError
from partitioner import Plan, partition

WIDTHS = tuple(8 * width for width in (256, 1024, 512, 1536, 256, 2048, 512, 512))
STATE_BYTES = 16  # parameters, gradients, two moments


class Net(nn.Module):
    """Layers of unlike sizes, and few samples: activations take next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*map(nn.Linear, WIDTHS, WIDTHS[1:]))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def planned(strategy: str, optimizer: str, bytes_per_parameter: float, kind: str = "cuda") -> Plan:
    """Plan for two devices with room for so many bytes of each parameter together."""
    with torch.device("meta"):
        model = Net()
    parameters = sum(p.numel() for p in model.parameters())
    device = {
        "kind": kind,
        "memory": f"{int(parameters * bytes_per_parameter / 2)}B",
        "memory_process": "0B",
        "memory_bandwidth": "1TB/s",
        "flops": {"float32": 1e13},
    }
    links = {"default": {"bandwidth": "50GB/s", "latency": "5us"}}
    cluster = ClusterSpec.from_dict({"nodes": [{"name": "n", "count": 2, "device": device, "links": links}]})
    return partition(
        model,
        cluster,
        example_inputs={"x": torch.randn(4, WIDTHS[0])},
        batch_size=4,
        strategy=strategy,
        optimizer_memory=optimizer,
    )


@pytest.mark.parametrize("strategy", ["layer", "feature", "hybrid", "free"])
def test_plans_have_room_for_it(strategy: str) -> None:
    plan = planned(strategy, "adamw", 1.3 * STATE_BYTES)
    for rank, peak in plan.prediction.peak_memory_bytes.items():
        capacity = plan.cluster.devices[int(rank)].memory_bytes
        assert plan.state_bytes[rank] + plan.update_bytes[rank] <= peak <= capacity
    assert sum(plan.update_bytes.values()) >= sum(plan.state_bytes.values()) // 5
    assert max(plan.simulate().peak_bytes) == max(plan.prediction.peak_memory_bytes.values())


def test_without_room_for_it_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match="simulated"):
        planned("layer", "adamw", 1.22 * STATE_BYTES)


@pytest.mark.parametrize(("optimizer", "kind"), [("adamw", "cpu"), ("momentum", "cuda")])
def test_others_need_no_room_for_it(optimizer: str, kind: str) -> None:
    plan = planned("layer", optimizer, 1.22 * STATE_BYTES, kind)
    assert set(plan.update_bytes.values()) == {0}
