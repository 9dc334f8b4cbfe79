"""Tables of cases of which ``make test`` runs those that show each idea once; ``make test-all`` runs the others too."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def thinned(cases: Iterable[Any], shown: Collection[Any]) -> list[Any]:
    """Return parameters for ``parametrize``, marked ``matrix`` where they are not among ``shown``.

    thinned([("a", 1), ("a", 2)], [("a", 2)])   ─►   ("a", 1) in ``make test-all`` only, ("a", 2) in both
    """
    every = list(cases)
    unknown = [case for case in shown if case not in every]
    assert not unknown, f"no cases of the table: {unknown}"
    return [
        case
        if case in shown
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.matrix)
        for case in every
    ]


def some(cases: Iterable[Any], one_in: int = 4) -> list[Any]:
    """Return cases that differ by a seed or a size alone, for ``parametrize``: ``make test`` runs the first quarter."""
    every = list(cases)
    return thinned(every, every[: -(-len(every) // one_in)])


def drawn(examples: int) -> settings:
    """Return settings for so many drawn examples in ``make test-all``, and for a quarter of them in ``make test``."""
    return settings(max_examples=max(1, examples * settings().max_examples // 100), deadline=None)
