"""Which gradients are copied before they are summed: those of weights are not, their memory is their own."""

from __future__ import annotations

import pytest
from torch import Tensor

from runtime.execute.reduce import GradientReduction
from runtime.ranks.launch import WorkerPool
from tests.distributed.sharded_models import Gpt, gpt_batch
from tests.distributed.test_sharded import CASES, SAMPLES, Task, run_task, sharded_of, task_of


def copied(task: Task) -> set[str]:
    """In a worker: parameters whose gradients are copied to be summed alone."""
    found: set[str] = set()
    writable = GradientReduction._writable

    def noted(self: GradientReduction, name: str, gradient: Tensor) -> Tensor:
        chosen = writable(self, name, gradient)
        if chosen.data_ptr() != gradient.data_ptr():
            found.add(name)
        return chosen

    GradientReduction._writable = noted  # type: ignore[method-assign]
    try:
        run_task(task)
    finally:
        GradientReduction._writable = writable  # type: ignore[method-assign]
    return found


def test_weights_are_summed_where_they_lie(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of layers that run together with the bridge in front of them (``runtime.ops.fused_linear``)."""
    monkeypatch.setattr("passes.shard.state.ALONE_BYTES", 1)
    _, mesh, forced = CASES["gpt batch and column row"]
    model, batch = Gpt().double(), gpt_batch(SAMPLES)
    task = task_of(model, batch, sharded_of(model, batch, mesh, forced))
    weights = {name for name in task.trained if name.startswith("h.") and name.endswith("weight")}
    weights -= {name for name in weights if "norm" in name}
    assert {name.split(".")[2] for name in weights} >= {"q", "k", "v", "up", "down"}
    for found in pool.run(copied, task, world_size=4, timeout_seconds=60):
        assert found
        assert not found & weights
