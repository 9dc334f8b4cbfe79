"""The degrees of a plan: what was fixed is found again, and what no other tool knows is refused with the reason."""

from __future__ import annotations

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from partitioner import partition
from partitioner.formats.from_plan import parallelism_of, stage_modules
from partitioner.formats.parallelism import Parallelism, units_of
from tests.support.formatted_plans import plan_of, small_gpt2

FIXES = {
    "pipeline=2 sequence=2 data=2 zero=1 microbatch=1 recompute=none": Parallelism(
        pipeline=2, tensor=2, sequence=True, data=2, zero=1, microbatches=16, layers=(3, 3)
    ),
    "data=8 zero=3 microbatch=2 recompute=gathers": Parallelism(
        data=8, zero=3, microbatch=2, microbatches=2, recompute="gathers"
    ),
    "tensor=4 data=2 microbatch=2 recompute=full": Parallelism(
        tensor=4, data=2, microbatch=2, microbatches=8, recompute="full"
    ),
}


@pytest.mark.parametrize("fix", FIXES)
def test_what_was_fixed_is_found_again(fix: str) -> None:
    schedule = "1f1b" if "pipeline" in fix else "auto"
    assert parallelism_of(plan_of(fix, schedule)) == FIXES[fix]


def test_its_own_fix_plans_the_same_again() -> None:
    plan = plan_of(
        "pipeline=2 interleave=2 tensor=2 data=2 zero=1 microbatch=1 recompute=full", "interleaved"
    )
    found = parallelism_of(plan)
    modules = [name for own in stage_modules(plan) for name in own]
    again = plan_of(str(found.fix(modules)), found.schedule)
    assert parallelism_of(again) == found
    assert again.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "layer", "min_stages": 4, "schedule": "1f1b"}, "in parts of several stages"),
        ({"strategy": "hybrid", "fix": "groups=2,6", "microbatches": 2}, "unequal numbers of devices: 2, 6"),
    ],
)
def test_plans_without_degrees_are_refused(options: dict[str, object], reason: str) -> None:
    plan = partition(small_gpt2(), ClusterSpec.parse("H100-80GB:8"), batch_size=24, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=reason):
        parallelism_of(plan)


def test_units_are_blocks_or_modules_with_ops_of_their_own() -> None:
    paths = ["", "embed", "h.0", "h.0.mlp.1", "h.1.mlp", "norm", "head.proj"]
    assert units_of(paths) == ["", "embed", "h.0", "h.0", "h.1", "norm", "head.proj"]


@pytest.mark.parametrize(
    ("layers", "borders"),
    [((1, 2), ("h.1",)), ((0, 3), ("h.0",)), ((3, 0), ("norm",)), ((0, 2, 1, 0), ("h.0", "h.2", "norm"))],
)
def test_borders_are_the_first_modules_of_stages(layers: tuple[int, ...], borders: tuple[str, ...]) -> None:
    p = Parallelism(pipeline=len(layers), layers=layers)
    assert p.borders(["embed", "h.0", "h.1", "h.2", "norm", "head"]) == borders


@pytest.mark.parametrize(
    ("layers", "why"), [((1, 1), r"1\+1 = 2 blocks"), ((1, 0, 2), "empty stage"), ((3, 0, 0), "empty stage")]
)
def test_layers_that_no_borders_divide_are_refused(layers: tuple[int, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Parallelism(pipeline=len(layers), layers=layers).borders(["embed", "h.0", "h.1", "h.2", "norm"])
