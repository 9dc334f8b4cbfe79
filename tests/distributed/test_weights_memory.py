"""``weights=`` costs a rank its own share of the weights, and hardly more, while it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from runtime.ranks.launch import spawn_local
from tests.support.matrix import thinned

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


def ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def rises(plans: list[str], folders: list[str] | None, dtype: torch.dtype) -> tuple[float, float]:
    """(what loading the wide model adds to the peak, bytes of its share). Without folders it is drawn."""
    for number, (text, width) in enumerate(zip(plans, (NARROW, WIDE[dtype]), strict=True)):
        options = {"init_fn": ones} if folders is None else {"weights": folders[number]}
        before = peak_bytes()  # of the narrow model the second time: tracing, code and all
        with Plan.from_json(text).deploy(workload(width, dtype), timeout_seconds=30.0, **options) as e:
            assert all(float(p[0, 0].detach()) == 1.0 for p in e.parameters.values())
            share = sum(p.numel() * p.itemsize for p in e.parameters.values())
    return peak_bytes() - before, share


def sharded(width: int) -> str:
    """Every weight by rows over two ranks, gathered where it is used."""
    pins = {"*": "zero3"}
    cluster = ClusterSpec.local(2)
    plan = partition(workload(width), cluster, strategy="feature", batch_size=4, microbatches=1, pins=pins)
    stages = [stage.sharding for stage in plan.stages]
    assert stages[0] is not None
    assert stages[0].stored == {f"{layer}.weight": "S0" for layer in range(LAYERS)}
    return plan.model_dump_json()


def rises_of_both(plans: list[str], folders: list[str], dtype: torch.dtype) -> list[tuple[float, float]]:
    """From files, then drawn: each from a peak that is what there is now."""
    found = [rises(plans, folders, dtype)]
    Path("/proc/self/clear_refs").write_text("5")
    return [*found, rises(plans, None, dtype)]


def test_loading_a_sharded_model_holds_a_ranks_blocks(tmp_path: Path) -> None:
    """``init_fn`` draws a whole matrix at a time."""
    widths = (NARROW, WIDE[torch.float32])
    plans, folders = [sharded(width) for width in widths], [str(tmp_path / str(width)) for width in widths]
    for width, folder in zip(widths, folders, strict=True):
        Path(folder).mkdir()
        one = {name: torch.ones(p.shape) for name, p in workload(width).model.named_parameters()}
        save_file(one, Path(folder) / "model.safetensors")
    matrix = 4 * widths[1] ** 2
    for found in spawn_local(2, rises_of_both, plans, folders, torch.float32, timeout_seconds=100.0):
        for (rise, share), drawn in zip(found, (0, matrix), strict=True):
            assert share == LAYERS // 2 * matrix > 100e6
            assert rise <= 1.10 * share + drawn + 2**20, f"{rise / share:.3f} of its share"


@pytest.mark.parametrize(
    ("stored", "wanted"),
    thinned([("float32", "float32"), ("float32", "bfloat16")], []),
)
def test_loading_holds_a_ranks_share(stored: str, wanted: str, tmp_path: Path) -> None:
    dtype, plans, folders = getattr(torch, wanted), [], []
    for width in (NARROW, WIDE[dtype]):
        made = workload(width, dtype)
        pins = {str(layer): layer // (LAYERS // 2) for layer in range(LAYERS)}
        plan = partition(
            made, ClusterSpec.local(2), batch_size=4, microbatches=2, pins=pins, strategy="layer"
        )
        plans.append(plan.model_dump_json())
        folders.append(str(tmp_path / str(width)))
        Path(folders[-1]).mkdir()
        one = {n: torch.ones(p.shape, dtype=getattr(torch, stored)) for n, p in made.model.named_parameters()}
        save_file(one, Path(folders[-1]) / "model.safetensors")
    for rise, share in spawn_local(2, rises, plans, folders, dtype, timeout_seconds=100.0):
        assert share == LAYERS // 2 * WIDE[dtype] ** 2 * dtype.itemsize > 100e6
        assert rise <= 1.10 * share + 2**20, f"{rise / share:.3f} of its share"
