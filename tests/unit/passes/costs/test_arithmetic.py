"""FLOPs of ops that do products, counted by hand: forward, backward, and the weight's part of backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import transformers.integrations.moe  # registers its op
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from passes.costs.arithmetic import is_uncounted
from passes.costs.costs import cost_graph
from passes.costs.kernels import KernelCounter
from passes.costs.unknown import unknown_costs
from passes.trace.trace import trace

# samples, rows, terms, columns, experts; none divides another
B, N, K, M, E = 5, 7, 11, 13, 3


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])


def _ends(rows: int) -> Tensor:
    return torch.full((E,), rows, dtype=torch.int32)


_fallback = torch.ops.transformers.grouped_mm_fallback
_HALF = torch.bfloat16

CASES: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]], int, int]] = {
    # op: call, shapes of its operands, FLOPs forward, FLOPs of backward
    "mm": (torch.mm, [(N, K), (K, M)], 2 * N * K * M, 4 * N * K * M),
    "bmm": (torch.bmm, [(B, N, K), (B, K, M)], 2 * B * N * K * M, 4 * B * N * K * M),
    "addmm": (torch.addmm, [(N, M), (N, K), (K, M)], 2 * N * K * M, 4 * N * K * M),
    "baddbmm": (torch.baddbmm, [(B, N, M), (B, N, K), (B, K, M)], 2 * B * N * K * M, 4 * B * N * K * M),
    "addbmm": (torch.addbmm, [(N, M), (B, N, K), (B, K, M)], 2 * B * N * K * M, 4 * B * N * K * M),
    "in place": (
        lambda a, x, y: a.clone().addmm_(x, y),
        [(N, M), (N, K), (K, M)],
        2 * N * K * M,
        4 * N * K * M,
    ),
    # of backward only the vector's gradient is a sum of products, the matrix' one goes by element
    "mv": (torch.mv, [(N, K), (K,)], 2 * N * K, 2 * N * K),
    "matmul by a vector": (torch.matmul, [(B, N, K), (K,)], 2 * B * N * K, 2 * B * N * K),
    "addmv": (torch.addmv, [(N,), (N, K), (K,)], 2 * N * K, 2 * N * K),
    "dot": (torch.dot, [(K,), (K,)], 2 * K, 0),
    "vdot": (torch.vdot, [(K,), (K,)], 2 * K, 0),
    "einsum": (
        lambda x, y: torch.einsum("bnk,xkm->bxnm", x, y),
        [(B, N, K), (E, K, M)],
        2 * B * E * N * K * M,
        4 * B * E * N * K * M,
    ),
    "tensordot": (
        lambda x, y: torch.tensordot(x, y, dims=([2], [0])),
        [(B, N, K), (K, M)],
        2 * B * N * K * M,
        4 * B * N * K * M,
    ),
    # three gradients, each a sum over two of the three dimensions of x W y
    "bilinear": (F.bilinear, [(B, N), (B, K), (M, N, K)], 2 * B * N * K * M, 6 * B * N * K * M),
    # a difference, its square and a sum; gradients of both sides
    "cdist, few rows": (torch.cdist, [(B, N, K), (B, M, K)], 3 * B * N * M * K, 6 * B * N * M * K),
    # |x|² − 2·x·y + |y|² as one product of K + 2 terms; each gradient is a product of the pairs with one side
    "cdist, many rows": (
        torch.cdist,
        [(B, 30, K), (B, 40, K)],
        2 * B * 30 * 40 * (K + 2),
        4 * B * 30 * 40 * K,
    ),
    "pdist": (F.pdist, [(N, K)], 3 * K * N * (N - 1) // 2, 3 * K * N * (N - 1)),
    # each row meets one expert's weight, whatever the offsets
    "grouped, float32": (
        lambda x, w: _fallback(x, w, _ends(N)),
        [(N, K), (E, K, M)],
        2 * N * K * M,
        4 * N * K * M,
    ),
    "conv_tbc": (
        lambda x, w: torch.conv_tbc(x, w, torch.zeros(M), 0),
        [(N, B, K), (3, K, M)],
        2 * (N - 2) * B * 3 * K * M,
        4 * (N - 2) * B * 3 * K * M,
    ),
    # scores and values by them; backward makes the scores anew, and four gradients
    "attention on a CPU": (
        _attend,
        [(B, 4, N, 8), (B, 4, M, 8), (B, 4, M, 8)],
        4 * B * 4 * N * M * 8,
        10 * B * 4 * N * M * 8,
    ),
    "attention of grouped queries on a CPU": (
        _attend,
        [(B, 4, N, 8), (B, 2, M, 8), (B, 2, M, 8)],
        4 * B * 4 * N * M * 8,
        10 * B * 4 * N * M * 8,
    ),
    "cholesky": (torch.linalg.cholesky, [(B, N, N)], B * N**3 // 3, -1),
    "solve": (torch.linalg.solve, [(B, N, N), (B, N, K)], B * 2 * N**3 // 3 + 2 * B * N * N * K, -1),
    "triangular": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
        [(B, N, N), (B, N, K)],
        B * N * N * K,
        -1,
    ),
    "inverse": (torch.linalg.inv, [(B, N, N)], 2 * B * N**3, -1),
    "determinant": (torch.linalg.det, [(B, N, N)], B * 2 * N**3 // 3, -1),
    "Fourier": (
        lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1)),
        [(B, 16, K)],
        5 * B * 16 * K * 4 // 2,
        -1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_by_hand(name: str) -> None:
    call, shapes, forward, backward = CASES[name]
    real = "attention" in name or name == "pdist"  # fake tensors of these decide otherwise than a CPU does
    with FakeTensorMode() if not real else torch.random.fork_rng():
        operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
        found = _counted(call, operands)
    assert found[0] == forward
    assert backward < 0 or found[1] == backward


def _counted(call: Callable[..., Any], operands: Sequence[Tensor]) -> tuple[int, int]:
    with KernelCounter() as counter:
        y = call(*operands)
        forward = counter.take()
        gradient = torch.ones_like(y)
        counter.take()
        torch.autograd.grad(y, list(operands), gradient)
        backward = counter.take()
    assert not counter.uncounted
    return forward.flops, backward.flops


@pytest.mark.parametrize("kind", ["rows", "columns", "terms", "groups"])
def test_a_product_of_groups(kind: str) -> None:
    """16 bits, so sizes are multiples of 8; the gradient of a product by rows is one by terms, and so on."""
    n, k, m = 16, 24, 8
    x, y = {
        "rows": ((n, k), (E, k, m)),
        "columns": ((E, n, k), (k, m)),
        "terms": ((n, k), (k, m)),
        "groups": ((E, n, k), (E, k, m)),
    }[kind]
    with FakeTensorMode():
        a, b = (torch.randn(shape, dtype=_HALF, requires_grad=True) for shape in (x, y))
        offsets = None if kind == "groups" else _ends(8)
        found = _counted(lambda a, b: torch._grouped_mm(a, b, offsets), [a, b])
    times = E if kind == "groups" else 1
    assert found == (2 * times * n * k * m, 4 * times * n * k * m)


@pytest.mark.parametrize(
    ("kind", "gates", "layers", "ways"),
    [(nn.LSTM, 4, 1, 1), (nn.LSTM, 4, 2, 2), (nn.GRU, 3, 2, 1), (nn.RNN, 1, 1, 2)],
)
def test_a_recurrence_as_the_cpu_runs_it(kind: type[nn.Module], gates: int, layers: int, ways: int) -> None:
    """Each step multiplies its input and its state by the weights of all gates; here in torch's kernels for CPUs."""
    layer = kind(K, M, num_layers=layers, bidirectional=ways == 2, batch_first=True)
    with KernelCounter() as counter:
        layer(torch.randn(B, N, K))
        found = counter.take()
    widths = [K] + [ways * M] * (layers - 1)
    assert found.flops == sum(2 * B * N * ways * gates * M * (width + M) for width in widths)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_a_cell(kind: type[nn.Module], gates: int) -> None:
    with FakeTensorMode(), KernelCounter() as counter:
        kind(K, M)(torch.randn(B, K))
        assert counter.take().flops == 2 * B * gates * M * (K + M)
        assert not counter.uncounted


def test_a_complex_product_is_four() -> None:
    with FakeTensorMode(), KernelCounter() as counter:
        torch.mm(torch.randn(N, K, dtype=torch.complex64), torch.randn(K, M, dtype=torch.complex64))
        assert counter.take().flops == 8 * N * K * M


def test_what_is_added_and_routed_does_not_spoil_alignment() -> None:
    """A weight of two columns beside tokens, and a summand of odd width, are no factors of the product."""
    with FakeTensorMode():
        x, w = torch.randn(32, 64, dtype=_HALF), torch.randn(64, 48, dtype=_HALF)
        added = torch.randn(32, 51, dtype=_HALF)[:, :48]
        with KernelCounter() as counter:
            torch.addmm(added, x, w)
        assert counter.share == 1.0
        with KernelCounter() as counter:
            torch.mm(x, torch.randn(64, 51, dtype=_HALF))
        assert counter.share == pytest.approx(1 / 0.29)
        with KernelCounter() as counter:  # two of 48 + 2 columns are not aligned
            torch.mm(x, w)
            torch.mm(x, torch.randn(64, 2, dtype=_HALF))
        assert counter.share == pytest.approx((48 + 2 / 0.55) / 50)


PRODUCT_FREE = [
    "_add_relu",
    "_convert_indices_from_coo_to_csr",
    "_cummax_helper",
    "_foreach_lgamma",
    "_thnn_fused_lstm_cell",
    "dist",
    "embedding",
    "linalg_vector_norm",
    "mul",
    "upsample_bilinear2d",
]
UNKNOWN = ["_linalg_eigh", "_linalg_svd", "linalg_matrix_exp", "linalg_qr", "sparse_sampled_addmm"]


@pytest.mark.parametrize("name", PRODUCT_FREE + UNKNOWN)
def test_unknown_arithmetic_is_told_from_none(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    assert is_uncounted(getattr(packet, packet.overloads()[0])) is (name in UNKNOWN)


def test_unknown_arithmetic_is_named_with_its_line() -> None:
    class Rotations(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.skew = nn.Linear(4, 9)

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(self.skew(x).view(-1, 3, 3)).sum()

    graph = trace(Rotations(), {"x": torch.randn(4, 4)})
    (note,) = unknown_costs(graph, cost_graph(graph, only_size=4))
    assert "aten::linalg_matrix_exp is not counted" in note
    assert "test_arithmetic.py:" in note


def test_one_kernel_for_both_gradients_is_half_the_weights() -> None:
    """Experts in float32, as the exporter sees them: a library's own op makes both gradients."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(K)
            self.weight = nn.Parameter(torch.randn(E, K, M))

        def forward(self, x: Tensor) -> Tensor:
            rows = self.norm(x).flatten(0, 1)
            ends = torch.arange(1, E + 1, dtype=torch.int32) * (rows.shape[0] // E)
            return _fallback(rows, self.weight, ends).sum()

    graph = trace(Experts(), {"x": torch.randn(B, N, K)})
    costs = cost_graph(graph, only_size=B)
    (row,) = (i for i, node in enumerate(graph.ops) if node.target is _fallback.default)
    table = costs.at(B)
    found = table.forward_flops[row], table.backward_input_flops[row], table.backward_weight_flops[row]
    assert found == (2 * B * N * K * M,) * 3
    assert costs.op_class(row) == "matmul"
    assert costs.uncounted[row] == ()


def test_a_mixture_computes_what_its_active_experts_do_and_the_router() -> None:
    """Mixtral, two of four experts, beside a Llama whose layers are as wide as two experts."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32,
        "use_cache": False,
    }
    mixture = transformers.MixtralConfig(**sizes, intermediate_size=24, num_local_experts=4)
    dense = transformers.LlamaConfig(**sizes, intermediate_size=48)
    ids = torch.randint(0, 32, (2, 8))
    found = []
    for model in (transformers.MixtralForCausalLM(mixture), transformers.LlamaForCausalLM(dense)):
        graph = trace(model, {"input_ids": ids, "labels": ids.clone()})
        work = cost_graph(graph, only_size=2).at(2)
        halves = work.forward_flops, work.backward_input_flops, work.backward_weight_flops
        found.append([half.sum() for half in halves])
    router = 2 * 16 * 16 * 4  # tokens, width, experts
    assert [a - b for a, b in zip(*found, strict=True)] == [router] * 3
