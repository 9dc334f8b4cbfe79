"""Known attention masks go; masks that data, the batch's size or a sample's place in it decides stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from passes.graph.nodes import argument
from passes.trace.normal.masks import simplify_masks
from passes.trace.normal.simplify import simplify
from tests.support.rewritten_graphs import export

aten = torch.ops.aten
TOKENS = 6


def _places() -> tuple[Tensor, Tensor]:
    return torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None, :]


def _causal(x: Tensor) -> Tensor:
    rows, columns = _places()
    return columns <= rows


def _causal_for_each_sample(x: Tensor) -> Tensor:
    return _causal(x).expand(x.shape[0], 1, TOKENS, TOKENS)


def _additive(x: Tensor) -> Tensor:
    return torch.zeros(TOKENS, TOKENS).masked_fill(~_causal(x), -torch.inf)


def _full(x: Tensor) -> Tensor:
    return (_places()[0] >= 0).expand(x.shape[0], 1, -1, TOKENS)


def _zero(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 1, TOKENS, TOKENS)


def _packed(x: Tensor) -> Tensor:
    """Build it as transformers does: where positions jump, another sequence begins, and tokens see their own one."""
    samples = torch.arange(x.shape[0])[:, None, None, None]
    positions = torch.arange(TOKENS)[None, :].expand(x.shape[0], -1)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    sequence = jumps.cumsum(-1)
    rows, columns = torch.arange(TOKENS)[None, None, :, None], torch.arange(TOKENS)[None, None, None, :]
    same = sequence[samples, rows] == sequence[samples, columns]
    same = same & sequence.new_ones(()).bool()
    return same & (positions[samples, columns] <= positions[samples, rows])


def _lower(x: Tensor) -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def _lowest_row_hidden(x: Tensor) -> Tensor:
    rows, columns = _places()
    return (columns <= rows) & (rows < TOKENS - 1)


def _window(x: Tensor) -> Tensor:
    rows, columns = _places()
    return (columns <= rows) & (columns > rows - 3)


def _shifted(x: Tensor) -> Tensor:
    rows, columns = _places()
    return columns <= rows + 1


def _by_data(x: Tensor) -> Tensor:
    return _causal(x) & (x.amax(-1) > -9.0)[:, :1, None, :]


def _by_place(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[0])[:, None, None, None] < 3) & _causal(x)


def _by_size(x: Tensor) -> Tensor:
    return (torch.ones(x.shape[0], 1, TOKENS, TOKENS).cumsum(0) < 3) & _causal(x)


def _by_number(x: Tensor) -> Tensor:
    return (torch.full((TOKENS, TOKENS), x.shape[0]) < 9) & _causal(x)


def _by_chance(x: Tensor) -> Tensor:
    return torch.rand(TOKENS, TOKENS) >= 0.0


class Attention(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=0.5)


def _simplified(mask: Callable[[Tensor], Tensor]) -> tuple[fx.GraphModule, fx.Node]:
    gm = simplify(export(Attention(mask), {"x": torch.randn(4, 2, TOKENS, 8)}).graph)
    simplify_masks(gm.graph)
    gm.graph.lint()
    gm.recompile()
    (attention,) = gm.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    return gm, attention


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (_causal, True),
        (_causal_for_each_sample, True),
        (_additive, True),
        (_packed, True),
        (_full, False),
        (_zero, False),
    ],
)
def test_a_known_mask_goes(mask: Callable[[Tensor], Tensor], causal: bool) -> None:
    gm, attention = _simplified(mask)
    assert argument(attention, "attn_mask") is None
    assert argument(attention, "is_causal") is causal
    assert argument(attention, "scale") == 0.5
    assert len(gm.graph.find_nodes(op="call_function", target=aten.arange.default)) == 0
    for samples in (1, 5):
        x = torch.randn(samples, 2, TOKENS, 8, dtype=torch.float64)
        (found,) = _first(gm(x))
        torch.testing.assert_close(found, Attention(mask)(x), rtol=1e-12, atol=1e-12)


def _first(results: Any) -> tuple[Any]:
    return (results[0] if isinstance(results, list | tuple) else results,)


@pytest.mark.parametrize("mask", [_window, _shifted, _by_data, _by_place, _by_size, _by_number, _by_chance])
def test_other_masks_stay(mask: Callable[[Tensor], Tensor]) -> None:
    _, attention = _simplified(mask)
    assert isinstance(argument(attention, "attn_mask"), fx.Node)
    assert argument(attention, "is_causal") is False


@pytest.mark.parametrize("mask", [_causal, _causal_for_each_sample, _additive, _packed, _lower, _full, _zero])
@pytest.mark.parametrize("band", [TOKENS, 4 * TOKENS])
def test_a_large_mask_is_looked_at_in_bands(
    mask: Callable[[Tensor], Tensor], band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a band of one row nor one of four of six rows ever makes the whole."""
    monkeypatch.setattr("passes.trace.normal.masks.BAND_ELEMENTS", band)
    monkeypatch.setattr("passes.trace.normal.masks.MOST_ELEMENTS", TOKENS * TOKENS - 1)
    _, attention = _simplified(mask)
    assert argument(attention, "attn_mask") is None
    assert argument(attention, "is_causal") is (mask not in (_full, _zero))


@pytest.mark.parametrize("mask", [_window, _shifted, _lowest_row_hidden])
def test_another_large_mask_stays(mask: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("passes.trace.normal.masks.BAND_ELEMENTS", TOKENS)
    monkeypatch.setattr("passes.trace.normal.masks.MOST_ELEMENTS", TOKENS * TOKENS - 1)
    _, attention = _simplified(mask)
    assert isinstance(argument(attention, "attn_mask"), fx.Node)


def test_a_large_mask_that_no_rule_parts_by_rows_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("passes.trace.normal.masks.BAND_ELEMENTS", TOKENS)
    monkeypatch.setattr("passes.trace.normal.masks.MOST_ELEMENTS", TOKENS * TOKENS - 1)
    _, attention = _simplified(lambda x: torch.ones(TOKENS, TOKENS).cumsum(0) >= 1)
    assert isinstance(argument(attention, "attn_mask"), fx.Node)
