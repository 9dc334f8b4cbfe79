"""Ops as the target device runs them, where its kernels keep or move something else than the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from passes.graph.nodes import tensors_in

aten = torch.ops.aten


def on_device(target: Any, device_kind: str, args: Sequence[Any]) -> Callable[..., Any]:
    """Return the op as the target device runs it.

    CUDA's dropout is one kernel that keeps a boolean mask; the CPU's keeps the scaled noise in the input's type. CUDA's RMS
    norm is a layer norm's kernel without the mean (``_fused_rms_norm`` in ATen's layer_norm_kernel.cu, since torch 2.8)
    where the weight has the input's type; the CPU's is a chain of elementwise ops in 32 bits.
    """
    if device_kind == "cuda" and target is aten.dropout.default and args[2] and 0 < args[1] < 1:
        return lambda x, p, train: aten.native_dropout.default(x, p, train)[0]
    if device_kind == "cuda" and target is aten.rms_norm.default and _of_one_type(args):
        return lambda x, shape, weight=None, eps=None: aten.layer_norm.default(x, shape, weight)
    op: Callable[..., Any] = target
    return op


def _of_one_type(args: Sequence[Any]) -> bool:
    return len({tensor.dtype for tensor in tensors_in(args)}) == 1
