"""``weights=`` costs a rank its own share of the weights, and hardly more, while it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from runtime.launch import spawn_local

LAYERS, NARROW = 6, 8
WIDE = {torch.float32: 2944, torch.bfloat16: 4096}
"""Shares of more than 100 MB: the noise of a process's peak, a few MB, is far below the 10 % that are allowed."""


def workload(width: int, dtype: torch.dtype = torch.float32) -> Workload:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(dtype)
    return Workload(
        model, {"input": torch.zeros(4, width, dtype=dtype)}, lambda output, _: output.mean(), "wide"
    )


def peak_bytes() -> int:
    """The most memory this process has had so far, files mapped into it included."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def rises(plans: list[str], folders: list[str], dtype: torch.dtype) -> tuple[float, float]:
    """(what loading the wide model adds to the peak, bytes of its share)."""
    for text, folder, width in zip(plans, folders, (NARROW, WIDE[dtype]), strict=True):
        before = peak_bytes()  # of the narrow model the second time: tracing, code and all
        with Plan.from_json(text).deploy(workload(width, dtype), weights=folder, timeout_seconds=30.0) as e:
            assert all(float(p[0, 0].detach()) == 1.0 for p in e.parameters.values())
            share = sum(p.numel() * p.itemsize for p in e.parameters.values())
    return peak_bytes() - before, share


@pytest.mark.parametrize(("stored", "wanted"), [("float32", "float32"), ("float32", "bfloat16")])
def test_loading_holds_a_ranks_share(stored: str, wanted: str, tmp_path: Path) -> None:
    dtype, plans, folders = getattr(torch, wanted), [], []
    for width in (NARROW, WIDE[dtype]):
        made = workload(width, dtype)
        pins = {str(layer): layer // (LAYERS // 2) for layer in range(LAYERS)}
        plan = partition(made, ClusterSpec.local(2), batch_size=4, microbatches=2, pins=pins)
        plans.append(plan.model_dump_json())
        folders.append(str(tmp_path / str(width)))
        Path(folders[-1]).mkdir()
        one = {n: torch.ones(p.shape, dtype=getattr(torch, stored)) for n, p in made.model.named_parameters()}
        save_file(one, Path(folders[-1]) / "model.safetensors")
    for rise, share in spawn_local(2, rises, plans, folders, dtype, timeout_seconds=100.0):
        assert share == LAYERS // 2 * WIDE[dtype] ** 2 * dtype.itemsize > 100e6
        assert rise <= 1.10 * share + 2**20, f"{rise / share:.3f} of its share"
