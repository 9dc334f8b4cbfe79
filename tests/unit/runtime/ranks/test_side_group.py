"""What one rank raises while ranks agree, all raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from cost_models.errors import RankFailureError
from runtime.ranks.side_group import SideGroup


def of_two(monkeypatch: pytest.MonkeyPatch, other: tuple[bool, Any]) -> SideGroup:
    """Rank 0 of two; rank 1 says ``other``."""

    def gather(outcomes: list[Any], mine: Any, group: Any) -> None:
        outcomes[:] = [mine, other]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    side = object.__new__(SideGroup)
    side.rank, side.size, side.group = 0, 2, None
    return side


def test_whatever_this_rank_raises_is_told_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what nobody expected, such as a dataset without a length: the other would wait for half an hour."""
    side = of_two(monkeypatch, (True, 3))
    assert side.agree("counting", lambda: 2) == [2, 3]
    with pytest.raises(RankFailureError, match=r"rank 0: TypeError\(") as caught:
        side.agree("counting", lambda: len(object()))  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, TypeError), "with its traceback"
    with pytest.raises(RankFailureError, match="rank 1: KeyError"):
        of_two(monkeypatch, (False, "KeyError('a')")).agree("counting", lambda: 2)
