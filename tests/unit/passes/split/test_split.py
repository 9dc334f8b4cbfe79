"""Ops in blocks of their neurons: what the graph looks like, that it computes the same, what is refused."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.errors import UsageError
from passes.split.split import Split, split_neurons
from runtime.mesh.sharding import Block
from tests.unit.passes.split.harness import check, ops, traced

aten = torch.ops.aten


class MLP(nn.Module):
    """x [b, 6] -> 10 -> 4, mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.fc2(F.gelu(self.fc1(x))).pow(2).mean()
        return loss


MLP_60_40 = """\
linear_b0 = linear(leaves_0, p_model_fc1_weight_b0, p_model_fc1_bias_b0)  (b, 6)
linear_b1 = linear(leaves_0, p_model_fc1_weight_b1, p_model_fc1_bias_b1)  (b, 4)
gelu_b0 = gelu(linear_b0)  (b, 6)
gelu_b1 = gelu(linear_b1)  (b, 4)
linear_1_b0 = linear(gelu_b0, p_model_fc2_weight_b0, p_model_fc2_bias)  (b, 4)
linear_1_b1 = linear(gelu_b1, p_model_fc2_weight_b1, None)  (b, 4)
linear_1_sum = add(linear_1_b0, linear_1_b1)  (b, 4)
pow_1 = pow(linear_1_sum, 2)  (b, 4)
mean = mean(pow_1)  ()"""


def test_an_mlp_split_60_40() -> None:
    graph, state, leaves = traced(MLP(), {"x": torch.randn(3, 6)})
    made = check(graph, [Split("linear", -1, (6, 4))], state, leaves)
    text = [
        f"{node.name} = {str(node.target).split('.')[1]}({', '.join(map(str, node.args))})  {shape(node.meta['val'])}"
        for node in made.ops
    ]
    assert "\n".join(text) == MLP_60_40
    assert {name: (part.whole, part.block) for name, part in made.parts.items()} == {
        "fc1.weight#0": ("fc1.weight", Block((0, 0), (6, 6))),
        "fc1.weight#1": ("fc1.weight", Block((6, 0), (4, 6))),
        "fc1.bias#0": ("fc1.bias", Block((0,), (6,))),
        "fc1.bias#1": ("fc1.bias", Block((6,), (4,))),
        "fc2.weight#0": ("fc2.weight", Block((0, 0), (4, 6))),
        "fc2.weight#1": ("fc2.weight", Block((0, 6), (4, 4))),
    }
    assert set(made.parameters) == {*made.parts, "fc2.bias"}
    assert made.blocks == {
        f"{op}_b{number}": (op, number) for op in ("linear", "gelu", "linear_1") for number in (0, 1)
    }


def test_a_block_is_known_by_its_op_whatever_name_is_free_for_it() -> None:
    graph, _, _ = traced(MLP(), {"x": torch.randn(3, 6)})
    graph.nodes["pow_1"]._rename("linear_b1")
    made = split_neurons(replace(graph), [Split("linear", -1, (6, 4))])
    assert made.blocks["linear_b1_0"] == ("linear", 1)
    assert "linear_b1" not in made.blocks
    assert made.trained == set(made.parameters)


def shape(value: Tensor) -> str:
    return str(tuple(size if isinstance(size, int) else "b" for size in value.shape)).replace("'", "")


def test_a_split_into_one_block_is_none() -> None:
    graph, _, _ = traced(MLP(), {"x": torch.randn(3, 6)})
    assert str(split_neurons(graph, [Split("linear", 1, (10,))]).graph) == str(graph.graph)


def test_split_again() -> None:
    """Parts of parts are parts of the model's tensors."""
    graph, state, leaves = traced(MLP(), {"x": torch.randn(3, 6)})
    once = split_neurons(graph, [Split("linear", -1, (6, 4))])
    twice = check(once, [Split("linear_b1", -1, (1, 3))], state, leaves)
    assert twice.parts["fc1.weight#1#1"].block == Block((7, 0), (3, 6))
    assert twice.parts["fc1.weight#1#1"].whole == "fc1.weight"


def test_everything_that_is_wrong_is_told_at_once() -> None:
    graph, _, _ = traced(MLP(), {"x": torch.randn(3, 6)})
    splits = [
        Split("nothing", 0, (1, 1)),
        Split("leaves_0", 1, (3, 3)),
        Split("linear", 2, (5, 5)),
        Split("gelu", 1, (5, 6)),
        Split("gelu", 1, (10, 0)),
        Split("linear_1", 0, (1, 2)),
        Split("mean", 0, (1,)),
    ]
    with pytest.raises(UsageError) as caught:
        split_neurons(graph, splits)
    text = "\n".join(caught.value.because)
    assert "gelu is named 2 times" in text
    assert "nothing is no op" in text
    assert "leaves_0 is no op" in text
    assert "linear has no dimension 2" in text
    assert "gelu: blocks of 5, 6" in text
    assert "gelu: blocks of 10, 0" in text
    assert "dimension 0 of linear_1 depends on the batch" in text
    assert "mean has no dimension 0" in text
    assert len(caught.value.because) == 8


class Gated(nn.Module):
    """Gate and up, apart or as one projection."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.first = nn.ModuleList([nn.Linear(6, 14)] if fused else [nn.Linear(6, 7), nn.Linear(6, 7)])
        self.down = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first[0](x).chunk(2, -1) if self.fused else (f(x) for f in self.first)
        y = x + self.down(F.silu(gate) * up)
        loss: Tensor = F.layer_norm(y, [6]).pow(3).sum()
        return loss


@pytest.mark.parametrize("fused", [False, True])
def test_a_gated_mlp(fused: bool) -> None:
    graph, state, leaves = traced(Gated(fused), {"x": torch.randn(3, 6)})
    seeds = [Split("linear", 1, (4, 3) * (2 if fused else 1))]
    seeds += [] if fused else [Split("linear_1", 1, (4, 3))]
    made = check(graph, seeds, state, leaves)
    assert ops(made, aten.cat.default) == []
    assert ops(made, aten.slice.Tensor) == []
    assert not ops(made, operator.getitem)


def test_unlike_blocks_meet_by_ranges() -> None:
    """Gate in blocks [4, 3], up in blocks [2, 5]: up's ranges are taken from the blocks that have them."""
    graph, state, leaves = traced(Gated(fused=False), {"x": torch.randn(3, 6)})
    made = check(graph, [Split("linear", 1, (4, 3)), Split("linear_1", 1, (2, 5))], state, leaves)
    assert [made.nodes[name].args[0] for name in ops(made, aten.cat.default)] != []
    assert "linear_1_whole" not in made.nodes


class Attention(nn.Module):
    """``kv`` of ``heads`` heads of 4; ``form``: how the scores are computed."""

    def __init__(self, heads: int, kv: int, fused: bool, form: str) -> None:
        super().__init__()
        self.heads, self.kv, self.form = heads, kv, form
        widths = [heads * 4, kv * 4, kv * 4]
        self.projections = nn.ModuleList(
            [nn.Linear(8, sum(widths))] if fused else [nn.Linear(8, width) for width in widths]
        )
        self.out = nn.Linear(heads * 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.projections) == 1:
            q, k, v = self.projections[0](x).split([self.heads * 4, self.kv * 4, self.kv * 4], -1)
        else:
            q, k, v = (f(x) for f in self.projections)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        if self.form == "gqa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
            scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
            y = scores @ v
        y = self.out(y.transpose(1, 2).flatten(2)) + x
        loss: Tensor = y.pow(2).mean()
        return loss


@pytest.mark.parametrize("form", ["gqa", "matmul"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kv", [6, 3])
def test_attention_by_heads(form: str, fused: bool, kv: int) -> None:
    graph, state, leaves = traced(Attention(6, kv, fused, form), {"x": torch.randn(2, 3, 8)})
    sizes = [(8, 16), (4 * kv // 3, 8 * kv // 3), (4 * kv // 3, 8 * kv // 3)]
    sizes[0] = (4 * 2, 4 * 4)
    if fused:
        seeds = [Split("linear", 2, sum(sizes, ()))]
    else:
        seeds = [Split(name, 2, s) for name, s in zip(("linear", "linear_1", "linear_2"), sizes, strict=True)]
    made = check(graph, seeds, state, leaves)
    assert ops(made, aten.cat.default) == []
    out = "linear_1" if fused else "linear_3"
    assert f"{out}_sum" in made.nodes


def test_a_block_that_cuts_through_a_head_is_put_together() -> None:
    graph, state, leaves = traced(Attention(6, 6, False, "gqa"), {"x": torch.randn(2, 3, 8)})
    made = check(graph, [Split("linear", 2, (6, 18))], state, leaves)
    assert ops(made, aten.cat.default) == ["linear_whole"]
    assert made.parts.keys() == {f"projections.0.{name}#{k}" for name in ("weight", "bias") for k in (0, 1)}


class Tied(nn.Module):
    """An embedding whose weight is the projection's too, and one cell called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.cell = nn.Linear(4, 4)
        self.project = nn.Linear(4, 7, bias=False)
        self.project.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.cell(torch.tanh(self.cell(self.embedding(ids)))))
        return F.cross_entropy(self.project(x).flatten(0, 1), labels.flatten())


def tied() -> tuple[object, ...]:
    return traced(Tied(), {"ids": torch.randint(7, (2, 5)), "labels": torch.randint(7, (2, 5))})


def test_a_tied_parameter_that_is_cut_in_two_ways_stays_whole() -> None:
    graph, state, leaves = tied()
    made = check(graph, [Split("linear_2", 2, (5, 2))], state, leaves)  # type: ignore[arg-type]
    assert not made.parts
    assert len(ops(made, aten.slice.Tensor)) == 2


def test_a_tied_parameter_that_is_cut_alike_becomes_parts() -> None:
    """Columns of the embedding, and the projection's inputs by the same columns. Its alias leads to the whole."""
    graph, state, leaves = tied()
    seeds = [Split("embedding", 2, (3, 1)), Split("linear_1", 2, (3, 1))]
    made = check(graph, seeds, state, leaves)  # type: ignore[arg-type]
    parts = {name for name in made.parts if name.startswith("embedding")}
    assert parts == {"embedding.weight#0", "embedding.weight#1"}
    assert made.aliases == {"project.weight": "embedding.weight"}
    # The cell is cut by inputs in its first call and by outputs in its second: whole, and slices of it.
    assert {"cell.weight", "cell.bias"} <= made.parameters.keys()


def test_a_cell_called_twice_in_the_same_blocks_has_parts() -> None:
    graph, state, leaves = tied()
    seeds = [Split("linear", 2, (3, 1)), Split("linear_1", 2, (3, 1))]
    made = check(graph, seeds, state, leaves)  # type: ignore[arg-type]
    assert {"cell.weight#0", "cell.weight#1", "cell.bias#0", "cell.bias#1"} == set(made.parts)
    assert ops(made, aten.cat.default) == ["tanh_whole", "tanh_1_whole"] or "linear_2_sum" in made.nodes


class Experts(nn.Module):
    """Stacked experts [e, i, o], and weights of which a block is only found through a transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(5, 4, 6))
        self.down = nn.Parameter(torch.randn(5, 4, 6))
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        every = x.unsqueeze(0).expand(5, -1, -1)
        y = torch.bmm(torch.relu(torch.bmm(every, self.up)), self.down.transpose(1, 2))
        loss: Tensor = (y * self.scale[:, None, None]).sum(0).pow(2).mean()
        return loss


def test_stacked_experts() -> None:
    graph, state, leaves = traced(Experts(), {"x": torch.randn(3, 4)})
    made = check(graph, [Split("bmm", 0, (2, 3))], state, leaves)
    assert set(made.parts) == {f"{name}#{k}" for name in ("up", "down", "scale") for k in (0, 1)}
    assert ops(made, aten.cat.default) == []
    assert "sum_1_sum" in made.nodes


class Statistics(nn.Module):
    """Running statistics of our own, written as a whole or in blocks, beside a batch norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.fc(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        loss: Tensor = self.last(h - self.mean).pow(2).mean()
        return loss


def test_written_buffers_become_parts_with_their_outputs() -> None:
    graph, state, leaves = traced(Statistics(), {"x": torch.randn(5, 4)})
    made = check(graph, [Split("linear", 1, (4, 2))], state, leaves)
    written = {output.name for output in made.outputs if output.kind == "buffer"}
    assert written == {"mean#0", "mean#1", "norm.num_batches_tracked"}
    assert {"norm.running_mean#1", "norm.running_var#0", "mean#0"} <= made.buffers.keys()


def test_a_buffer_that_is_also_read_whole_is_written_whole() -> None:
    class Both(Statistics):
        def forward(self, x: Tensor) -> Tensor:
            return (
                super().forward(x)
                + self.norm.running_mean.detach().cumsum(0).sum()
                + self.mean.cumsum(0).sum()
            )

    graph, state, leaves = traced(Both(), {"x": torch.randn(5, 4)})
    made = check(graph, [Split("linear", 1, (4, 2))], state, leaves)
    assert {"mean", "norm.running_mean"} <= made.buffers.keys()
    assert [node.target for node in made.ops].count(aten.batch_norm.default) == 1


class Outputs(nn.Module):
    """Returns a value in blocks, one that is a block of it, one that is a parameter, and one whole."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(self.fc(x))
        return h, h[:, :4], self.fc.bias * 2, self.last(h)


def test_outputs_are_whole() -> None:
    graph, state, leaves = traced(Outputs(), {"x": torch.randn(5, 4)}, training=False)
    made = check(graph, [Split("linear", 1, (4, 2))], state, leaves)
    assert [output.name for output in made.outputs] == [output.name for output in graph.outputs]
    assert made.outputs[0].node == "batch_norm_whole"
    assert "norm.running_mean#1" in made.buffers
    assert "fc.bias" in made.parameters  # returned: read whole


def test_statistics_are_read_when_they_were_read() -> None:
    """Before the batch norm writes them, though only ranges of what was computed from them are wanted after it."""

    class Before(Statistics):
        def forward(self, x: Tensor) -> Tensor:
            early = self.norm.running_mean * 3 + 1
            h = self.norm(self.fc(x))
            loss: Tensor = self.last(h * early).pow(2).mean() + self.mean.sum()
            return loss

    graph, state, leaves = traced(Before(), {"x": torch.randn(5, 4)})
    check(graph, [Split("linear", 1, (4, 2))], state, leaves)


def test_an_op_without_a_rule_is_read_whole() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            loss: Tensor = (h.sort(-1).values * h.cumsum(-1)).mean() + torch.linalg.norm(h.roll(1, -1))
            return loss

    graph, state, leaves = traced(Sorted(), {"x": torch.randn(3, 4)})
    made = check(graph, [Split("linear", 1, (1, 3, 2))], state, leaves)
    assert ops(made, aten.cat.default) == ["linear_whole"]  # once, for all three


def test_memory_is_read_as_it_lay() -> None:
    """Blocks of a transposed value do not lie as the whole did; diagonals are read by strides."""

    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x).transpose(0, 1)
            g = torch.cat([h, h * 2], 0).mean(1)
            loss: Tensor = g.as_strided((3, 2), (4, 1)).pow(2).sum() + h.reshape(-1).cumsum(0).mean()
            return loss

    graph, state, leaves = traced(Strided(), {"x": torch.randn(3, 4)})
    made = check(graph, [Split("linear", 1, (4, 2))], state, leaves)
    assert "transpose_whole" in made.nodes


def test_names_do_not_clash() -> None:
    graph, state, leaves = traced(MLP(), {"x": torch.randn(3, 6)})
    graph.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)[0].name = "linear_b1"
    graph.__dict__.pop("nodes", None)
    made = check(graph, [Split("linear", 1, (5, 5))], state, leaves)
    assert len(made.nodes) == len(list(made.graph.nodes))
    assert made.nodes["linear_b1"].target is aten.pow.Tensor_Scalar
