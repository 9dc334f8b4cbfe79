"""Where gradients are summed: in their own memory if nobody else reads it, else in a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.execute.reduce import GradientReduction


class Done:
    def wait(self, *_: object) -> None: ...

    def is_completed(self) -> bool:
        return True


def doubled(flat: Tensor) -> Done:
    """As a sum over two ranks with equal gradients."""
    flat.mul_(2)
    return Done()


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def alike() -> dict[str, Tensor]:
    """Two parameters whose gradients autograd leaves in one memory."""
    a, b = (torch.zeros(4, 4, requires_grad=True) for _ in range(2))
    ((a.view(16) + b.view(16)) * torch.ones(16)).sum().backward()  # type: ignore[no-untyped-call]
    assert gradient(a).data_ptr() == gradient(b).data_ptr()
    return {"a": a, "b": b}


def test_shared_memory_is_summed_once_for_each() -> None:
    parameters = alike()
    for name, parameter in parameters.items():
        reduction = GradientReduction(0, {name: parameter})
        reduction.start(doubled).wait()
        reduction.finish()
    for parameter in parameters.values():
        assert torch.equal(gradient(parameter), torch.full((4, 4), 2.0))


def test_a_fresh_gradient_is_not_copied() -> None:
    w = torch.zeros(4, 4, requires_grad=True)
    (torch.ones(2, 4) @ w).sum().backward()  # type: ignore[no-untyped-call]
    before = gradient(w).data_ptr()
    reduction = GradientReduction(0, {"w": w}, fresh={"w"})
    reduction.start(doubled).wait()
    reduction.finish()
    assert gradient(w).data_ptr() == before
    assert torch.equal(gradient(w), torch.full((4, 4), 4.0))


def test_a_missing_gradient_counts_as_zeros() -> None:
    w = torch.zeros(3, requires_grad=True)
    reduction = GradientReduction(0, {"w": w})
    reduction.start(doubled).wait()
    reduction.finish()
    assert torch.equal(gradient(w), torch.zeros(3))
