"""From a compile to a Plan: every number comes from the compile, and the file alone gives the same step again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError
from partitioner import Plan, Workload, partition, trace
from partitioner.record.describe import MOST_RUNNER_UPS, distinct_runner_ups
from partitioner.record.rebuild import refuse_other_model
from partitioner.report.text import text_within
from passes.lower.candidate import Candidate, Origin, Trail
from passes.search.outcome import Label, RunnerUp
from tests.support.bad_workloads import Net, NoLoss, batch

TWO = ClusterSpec.parse("A100-40GB:2")


class Tokens(nn.Module):
    """(batch, 16) token ids -> loss; a batch norm in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def tokens_plan() -> Plan:
    inputs = {"ids": torch.randint(50, (4, 16))}
    return partition(
        Tokens(), TWO, example_inputs=inputs, batch_size=9, microbatches=2, pins={"embed": 0, "head": 1}
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return tokens_plan()


def test_the_prediction_is_the_simulation_of_the_file(plan: Plan) -> None:
    simulated = Plan.from_json(plan.model_dump_json()).simulate()
    assert simulated.step_seconds == plan.prediction.step_seconds
    assert simulated.bubble_fraction == plan.prediction.bubble_fraction
    assert {str(r): int(p) for r, p in enumerate(simulated.peak_bytes)} == plan.prediction.peak_memory_bytes
    assert simulated.message_count == plan.prediction.messages
    assert int(sum(simulated.pair_bytes.values())) == plan.prediction.communication_bytes


def test_the_same_input_gives_the_same_plan(plan: Plan) -> None:
    again = tokens_plan()
    same_time = {"certificate": replace(plan.certificate, search_seconds=0.0)}
    other = {"certificate": replace(again.certificate, search_seconds=0.0)}
    assert again.model_copy(update=other) == plan.model_copy(update=same_time)


def test_rates_follow_from_the_step(plan: Plan) -> None:
    p = plan.prediction
    assert p.samples_per_second == pytest.approx(9 / p.step_seconds)
    assert p.tokens_per_second == pytest.approx(9 * 16 / p.step_seconds)
    assert p.mfu is not None
    assert 0 < p.mfu < 1


def test_every_op_is_placed_once_or_recomputed(plan: Plan) -> None:
    graph = trace(Tokens(), {"ids": torch.randint(50, (4, 16))})
    assert set(plan.placements) | set(plan.recomputed) == {node.name for node in graph.ops}
    assert not set(plan.placements) & set(plan.recomputed)
    assert plan.model.parameters == sum(p.numel() for p in Tokens().parameters())
    assert sum(stage.parameter_bytes for stage in plan.stages) == plan.model.parameter_bytes


def test_what_an_expert_asks_for_is_said(plan: Plan) -> None:
    with text_within(120):
        text = str(plan)
    assert "one device" in text
    assert "data parallel x2" in text
    assert "not tried   data parallelism; tensor parallelism; ZeRO sharding" in text
    assert "1 batch norm: statistics of one micro-batch at a time" in text.replace("\n            ", " ")
    assert "schedule    " + plan.schedule + ", batch 9 = 1 micro-batch of 5 + 1 of 4" in text


def test_baselines_say_whether_they_fit() -> None:
    small = TWO.to_dict()
    small["nodes"][0]["device"] = {"preset": "A100-40GB", "memory": "460MiB", "memory_process": 0}
    wide = Workload(Net(6_000_000), batch())
    found = partition(
        wide, ClusterSpec.model_validate(small), batch_size=16, optimizer_memory="none", strategy="layer"
    ).alternatives
    reasons = {other.strategy: (other.feasible, other.reason) for other in found}
    assert not reasons["one device"][0]
    assert reasons["one device"][1].startswith("does not fit: ")
    assert reasons["data parallel x2"][1].endswith(" short on each device")


def test_training_nothing_is_noted() -> None:
    model = Net()
    model.requires_grad_(False)
    frozen = partition(model, TWO, example_inputs=batch(), batch_size=4, strategy="layer")
    assert "nothing is trained: no parameter requires a gradient" in frozen.notes


def test_inputs_that_the_model_does_not_read_are_no_tokens() -> None:
    inputs = {"x": torch.randn(4, 4), "ids": torch.zeros(4, 7, dtype=torch.long)}
    made = partition(
        NoLoss(), TWO, example_inputs=inputs, loss_fn=lambda out, _: out.sum(), batch_size=4, strategy="layer"
    )
    assert made.prediction.tokens_per_second is None


def test_an_image_of_labels_is_no_text() -> None:
    class Segment(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 5, 3, padding=1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.conv(x), mask)

    inputs = {"x": torch.randn(4, 1, 6, 6), "mask": torch.zeros(4, 6, 6, dtype=torch.long)}
    made = partition(Segment(), TWO, example_inputs=inputs, batch_size=4, strategy="layer")
    assert made.prediction.tokens_per_second is None


def pipeline(stages: int, schedule: str, microbatches: int) -> Candidate:
    return Candidate({}, tuple((rank,) for rank in range(stages)), microbatches, schedule)


def test_runner_ups_are_the_best_of_their_kind() -> None:
    def entry(stages: int, schedule: str, microbatches: int, seconds: float, over: int = 0) -> RunnerUp:
        return RunnerUp(Label.of_stages(pipeline(stages, schedule, microbatches)), seconds, 1, over)

    overflows = entry(2, "1f1b", 8, 1.0, over=1)
    few = [entry(4, "zb-v", 1, 3.0), entry(2, "zb-v", 1, 2.0), overflows]
    found = distinct_runner_ups([*few, *(entry(2, "gpipe", m, 4.0 + m) for m in range(9))])
    assert found[0] == entry(2, "zb-v", 1, 2.0)
    assert len(found) == MOST_RUNNER_UPS
    assert len({str(other.label) for other in found}) == MOST_RUNNER_UPS
    assert overflows not in found
    assert distinct_runner_ups(few) == [entry(2, "zb-v", 1, 2.0), overflows], "what overflows comes last"


def test_runner_ups_of_a_free_search_are_told_apart_by_how_they_were_found() -> None:
    def found_by(origin: Origin, number: int, microbatches: int, seconds: float) -> RunnerUp:
        return RunnerUp(Label.of_trail(Trail.of(origin, number), microbatches), seconds, 1)

    runs, more = (found_by(Origin.CONTIGUOUS_RUNS, number, 2, 1.0 + number) for number in (3, 4))
    others = [
        found_by(Origin.CONTIGUOUS_RUNS, 3, 4, 6.0),
        found_by(Origin.EARLIEST_FINISH, 0, 2, 7.0),
        RunnerUp(Label.of_variant(14, 2, 3), 8.0, 1),
        RunnerUp(Label.of_layer_wise(pipeline(2, "1f1b", 2)), 9.0, 1),
    ]
    assert distinct_runner_ups([more, *others, runs]) == [runs, *others]
    faster = [found_by(Origin.CONTIGUOUS_RUNS, 1, count, 2.0) for count in range(5, 10)]
    named = replace(others[-1], named=True)
    assert distinct_runner_ups([*faster, named]) == [*faster[:4], named], (
        "the plan that the search began with"
    )


def test_another_model_is_refused_with_what_differs(plan: Plan) -> None:
    with pytest.raises(PlanError) as caught:
        refuse_other_model(plan, trace(Net(), batch()))
    text = str(caught.value)
    assert "the plan for Tokens does not fit Net" in text
    assert "planned ops are not in the model, such as " in text
    assert "the model has 67 parameters, the plan's" in text
    refuse_other_model(
        plan, trace(Tokens(), {"ids": torch.randint(50, (3, 16))})
    )  # another batch size is the same model


def test_a_plan_holds_plain_data_only(plan: Plan) -> None:
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()
