"""Every sharding rule, proved: shard drawn inputs, run the shards, put forward and gradients together, compare."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from cost_models.layout import Partial, Replicate, Shard
from passes.shard.rules import RULES, choices, has_rule
from passes.shard.rules.local import fits
from passes.shard.rules.shapes import operand_names
from passes.shard.rules.simulate import Trial, node_of, problem, trial
from passes.shard.rules.threads import Rendezvous
from passes.shard.rules.traffic import local_collectives
from passes.shard.words import Choice, Need, operands
from tests.support.matrix import drawn
from tests.support.traced_models import small_gpt2
from tests.unit.passes.shard.rules import cases as shard_cases
from tests.unit.passes.shard.rules.cases_rare import RARE
from tests.unit.passes.shard.rules.draw import Draw

aten = torch.ops.aten
WITHOUT_GRADIENT = {
    (aten.batch_norm.default, "running_mean"),
    (aten.batch_norm.default, "running_var"),
    (aten.cross_entropy_loss.default, "weight"),
    (aten.cross_entropy_loss.default, "target"),
    (aten.nll_loss_nd.default, "weight"),
    (aten.soft_margin_loss.default, "target"),
    (aten.multi_margin_loss.default, "weight"),
    (aten.binary_cross_entropy_with_logits.default, "weight"),
    (aten.binary_cross_entropy_with_logits.default, "pos_weight"),
}
R, P, S = Replicate(), Partial(), Shard


CASES = {**shard_cases.CASES, **RARE}


def example(family: str, random: Random) -> tuple[fx.Node, Trial]:
    case = CASES[family](Draw(random))
    args, kwargs = case if isinstance(case[-1], dict) and isinstance(case[0], tuple) else (case, {})
    if isinstance(args[-1], dict):
        args, kwargs = args[:-1], args[-1]
    node = node_of(*args, **kwargs)
    values = [source.meta["val"] for source in operands(node)]
    frozen = [i for i, name in enumerate(operand_names(node)) if (node.target, name) in WITHOUT_GRADIENT]
    return node, trial(node, values, frozen=frozen)


@pytest.mark.parametrize("family", CASES)
@drawn(60)
@given(random=st.randoms(use_true_random=False))
def test_every_choice_gives_what_the_whole_op_gives(family: str, random: Random) -> None:
    node, whole = example(family, random)
    assert has_rule(node), node.target
    for choice in choices(node):
        for ranks in (2, 3, 4):
            if fits(node, [choice], [ranks]):
                wrong = problem(whole, [choice], [ranks])
                assert wrong is None, f"{node.target} {node.args}: {choice} on {ranks} ranks: {wrong}"


@pytest.mark.parametrize("family", CASES)
@drawn(25)
@given(random=st.randoms(use_true_random=False))
def test_choices_of_two_axes_go_together(family: str, random: Random) -> None:
    node, whole = example(family, random)
    known = choices(node)
    for _ in range(4):
        pair = [random.choice(known), random.choice(known)]
        if fits(node, pair, (2, 2)):
            wrong = problem(whole, pair, (2, 2))
            assert wrong is None, f"{node.target} {node.args}: {pair[0]} / {pair[1]}: {wrong}"


NOTHING_TO_COMPARE = {
    *(aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.randperm.default),
    *(aten.bernoulli.default, aten.bernoulli.p, aten.rand_like.default, aten.randn_like.default),
    *(aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default),
    aten._grouped_mm.default,  # knows 16 bits only: see below
}


class Everything(Draw):
    """Notes every op among the options."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.met: set[object] = set()

    def one_of(self, *options: Any) -> Any:
        for option in options:
            self.met.update(item for item in (option if isinstance(option, tuple) else ()) if callable(item))
        return super().one_of(*options)


def test_every_rule_has_a_drawn_example() -> None:
    met: set[object] = set()
    for family in CASES.values():
        for seed in range(40):
            draw = Everything(Random(seed))
            args = family(draw)
            met |= draw.met | {args[0][0] if isinstance(args[0], tuple) else args[0]}
    assert {str(op) for op in RULES.keys() - met - NOTHING_TO_COMPARE} == set()


def test_grouped_products_split_their_columns_and_terms() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 32).bfloat16(), torch.randn(2, 32, 16).bfloat16()
    values = [x, w, torch.tensor([3, 8], dtype=torch.int32)]
    whole = trial(node_of(aten._grouped_mm.default, *values), values, tolerance=3e-2)
    for choice in choices(whole.node):
        if Partial() not in [need.placement for need in choice.inputs]:
            assert problem(whole, [choice], [2]) is None, choice


def linear_trial() -> Trial:
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((4, 6), (8, 6), (8,)))
    return trial(node_of(aten.linear.default, x, w, b), [x, w, b])


@pytest.mark.parametrize(
    ("needs", "output", "complaint"),
    [
        ((Need(S(0)), Need(R), Need(R)), S(0), "gradient of operand 1"),
        ((Need(S(0)), Need(R, True), Need(R, True)), S(1), "output 0"),
        ((Need(S(1)), Need(S(1)), Need(R)), P, "output 0"),
        ((Need(R), Need(S(0)), Need(S(0))), S(1), "gradient of operand 0"),
        ((Need(R, True), Need(R, True), Need(R, True)), R, "gradient of operand 0"),
        ((Need(P), Need(P), Need(P)), P, "output 0"),
    ],
)
def test_wrong_rules_are_caught(needs: tuple[Need, ...], output: Any, complaint: str) -> None:
    whole = linear_trial()
    assert complaint in str(problem(whole, [Choice(needs, (output,))], [2]))


def test_wrong_local_computations_are_caught() -> None:
    whole = linear_trial()
    by_output = choices(whole.node)[3]
    assert problem(whole, [by_output], [2]) is None
    wrong = replace(whole, call=lambda x, w, b: aten.linear.default(x, w, b) * (1 + 1e-10))
    assert "output 0" in str(problem(wrong, [by_output], [2]))


def test_the_same_shapes_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[torch.Size, ...]] = []
    monkeypatch.setattr(
        "passes.shard.rules.simulate._on_meta",
        lambda call, node, values, *_: checked.append(tuple(value.shape for value in values)),
    )
    whole = linear_trial()
    assert [problem(whole, [choice], [2]) for choice in choices(whole.node) if not choice.local].count(None)
    assert checked
    assert len(checked) == len(set(checked))


class Listening(Rendezvous):
    """Writes down what rank 0 brings to collectives."""

    heard: list[tuple[str, int]]

    def axis(self, dims: tuple[int, ...], rank: tuple[int, ...]) -> Any:
        axis, heard = super().axis(dims, rank), self.heard

        class Ear:
            rank, size = axis.rank, axis.size

            def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
                self.note("all_reduce", tensor)
                return axis.all_reduce(tensor, op)

            def all_gather(self, tensor: Tensor) -> Tensor:
                self.note("all_gather", tensor)
                return axis.all_gather(tensor)

            def exchange(self, tensor: Tensor, cut: int, join: int) -> Tensor:
                self.note("all_to_all", tensor)
                return axis.exchange(tensor, cut, join)

            def note(self, kind: str, tensor: Tensor) -> None:
                if not any(rank):
                    heard.append((kind, tensor.numel() * tensor.itemsize))

        return Ear()


@pytest.mark.parametrize("family", ["loss", "norm", "embedding", "reduction", "attention"])
@drawn(40)
@given(random=st.randoms(use_true_random=False))
def test_what_local_functions_say_is_what_is_counted(family: str, random: Random) -> None:
    node, whole = example(family, random)
    known = choices(node)
    pair = [random.choice(known), random.choice(known)]
    if not fits(node, pair, (2, 2)):
        return
    heard: list[tuple[str, int]] = []
    meeting = type("Heard", (Listening,), {"heard": heard})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("passes.shard.rules.simulate.Rendezvous", meeting)
        assert problem(whole, pair, (2, 2)) is None
    counted = local_collectives(node, pair, (2, 2), {})
    assert sorted((c.kind, c.size_bytes) for c in counted) == sorted(heard)


def test_heads_of_queries_alone_are_split_within_those_of_both() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(1, heads, 8, 2, dtype=torch.float64) for heads in (8, 4))
    values, options = [query, key, key.clone()], (None, 0.0, True)
    node = node_of(aten.scaled_dot_product_attention.default, *values, *options, enable_gqa=True)
    whole = trial(node, values)
    ways = {choice.local: choice for choice in choices(node) if choice.outputs == (S(1),)}
    both, alone = ways[""], [ways["attention:queries"], ways["attention:tokens"]]
    for way in alone:
        assert problem(whole, [way], [8]) is None  # twice as many ranks as heads of keys
        assert fits(node, [both, way], (4, 2))
        assert problem(whole, [both, way], (4, 2)) is None
        assert not fits(node, [way, both], (2, 4))
        assert problem(whole, [way, both], (2, 4)) is not None
    assert not fits(node, alone, (2, 2))


def test_squeeze_keeps_a_dimension_whose_shard_is_one_element() -> None:
    x = torch.randn(4, 1, 2, dtype=torch.float64)
    node = node_of(aten.squeeze.default, x)
    assert problem(trial(node, [x]), [Choice((Need(S(0)),), (S(0),))], [4]) is None


def test_open_sizes_fit_where_some_size_does() -> None:
    _, graph = small_gpt2()
    view = next(n for n in graph.ops if n.target is aten.view.default and isinstance(n.args[1][0], fx.Node))
    by_sample, by_last = choices(view)[1], choices(view)[2]
    assert fits(view, [by_sample], [3])
    symbol = graph.batch.batch_symbol
    assert not fits(view, [by_sample], [3], {symbol: 4})
    assert not fits(view, [by_last], [7])
