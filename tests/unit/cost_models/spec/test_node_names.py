"""Names with ranges."""

from __future__ import annotations

import pytest

from cost_models.spec.fields import expand_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node", ("node",)),
        ("dgx[00-02]", ("dgx00", "dgx01", "dgx02")),
        ("dgx[8-11]", ("dgx8", "dgx9", "dgx10", "dgx11")),
        ("10.0.0.[1-3]", ("10.0.0.1", "10.0.0.2", "10.0.0.3")),
        ("r[0-1]n[1,4-5]", ("r0n1", "r0n4", "r0n5", "r1n1", "r1n4", "r1n5")),
        ("a[7]b", ("a7b",)),
    ],
)
def test_ranges(text: str, names: tuple[str, ...]) -> None:
    assert expand_names(text) == names


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a name such as"),
        ("a b", "a name of letters"),
        ("a:1", "a name of letters"),
        ("a[", "a name of letters"),
        ("a[]", "a range such as"),
        ("a[1-]", "a range such as"),
        ("a[x-y]", "a range such as"),
        ("a[3-1]", "a range that counts up"),
        ("a[0-999999999]", "at most 65536"),
        ("a[0-999][0-999]", "at most 65536"),
    ],
)
def test_malformed(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        expand_names(text)
