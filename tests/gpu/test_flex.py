"""flex_attention on one GPU: torch's compiled kernel beside the dense form in float64, also between compiled ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from runtime.ops.flex import FLEX_ATTENTION, FLEX_BLOCKS
from runtime.segment.compiled import compiled

ROWS, SAMPLES, HEADS, WIDTH = 2000, 2, 4, 64
MASK = ["ge.Tensor %0 %1", "eq.Tensor %2 %3", "__and__.Tensor $0 $1"]
SCORE = ["sub.Tensor %0 %1", "mul.Tensor %4 $0", "sub.Tensor %5 $1", "tanh.default $2"]


def operands(device: str) -> list[Tensor]:
    place = torch.arange(ROWS, device=device)
    document = place // torch.tensor([300, 700], device=device).view(-1, 1, 1, 1)
    slopes = torch.linspace(0, 0.01, HEADS, device=device).view(-1, 1, 1)
    return [place.view(-1, 1), place, document.transpose(-2, -1), document, slopes]


@pytest.mark.parametrize("score", [[], SCORE], ids=["mask", "mask and score"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float32, 5e-3)], ids=str)
def test_the_kernel_computes_what_the_dense_form_does(
    dtype: torch.dtype, tolerance: float, score: list[str]
) -> None:
    """float32 products of the kernel may be in tf32, with 10 bits. Nothing has the size of the scores."""
    torch.manual_seed(0)
    shapes = (HEADS, ROWS, WIDTH), (HEADS // 2, ROWS, WIDTH), (HEADS // 2, ROWS, WIDTH)
    given = [torch.randn(SAMPLES, *shape, device="cuda", dtype=dtype) for shape in shapes]
    values = operands("cuda")
    blocks = FLEX_BLOCKS(values[:4], MASK, ROWS, ROWS)
    gradient = torch.randn(SAMPLES, *shapes[0], device="cuda", dtype=dtype)

    def run(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = FLEX_ATTENTION(*leaves, blocks, values, MASK, score, 0.125, True)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]

    run(given)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(given)
    assert torch.cuda.max_memory_allocated() - before < SAMPLES * HEADS * ROWS * ROWS * dtype.itemsize
    for mine, exact in zip(found, run([t.double() for t in given]), strict=True):
        assert (mine.double() - exact).norm() <= tolerance * exact.norm()


def test_it_runs_between_compiled_ops() -> None:
    torch.manual_seed(0)
    graph = fx.Graph()
    x, blocks, *inputs = (graph.placeholder(name) for name in ("x", "blocks", "i", "j", "a", "b", "slopes"))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    arguments = (doubled, x, x, blocks, inputs, MASK, SCORE, 0.125)
    attended = graph.call_function(FLEX_ATTENTION, arguments)
    graph.output(graph.call_function(torch.ops.aten.tanh.default, (attended,)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    values = operands("cuda")
    given = torch.randn(SAMPLES, HEADS, ROWS, WIDTH, device="cuda", requires_grad=True)
    lists = FLEX_BLOCKS(values[:4], MASK, ROWS, ROWS)
    results = []
    for function in (module.forward, compiled(module, {})):
        out = function(given, lists, *values)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
