"""What ranks found of parts is held against the model's whole tensors. No processes: results are made here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partitioner.verify.rank import VerificationTask, own_state
from partitioner.verify.ranks import compare_ranks, put_together
from passes.fidelity.agree import StepResult
from passes.lower.lower import lower
from passes.lower.segment import Segmentation
from runtime.mesh.sharding import Block
from runtime.program.program import Segment, SegmentCost, SegmentGraph
from runtime.segment.code import SegmentCode, SegmentOutput
from runtime.state.rank_state import TensorPart
from tests.support.split_model import SIZES, model, traced, workload
from tests.support.split_model import split as split_graph

NOT_KNOWN = None
PARTS = {
    "w#0": TensorPart("w", Block((0, 0), (2, 3))),
    "w#1": TensorPart("w", Block((2, 0), (1, 1))),
    "w#2": TensorPart("w", Block((2, 1), (1, 2))),
    "n#0": TensorPart("n", Block((0,), (1,))),
    "n#1": TensorPart("n", Block((1,), (2,))),
}
STATE = {
    "w": torch.arange(9.0, dtype=torch.float64).view(3, 3),
    "v": torch.tensor([7.0, 8.0], dtype=torch.float64),
    "n": torch.tensor([-1, -1, -1]),
}
GRADIENT = torch.ones(3, 3, dtype=torch.float64)
LOSS = SegmentCode(0, GraphModule(nn.Module(), Graph()), (), (SegmentOutput("loss", "loss"),))
TASK = VerificationTask(
    programs=(),
    codes={0: LOSS},
    segments=SegmentGraph((Segment(0, (1,), SegmentCost(1.0, 1.0, 1.0)),), (), 2),
    batch_specs=(),
    batch={},
    state=STATE,
    trainable=frozenset({"w", "v"}),
    microbatches=1,
    weights=(1.0,),
    optimizer="sgd",
    learning_rate=0.1,
    timeout_seconds=1.0,
    parts=PARTS,
)
EXPECTED = StepResult(
    3.0,
    {"w": GRADIENT, "v": GRADIENT[0, :2]},
    {"w": STATE["w"], "v": STATE["v"]},
    {"n": STATE["n"]},
)


def found(rank: int, names: tuple[str, ...], loss: float) -> StepResult:
    """What ``rank`` would say if everything was right."""

    def values(of: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            n: PARTS[n].block.of(of[PARTS[n].whole]) if n in PARTS else of[n] for n in names if n[0] in of
        }

    return StepResult(
        loss, values(dict(EXPECTED.gradients)), values(dict(EXPECTED.parameters)), values({"n": STATE["n"]})
    )


def ranks() -> list[StepResult]:
    """v is tied: both have it. Rank 0 has two parts of w."""
    return [found(0, ("w#0", "w#2", "v", "n#1"), NOT_KNOWN), found(1, ("w#1", "v", "n#0"), 3.0)]


def different(results: list[StepResult]) -> set[tuple[str, str]]:
    compared = compare_ranks(EXPECTED, put_together(results, TASK), STATE, 0.1)
    return {(c.kind, c.name) for c in compared if not c.agrees}


def test_parts_become_whole_tensors_and_every_copy_counts() -> None:
    first, second = put_together(ranks(), TASK)
    assert first.loss == 3.0
    assert second.loss is None
    for kind, name in (("gradients", "w"), ("parameters", "w"), ("parameters", "v"), ("buffers", "n")):
        assert torch.equal(getattr(first, kind)[name], getattr(EXPECTED, kind)[name])
    assert set(second.parameters) == {"v"}, "the other copy of what is tied"
    assert different(ranks()) == set()


@pytest.mark.parametrize(
    ("rank", "kind", "name", "seen"),
    [
        (0, "parameters", "w#2", {("parameter", "w")}),
        (1, "parameters", "w#1", {("parameter", "w")}),
        (0, "parameters", "v", {("parameter", "v")}),
        (1, "parameters", "v", {("parameter", "v")}),
        (0, "gradients", "w#0", {("gradient", "w")}),
        (1, "gradients", "w#1", {("gradient", "w")}),
    ],
)
def test_a_wrong_part_is_a_wrong_tensor(rank: int, kind: str, name: str, seen: set[tuple[str, str]]) -> None:
    results = ranks()
    tensors = dict(getattr(results[rank], kind))
    tensors[name] = tensors[name] + 1e-6
    results[rank] = replace(results[rank], **{kind: tensors})
    assert different(results) == seen


@pytest.mark.parametrize(
    ("rank", "name", "seen"),
    [
        (0, "w#2", {("gradient", "w"), ("parameter", "w")}),
        (1, "w#1", {("gradient", "w"), ("parameter", "w")}),
        (0, "n#1", {("buffer", "n")}),
        (1, "n#0", {("buffer", "n")}),
    ],
)
def test_a_part_that_nobody_has_is_a_difference(rank: int, name: str, seen: set[tuple[str, str]]) -> None:
    """Also of integers, which have no nan: -1 is what the buffer really holds."""
    results = ranks()
    kinds = {
        kind: {n: t for n, t in getattr(results[rank], kind).items() if n != name}
        for kind in ("gradients", "parameters", "buffers")
    }
    results[rank] = replace(results[rank], **kinds)
    assert different(results) == seen


def test_no_gradient_of_a_part_is_zero() -> None:
    results = ranks()
    kept = {n: g for n, g in results[1].gradients.items() if n != "w#1"}
    results[1] = replace(results[1], gradients=kept)
    assert different(results) == {("gradient", "w")}
    zero = GRADIENT.clone()
    zero[2, 0] = 0.0
    expected = replace(EXPECTED, gradients={**EXPECTED.gradients, "w": zero})
    compared = compare_ranks(expected, put_together(results, TASK), STATE, 0.1)
    assert all(c.agrees for c in compared)


def test_two_losses_or_none_agree_with_nothing() -> None:
    assert different([replace(r, loss=1.5) for r in ranks()]) == {("loss", "loss")}
    first, second = ranks()
    assert different([replace(first, loss=3.0), replace(second, loss=NOT_KNOWN)]) == {("loss", "loss")}, (
        "not its rank"
    )
    assert different([replace(r, loss=NOT_KNOWN) for r in ranks()]) == {("loss", "loss")}


def test_a_rank_starts_with_copies_of_its_blocks() -> None:
    made = workload()
    split = split_graph(traced(made))
    values = {**dict(made.model.named_parameters()), **dict(made.model.named_buffers())}
    task = replace(TASK, state=values, parts=split.parts, trainable=frozenset({"fc1.weight"}))
    everything = Segmentation({node.name: 0 for node in split.ops}, ((0,),), frozenset())
    state = own_state(lower(split, everything), task, 0)
    weight = model().fc1.weight
    assert [state.leaves[f"fc1.weight#{i}"].shape[0] for i in range(3)] == list(SIZES)
    assert torch.equal(torch.cat([state.leaves[f"fc1.weight#{i}"] for i in range(3)]), weight)
    assert torch.equal(torch.cat([state.leaves[f"fc2.weight#{i}"] for i in range(3)], 1), model().fc2.weight)
    assert state.parameters["fc1.weight#1"].requires_grad
    assert not state.parameters["fc2.weight#1"].requires_grad
    with torch.no_grad():
        state.leaves["fc1.weight#0"].zero_()
    assert torch.equal(made.model.fc1.weight, weight), "the model's own is never written"  # type: ignore[union-attr]


def test_losses_of_ranks_that_share_a_stage_are_parts_of_one() -> None:
    """Where stages have all parameters in common, ranks hold every tensor whole, and still share the work."""
    shared = Segment(0, (0, 1), SegmentCost(1.0, 1.0, 1.0))
    task = replace(TASK, segments=SegmentGraph((shared,), (), 2), parts={}, state={"v": STATE["v"]})
    first, second = put_together([found(0, ("v",), 1.0), found(1, ("v",), 2.0)], task)
    assert (first.loss, second.loss) == (3.0, None)
    for each in (first, second):
        assert torch.equal(each.parameters["v"], STATE["v"])
