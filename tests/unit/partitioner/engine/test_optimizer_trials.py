"""Which optimizers may train parts of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.errors import UsageError
from partitioner.engine.optimizer_trials import refuse_whole_tensors

NAMES = ["a", "b", "c"]


class Trust(torch.optim.Optimizer):
    """LAMB's idea: the step is scaled by the norm of the whole tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad * p.data.norm() / p.grad.norm(), alpha=-group["lr"])


class Normal(torch.optim.Optimizer):
    """Steps by the gradient's sign, where it can be built without its groups only."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        if getattr(Normal, "built", False):
            raise TypeError("once only")
        Normal.built = True  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> None:
        raise AssertionError


def check(make: Any, parts: set[str], **options: Any) -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in NAMES]
    names = {id(p): name for p, name in zip(parameters, NAMES, strict=True)}
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    refuse_whole_tensors(make(groups, **options), names, parts, torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.1)}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_element_by_element(make: Any, options: dict[str, Any]) -> None:
    check(make, {"a", "c"}, **options)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Muon, Trust])
def test_tensors_as_a_whole(make: Any) -> None:
    check(make, set())
    with pytest.raises(UsageError, match="treats a tensor as a whole") as caught:
        check(make, {"b", "c"})
    assert caught.value.because[1] == "this plan trains parts of b, c"


def test_what_cannot_be_tried_is_let_through_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check(Normal, {"a"})
    assert "whether Normal treats every element by itself cannot be tried out" in caplog.text


def test_gradients_are_not_shared() -> None:
    """An optimizer that writes into its gradients changes nobody's probe."""

    class Writes(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    grad: Tensor = p.grad
                    grad.clamp_(-0.1, 0.1)
            super().step()

    check(Writes, {"a"}, lr=0.1)
