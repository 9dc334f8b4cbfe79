"""What a user fixes of a hybrid plan: read, refused in words, and made into device groups."""

from __future__ import annotations

import pytest

from cost_models.errors import UsageError
from passes.search.hybrid.fix import Fix, read_fix
from passes.search.hybrid.fixed import degrees_of, microbatch_counts


def test_text_and_mapping_are_read_alike() -> None:
    text = "pipeline=8 interleave=5 tensor=4 zero=1 microbatch=1 recompute=full"
    given = read_fix(text)
    assert given == Fix(pipeline=8, interleave=5, tensor=4, zero=1, microbatch=1, recompute="full")
    assert given == read_fix(
        {"pipeline": 8, "interleave": 5, "tensor": 4, "zero": 1, "microbatch": 1, "recompute": "full"}
    )
    assert str(given) == text
    assert read_fix(str(given)) == given
    assert read_fix("groups=1,3 borders=h.1") == Fix(groups=(1, 3), borders=("h.1",))
    assert read_fix(None) == Fix() == read_fix("")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("pipelin=2", r"did you mean pipeline\?"),
        ("pipeline", "is not NAME=VALUE"),
        ("pipeline=0", "a number from 1"),
        ("pipeline=2 pipeline=4", "pipeline is fixed twice"),
        ("zero=2", "zero=1 splits what is summed"),
        ("zero=4", "expected one of 0, 1, 3"),
        ("recompute=some", "expected one of none, gathers, selective, full, auto"),
        ("groups=1,x", "a number from 1"),
        ({"tensor": True}, "a number from 1"),
        ({"tensor": 2.0}, "a number from 1"),
        (7, "a text such as"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_in_words(given: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_fix(given)  # type: ignore[arg-type]


def arranged(fix: str, world: int, samples: int) -> list[list[tuple[int, int, int]]]:
    """Per way to arrange the groups: the first rank of each, its replicas and shards."""
    degrees = degrees_of(read_fix(fix), world)
    return [
        [(group[0], *shape) for group, shape in zip(degrees.groups, shapes, strict=True)]
        for shapes in degrees.shapes(samples)
    ]


def test_degrees_that_are_left_out_follow_from_the_others() -> None:
    for fix in ("pipeline=2 tensor=4", "data=2 tensor=4", "pipeline=2 data=2"):
        assert arranged(fix, 16, 4) == [[(0, 2, 4), (8, 2, 4)]]
    assert arranged("data=8 zero=3", 8, 8) == [[(0, 8, 1)]]
    assert arranged("pipeline=2 sequence=2", 4, 1) == [[(0, 1, 2), (2, 1, 2)]]
    assert arranged("groups=1,3 zero=1", 4, 6) == [[(0, 1, 1), (1, 3, 1)]]
    assert arranged("pipeline=2", 4, 2) == [[(0, 2, 1), (2, 2, 1)], [(0, 1, 2), (2, 1, 2)]]
    assert arranged("", 4, 2) == [[(0, 2, 2)], [(0, 1, 4)]]
    assert degrees_of(read_fix("pipeline=8 interleave=5 tensor=4"), 64).stages == 40


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ("pipeline=3", "3 equal groups: groups= gives unequal ones"),
        ("pipeline=2 tensor=3", r"4 devices is not tensor=3"),
        ("pipeline=2 data=4 tensor=2", r"pipeline 2 x data 4 x tensor 2 = 16 devices, there are 8"),
        ("groups=4,8", r"4 \+ 8 = 12 devices, there are 8"),
        ("groups=2,2 pipeline=3", "are 2, pipeline=3"),
        ("tensor=2 sequence=4", "they are the same devices"),
    ],
)
def test_degrees_that_cannot_be_are_refused(fix: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        degrees_of(read_fix(fix), 8)


def test_micro_batches_are_whole_samples_on_every_replica() -> None:
    def counts(fix: str, batch: int, wanted: int | str = "auto") -> list[int]:
        return microbatch_counts(read_fix(fix), degrees_of(read_fix(fix), 8), batch, wanted)

    assert counts("pipeline=2 tensor=2 microbatch=1", 16) == [8]
    assert counts("pipeline=2 tensor=2", 16) == [1, 2, 4, 8]
    assert counts("pipeline=2 tensor=2", 16, 4) == [4]
    assert counts("data=8", 16) == [1, 2]
    with pytest.raises(UsageError, match="2 does not divide 15"):
        counts("pipeline=2 tensor=2 microbatch=1", 15)
    with pytest.raises(UsageError, match="theirs is searched"):
        counts("pipeline=2 microbatch=1", 16)
    with pytest.raises(UsageError, match="1 or 2 micro-batches"):
        counts("data=8", 16, 4)
