"""Grouped matrix products, group by group, for types that torch's own kernels do not know (float64 among them).

self       mat2       offs           result      which is
[m k]      [g k n]    ends of rows   [m n]       rows of group i @ mat2[i]; rows after the last end are zero
[g m k]    [k n]      ends of cols   [m n]       self[i] @ columns of group i; columns after the last end are zero
[m k]      [k n]      ends of k      [g m n]     columns of self in group i @ rows of mat2 in it
[g m k]    [g k n]    none           [g m n]     self[i] @ mat2[i]
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

aten = torch.ops.aten

GROUPED = frozenset({torch._grouped_mm, aten._grouped_mm.default})
"""Torch's own, as a function and as an op."""


def grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute what ``aten._grouped_mm`` does, in the type of its factors. Arguments are called as its own are."""
    if offs is None:
        product = self @ mat2
    else:
        groups = list(pairwise([0, *offs.tolist()]))
        if self.dim() == mat2.dim():
            product = torch.stack([self[:, start:end] @ mat2[start:end] for start, end in groups])
        elif self.dim() == 2:
            parts = [self[start:end] @ mat2[i] for i, (start, end) in enumerate(groups)]
            rest = self.new_zeros(self.shape[0] - groups[-1][1], mat2.shape[-1])
            product = torch.cat([*parts, rest])
        else:
            parts = [self[i] @ mat2[:, start:end] for i, (start, end) in enumerate(groups)]
            rest = self.new_zeros(self.shape[-2], mat2.shape[-1] - groups[-1][1])
            product = torch.cat([*parts, rest], -1)
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)
