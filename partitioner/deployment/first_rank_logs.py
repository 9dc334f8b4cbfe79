"""What the library says of its work is said once: by rank 0. Warnings are everybody's."""

from __future__ import annotations

import logging

logger = logging.getLogger("partitioner")


class _WarningsOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING


def log_on_first_rank(rank: int) -> None:
    """From now on this process, which is ``rank``, logs below WARNING only if it is the first."""
    for before in [one for one in logger.filters if isinstance(one, _WarningsOnly)]:
        logger.removeFilter(before)
    if rank != 0:
        logger.addFilter(_WarningsOnly())
