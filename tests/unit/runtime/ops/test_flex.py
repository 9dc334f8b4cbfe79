"""flex_attention as an op: lists of blocks are torch's own, and its kernel is told what the dense form computes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import runtime.ops.flex as ours
from passes.trace.normal.flex import flex_with_backward
from runtime.ops.flex import FLEX_ATTENTION, FLEX_BLOCKS, at_one, block_kinds, block_mask, by_kernel, dense
from runtime.ops.flex_program import ProgramValue, evaluate, parse, write

aten = torch.ops.aten
ROWS, COLUMNS = 300, 260
SAMPLES, HEADS = 2, 4
MASK = ["ge.Tensor %0 %1", "eq.Tensor %2 %3", "__and__.Tensor $0 $1"]
SCORE = ["sub.Tensor %0 %1", "mul.Tensor %4 $0", "add.Tensor %5 $1", "tanh.default $2"]


def operands() -> list[Tensor]:
    """Numbers of rows and columns, documents of 128 and 200 tokens that differ by sample, a slope of each head."""
    rows, columns = torch.arange(ROWS).view(1, 1, -1, 1), torch.arange(COLUMNS).view(1, 1, 1, -1)
    lengths = torch.tensor([128, 200]).view(-1, 1, 1, 1)
    slopes = torch.linspace(0, 0.1, HEADS, dtype=torch.float64).view(-1, 1, 1)
    return [rows, columns, rows // lengths, columns // lengths, slopes]


def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    length = torch.where(b > 0, 200, 128)
    return (i >= j) & (i // length == j // length)


@pytest.mark.parametrize("at_once", [1, 1 << 26])
def test_blocks_are_those_that_torch_lists(at_once: int) -> None:
    wanted = create_block_mask(visible, SAMPLES, None, ROWS, COLUMNS, device="cpu")
    with mock.patch.object(ours, "_PAIRS_AT_ONCE", at_once):
        blocks = FLEX_BLOCKS(operands()[:4], MASK, ROWS, COLUMNS)
    found = block_mask(blocks, visible, ROWS, COLUMNS)
    assert found.shape == wanted.shape
    assert found.BLOCK_SIZE == wanted.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        for kind in ("num_blocks", "indices"):
            torch.testing.assert_close(getattr(found, f"{name}_{kind}"), getattr(wanted, f"{name}_{kind}"))
    assert found.sparsity() == wanted.sparsity()


def test_a_block_is_hidden_partly_seen_or_whole() -> None:
    """Behind the last row and column, all is hidden."""
    kinds = block_kinds(operands()[:2], MASK[:1], ROWS, COLUMNS)
    assert kinds[0, 0].tolist() == [[1, 0, 0], [2, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("score", [[], SCORE], ids=["mask", "mask and score"])
def test_the_kernel_is_told_what_the_dense_form_computes(score: list[str]) -> None:
    """By torch's own definition of its kernel, which calls both functions with the numbers of one pair."""
    torch.manual_seed(0)
    shapes = (HEADS, ROWS, 16), (HEADS // 2, COLUMNS, 16), (HEADS // 2, COLUMNS, 24)
    given = [torch.randn(SAMPLES, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    blocks = FLEX_BLOCKS(operands()[:4], MASK, ROWS, COLUMNS)
    found = dense(*given, operands(), MASK, score, 0.3, True)
    with flex_with_backward(), mock.patch.object(ours, "_compiled", return_value=flex_attention):
        wanted = by_kernel(*given, blocks, operands(), MASK, score, 0.3, True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad(out, given, gradient) for out in (found, wanted)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.matrix
def test_the_kernel_compiles_what_it_is_told() -> None:
    """On CPUs torch compiles its forward alone."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(SAMPLES, HEADS, size, 16) for size in (ROWS, COLUMNS, COLUMNS))
    values = [t.float() if t.is_floating_point() else t for t in operands()]
    blocks = FLEX_BLOCKS(values[:4], MASK, ROWS, COLUMNS)
    with torch.no_grad():
        found = by_kernel(query, key, value, blocks, values, MASK, SCORE, 0.3, False)
    torch.testing.assert_close(found, dense(query, key, value, values, MASK, SCORE, 0.3, False))


def test_a_query_that_sees_nothing_gets_zeros_and_gives_none() -> None:
    query, key, value = (torch.randn(1, 2, 4, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows, columns = torch.arange(4).view(4, 1), torch.arange(4)
    for score in ([], ["tanh.default %2"]):
        blocks = FLEX_BLOCKS([rows, columns], ["gt.Tensor %0 %1"], 4, 4)
        out = FLEX_ATTENTION(query, key, value, blocks, [rows, columns], ["gt.Tensor %0 %1"], score, 0.3)
        (gradient,) = torch.autograd.grad(out.square().sum(), query)
        for tensor in (out, gradient):
            assert not tensor[:, :, 0].any()
            assert tensor.isfinite().all()


def test_steps_are_written_and_read_back() -> None:
    x = torch.tensor([[3.0, 5.0], [7.0, 20.0]])
    steps = [
        write(aten.div.Tensor_mode, [ProgramValue(0), 4], {"rounding_mode": "floor"}),
        write(aten.to.dtype, [ProgramValue(0, made=True), torch.float32], {}),
        write(aten.lt.Scalar, [ProgramValue(1, made=True), 2.5], {"device": torch.device("cpu")}),
    ]
    assert steps == [
        'div.Tensor_mode %0 4 rounding_mode="floor"', "to.dtype $0 torch.float32", "lt.Scalar $1 2.5"
    ]  # fmt: skip
    assert evaluate(parse(tuple(map(str, steps))), [x]).tolist() == [[True, True], [True, False]]
    wide = evaluate(parse(("to.dtype %0 torch.float32",)), [x.double()], wide=True)
    assert wide.dtype == torch.float64
    assert write(aten.add.Tensor, [ProgramValue(0), [1, 2]], {}) is None
    assert at_one(["%1"], operands()[:2])(*map(torch.tensor, (0, 0, 7, 9))).item() == 9
