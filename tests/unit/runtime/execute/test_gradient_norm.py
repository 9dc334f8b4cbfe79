"""The norm over ranks is torch's norm over everything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

from cost_models.errors import UsageError
from runtime.execute.gradient_norm import global_norm, gradients_of, refuse_nonfinite
from runtime.ranks.collective import Pending


class Ranks:
    """The collectives of one of two ranks; the other one's vector is known."""

    device = torch.device("cpu")

    def __init__(self, other: Tensor | None = None) -> None:
        self.other, self.sent = other, torch.empty(0)

    def all_reduce(self, tensor: Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> Pending:
        self.sent = tensor.clone()
        if self.other is None:
            return Pending(tensor)
        if op == dist.ReduceOp.MAX:
            return Pending(torch.where(tensor > self.other, tensor, self.other))
        return Pending(tensor + self.other)


def over_two_ranks(first: list[Tensor], second: list[Tensor], norm_type: float) -> Tensor:
    alone = Ranks()
    global_norm(first, norm_type, alone)  # type: ignore[arg-type]
    return global_norm(second, norm_type, Ranks(alone.sent))  # type: ignore[arg-type]


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    made = []
    for number, dtype in enumerate(dtypes):
        generator = torch.Generator().manual_seed(number)
        parameter = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
        real = torch.float32 if dtype.is_complex else dtype
        parameter.grad = torch.randn(3, 5, generator=generator).to(real).to(dtype)
        made.append(parameter)
    return made


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize(
    "dtypes", [(torch.float64,) * 3, (torch.float32, torch.float64, torch.complex64), (torch.float32,) * 3]
)
def test_clipping_equals_torch_s(norm_type: float, dtypes: tuple[torch.dtype, ...]) -> None:
    ours, theirs = parameters(*dtypes), parameters(*dtypes)
    unused = nn.Parameter(torch.zeros(2))
    norm = over_two_ranks(gradients_of([*ours[:1], unused]), gradients_of(ours[1:]), norm_type)
    expected = clip_grad_norm_(theirs, 0.5, norm_type)
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    clip_grads_with_norm_([*ours, unused], 0.5, norm)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0.0)
    assert unused.grad is None


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_whichever_rank_has_it(norm_type: float, bad: float) -> None:
    good, broken = torch.ones(4), torch.tensor([1.0, bad])
    for first, second in ((good, broken), (broken, good)):
        norm = over_two_ranks([first], [second], norm_type)
        assert bool(norm.isnan()) == math.isnan(bad)
        assert bool(norm.isinf()) == math.isinf(bad)
        with pytest.raises(RuntimeError, match="non-finite"):
            refuse_nonfinite(norm, norm_type)


def test_ranks_without_gradients_add_nothing() -> None:
    for norm_type in (2.0, math.inf):
        assert float(over_two_ranks([], [torch.tensor([3.0, 4.0])], norm_type)) == {2.0: 5.0}.get(
            norm_type, 4.0
        )
        assert float(over_two_ranks([], [], norm_type)) == 0.0


def test_16_bit_gradients_do_not_overflow_in_their_square() -> None:
    large = torch.full((4,), 300.0, dtype=torch.float16)
    assert float(over_two_ranks([large], [large], 2.0)) == pytest.approx(300.0 * math.sqrt(8))


def test_sparse_gradients_count() -> None:
    indices = torch.tensor([[0, 2, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 2.0, 2.0]), (4,))
    assert float(over_two_ranks([sparse], [], 2.0)) == 5.0


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -math.inf, math.nan])
def test_other_norms_are_refused(norm_type: float) -> None:
    with pytest.raises(UsageError, match="cannot clip by a"):
        global_norm([], norm_type, Ranks())  # type: ignore[arg-type]
