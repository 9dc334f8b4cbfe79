"""FLOPs of kernels: formulas for all that multiply sums of products, and a rule that tells which kernels nobody counts.

Torch's registry (``torch.utils.flop_counter``) knows the products and convolutions of common models. Other kernels would be
priced as nothing: products of groups and of vectors, distances, recurrences, decompositions, attention on a CPU. Formulas
here stand before the registry's.

Symbols
    n, k, m   rows, terms and columns of a product        2·n·k·m, a multiplication and an addition per term
    b, h      samples, heads of the queries; s, t queries and keys of each; d, v columns of keys and values

A complex product counts four real ones. What a library's own op does is known if somebody has told the registry
(``register_flop_formula``), or by name here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Formula: TypeAlias = Callable[..., int]
"""FLOPs, given the op's arguments as its schema orders them, and its result ``out_val``."""


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of one kernel. ``factors``: the tensors that it multiplies with each other, and the product."""

    flops: int
    factors: tuple[Tensor, ...]


def arithmetic(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Arithmetic | None:
    """Return the arithmetic of a call of the op ``func``; None if it has no formula."""
    name = func._schema.name.removesuffix("_")  # in place it does the same
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, func._overloadpacket)
    formula = _FORMULAS.get(name) or flop_registry.get(packet)
    if formula is None:
        return None
    places = _FACTORS.get(name, (0, 1))
    given = [args[place] for place in places if place < len(args)]
    factors = tuple(tensor for tensor in (*given, result) if isinstance(tensor, Tensor))
    times = 4 if any(factor.is_complex() for factor in factors) and "fft" not in name else 1
    return Arithmetic(times * int(formula(*args, **kwargs, out_val=result)), factors)


def is_uncounted(func: Any) -> bool:
    """Tell whether the op ``func``, which has no formula, may do arithmetic worth counting: by name, or a library's own."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "aten":
        return _MULTIPLIES.search(name) is not None
    return namespace not in _WITHOUT_ARITHMETIC


_MULTIPLIES = re.compile(
    r"^(?!_thnn_fused).*(mm|mv|dot|matmul|linear|attention|rnn|lstm|gru|qr|svd|inverse|solve|lstsq|[cp]dist|transformer|"
    r"cholesky|geqrf|ormqr)(_|$)|conv(?!ert)|_fft_|^_?linalg_(?!cross|vector_norm|check_errors|_powsum)"
)
"""Names of ATen ops that do products. The fused parts of cells have theirs before them: what is left goes by element."""
_WITHOUT_ARITHMETIC = frozenset({"prims", "c10d", "_c10d_functional", "_c10d_functional_autograd"})


# --------------------------------------------------------------------------------------------------
# Products


def _terms(*tensors: Tensor, out_val: Tensor, **_: Any) -> int:
    """Count 2·k of each element of the result; k is the last dimension of the first factor."""
    return 2 * out_val.numel() * tensors[0].shape[-1]


def _terms_of_second(_added: Tensor, *tensors: Any, out_val: Tensor, **_: Any) -> int:
    return 2 * out_val.numel() * int(tensors[0].shape[-1])


def _summed_batches(_added: Tensor, x: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * y.shape[-1]


def _grouped_mm(x: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    """Count 2·n·k·m with the rows, terms or columns of all groups together, however the offsets part them.

    rows      x [n, k]      y [g, k, m]     each row is in one group
    columns   x [g, n, k]   y [k, m]        each column is in one group
    terms     x [n, k]      y [k, m]        a product of each group's terms: the gradient of g weights
    groups    x [g, n, k]   y [g, k, m]     ordinary products
    """
    groups = x.shape[0] if x.dim() == 3 and y.dim() == 2 else 1
    return 2 * x.numel() * y.shape[-1] // groups


def _grouped_mm_backward(x: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    """Count both gradients, which transformers' op makes at once."""
    return 2 * _grouped_mm(x, y)


def _per_element(times: int, place: int = 0) -> Formula:
    """Return the formula of as many FLOPs for each element of the argument at ``place``."""
    return lambda *args, **_: times * int(args[place].numel())


def _trilinear(a: Tensor, b: Tensor, c: Tensor, *rest: Any, **_: Any) -> int:
    """Count 2 for each point of the space that the three tensors span together, once their missing dimensions are there.

    Two of them are multiplied and summed up; the third meets what is left, which is less by one dimension.
    """
    shapes = [list(tensor.shape) for tensor in (a, b, c)]
    for shape, missing in zip(shapes, rest, strict=False):
        for dim in missing:
            shape.insert(dim, 1)
    return 2 * math.prod(int(max(sizes)) for sizes in zip(*shapes, strict=True))


def _distances(x: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    """Count a difference, its power and a sum per pair of rows and column."""
    return 3 * x.numel() * y.shape[-2]


def _distances_backward(_gradient: Tensor, x: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    return _distances(x, y)


def _distances_by_product(x: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    """Count the product that |x − y|² = |x|² − 2·x·y + |y|² takes, with a column for each of the two squares."""
    return 2 * math.prod(x.shape[:-1]) * (x.shape[-1] + 2) * y.shape[-2]


def _distances_within(x: Tensor, *_: Any, **__: Any) -> int:
    return 3 * x.shape[-1] * x.shape[-2] * (x.shape[-2] - 1) // 2


def _distances_within_backward(_gradient: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _distances_within(x)


def _convolution_of_time(_x: Tensor, weight: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return 2 * out_val.numel() * weight.shape[0] * weight.shape[1]


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *arguments: Any, out_val: Any) -> int:
    """Count the FLOPs of the gradients of ``x`` and ``weight``, as far as they are asked for.

    Each multiplies what forward multiplies: every sample's value at each of P points with every number of the weight
    that it meets, 2 · samples · P · numel(weight). P are the points of the output, of a transposed convolution those
    of the input. The weight is [out, in / groups, …], so ``groups`` is in its size. (The registry's formula counts the
    weight's gradient ``groups`` times.)
    """
    *_, transposed, _padding, _groups, wanted = arguments
    points = (x if transposed else gradient).shape[2:]
    one = 2 * x.shape[0] * math.prod(points) * weight.numel()
    return one * sum(map(bool, wanted[:2]))


# --------------------------------------------------------------------------------------------------
# Attention, recurrences, decompositions


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return 2·b·h·s·t·(d + v): the scores, and values by them. A causal mask counts in full, as is the custom.

    Keys and values of grouped queries are multiplied as often as there are heads of queries.
    """
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return 2·b·h·s·t·(3·d + 2·v): the scores anew, and the gradients of scores, values, queries and keys."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return attention_flops(query.shape, key.shape, value.shape)


def _attention_backward(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    return attention_backward_flops(query.shape, key.shape, value.shape)


def _recurrence(times: int) -> Formula:
    """Return the formula of a layer of one direction: each row meets both weights, [gates, inputs] and [gates, hidden]."""
    return lambda x, w, u, *_, **__: 2 * times * math.prod(x.shape[:-1]) * (w.numel() + u.numel())


def _recurrences(times: int) -> Formula:
    """Return the formula of all layers and directions: each row meets every weight."""
    return lambda x, weights, *_, **__: (
        2 * times * math.prod(x.shape[:-1]) * sum(w.numel() for w in weights if w.dim() == 2)
    )


def _cubes(share: float) -> Formula:
    """Return the formula of a decomposition of n × n matrices that takes ``share`` · n³ (Golub, Van Loan 2013)."""
    return lambda x, *_, **__: int(share * x.numel() * x.shape[-1])


def _solved(matrix: int, right: int, times: int) -> Formula:
    """Return the formula of ``times`` · n² for every column of the right side, the matrix being n × n."""

    def formula(*args: Any, **_: Any) -> int:
        return times * int(args[right].numel()) * int(args[matrix].shape[-1])

    return formula


def _factored_and_solved(x: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return _cubes(2 / 3)(x) + 2 * right.numel() * x.shape[-1]


def _fourier(x: Tensor, dims: Sequence[int], *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count 5·N·log₂ N of a complex transform of N points, half of that where one side is real (FFTW's convention)."""
    complex_ones = x.is_complex() and out_val.is_complex()
    whole = out_val if x.is_complex() else x
    points = math.prod(whole.shape[dim] for dim in dims)
    return int((5 if complex_ones else 2.5) * whole.numel() * math.log2(max(points, 1)))


_DOTTED = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
_ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"

_FORMULAS: Mapping[str, Formula] = {
    **dict.fromkeys(
        ("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"), _grouped_mm
    ),
    "transformers::grouped_mm_fallback": _grouped_mm,
    "transformers::grouped_mm_fallback_backward": _grouped_mm_backward,
    **dict.fromkeys(("aten::mv", "aten::dot", "aten::vdot"), _per_element(2)),
    "aten::addmv": _per_element(2, 1),
    "aten::addbmm": _summed_batches,
    "aten::_addmm_activation": _terms_of_second,
    **dict.fromkeys(
        ("aten::_int_mm", "aten::_scaled_mm_v2", "aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm"), _terms
    ),
    "aten::_trilinear": _trilinear,
    "aten::_cdist_forward": _distances,
    "aten::_cdist_backward": _distances_backward,
    "aten::_euclidean_dist": _distances_by_product,
    "aten::_pdist_forward": _distances_within,
    "aten::_pdist_backward": _distances_within_backward,
    "aten::conv_tbc": _convolution_of_time,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{way}": _attention for way in _DOTTED},
    **{f"aten::_scaled_dot_product_{way}_backward": _attention_backward for way in _DOTTED},
    _ON_CPU: _attention,
    f"{_ON_CPU}_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _recurrence(1),
    "aten::mkldnn_rnn_layer_backward": _recurrence(2),
    **dict.fromkeys(("aten::_cudnn_rnn", "aten::miopen_rnn"), _recurrences(1)),
    **dict.fromkeys(("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward"), _recurrences(2)),
    **dict.fromkeys(("aten::linalg_cholesky_ex", "aten::cholesky", "aten::linalg_ldl_factor_ex"), _cubes(1 / 3)),
    **dict.fromkeys(("aten::linalg_lu_factor_ex", "aten::linalg_lu"), _cubes(2 / 3)),
    **dict.fromkeys(("aten::_linalg_det", "aten::_linalg_slogdet"), _cubes(2 / 3)),
    **dict.fromkeys(("aten::linalg_inv_ex", "aten::cholesky_inverse"), _cubes(2)),
    "aten::_linalg_solve_ex": _factored_and_solved,
    "aten::linalg_solve_triangular": _solved(0, 1, 1),
    "aten::triangular_solve": _solved(1, 0, 1),
    "aten::cholesky_solve": _solved(1, 0, 2),
    "aten::linalg_lu_solve": _solved(0, 2, 2),
    **dict.fromkeys(("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r"), _fourier),
}  # fmt: skip
"""Formulas by the op's name: some ops are there only once a library is imported, or with some versions of torch."""

_FACTORS: Mapping[str, tuple[int, ...]] = dict.fromkeys(
    ("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv", "aten::_addmm_activation"), (1, 2)
)
"""Places of the factors where they are not the first two arguments: what is added is read by row, however it lies."""
