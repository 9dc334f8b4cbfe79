"""What an engine decides from a batch alone, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError, UsageError
from partitioner.batches.reader import same_constant
from partitioner.batches.step import (
    BatchCuts,
    refuse_autocast,
    refuse_no_grad,
    seed_scale,
    share_results,
)
from partitioner.record.rebuild import plan_programs
from runtime.execute.context import StepSums
from runtime.ranks.collective import Pending
from runtime.segment.microbatch import microbatch_sizes
from tests.support.made_plans import made_plan


@pytest.mark.parametrize(
    ("samples", "least", "expected"), [(8, 1, 4), (5, 1, 4), (4, 1, 4), (3, 1, 3), (1, 1, 1), (5, 2, 2)]
)
def test_microbatches_of_a_short_batch(samples: int, least: int, expected: int) -> None:
    assert BatchCuts(8, 4, least, "batch_norm").of_training(samples, "m").sizes == microbatch_sizes(
        samples, expected
    )


@pytest.mark.parametrize(
    ("samples", "least", "expected"), [(16, 1, 4), (10, 1, 4), (6, 1, 3), (2, 1, 1), (10, 3, 2)]
)
def test_ranks_that_share_samples_take_a_multiple(samples: int, least: int, expected: int) -> None:
    cuts = BatchCuts(16, 4, least, "batch_norm", 2)
    assert cuts.of_training(samples, "m").sizes == microbatch_sizes(samples, expected, 2)
    assert cuts.shared_and_rest(samples) == (microbatch_sizes(samples, expected, 2), ())
    with pytest.raises(
        PlanError, match=r"it has 5 samples, and ranks share .* a multiple of 2[\s\S]*drop_last=True"
    ):
        BatchCuts(16, 4, multiple=2).of_training(5, "m")


@given(
    samples=st.integers(1, 100),
    microbatches=st.integers(1, 5),
    planned=st.integers(1, 5),
    least=st.integers(1, 5),
    multiple=st.integers(1, 8),
)
def test_every_sample_is_evaluated_in_a_micro_batch_that_fits(
    samples: int, microbatches: int, planned: int, least: int, multiple: int
) -> None:
    """``planned``: multiples in a micro-batch of the plan."""
    if samples < least:
        return
    most = max(planned * multiple, -(-least // multiple) * multiple)
    shared, rest = BatchCuts(microbatches * most, microbatches, least, "", multiple).shared_and_rest(samples)
    assert sum(shared) + sum(rest) == samples
    assert all(size % multiple == 0 for size in shared)
    assert all(size >= least for size in (*shared, *rest))
    assert sum(rest) < max(multiple + least, 2 * least + multiple)
    assert all(size < most + least + multiple for size in shared)


def test_batches_that_do_not_fit_say_why() -> None:
    with pytest.raises(
        PlanError, match="it has 9 samples, the plan is made for 8 a step, and memory for more"
    ):
        BatchCuts(8, 4).of_training(9, "m")
    with pytest.raises(PlanError, match="it has 1 samples, and batch_norm in bn needs 2"):
        BatchCuts(8, 4, 2, "batch_norm in bn").of_training(1, "m")


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("gpipe", (0, 1, 2)),
        ("1f1b", (0, 1, 2)),
        ("zb-h1", (0, 1, 2)),
        ("zb-h2", (0, 1, 2)),
        ("zb-v", (0, 1, 2, 2, 1, 0)),
        ("interleaved", (0, 1, 2, 0, 1, 2)),
        ("list", (0, 1, 0, 2)),
    ],
)
def test_programs_for_fewer_micro_batches_are_proved_too(schedule: str, ranks: tuple[int, ...]) -> None:
    plan = made_plan(ClusterSpec.local(3), ranks, schedule=schedule, microbatches=6)
    for microbatches in range(1, plan.microbatches):
        programs = plan_programs(plan.model_copy(update={"microbatches": microbatches}))
        found = {i.microbatch for p in programs for i in p.instructions if hasattr(i, "microbatch")}
        assert found == set(range(microbatches))


class Alone:
    """Collectives of one rank, or as if ``others`` brought their vectors too."""

    device = torch.device("cpu")

    def __init__(self, *others: list[float]) -> None:
        self.others = others

    def all_reduce(self, vector: torch.Tensor, what: str) -> Pending:
        assert what == "the loss"
        return Pending(sum((torch.tensor(v, dtype=torch.float64) for v in self.others), vector))


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_results_count_once_wherever_they_are_computed() -> None:
    weights = (0.5, 0.3, 0.2)
    here = StepSums(number(2.5), {"right": number(0.7)}, weights, ())
    nothing = [0.0] * 4
    for others in ([], [nothing], [nothing, [2.5, 1.0, 0.7, 1.0]], [[0.0, 0.0, 0.7, 1.0]]):
        loss, metrics = share_results(here, ["right"], weights, Alone(*others)).wait()  # type: ignore[arg-type]
        assert float(loss) == pytest.approx(2.5)
        assert float(metrics["right"]) == pytest.approx(0.7)
    elsewhere = StepSums(None, {}, weights, ())
    loss, metrics = share_results(elsewhere, ["right"], weights, Alone([2.5, 1.0, 0.7, 1.0])).wait()  # type: ignore[arg-type]
    assert (float(loss), float(metrics["right"])) == (2.5, 0.7)


def test_replicas_bring_their_parts_of_the_batch() -> None:
    """Each replica ran one of two micro-batches: together they bring all the weight there is."""
    mine = StepSums(number(0.75 * 2.0), {}, (0.75,), ())
    loss, _ = share_results(mine, [], (0.75, 0.25), Alone([0.25 * 4.0, 0.25])).wait()  # type: ignore[arg-type]
    assert float(loss) == 0.75 * 2.0 + 0.25 * 4.0


def test_constants_are_the_same_if_a_trace_of_one_is_a_trace_of_the_other() -> None:
    same = [(1, 1), (math.nan, math.nan), (None, None), ("a", "a"), (2.0, torch.tensor(2.0).item())]
    other = [(1, 2), (1, 1.0), (True, 1), (math.nan, 1.0), (None, 0), ("a", "b"), (0.0, False)]
    assert all(same_constant(a, b) for a, b in same)
    assert not any(same_constant(a, b) or same_constant(b, a) for a, b in other)


def test_where_a_step_would_compute_something_else_it_is_refused() -> None:
    refuse_autocast("train_step", "cpu")
    refuse_no_grad("train_step")
    with torch.autocast("cpu"), pytest.raises(UsageError, match=r"under torch\.autocast"):
        refuse_autocast("train_step", "cuda")
    with torch.no_grad(), pytest.raises(UsageError, match=r"under torch\.no_grad"):
        refuse_no_grad("train_step")
    with torch.inference_mode(), pytest.raises(UsageError, match=r"under torch\.inference_mode"):
        refuse_no_grad("train_step")


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 2), (5, 5, 4, 4), (85, 85, 85)])
def test_weights_times_the_seed_scale_are_exact_in_16_bits(sizes: tuple[int, ...]) -> None:
    samples = sum(sizes)
    weights = [size / samples for size in sizes]
    for dtype in (torch.bfloat16, torch.float16):
        scale = seed_scale(weights, samples, dtype)
        seeds = torch.tensor([weight * scale for weight in weights], dtype=dtype).double()
        assert 0.5 < float(seeds.sum()) <= 1.0
        assert torch.allclose(seeds / scale, torch.tensor(weights).double(), rtol=1e-7, atol=0.0)
        assert seed_scale([0.25] * 4, 8, dtype) == 1.0
        assert seed_scale([1.0] * 3, 6, dtype) == 1.0
    assert seed_scale(weights, samples, torch.float32) == 1.0
