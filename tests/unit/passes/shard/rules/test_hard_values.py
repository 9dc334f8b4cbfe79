"""Rules with what normal numbers never show: NaN, infinities, ties, other types, sizes 0, small indices, three axes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from cost_models.layout import Partial
from passes.shard.rules import choices
from passes.shard.rules.local import fits
from passes.shard.rules.simulate import Trial, is_float, node_of, problem, trial
from passes.shard.words import Choice, operands
from runtime.ops.bags import EMBEDDING_BAG
from tests.unit.passes.shard.rules.test_rules import CASES, example

aten = torch.ops.aten
TYPES = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def again(node: fx.Node, values: list[Tensor], tolerance: float = 1e-12, frozen: bool = True) -> Trial | None:
    """The op on other values of the same shapes; None if it does not take them."""
    left = iter(values)
    args = fx.map_arg(
        node.args, lambda source: next(left) if isinstance(source.meta["val"], Tensor) else source.meta["val"]
    )
    kwargs = fx.map_arg(node.kwargs, lambda source: next(left))
    try:
        fresh = node_of(node.target, *args, **kwargs)
        kept = [i for i, value in enumerate(values) if is_float(value)] if frozen else []
        return trial(fresh, values, tolerance, kept)
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        return None


def uses_partial(choice: Choice) -> bool:
    return Partial() in [need.placement for need in choice.inputs]


KERNELS = {aten.scaled_dot_product_attention.default}
"""What these make of NaN depends on the sizes that they get, sharded or not."""


def odd_numbers(value: Tensor, random: Random) -> Tensor:
    if not is_float(value) or not value.numel():
        return value
    chance = torch.rand(value.shape)
    if random.random() < 0.5:
        whole = (
            torch.view_as_complex(torch.view_as_real(value).round()) if value.is_complex() else value.round()
        )
        return whole.masked_fill(chance < 0.15, float("nan"))
    return value.masked_fill(chance < 0.1, float("inf")).masked_fill(chance > 0.9, float("-inf"))


@pytest.mark.parametrize("family", CASES)
@settings(max_examples=6, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_nan_and_infinity_stay_where_they_are(family: str, random: Random) -> None:
    node, _ = example(family, random)
    values = [odd_numbers(source.meta["val"], random) for source in operands(node)]
    whole = again(node, values)
    if whole is None or node.target in KERNELS:
        return
    for choice in choices(node):
        if choice.local.startswith("batch_norm") and any(is_float(v) and v.isinf().any() for v in values):
            continue  # the kernel's mean of an infinite number is NaN or infinite by its place
        if family == "einsum" and len(values) > 2 and any(is_float(v) and v.isinf().any() for v in values):
            continue  # of three factors it sums one before it multiplies: a part's sum may be zero, times infinity
        if choice.local == "embedding_bag:vocabulary":
            continue  # rows of other ranks count zero times, and so does some row of this one: no number stays none
        if choice.local == "cross_entropy:classes" and any(
            is_float(v) and v.dim() == 1 and v.isinf().any() for v in values
        ):
            continue  # smoothed losses of an infinite class weight are the difference of two infinite sums here
        if not uses_partial(choice) and fits(node, [choice], [2]):
            wrong = problem(whole, [choice], [2])
            assert wrong is None, f"{node.target} {node.args} {values}: {choice}: {wrong}"


@pytest.mark.parametrize("family", CASES)
@settings(max_examples=4, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_other_types_are_sharded_alike(family: str, random: Random) -> None:
    node, _ = example(family, random)
    dtype = random.choice([*TYPES])
    values = [
        v.to(dtype) if is_float(v) and not v.is_complex() else v
        for v in (s.meta["val"] for s in operands(node))
    ]
    whole = again(node, values, TYPES[dtype])
    if whole is None:
        return
    for choice in choices(whole.node):
        if not uses_partial(choice) and Partial() not in choice.outputs and fits(whole.node, [choice], [2]):
            wrong = problem(whole, [choice], [2])
            assert wrong is None, f"{node.target} {node.args} {dtype}: {choice}: {wrong}"


@pytest.mark.parametrize("family", CASES)
@settings(max_examples=3, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_choices_of_three_axes_go_together(family: str, random: Random) -> None:
    node, whole = example(family, random)
    known = choices(node)
    for _ in range(3):
        three = [random.choice(known) for _ in range(3)]
        if fits(node, three, (2, 2, 2)):
            wrong = problem(whole, three, (2, 2, 2))
            assert wrong is None, f"{node.target} {node.args}: {' / '.join(map(str, three))}: {wrong}"


def doubles(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def small_indices() -> list[tuple[Any, ...]]:
    """An index shorter than its source along ``dim``, across, both; negative and repeated indices; masks; other types."""
    index = torch.randint(4, (4, 4))
    x, src = doubles(4, 8), doubles(4, 8)
    padded = torch.tensor([[0, 3, 0, 1], [0, 0, 0, 0], [1, 2, 3, 1], [3, 2, 3, 0]])
    return [
        (aten.scatter_add.default, x, 1, index, src),
        (aten.scatter_add.default, x, 0, torch.randint(4, (2, 4)), doubles(4, 8)),
        (aten.scatter_add.default, x, 0, torch.randint(4, (8, 4)), doubles(8, 8)),
        (aten.scatter_add.default, x, 1, index, doubles(4, 4)),
        (aten.scatter_add.default, doubles(4), 0, torch.randint(4, (8,)), doubles(12)),
        (aten.scatter.src, x, 1, torch.tensor([[0, 2], [1, 3]]), src),
        (aten.scatter.src, x, 0, torch.tensor([[0, 2, 1, 3]]), src),
        (aten.scatter.value, x, 1, index, 0.0),
        (aten.gather.default, x, 1, torch.randint(8, (2, 4))),
        (aten.gather.default, x, 0, torch.randint(4, (4, 2))),
        (aten.gather.default, x, 1, torch.randint(8, (4, 16))),
        (aten.index.Tensor, x, [torch.tensor([-1, -4, 2, 2])]),
        (aten.index.Tensor, x, [torch.tensor([0, -1]), torch.tensor([[-8], [3]])]),
        (aten.index_put.default, x, [torch.tensor([-1, 0, 0, -4])], doubles(4, 8), True),
        (aten.index_put.default, x, [x > 0], doubles(1)),
        (aten.index_put.default, x, [torch.tensor([True, False, True, True])], doubles(8)),
        (aten.index.Tensor, x, [x > 0]),
        (aten.index_add.default, x, 0, torch.tensor([2, 2, 0, 2]), doubles(4, 8)),
        (aten.embedding.default, doubles(4, 8), torch.randint(4, (4, 4)), -1, False, True),
        (aten.embedding.default, doubles(4, 8), torch.randint(4, (4, 4)), 2, True, False),
        (EMBEDDING_BAG, doubles(4, 8), padded, None, False, 1, False, None, False, 0),
        (EMBEDDING_BAG, doubles(4, 8), padded[0], torch.tensor([0, 1]), False, 1, False, None, False, 0),
        (
            aten.instance_norm.default,
            doubles(4, 4, 6),
            None,
            None,
            doubles(4),
            doubles(4).abs(),
            True,
            0.1,
            1e-5,
            False,
        ),
        (
            aten.instance_norm.default,
            doubles(4, 4, 6),
            doubles(4),
            doubles(4),
            doubles(4),
            doubles(4).abs(),
            True,
            0.1,
            1e-5,
            False,
        ),
        (aten.renorm.default, x, 2, 0, 0.7),
        (aten.renorm.default, x, 2, 0, 70.0),
        (aten.nanmean.default, x.masked_fill(x > 0.5, float("nan")), [0]),
        (aten.nansum.default, x.masked_fill(x > 0.5, float("nan")), [0]),
    ]


@pytest.mark.parametrize("number", range(len(small_indices())))
def test_rare_forms_are_sharded_right(number: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        op, *args = small_indices()[number]
        node = node_of(op, *args)
        values = [source.meta["val"] for source in operands(node)]
        whole = again(node, values, frozen=False) or again(node, values)
        assert whole is not None
        known = choices(node)
        for mesh in ([2], [4], [2, 2]):
            for first in known:
                for second in known if len(mesh) == 2 else [first]:
                    pair = [first, second][: len(mesh)]
                    if fits(node, pair, mesh):
                        wrong = problem(whole, pair, mesh)
                        assert wrong is None, f"{op} {args}: {' / '.join(map(str, pair))} on {mesh}: {wrong}"


def emptied(value: Tensor, dim: int, size: int) -> Tensor:
    """The tensor with no element along every dimension of this size."""
    return value[
        tuple(slice(0) if n == size and d >= dim else slice(None) for d, n in enumerate(value.shape))
    ]


@pytest.mark.parametrize("family", CASES)
@settings(max_examples=4, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_empty_tensors_are_sharded_right(family: str, random: Random) -> None:
    node, _ = example(family, random)
    values = [source.meta["val"] for source in operands(node)]
    sizes = sorted({size for value in values for size in value.shape if size > 1})
    if not sizes:
        return
    size = random.choice(sizes)
    emptied_values = [emptied(value, 0, size) for value in values]
    if (
        node.target is EMBEDDING_BAG
        and emptied_values[1].numel()
        and not all(v.numel() for v in emptied_values)
    ):
        return  # rows of no table, or in no bag: torch does not look
    whole = again(node, emptied_values, frozen=False)
    if whole is None:
        return
    for choice in choices(whole.node):
        if fits(whole.node, [choice], [2]):
            wrong = problem(replace(whole, tolerance=1e-9), [choice], [2])
            assert wrong is None, (
                f"{node.target} {whole.node.args} {[v.shape for v in whole.values]}: {choice}: {wrong}"
            )
