"""Arithmetic of kernels, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.costs.kernels import KernelCounter


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize(("kind", "points"), [(nn.Conv2d, 4 * 4), (nn.ConvTranspose2d, 9 * 9)])
def test_a_convolution_in_groups(kind: type[nn.Module], points: int, groups: int) -> None:
    """5 samples of 8 channels, 9 x 9, to 16 channels by 3 x 3 with stride 2: 4 x 4 outputs, 9 x 9 inputs transposed.

    Each group takes 8 / groups channels to 16 / groups, so all groups together multiply 8 · 16 / groups · 9 numbers of
    the weight at each point; each gradient as often as forward.
    """
    multiplied = 5 * points * (8 * 16 // groups) * 9
    with FakeTensorMode():
        layer = kind(8, 16, 3, stride=2, groups=groups)
        x = torch.randn(5, 8, 9, 9, requires_grad=True)
        with KernelCounter() as counter:
            y = layer(x)
            forward = counter.take()
            gradient = torch.ones_like(y)
            counter.take()
            torch.autograd.grad(y, [x, layer.weight], gradient, retain_graph=True)
            both = counter.take()
            torch.autograd.grad(y, [layer.weight], gradient)
            weight = counter.take()
    assert (forward.flops, both.flops, weight.flops) == (2 * multiplied, 4 * multiplied, 2 * multiplied)


@pytest.mark.parametrize(("dtype", "reads"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_batch_norm_reads_its_operand_again_for_the_sums(dtype: torch.dtype, reads: int) -> None:
    size_bytes = 4 * 8 * 32 * 32 * dtype.itemsize
    with FakeTensorMode():
        layer = nn.BatchNorm2d(8, affine=False, track_running_stats=False)
        x = torch.randn(4, 8, 32, 32, dtype=dtype, requires_grad=True)
        with KernelCounter() as counter:
            y = layer(x)
            forward = counter.take()
            gradient = torch.ones_like(y)
            counter.take()
            torch.autograd.grad(y, [x], gradient)
            backward = counter.take()
    assert forward.bytes == pytest.approx((reads + 1) * size_bytes, rel=1e-2)
    assert backward.bytes == pytest.approx((2 * reads + 1) * size_bytes, rel=1e-2)
