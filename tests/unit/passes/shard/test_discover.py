"""Choices of ops without a rule: custom ops of all manners, the cache, and the table beside what is found by trying."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from passes.shard.discover import Discovery, all_valid_choices
from passes.shard.rules import choices
from passes.shard.rules.shapes import operand_names
from passes.shard.rules.simulate import node_of
from passes.shard.words import Choice

aten = torch.ops.aten
SPACE = "sharding_tests"


@torch.library.custom_op(f"{SPACE}::scaled_gate", mutates_args=())
def scaled_gate(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """x (…, i), gate (…, i), weight (o, i): a product of three, summed over i."""
    return (x * gate) @ weight.T


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, gate, weight = ctx.saved_tensors
    inner = grad @ weight
    return inner * gate, inner * x, grad.flatten(0, -2).T @ (x * gate).flatten(0, -2)


scaled_gate.register_autograd(_gradients, setup_context=_saved)


@torch.library.custom_op(f"{SPACE}::whiten", mutates_args=())
def whiten(x: Tensor) -> Tensor:
    """Statistics over everything: nothing to shard."""
    return (x - x.mean()) / (x.std() + 1) * x.abs().max()


@torch.library.custom_op(f"{SPACE}::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws random numbers and says so to nobody."""
    return x + torch.randn_like(x)


@torch.library.custom_op(f"{SPACE}::counting", mutates_args={"count"})
def counting(x: Tensor, count: Tensor) -> Tensor:
    count.add_(1)
    return x * 2


@torch.library.custom_op(f"{SPACE}::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    """Takes no small tensors."""
    if x.numel() < 1_000_000:
        raise ValueError("too small")
    return x * 2


@torch.library.custom_op(f"{SPACE}::single_precision", mutates_args=())
def single_precision(x: Tensor, rows: Tensor) -> Tensor:
    """Only for float32; looks rows up."""
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return x[rows].exp()


@torch.library.custom_op(f"{SPACE}::sneaky", mutates_args=())
def sneaky(x: Tensor) -> Tensor:
    """Writes to its operand and says so to nobody."""
    result = x * 3
    x.detach().zero_()
    return result


def custom(name: str, *args: Any) -> fx.Node:
    return node_of(getattr(torch.ops, SPACE).__getattr__(name).default, *args)


def gate_node() -> fx.Node:
    return custom("scaled_gate", torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(12, 8))


def texts(found: tuple[Choice, ...]) -> set[str]:
    return {str(choice) for choice in found}


def test_a_custom_op_is_sharded_as_it_allows() -> None:
    assert texts(Discovery().choices(gate_node())) == {
        "R R R -> R",
        "S0 S0 R~ -> S0",
        "S1 S1 R~ -> S1",
        "R~ R~ S0 -> S2",
        "S2 S2 S1 -> P",
        "P R~ R~ -> P",
        "R~ P R~ -> P",
        "R~ R~ P -> P",
    }


@pytest.mark.parametrize("name", ["whiten", "noisy", "picky", "sneaky"])
def test_what_cannot_be_sharded_is_replicated(name: str) -> None:
    size = 1_000_000 if name == "picky" else 4
    assert texts(all_valid_choices(custom(name, torch.randn(size, 8)))) == {"R -> R"}


@torch.library.custom_op(f"{SPACE}::capped", mutates_args=())
def capped(x: Tensor) -> Tensor:
    """Rows whose norm is above 20 are made shorter: no draw of normal numbers shows it."""
    norm = x.norm(dim=1, keepdim=True)
    return torch.where(norm > 20, x / norm, x)


@torch.library.custom_op(f"{SPACE}::mean_of_numbers", mutates_args=())
def mean_of_numbers(x: Tensor) -> Tensor:
    return x.nanmean(1)


@torch.library.custom_op(f"{SPACE}::sums_of_runs", mutates_args=())
def sums_of_runs(x: Tensor, starts: Tensor) -> Tensor:
    """Rows of ``x`` by the number of starts that lie before them: what an index means depends on the other ones."""
    run = (torch.arange(x.shape[0])[:, None] >= starts).sum(1)
    return x.new_zeros(starts.shape[0] + 1, x.shape[1]).index_add(0, run, x)


@torch.library.custom_op(f"{SPACE}::rare_rows", mutates_args=())
def rare_rows(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """Looks ids from 100,000 on up in the table; small draws have none."""
    return torch.where((ids >= 100_000)[:, None], table[(ids - 100_000).clamp(min=0) % table.shape[0]], x * 2)


@pytest.mark.parametrize(
    ("node", "found"),
    [
        (
            custom("rare_rows", torch.randn(4, 8), torch.tensor([1, 2, 0, 3]), torch.randn(6, 8)),
            {"R R R -> R"},
        ),
        (custom("capped", torch.randn(4, 8)), {"R -> R", "S0 -> S0"}),
        (custom("mean_of_numbers", torch.randn(4, 8)), {"R -> R", "S0 -> S0"}),
        (
            custom("sums_of_runs", torch.randn(4, 8), torch.tensor([1, 2])),
            {"R R -> R", "S1 R -> S1", "P R -> P"},
        ),
        (node_of(aten.renorm.default, torch.randn(4, 8), 2, 0, 50.0), {"R -> R", "S0 -> S0"}),
        (node_of(aten.nanmean.default, torch.randn(4, 8), [1]), {"R -> R", "S0 -> S0"}),
    ],
    ids=["rare_rows", "capped", "mean_of_numbers", "sums_of_runs", "renorm", "nanmean"],
)
def test_values_that_are_rarely_drawn_are_tried(node: fx.Node, found: set[str]) -> None:
    assert texts(all_valid_choices(node)) == found


def test_writes_keep_an_op_whole() -> None:
    found = all_valid_choices(custom("counting", torch.randn(4, 8), torch.zeros(1)))
    assert texts(found) == {"R R -> R"}


def test_ops_of_one_precision_are_tried_in_it() -> None:
    node = custom("single_precision", torch.randn(8, 4), torch.randint(8, (6,)))
    assert {"R R -> R", "S1 R -> S1", "R S0 -> S0"} == texts(all_valid_choices(node))


def test_big_ops_are_tried_small() -> None:
    x, w = torch.empty(64, 4096, 512, device="meta"), torch.empty(2048, 512, device="meta")
    node = custom("scaled_gate", torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(12, 8))
    for source, value in zip(node.args, (x, x, w), strict=True):
        assert isinstance(source, fx.Node)
        source.meta["val"] = value
    node.meta["val"] = torch.empty(64, 4096, 2048, device="meta")
    assert "S2 S2 S1 -> P" in texts(all_valid_choices(node))


def test_arguments_that_mean_something_else_with_new_sizes_are_not_trusted() -> None:
    """(4, 16, 128) becomes (4, 8, 12), of which view(-1, 128) would make (3, 128)."""
    found = texts(all_valid_choices(node_of(aten.view.default, torch.randn(4, 16, 128), [-1, 128])))
    assert found == {"R -> R", "S0 -> S0", "S2 -> S1", "P -> P"}
    thirds = node_of(aten.split.Tensor, torch.randn(4, 16, 96), 32, 2)
    assert "S1 -> S1 S1 S1" in texts(all_valid_choices(thirds))


def test_a_kernel_that_does_not_look_at_shapes_is_not_run_on_what_does_not_fit() -> None:
    """With a part of one operand and all of the other this one writes beyond its result: the process aborts."""
    node = node_of(aten._weight_norm.default, torch.randn(6, 6), torch.randn(6, 1))
    assert texts(all_valid_choices(node)) == {"R R -> R", "R~ P -> P", "S0 S0 -> S0"}


def test_nothing_is_written_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """LAPACK writes lines about infinite numbers that no Python sees."""
    all_valid_choices(node_of(aten.linalg_svdvals.default, torch.randn(4, 6, 6, dtype=torch.float64)))
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")


def test_the_users_random_numbers_are_left_alone() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    all_valid_choices(node_of(aten.relu.default, torch.ones(4)))
    assert torch.equal(torch.rand(3), wanted)


def test_counts_say_where_choices_come_from() -> None:
    discovery = Discovery()
    relu = node_of(aten.relu.default, torch.ones(4, 4))
    for node in (relu, gate_node(), custom("noisy", torch.ones(4))):
        discovery.choices(node)
    assert discovery.counts == {"rule": 1, "discovered": 1, "replicated": 1}


def test_results_are_kept_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sharding.json"
    found = Discovery(file).choices(gate_node())
    (key,) = json.loads(file.read_text())["choices"]

    def never(node: fx.Node, seconds: float = 0.0) -> tuple[Choice, ...]:
        raise AssertionError("tried everything anew")

    with monkeypatch.context() as patched:
        patched.setattr("passes.shard.discover.all_valid_choices", never)
        assert Discovery(file).choices(gate_node()) == found
    # What is no longer true (a custom op's code was changed) is found out.
    stale = json.loads(file.read_text())
    stale["choices"][key].append("S0 R R -> S0")
    file.write_text(json.dumps(stale))
    assert Discovery(file).choices(gate_node()) == found
    assert "S0 R R -> S0" not in file.read_text()


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"format": 4}', '{"format": 1, "torch": 3, "choices": {}}'),
        '{"format": 4, "torch": 3, "choices": {"x": ["S -> R"]}}',
        '{"format": 4, "torch": 3, "proved_on": ["something else"], "choices": {}}',
    ],
)
def test_bad_cache_files_are_left_aside(tmp_path: Path, text: str) -> None:
    file = tmp_path / "sharding.json"
    file.write_text(text.replace("3", json.dumps(torch.__version__)))
    assert len(Discovery(file).choices(gate_node())) == 8


def example_ops() -> dict[str, fx.Node]:
    """Without sizes of 1, and without dimensions that are equal by accident."""
    Random(0)
    torch.manual_seed(0)

    def t(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    rows = torch.randint(4, (6,))
    nodes = [
        node_of(aten.linear.default, t(4, 6, 8), t(12, 8), t(12)),
        node_of(aten.bmm.default, t(4, 6, 8), t(4, 8, 12)),
        node_of(aten.addmm.default, t(12), t(4, 8), t(8, 12)),
        node_of(aten.conv2d.default, t(4, 6, 7, 7), t(8, 6, 3, 3), t(8)),
        node_of(aten.embedding.default, t(8, 4), torch.randint(8, (6, 12))),
        node_of(aten.layer_norm.default, t(4, 6, 8), [8], t(8), t(8)),
        node_of(aten.rms_norm.default, t(4, 6, 8), [8], t(8)),
        node_of(aten.scaled_dot_product_attention.default, t(2, 4, 6, 8), t(2, 4, 6, 8), t(2, 4, 6, 8)),
        node_of(aten.softmax.int, t(4, 6, 8), 1),
        node_of(aten.cross_entropy_loss.default, t(8, 12), torch.randint(12, (8,)), None, 2),
        node_of(aten.mul.Tensor, t(4, 6, 8), t(6, 8)),
        node_of(aten.add.Tensor, t(4, 6, 8), t(8)),
        node_of(aten.gelu.default, t(4, 6)),
        node_of(aten.where.self, t(4, 6) > 0, t(4, 6), t(6)),
        node_of(aten.sum.dim_IntList, t(4, 6, 8), [1]),
        node_of(aten.amax.default, t(4, 6, 8), [1]),
        node_of(aten.view.default, t(4, 6, 8), [24, 8]),
        node_of(aten.view.default, t(24, 8), [4, 6, 8]),
        node_of(aten.transpose.int, t(4, 6, 8), 1, 2),
        node_of(aten.cat.default, [t(4, 6), t(4, 8)], 1),
        node_of(aten.slice.Tensor, t(4, 6), 1, 0, 4),
        node_of(aten.expand.default, t(4, 1, 6), [4, 8, 6]),
        node_of(aten.index.Tensor, t(4, 8), [rows]),
        node_of(aten.gather.default, t(4, 6), 1, torch.randint(6, (4, 8))),
        node_of(aten.index_add.default, t(4, 8), 0, rows, t(6, 8)),
        node_of(aten.topk.default, t(4, 6), 2),
        node_of(aten.max_pool2d.default, t(4, 6, 8, 8), [2, 2]),
    ]
    return {f"{i} {node.target}": node for i, node in enumerate(nodes)}


SMALLER: dict[str, set[str]] = {
    # A norm is linear in weight and bias together.
    "aten.layer_norm.default": {"R~ P P -> P"},
    "aten.rms_norm.default": {"R~ P -> P"},
    # Windows that touch but do not overlap may be shared out by rows.
    "aten.max_pool2d.default": {"S2 -> S2", "S3 -> S3"},
}
"""Where trying finds more than the table has."""
WITHOUT_NAN = {"aten.scaled_dot_product_attention.default": {"R~ R~ S3 -> S3"}}
"""Where a kernel lets NaN through or not, by the sizes that it gets and by the processor (with AVX2 alone it does as the
table says): true of numbers only, and the table is about these."""


@pytest.mark.parametrize("name", example_ops())
def test_the_table_and_discovery_agree(name: str) -> None:
    node = example_ops()[name]
    table = texts(tuple(choice for choice in choices(node) if not choice.local))
    found = texts(all_valid_choices(node))
    assert table - found in (set(), WITHOUT_NAN.get(str(node.target), set()))
    assert found - table == SMALLER.get(str(node.target), set()), operand_names(node)
