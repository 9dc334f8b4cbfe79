"""Functions of torch by chapter: FFT, linear algebra, sorting and indexing, complex and sparse, random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import linalg as la

from tests.odd_models.case import function, model


def _magnitude(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(1)


FFT = {
    "fft": function(lambda x: _magnitude(torch.fft.fft(x)), 4, 6),
    "ifft, orthonormal": function(lambda x: _magnitude(torch.fft.ifft(x, norm="ortho").resolve_conj()), 4, 6),
    "rfft and back": function(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 1j, n=6), 4, 6),
    "fft2 and shifts": function(lambda x: _magnitude(torch.fft.fftshift(torch.fft.fft2(x))), 4, 6),
    "rfftn": function(lambda x: _magnitude(torch.fft.rfftn(x, dim=(-2, -1))), 4, 6),
    "hfft": function(lambda x: torch.fft.hfft(torch.complex(x, x * 0.5), n=8), 4, 5),
    "stft and back": function(
        lambda x: torch.istft(
            torch.stft(x, 8, 4, window=torch.hann_window(8), return_complex=True),
            8,
            4,
            window=torch.hann_window(8),
        ),
        32,
    ),
    "fft over the batch": function(lambda x: _magnitude(torch.fft.fft(x, dim=0)), 4, 6),
}


def _square(x: Tensor) -> Tensor:
    return x @ x.mT + 3 * torch.eye(x.shape[-1])


LINALG = {
    name: function(run, 4, 4)
    for name, run in {
        "det": lambda x: la.det(_square(x) * 0.3),
        "slogdet": lambda x: la.slogdet(_square(x)).logabsdet,
        "inv": lambda x: la.inv(_square(x)),
        "solve": lambda x: la.solve(_square(x), x),
        "solve_triangular": lambda x: la.solve_triangular(_square(x).tril(), x, upper=False),
        "cholesky": lambda x: la.cholesky(_square(x)),
        "qr": lambda x: la.qr(_square(x)).R,
        "svdvals": lambda x: la.svdvals(_square(x)),
        "svd": lambda x: la.svd(x)[1],
        "eigvalsh": lambda x: la.eigvalsh(_square(x)),
        "eigh": lambda x: la.eigh(_square(x)).eigenvectors.abs(),
        "eigvals": lambda x: la.eigvals(_square(x)).abs().sum(-1),
        "lu": lambda x: torch.linalg.lu(_square(x))[2],
        "pinv": lambda x: la.pinv(_square(x)),
        "lstsq": lambda x: la.lstsq(_square(x), x).solution,
        "matrix_exp": lambda x: la.matrix_exp(x * 0.3),
        "matrix_power": lambda x: la.matrix_power(x, 3),
        "matrix_norm": lambda x: la.matrix_norm(x, ord="nuc"),
        "vector_norm": lambda x: la.vector_norm(x, ord=3, dim=(1, 2)),
        "cross": lambda x: la.cross(x[..., :3], x[..., 1:]),
        "multi_dot": lambda x: torch.stack([la.multi_dot([x[0], x[1], x[0].T]), x[1]]),
        "householder_product": lambda x: la.householder_product(x, x[..., 0] * 0.1),
        "vander": lambda x: la.vander(x[..., 0], N=3),
        "kron": lambda x: torch.kron(x, torch.ones(1, 2, 1)),
        "tensordot": lambda x: torch.tensordot(x, torch.ones(4, 4, 2), dims=2),
        "baddbmm": lambda x: torch.baddbmm(x, x, x, beta=0.5, alpha=2),
        "cdist": lambda x: torch.cdist(x, x + 1, p=1.5),
        "logdet": lambda x: torch.logdet(_square(x)),
        "trace by einsum": lambda x: torch.einsum("bii->b", x),
        "cov and corrcoef": lambda x: torch.cov(x[:, 0].T) + torch.corrcoef(x[:, 1].T),
    }.items()
}


def _scattered(x: Tensor, which: str) -> Tensor:
    """An index smaller than its source in every dimension, with repeats."""
    index = torch.tensor([[0, 2, 2], [1, 1, 0]]).repeat(x.shape[0], 1, 1)[:, :2, :3]
    zero = x.sin()
    if which == "add":
        return zero.scatter_add(2, index, x.detach()) + x
    if which == "src":
        return zero.scatter(1, index[:, :2, :2].argsort(1), x.detach()) + x
    if which == "reduce":
        return zero.scatter_reduce(2, index, x.detach(), "mean", include_self=False) + x
    return x.gather(2, index)


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = x[:, 0] * 2
    y[y > 0.8] = 0.5
    y[..., -1] += x[..., 0]
    return y


ROWS = torch.tensor([0, 2, 2])
INDEXING = {
    name: function(run, 4, 6)
    for name, run in {
        "sort": lambda x: x.sort(-1, descending=True).values,
        "sort, stable, by samples": lambda x: x.sort(stable=True, dim=0).values,
        "argsort and gather": lambda x: x.gather(1, x.argsort(1)),
        "topk": lambda x: x.topk(2, dim=1).values,
        "kthvalue": lambda x: x.kthvalue(2, dim=-1).values,
        "median": lambda x: x.median(-1).values,
        "nanmedian": lambda x: torch.where(x > 0.6, float("nan"), x).nanmedian(-1).values.nan_to_num(),
        "mode": lambda x: x.round(decimals=1).mode(-1).values + x.mode(-1).values,
        "quantile": lambda x: x.quantile(torch.tensor([0.2, 0.5]), dim=-1).movedim(0, -1),
        "cummax": lambda x: x.cummax(-1).values,
        "cumsum and cumprod": lambda x: x.cumsum(1) * x.cumprod(-1),
        "logcumsumexp": lambda x: x.logcumsumexp(-1),
        "aminmax": lambda x: torch.stack(torch.aminmax(x, dim=-1), -1),
        "amax with ties": lambda x: x.round().amax((1, 2)) + x.amax((1, 2)),
        "roll, flip, rot90": lambda x: torch.rot90(x.roll((1, 2), (1, 2)).flip(1), 1, (1, 2)),
        "tril and triu": lambda x: x.tril(1) - x.triu(-1),
        "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1]), dim=1),
        "tile and repeat": lambda x: x.tile((2, 1)) * x.repeat(1, 2, 1),
        "unfold": lambda x: x.unfold(2, 3, 2),
        "as_strided": lambda x: x.contiguous().as_strided((x.shape[0], 3, 4), (24, 6, 1), 2),
        "diagonal family": lambda x: torch.diagonal_scatter(
            torch.diag_embed(x[:, 0]), x[:, 1], dim1=1, dim2=2
        ),
        "select and slice scatter": lambda x: (
            x.sin().select_scatter(x[:, 0] * 2, 1, 2).slice_scatter(x[..., :2], 2, 1, 3)
        ),
        "scatter_add, small index": lambda x: _scattered(x, "add"),
        "scatter, small index": lambda x: _scattered(x, "src"),
        "scatter_reduce, small index": lambda x: _scattered(x, "reduce"),
        "gather, small index": lambda x: _scattered(x, "gather"),
        "take_along_dim": lambda x: torch.take_along_dim(x, torch.tensor([[[0], [3]]]), dim=1),
        "take": lambda x: x.take(torch.tensor([0, 3, 3, 5])),
        "index_select": lambda x: x.index_select(1, ROWS),
        "index_add": lambda x: x.sin().index_add(1, ROWS, x[:, :3], alpha=0.5),
        "index_copy": lambda x: x.sin().index_copy(1, torch.tensor([3, 0]), x[:, :2]),
        "index_fill": lambda x: x.index_fill(2, ROWS, 0.25),
        "index_reduce": lambda x: x.sin().index_reduce(1, ROWS, x[:, :3], "amax"),
        "index with tensors": lambda x: x[:, ROWS, torch.tensor([-1, 1, 1])],
        "index with tensors apart": lambda x: x[torch.arange(x.shape[0]), :, torch.arange(x.shape[0]) % 6],
        "index_put, added": lambda x: x.index_put(
            (torch.arange(x.shape[0]), torch.tensor(1)), x[:, 0], accumulate=True
        ),
        "index_put with a mask": lambda x: x.index_put((x > 0.3,), torch.tensor(0.1)),
        "writes in place": _written,
        "masked_fill and where": lambda x: torch.where(x > 0, x, x.masked_fill(x < -0.5, 2.0)),
        "masked_scatter": lambda x: x.masked_scatter(x > 0.2, x.sin()),
        "masked_select": lambda x: x.masked_select(x > 0.0).sum().reshape(1),
        "boolean index, summed": lambda x: (x[x > 0.0] ** 2).sum().reshape(1) + x.sum(),
        "nonzero": lambda x: x.flatten()[(x.flatten() > 0).nonzero().squeeze(1)].sum().reshape(1),
        "unique": lambda x: torch.unique(x.detach().round(decimals=1)).sum().reshape(1) + x.mean(),
        "bucketize": lambda x: x * torch.bucketize(x.detach(), torch.tensor([-0.5, 0.0, 0.5])),
        "searchsorted": lambda x: x * torch.searchsorted(x.detach().sort(-1).values, x.detach()),
        "histc and bincount": lambda x: (
            x * torch.histc(x.detach(), 4, -1, 1).sum() + torch.bincount(ROWS).sum()
        ),
        "renorm": lambda x: x.renorm(2, 1, 0.7),
        "renorm by samples": lambda x: x.renorm(2, 0, 0.7),
        "logsumexp": lambda x: x.logsumexp((1, 2)),
        "nansum and nanmean": lambda x: (
            torch.where(x > 0.7, float("nan"), x).nanmean(-1) + x.nansum(1).sum(-1, keepdim=True)
        ),
        "std_mean and var": lambda x: torch.std_mean(x, 1)[0] * x.var(1, correction=0),
        "prod": lambda x: x.prod(-1) + x.prod(),
        "dist and norm": lambda x: torch.dist(x[:, 0], x[:, 1], 3).reshape(1) + x.norm(p=1),
        "trapezoid and diff": lambda x: torch.trapezoid(x, dim=1) + x.diff(dim=1)[:, 0],
        "type_as": lambda x: (x > 0).type_as(x) * x,
        "empty tensors": lambda x: torch.cat([x[:, :0], x[:, :2], x[:, 4:]], 1) + x[:, :0].sum(),
        "split, chunk, unbind, stack": lambda x: torch.stack(
            [*x.split([2, 2], 1)[0].unbind(1), x.chunk(3, 2)[0].mean(2)[:, :1].expand(-1, 6)]
        ),
        "meshgrid and block_diag": lambda x: (
            torch.block_diag(x[0], x[1])[None]
            * torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij")[0]
        ),
        "cartesian products": lambda x: (
            torch.combinations(x[0, 0]) * torch.cartesian_prod(x[0, 1, :3], x[0, 2, :5])
        ),
        "special functions": lambda x: (
            torch.special.erf(x)
            + torch.special.i0(x)
            + torch.xlogy(x.abs(), x.abs() + 1)
            + torch.lgamma(x + 2)
        ),
        "rounding with pass-through": lambda x: (
            x + (x * 3).round().detach() - x.frac() + x.fmod(0.3) + torch.copysign(x, -x)
        ),
        "outer and view tricks": lambda x: (
            x.movedim(1, 2).swapaxes(1, 2).ravel().view(x.shape).mT.contiguous().view(-1, 24)
        ),
        "view as another type": lambda x: x * (x.detach().view(torch.int64) >= 0),
    }.items()
}


def _sparse_product(m: Any, x: Tensor) -> Tensor:
    at = torch.tensor([[0, 1, 2, 5], [1, 0, 3, 3]])
    return torch.sparse.mm(torch.sparse_coo_tensor(at, m.w, (6, 6)), m.a(x).T).T


def _csr(m: Any, x: Tensor) -> Tensor:
    matrix = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2, 3]), torch.tensor([0, 4, 2]), torch.ones(3), (3, 6)
    )
    return (matrix @ m.a(x).T).T


def _complex_parts() -> dict[str, Any]:
    return {
        "w": nn.Parameter(torch.randn(6, 6, dtype=torch.complex128)),
        "p": nn.Parameter(torch.randn(6, dtype=torch.complex128)),
    }


COMPLEX_AND_SPARSE = {
    "complex parameters": model(lambda m, x: (m.a(x) * m.p) @ m.w, parts=_complex_parts),
    "complex functions": model(
        lambda m, x: (
            torch.polar(m.a(x).abs() + 0.1, m.b(x)).conj().angle()
            + torch.view_as_real(m.p * x.to(m.p.dtype)).sum(-1)
        ),
        parts=_complex_parts,
    ),
    "complex linear and loss": model(
        lambda m, x: nn.functional.linear(torch.complex(m.a(x), m.b(x)), m.w, m.p), parts=_complex_parts
    ),
    "complex division, exp, sqrt": model(
        lambda m, x: (torch.exp(1j * m.a(x)) / (m.p + 3)).sqrt().real, parts=_complex_parts
    ),
    "complex module": model(
        lambda m, x: m.l(x.to(torch.complex128)).abs(),
        parts=lambda: {"l": nn.Linear(6, 6).to(torch.complex128)},
    ),
    "sparse product": model(_sparse_product, parts=lambda: {"w": nn.Parameter(torch.randn(4))}),
    "sparse rows": model(_csr),
    "dense to sparse to dense": function(lambda x: x.to_sparse().to_dense(), 4, 6),
    "nested tensors": function(
        lambda x: torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([x[0], x[1, :2]]), 0.0), 4, 6
    ),
}


def _sampled(m: Any, x: Tensor) -> Tensor:
    only = torch.zeros(6).index_fill(0, torch.tensor(2), 1.0)
    return m.a(x)[:, torch.multinomial(only, 1)] * m.b(x)


RANDOM = {
    "bernoulli of certain things": function(lambda x: x * torch.bernoulli(torch.ones_like(x)), 6),
    "rand compared": function(lambda x: x * (torch.rand_like(x) < 2).double(), 6),
    "randn of no width": function(lambda x: x + torch.randn_like(x) * 0, 6),
    "a permutation, summed": function(lambda x: x[:, torch.randperm(6)].sum(1), 6),
    "normal of no width": function(lambda x: torch.normal(x, torch.zeros_like(x)) * 0 + x, 6),
    "multinomial of one": model(_sampled),
    "gumbel_softmax, summed": function(
        lambda x: x * nn.functional.gumbel_softmax(x, hard=True).sum(-1, keepdim=True), 6
    ),
    "uniform_ in place": function(lambda x: x + torch.empty_like(x).uniform_(0, 1).floor(), 6),
    "exponential_, signed": function(lambda x: x * torch.empty_like(x).exponential_().sign(), 6),
    "randint of one": function(lambda x: x + torch.randint(3, 4, (6,)), 6),
    "drop path of nothing": function(lambda x: x * torch.empty(x.shape[0], 1).bernoulli_(1.0), 6),
    "dropout by own seed": function(
        lambda x: x * torch.rand(6, generator=torch.Generator().manual_seed(3)), 6
    ),
}

CHAPTERS = {
    "fft": FFT,
    "linalg": LINALG,
    "sorting and indexing": INDEXING,
    "complex and sparse": COMPLEX_AND_SPARSE,
    "random": RANDOM,
}
