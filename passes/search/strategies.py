"""The searches by the strategy that a request asks for; a new way of partitioning is a room and a case here."""

from __future__ import annotations

from typing import Any

from passes.search.judge import Judge
from passes.search.outcome import Outcome
from passes.search.place import place_stages


def search(request: Any, judge: Judge) -> Outcome:
    """Search a placement of the judge's graph by ``request.strategy``; ``request``: the strategy's own kind."""
    if request.strategy == "free":
        from passes.search.free.rounds import place_anywhere  # twenty modules that no other strategy reads

        return place_anywhere(request, judge)
    return place_stages(request, judge)
