"""The table of attention backends, compared with PyTorch's own autograd formulas and its own choice on CPU."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cost_models.attention import (
    AttentionCall,
    backward_peak_bytes,
    choose_backend,
    copied_gradient_bytes,
    output_storage_bytes,
    saved_tensors,
    supports,
    transferred_bytes,
)
from cost_models.errors import UsageError

aten = torch.ops.aten
SHAPE = (2, 4, 24, 16)

KERNELS = {
    "flash": lambda q, k, v, mask: aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True),
    "efficient": lambda q, k, v, mask: aten._scaled_dot_product_efficient_attention.default(
        q, k, v, mask, True, 0.0, mask is None
    ),
    "cudnn": lambda q, k, v, mask: aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, mask, True, 0.0, mask is None
    ),
    "cpu-flash": lambda q, k, v, mask: aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, mask is None, attn_mask=mask
    ),
}


def _call(dtype: torch.dtype = torch.bfloat16, **changes: object) -> AttentionCall:
    values = {"query": SHAPE, "key": SHAPE, "value": SHAPE, "dtype": dtype, **changes}
    return AttentionCall(**values)  # type: ignore[arg-type]


def _storages(call: AttentionCall, kernel) -> Counter[str | int]:
    """What autograd keeps when the kernel itself runs on fake tensors: names of operands, sizes of its own."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        operands = [torch.empty(SHAPE, dtype=call.dtype, requires_grad=True) for _ in range(3)]
        mask = torch.empty(call.mask, dtype=call.dtype) if call.mask is not None else None
        out = kernel(*operands, mask)[0]
        named = zip(("query", "key", "value", "mask", "out"), (*operands, mask, out), strict=True)
        names = {t.untyped_storage()._cdata: name for name, t in named if t is not None}
        return Counter(
            names.get(t.untyped_storage()._cdata, t.untyped_storage().nbytes()) for t in kept if t.numel()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("flash", None),
        ("efficient", None),
        ("efficient", (2, 4, 24, 24)),
        ("cudnn", None),
        ("cudnn", (2, 4, 24, 24)),
        ("cpu-flash", None),
        ("cpu-flash", (2, 1, 24, 24)),
    ],
)
def test_the_table_says_what_the_kernels_autograd_formula_keeps(name, mask, dtype):
    call = _call(dtype, mask=mask, mask_dtype=dtype if mask else None)
    assert Counter(saved_tensors(name, call)) == _storages(call, KERNELS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({}, {"is_causal": True}),
        ({"mask": (2, 1, 24, 24), "mask_dtype": torch.bool}, {"attn_mask": torch.ones(2, 1, 24, 24) > 0}),
        ({"dropout": 0.5}, {"dropout_p": 0.5}),
        ({"value": (2, 4, 24, 8)}, {}),
    ],
    ids=["causal", "mask", "dropout", "unlike heads"],
)
def test_the_choice_on_a_cpu_is_pytorchs_own(changes, arguments, dtype):
    call = _call(dtype, **changes)
    q, k, v = (torch.zeros(s, dtype=dtype, requires_grad=True) for s in (call.query, call.key, call.value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments)
    runs_flash = "FlashAttentionForCpu" in type(out.grad_fn).__name__
    assert choose_backend(call, "cpu") == ("cpu-flash" if runs_flash else "math")


def test_the_choice_on_a_gpu():
    assert choose_backend(_call(), "cuda") == "flash"
    assert choose_backend(_call(torch.float32), "cuda") == "efficient"
    assert choose_backend(_call(mask=(2, 4, 24, 24), mask_dtype=torch.bfloat16), "cuda") == "efficient"
    assert choose_backend(_call(torch.float64), "cuda") == "math"
    assert (
        choose_backend(_call(query=(2, 4, 24, 512), key=(2, 4, 24, 512), value=(2, 4, 24, 512)), "cuda")
        == "efficient"
    )


def test_a_request_holds_where_it_can_and_yields_where_it_cannot():
    assert choose_backend(_call(), "cuda", "math") == "math"
    assert choose_backend(_call(), "cuda", "cudnn") == "cudnn"
    assert choose_backend(_call(torch.float32), "cuda", "flash") == "efficient"
    with pytest.raises(UsageError, match="cpu-flash"):
        choose_backend(_call(), "cuda", "sage")


def test_grouped_heads():
    grouped = _call(key=(2, 2, 24, 16), value=(2, 2, 24, 16))
    assert supports("flash", grouped)
    assert not supports("efficient", grouped)


def test_flash_makes_gradients_of_shared_heads_once_per_head_of_queries():
    shared = _call(key=(2, 2, 24, 16), value=(2, 2, 24, 16))
    copied = 2 * (2 * 4 * 24 * 16) * 2
    assert copied_gradient_bytes("flash", _call()) == 0
    assert copied_gradient_bytes("cudnn", shared) == 0
    assert copied_gradient_bytes("flash", shared) == copied
    assert backward_peak_bytes("flash", shared) - backward_peak_bytes("cudnn", shared) == copied


def test_copies_that_an_op_makes_are_its_own():
    copies = replace(_call(), copies_heads=True)
    of_key, of_value = (2 * math.prod(shape) for shape in (copies.key, copies.value))
    assert saved_tensors("flash", copies)[:4] == ("query", of_key, of_value, "out")
    extra = 2 * (of_key + of_value)
    assert transferred_bytes(copies) == tuple(moved + extra for moved in transferred_bytes(_call()))


def test_a_boolean_mask_is_kept_as_a_copy_of_the_querys_type():
    call = _call(torch.float32, mask=(2, 1, 24, 24), mask_dtype=torch.bool)
    kept = saved_tensors("cpu-flash", call)
    assert "mask" not in kept
    assert 2 * 24 * 24 * 4 in kept


def test_unaligned_heads_and_masks_are_kept_as_padded_copies():
    shape = (2, 4, 10, 12)
    call = _call(query=shape, key=shape, value=shape)
    padded = 2 * 4 * 10 * 16 * 2
    assert saved_tensors("flash", call)[:4] == (padded, padded, padded, "out")
    assert output_storage_bytes("flash", call) == padded
    assert saved_tensors("efficient", call)[:4] == ("query", "key", "value", "out")
    masked = _call(mask=(2, 1, 10, 10), mask_dtype=torch.bfloat16)
    assert saved_tensors("efficient", masked)[-1] == 2 * 10 * 16 * 2
    assert saved_tensors("cudnn", masked)[-1] == "mask"


def test_fused_kernels_move_no_scores():
    """Bytes grow linearly with the sequence, not with its square."""
    short, long = (_call(query=s, key=s, value=s) for s in ((1, 1, 1024, 64), (1, 1, 2048, 64)))
    assert transferred_bytes(long) == tuple(2 * n for n in transferred_bytes(short))
