"""A forward that asks for gradients is refused, and what else went wrong is not hidden by that."""

from __future__ import annotations

import pytest
import torch

from cost_models.errors import ModelError, UsageError
from passes.trace.watch import refuse_own_backwards


def ask(then: BaseException | None = None) -> None:
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(x.sum(), x)
    if then is not None:
        raise then


def test_asking_for_gradients_is_refused() -> None:
    with pytest.raises(ModelError, match="forward asks for gradients itself"), refuse_own_backwards():
        ask()


def test_the_first_error_is_told_as_well() -> None:
    with pytest.raises(ModelError) as caught, refuse_own_backwards():
        ask(then=KeyError("lost"))
    assert "tracing then ended with KeyError: 'lost'" in caught.value.because
    assert isinstance(caught.value.__cause__, KeyError)


def test_errors_that_say_what_is_wrong_and_interrupts_stay_as_they_are() -> None:
    with pytest.raises(UsageError, match="no such input"), refuse_own_backwards():
        ask(then=UsageError("no such input"))
    with pytest.raises(KeyboardInterrupt), refuse_own_backwards():
        ask(then=KeyboardInterrupt())
    with pytest.raises(KeyError, match="not ours"), refuse_own_backwards():
        raise KeyError("not ours")
