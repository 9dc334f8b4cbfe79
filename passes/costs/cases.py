"""Calibration cases, counted exactly as ``passes.costs.saved`` counts the ops of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cost_models.attention import AttentionCall, transferred_bytes
from cost_models.measure.cases import OpCase
from cost_models.measure.ops import CaseWork
from passes.costs.arithmetic import attention_backward_flops, attention_flops
from passes.costs.kernels import KernelCounter


def count_case(case: OpCase) -> CaseWork:
    """Count FLOPs and bytes of the case's forward and of both halves of its backward."""
    with FakeTensorMode():
        inputs, weights = [t.detach() for t in case.inputs()], list(case.weights())
        if case.kind == "scaled_dot_product_attention":
            return _attention(inputs)
        for tensor in (*inputs, *weights):
            if tensor.is_floating_point():
                tensor.requires_grad_()
        counter = KernelCounter()
        with counter:
            output = case.call(*inputs, *weights)
            forward = counter.take()
            gradient = torch.ones_like(output)
            trained = [t for t in (*inputs, *weights) if t.requires_grad]
            counter.take()
            torch.autograd.grad(output, trained, gradient, retain_graph=True)
            total = counter.take()
            if weights:
                torch.autograd.grad(output, weights, gradient, retain_graph=True)
        weight = counter.take()
    added = 3 * sum(_size(w) for w in weights)  # to the gradients of earlier micro-batches
    return CaseWork(
        forward=(forward.flops, forward.bytes),
        backward_input=(total.flops - weight.flops, max(0, total.bytes - weight.bytes)),
        backward_weight=(weight.flops, weight.bytes + added),
    )


def _attention(operands: Sequence[Tensor]) -> CaseWork:
    q, k, v = (tuple(t.shape) for t in operands)
    call = AttentionCall(
        query=q,
        key=k,
        value=v,
        dtype=operands[0].dtype,
        mask=None,
        mask_dtype=None,
        mask_requires_grad=False,
        dropout=0.0,
    )
    forward_bytes, backward_bytes = transferred_bytes(call)
    forward, backward = attention_flops(q, k, v), attention_backward_flops(q, k, v)
    return CaseWork((forward, forward_bytes), (backward, backward_bytes), (0, 0))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
